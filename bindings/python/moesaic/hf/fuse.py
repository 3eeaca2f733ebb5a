"""Fused operators in the dense parts of a transformers model, and the way back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from moesaic.hf import attention as attention_layers
from moesaic.hf import loss, rotary
from moesaic.hf.blocks import require_module
from moesaic.hf.head import Head, find_head
from moesaic.hf.operators import OPERATORS, Dense, Operator

__all__ = ["FuseReport", "FusedModule", "KeptModule", "fuse", "unfuse"]

#: How far the fused result may be from the stock one on a probe, relative L2: some roundings of bf16, or of fp32 sums.
_BOUND = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class FusedModule:
    """A module that a fused operator computes now."""

    name: str
    class_name: str
    operator: str
    bytes_packed: int


@dataclass(frozen=True)
class KeptModule:
    """A module with a dense layer, a norm or attention that goes on as it was, all of it or the part that is named."""

    name: str
    class_name: str
    reason: str


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` did; ``print`` it."""

    replaced: tuple[FusedModule, ...]
    kept: tuple[KeptModule, ...]

    @property
    def bytes_packed(self) -> int:
        """Bytes of the packed weights, beside the model's own."""
        return sum(module.bytes_packed for module in self.replaced)

    def __str__(self) -> str:
        lines = [f"moesaic: {len(self.replaced)} modules fused, {self.bytes_packed / 2**20:.1f} MiB packed beside them"]
        for (class_name, operator), n in Counter((m.class_name, m.operator) for m in self.replaced).items():
            lines.append(f"  {n} x {class_name}: {operator}")
        for (class_name, reason), n in Counter((m.class_name, m.reason) for m in self.kept).items():
            lines.append(f"  kept {n} x {class_name}: {reason}")
        return "\n".join(lines)


def fuse(model: nn.Module, attention: bool = True) -> FuseReport:
    """Lets fused operators compute the sub-graphs of `model` that they match.

    BERT's and RoBERTa's output layers (dense, residual, LayerNorm) and intermediate layers (dense, GELU), ViT's FFN,
    the dense FFN of decoders (gate, up, an activation, down), layer and RMS norms, the projections of attention layers
    and, where it does not train, to the vocabulary; in bf16 the attention itself, where transformers is set to "sdpa",
    of encoders and of decoders, that train or generate (`moesaic.nn.functional.attention`); rotary embeddings of
    queries and keys (`moesaic.nn.functional.rotary`); and the loss of causal language models
    (`moesaic.nn.functional.log_probs`). The losses of TRL's trainers read the weights of the projection to the
    vocabulary themselves: they get their log-probabilities from the engine (`moesaic.nn.functional.gemm_log_probs`).
    Logits must not be written to between a loss and its backward.

    A module's forward is replaced only if it and the operator agree on a probe; attention is looked up in each call by
    transformers itself, and not probed, nor are losses. Rotary embeddings have PyTorch's bits in forward, and are tried
    as well; few tokens are PyTorch's. A module keeps its parameters and its state_dict; the packed weights are a second
    copy, packed anew when the parameters change (as `moesaic.nn.PackedLinear` does). Under autocast to bf16, as TRL
    trains, a model in fp32 has its products and attention in bf16, as in PyTorch; the first such call packs its weights
    in bf16, and the next one without autocast, as GRPO generates, in fp32 again. Adapters of PEFT, put on before or
    after, are computed too: of products in bf16 by the engine, but where dropout is active and, of projections, where
    they were put on after or stand before the vocabulary. After PEFT has taken its layers out (`merge_and_unload`),
    fuse again.

    In every call the module's own forward, or transformers' own attention, still runs where the operator may not:
    dropout, autocast to fp16, torch.compile, `torch.func`, another dtype or device, hooks on a layer inside, a variant
    of LoRA.

    Args:
        model: a transformers model, or any module.
        attention: also attention layers: their projections, and what is computed between them.

    Returns:
        What was replaced, and what was not, and why.

    Raises:
        TypeError: `model` is no module.
        MemoryError: memory cannot be had; what was replaced so far stays so, `unfuse` undoes it.
    """
    unfuse(model)
    replaced: list[FusedModule] = []
    kept: list[KeptModule] = []
    inside: tuple[str, ...] = ()  # of a replaced sub-graph: nothing of it is looked at again
    parents: dict[str, nn.Module] = dict(model.named_modules())
    head = find_head(model)
    for name, module in parents.items():
        if inside and name.startswith(inside):
            continue
        if attention:
            served = []
            for serve, what in ((attention_layers.serve, _attention(module)), (rotary.serve, "rotary")):
                refused = serve(module)
                if refused is None:
                    served.append(what)
                elif refused:
                    kept.append(KeptModule(name, type(module).__name__, refused))
            if served:
                replaced.append(FusedModule(name, type(module).__name__, ", ".join(served), 0))
        if loss.serve(module):
            replaced.append(FusedModule(name, type(module).__name__, "log_probs, as its loss", 0))
        operator = _operator(name, module, parents, attention, head)
        if operator is None:
            continue
        reason = "no fused operator matches what it belongs to" if isinstance(operator, str) else _refusal(operator)
        if isinstance(operator, str) or reason is not None:
            kept.append(KeptModule(name, type(module).__name__, reason or ""))
            continue
        module.__dict__["forward"] = operator
        inside = (*inside, f"{name}.") if name else ("",)
        replaced.append(FusedModule(name, type(module).__name__, operator.name, operator.packed_bytes))
    return FuseReport(tuple(replaced), tuple(kept))


def unfuse(model: nn.Module) -> int:
    """Undoes `fuse`; returns how many modules are as they were again. TypeError: `model` is no module."""
    require_module(model)
    count = 0
    for module in model.modules():
        count += any([attention_layers.restore(module), rotary.restore(module)]) + loss.restore(module)
        if isinstance(module.__dict__.get("forward"), Operator):
            del module.__dict__["forward"]
            count += 1
    return count


def _attention(module: nn.Module) -> str:
    """What a report calls the attention of `module`."""
    weight = next(module.parameters(), None)
    return "attention" if weight is None or weight.dtype == torch.bfloat16 else "attention under autocast to bf16"


def _operator(
    name: str, module: nn.Module, parents: dict[str, nn.Module], attention: bool, head: nn.Module | None
) -> Operator | str | None:
    """An operator for `module`; "" where there is none and it has a dense layer or is a norm; None otherwise."""
    for kind in OPERATORS:
        if kind.matches(module):
            return kind(module)
    if any(part.startswith("lora_") for part in name.split(".")):
        return None
    parent = name.removesuffix(".base_layer").rpartition(".")[0]
    in_attention = name != "" and "Attention" in type(parents[parent]).__name__
    if attention and in_attention and Dense.matches(module):
        return Dense(module)
    if not isinstance(module, nn.Linear):
        return "" if type(module).__name__.endswith(("LayerNorm", "RMSNorm")) else None
    return Head(module) if module is head and Head.matches(module) else ""


def _refusal(operator: Operator) -> str | None:
    """Why the operator cannot stand in; it has run once, and its weights are packed, where it can."""
    module = operator.module
    if "forward" in module.__dict__:
        return "its forward was replaced already, by somebody else"
    reason = operator.refusal()
    if reason is not None:
        return reason
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            probe = operator.probe()
            fused = operator.fused(*probe)
            if fused is None:
                return "its layers are of kinds or dtypes that do not go together here"
            stock = operator.stock(*probe)
            if not operator.looks_at_dropout:
                module.train()
                for part in (part for layer in operator.layers() for part in layer.modules()):
                    part.training = part is module  # dropout of adapters is looked at in each call
                operator.in_training = torch.equal(operator.stock(*probe), stock)
    finally:
        for m, was in training.items():
            m.training = was
    if fused.dtype != stock.dtype or fused.shape != stock.shape:
        return f"its result is {stock.dtype} {list(stock.shape)}; the operator gives {fused.dtype} {list(fused.shape)}"
    exact = stock.double()
    distances = (fused.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)
    distance = float(distances.max())  # NaN, if one is
    if not distance <= _BOUND[fused.dtype]:
        return f"{type(module).__name__} computes something else (on a probe they differ by {distance:.1e})"
    return None
