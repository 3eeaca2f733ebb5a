"""Training steps of small models with random weights, through transformers and PEFT, and their calls of the experts: as
a step makes them, alone, or replaced."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moesaic import ExpertsLayer, Lora

__all__ = ["MODELS", "RecordedCall", "TrainingStep", "build_model", "engine_calls_ms", "replaced_experts"]

_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_experts": 32,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "demo": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
"""Sizes of Qwen3-MoE models. "demo" has those of `make demo`, the last one 4 layers of Qwen3-30B-A3B with a quarter of
their experts."""


@dataclass
class RecordedCall:
    """One call of the experts in a step."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    layer: ExpertsLayer
    lora: Lora | Sequence[Lora] | None
    d_out: torch.Tensor | None = None


def build_model(sizes: Mapping[str, Any], rank: int, dtype: torch.dtype | None = None) -> nn.Module:
    """A model with random weights, packed experts (in bf16), and LoRA on attention and experts.

    Args:
        sizes: one of MODELS, or others like them.
        rank: of the adapter.
        dtype: of all other weights; None: bf16.

    Raises:
        ImportError: transformers or PEFT is missing.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    import moesaic.hf

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**_COMMON, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    moesaic.hf.prepare(model, progress=False)
    adapter = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(model, adapter)
    return adapted.train()


class TrainingStep:
    """Forward and backward of a model, without checkpointing.

    Args:
        model: as `build_model` makes it.
        tokens: in a step.
        autocast: its forward under autocast to bf16.

    Attributes:
        calls: of the experts in one step, on the inputs and gradients that they had there.
    """

    def __init__(self, model: nn.Module, tokens: int, autocast: bool = False) -> None:
        import torch

        self._model = model
        self._autocast = autocast
        self._ids = torch.randint(_COMMON["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
        self.run()  # gradients are there from now on, and the next ones are added to them
        self.calls: list[RecordedCall] = []
        with replaced_experts(_recorder(self.calls)):
            self.run()

    def run(self) -> float:
        """The step; its loss."""
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._model(input_ids=self._ids, labels=self._ids).loss
        loss.backward()
        return float(loss.detach())

    def run_alone(self) -> list[float]:
        """Its calls without anything between them: all forwards, then all backwards, last layer first. Milliseconds of
        each, Python included."""
        from moesaic import _core

        saved, ends = [], [_core.clock_ns()]
        for call in self.calls:
            saved.append(call.layer.forward(call.hidden, call.ids, call.weights, call.lora)[1])
            ends.append(_core.clock_ns())
        for call, state in zip(reversed(self.calls), reversed(saved), strict=True):
            assert state is not None and call.d_out is not None  # saved, and recorded by a whole step
            call.layer.backward(state, call.d_out)
            ends.append(_core.clock_ns())
        return [(end - begin) * 1e-6 for begin, end in itertools.pairwise(ends)]


def engine_calls_ms(step: Callable[[], object]) -> list[float]:
    """Milliseconds of the engine in each of its calls in a step."""
    import moesaic
    from moesaic import _core

    with moesaic.profile():
        step()
        calls, _ = _core.calls()
    return [(call["engine_end_ns"] - call["engine_begin_ns"]) * 1e-6 for call in calls]


@contextlib.contextmanager
def replaced_experts(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """`function` in the place of moesaic.moe_experts, as transformers calls it."""
    from moesaic.hf import experts

    original = vars(experts)["moe_experts"]
    vars(experts)["moe_experts"] = function
    try:
        yield
    finally:
        vars(experts)["moe_experts"] = original


def _recorder(calls: list[RecordedCall]) -> Callable[..., torch.Tensor]:
    """moe_experts, which also keeps what it is called with."""
    import moesaic

    def record(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        layer: ExpertsLayer,
        lora: Lora | Sequence[Lora] | None,
    ) -> torch.Tensor:
        out = moesaic.moe_experts(hidden, ids, weights, layer, lora)
        call = RecordedCall(hidden.detach(), ids, weights.detach(), layer, _detached(lora))
        calls.append(call)

        def keep(d_out: torch.Tensor) -> None:
            call.d_out = d_out

        out.register_hook(keep)  # type: ignore[no-untyped-call]
        return out

    return record


def _detached(lora: Lora | Sequence[Lora] | None) -> Sequence[Lora]:
    import moesaic

    if lora is None:
        return ()
    adapters = [lora] if isinstance(lora, moesaic.Lora) else lora

    def pair(of: moesaic.LoraPair | None) -> moesaic.LoraPair | None:
        return None if of is None else moesaic.LoraPair(of.a.detach(), of.b.detach(), of.scale, of.experts)

    return [moesaic.Lora(*(pair(p) for p in (a.gate_up, a.gate, a.up, a.down))) for a in adapters]
