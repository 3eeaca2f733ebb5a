"""The projection to the vocabulary by the engine: as a layer, and inside the losses of TRL's trainers.

TRL (1.16) does not call the head. Its trainers project the last hidden states by ``lm_head.weight`` themselves, in
tiles of the vocabulary, and on a CPU multiply their gradients in fp32. Where the weight is that of a fused head, the
engine computes those log-probabilities (`moesaic.nn.functional.gemm_log_probs`).
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from typing import Any

import torch
from torch import nn

from moesaic import forward_mode
from moesaic.hf.operators import Dense, product_dtype
from moesaic.nn.log_probs import TokenLogProbs, log_probs_of

__all__ = ["Head", "find_head"]

#: Of TRL's function, in this order; another list is another version, which is left alone.
_ARGUMENTS = (
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

_lock = threading.Lock()
#: All that there are, guarded by `_lock`.
_heads: weakref.WeakSet[Head] = weakref.WeakSet()


class Head(Dense):
    """The projection to the vocabulary, whose weights are most of what a model reads for a token."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        _install()
        with _lock:
            _heads.add(self)

    @property
    def name(self) -> str:  # type: ignore[override]
        """What it computes: with a TRL that asks for them, log-probabilities as well."""
        return "gemm_bias, gemm_log_probs" if _install() else "gemm_bias"

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        """The logits; None where the engine may not, or the weight trains."""
        if torch.is_grad_enabled() and self.module.weight.requires_grad:
            return None  # packed in every call it would take longer
        return super().fused(*args)

    def log_probs(self, x: torch.Tensor, targets: torch.Tensor, scale: float) -> TokenLogProbs | None:
        """Of `targets` ``[rows]`` after `x` ``[rows, K]``; None where the engine may not."""
        module = self.module
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        fits = x.dim() == 2 and targets.shape == x.shape[:1] and targets.dtype == torch.int64 and targets.is_cpu
        if trains or not fits or forward_mode.is_on() or not self._may_run((x,)):
            return None
        if x.dtype != module.weight.dtype and not torch.is_autocast_enabled("cpu"):
            return None
        if not ((targets >= 0) & (targets < module.out_features)).all():
            return None  # for TRL they mean something else
        x = x.to(product_dtype(x.dtype))
        packed = self._pack("weight", [module], ((),), x.dtype).packed()
        return log_probs_of(x, packed, module.bias, targets, scale)


def find_head(model: nn.Module) -> nn.Module | None:
    """The projection to the vocabulary, of a model of transformers that has one."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return getattr(head, "base_layer", head)


@functools.cache
def _install() -> bool:
    """Lets TRL's log-probabilities ask the engine; False where there is no TRL, or one that computes them otherwise."""
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    except ImportError:
        return False
    if tuple(inspect.signature(ChunkedLogProbFunction.forward).parameters)[1:] != _ARGUMENTS:
        return False

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        asked = cls is ChunkedLogProbFunction and len(args) == len(_ARGUMENTS) and not kwargs
        found = _log_probs(*args) if asked and not torch.compiler.is_compiling() else None
        return super(ChunkedLogProbFunction, cls).apply(*args, **kwargs) if found is None else found

    ChunkedLogProbFunction.apply = classmethod(apply)
    return True


def _log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    _chunk_size: int,
    softcap: float | None,
    logit_scale: float,
    outputs: tuple[str, ...],
) -> tuple[torch.Tensor | None, ...] | None:
    """What TRL's function returns; None where the engine may not compute it."""
    with _lock:
        heads = [head for head in _heads if head.module.__dict__.get("forward") is head]
    head = next((head for head in heads if head.module.weight is weight and head.module.bias is bias), None)
    if head is None or softcap is not None:
        return None
    found = head.log_probs(hidden, targets, logit_scale / temperature)
    if found is None:
        return None
    return (found.log_probs, *(getattr(found, name) if name in outputs else None for name in _OUTPUTS))
