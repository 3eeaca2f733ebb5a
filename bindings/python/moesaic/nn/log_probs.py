"""Log-probabilities of tokens: from the hidden states before the vocabulary, without the logits in memory; or from
those."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from moesaic import _core, forward_mode
from moesaic.nn import checked
from moesaic.nn.autograd import once, rows_of
from moesaic.nn.linear import PackedLinear

__all__ = ["TokenLogProbs", "gemm_log_probs", "log_probs", "log_probs_of"]


class TokenLogProbs(NamedTuple):
    """What `gemm_log_probs` and `log_probs` say of each row. The first two are differentiable."""

    #: Of the target: ``z[target] - log(sum(e^z))``.
    log_probs: torch.Tensor
    #: ``-sum(p log p)`` with ``p = softmax(z)``.
    entropy: torch.Tensor
    #: ``log(sum(p^2))``.
    log_sum_sq_probs: torch.Tensor
    #: Of z, over the vocabulary.
    mean_logits: torch.Tensor
    #: bool: whether the target is the first of the largest z.
    is_top1: torch.Tensor


class _LogProbs(torch.autograd.Function):
    """Saves x and two numbers of each row; backward makes the logits again, where x is not they."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: _core.PackedMatrix | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
    ) -> TokenLogProbs:
        out, log_sums = _forward(x, packed, bias, targets, scale)
        ctx.save_for_backward(x, bias, targets, log_sums, out.entropy)
        ctx.packed = packed
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[2:])
        return out

    @staticmethod
    def backward(
        ctx: Any, d_log_probs: torch.Tensor | None, d_entropy: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        if d_log_probs is None and d_entropy is None:
            return (None,) * 5
        x, bias, targets, log_sums, entropy = ctx.saved_tensors
        d_x = _core.log_probs_backward(
            None if d_log_probs is None else d_log_probs.contiguous(),
            None if d_entropy is None else d_entropy.contiguous(),
            x,
            ctx.packed,
            targets,
            log_sums,
            entropy,
            bias,
            ctx.scale,
        )
        return once((d_x, None, None, None, None), (d_log_probs, d_entropy, x))


def _forward(
    x: torch.Tensor, packed: _core.PackedMatrix | None, bias: torch.Tensor | None, targets: torch.Tensor, scale: float
) -> tuple[TokenLogProbs, torch.Tensor]:
    # Clones: who writes to one of them is not to write to what another one's backward needs.
    rows = (row.clone() for row in _core.log_probs(x, packed, targets, bias, scale))
    of_targets, log_sums, entropy, log_squares, mean, is_top1 = rows
    return TokenLogProbs(of_targets, entropy, log_squares, mean, is_top1 != 0), log_sums


def gemm_log_probs(x: torch.Tensor, w: PackedLinear, targets: torch.Tensor, scale: float = 1.0) -> TokenLogProbs:
    """Log-probabilities of `targets` under ``softmax(z)``, ``z = scale (x W^T + bias)``, and what else losses and
    metrics ask of the distribution.

    The logits, ``[..., V]``, are never in memory: blocks of them are made and met in cache, fp32, and made again for
    the gradient. ``-log_probs.sum()`` is the summed cross entropy.

    Args:
        x: ``[..., K]``, the last hidden states.
        w: the packed projection ``[V, K]``; frozen, without LoRA.
        targets: ``[...]`` int64, below V; of a negative one, as -100, all results and the gradient of its row are 0.
        scale: of the logits, 1 / temperature say.

    Returns:
        Tensors ``[...]``, fp32 and, `is_top1`, bool.

    Raises:
        TypeError, ValueError: as the module says; of a target that is V or more.
    """
    if not isinstance(w, PackedLinear):
        raise TypeError(f"w is a {type(w).__name__}; expected a moesaic.nn.PackedLinear")
    checked.check(x, "x", w.in_features)
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype}; expected {w.dtype}, as w was packed")
    _check_targets(x, targets, scale)
    if w.lora:
        raise ValueError("w has LoRA; expected none: its gradients would be missing")
    for name, tensor in (("w.weight", w.weight), ("w.bias", w.bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient; expected a frozen one")
        if tensor is not None and forward_mode.is_on():
            forward_mode.refuse(tensor, name)
    return log_probs_of(x, w.packed(), w.bias, targets, scale)


def log_probs(logits: torch.Tensor, targets: torch.Tensor, scale: float = 1.0) -> TokenLogProbs:
    """The same under ``softmax(scale logits)``, of logits ``[..., V]`` that are there: computed in fp32, which no
    tensor holds, with a gradient in their dtype."""
    checked.check(logits, "logits")
    _check_targets(logits, targets, scale, "logits")
    return log_probs_of(logits, None, None, targets, scale)


def _check_targets(x: torch.Tensor, targets: torch.Tensor, scale: float, name: str = "x") -> None:
    if not isinstance(targets, torch.Tensor):
        raise TypeError(f"targets is a {type(targets).__name__}; expected a torch.Tensor")
    if targets.dtype != torch.int64 or targets.shape != x.shape[:-1]:
        raise ValueError(
            f"targets has shape {list(targets.shape)} and is {targets.dtype}; expected {list(x.shape[:-1])} and "
            f"torch.int64, one for each row of {name}"
        )
    if not targets.is_cpu:
        raise ValueError(f"targets is on {targets.device}; expected a CPU tensor")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number")


def log_probs_of(
    x: torch.Tensor, packed: _core.PackedMatrix | None, bias: torch.Tensor | None, targets: torch.Tensor, scale: float
) -> TokenLogProbs:
    """`gemm_log_probs`, or without weights `log_probs`, of arguments that fit."""
    rows, ids = rows_of(x), targets.reshape(-1).contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        out = TokenLogProbs(*_LogProbs.apply(rows, packed, bias, ids, scale))  # type: ignore[no-untyped-call]
    else:
        out, _ = _forward(rows, packed, bias, ids, scale)
    return TokenLogProbs(*(tensor.view(targets.shape) for tensor in out))
