"""What a user would run without moesaic: experts in plain PyTorch, each in its own best way.

Both follow transformers' implementations ("eager" and "grouped_mm"), with LoRA as two narrow products beside each base
product; PEFT itself materialises W + B A for every expert, which is slower by far. Adapters are rounded to bf16 once a
call, like autocast does; router weights are taken as bf16, as Qwen's models give them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from moesaic.commands.layer_data import Adapter, AdapterPair, Batch, Weights

# Computes the experts' output [T, H] of a batch, differentiable in the batch's leaves and the adapter's parameters.
Peer = Callable[[Batch, Weights, "Adapter | None"], torch.Tensor]


def torch_loop(batch: Batch, weights: Weights, adapter: Adapter | None) -> torch.Tensor:
    """One expert after the other, on the rows routed to it."""
    hidden = batch.hidden
    out = torch.zeros_like(hidden)
    router = batch.router.to(hidden.dtype)
    gate_up_lora = None if adapter is None else _rounded(adapter.gate_up)
    down_lora = None if adapter is None else _rounded(adapter.down)
    for expert in torch.unique(batch.ids).tolist():
        rows, slots = torch.where(batch.ids == expert)
        x = hidden[rows]
        gate, up = _adapted_linear(x, weights.gate_up[expert], gate_up_lora, expert).chunk(2, dim=-1)
        z = F.silu(gate) * up
        y = _adapted_linear(z, weights.down[expert], down_lora, expert)
        out.index_add_(0, rows, y * router[rows, slots, None])
    return out


def torch_grouped_mm(batch: Batch, weights: Weights, adapter: Adapter | None) -> torch.Tensor:
    """All experts at once: rows sorted by expert, grouped_mm for every product."""
    tokens, top_k = batch.ids.shape
    experts = weights.gate_up.shape[0]
    sorted_ids, order = torch.sort(batch.ids.reshape(-1))
    offsets = torch.cumsum(torch.bincount(sorted_ids, minlength=experts), dim=0, dtype=torch.int32)
    x = batch.hidden[order // top_k]
    router = batch.router.to(x.dtype).reshape(-1)[order]

    gate_up = _grouped(x, weights.gate_up, None if adapter is None else adapter.gate_up, offsets)
    gate, up = gate_up.chunk(2, dim=-1)
    z = F.silu(gate) * up
    y = _grouped(z, weights.down, None if adapter is None else adapter.down, offsets)

    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    y = (y * router[:, None])[inverse]
    return y.view(tokens, top_k, -1).sum(dim=1).to(batch.hidden.dtype)


PEERS: dict[str, Peer] = {"torch_loop": torch_loop, "torch_grouped_mm": torch_grouped_mm}

# What --peers accepts besides the peers' own names.
PEER_GROUPS: dict[str, list[str]] = {"torch": ["torch_loop", "torch_grouped_mm"]}


def grouped_mm_available() -> bool:
    """Whether this PyTorch has a grouped_mm that runs on CPUs."""
    operator = _grouped_mm_operator()
    if operator is None:
        return False
    offsets = torch.tensor([8], dtype=torch.int32)
    operand = torch.zeros(8, 8, dtype=torch.bfloat16)
    try:
        operator(operand, operand[None], offs=offsets)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _grouped_mm_operator() -> Callable[..., torch.Tensor] | None:
    """The public name since PyTorch 2.10, the private one before."""
    operator: Callable[..., torch.Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    return operator


def _rounded(pair: AdapterPair) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in], times the scale, and B [E, out, r] as contiguous bf16, the rank padded with zeros to whole 16
    bytes, which grouped_mm wants of every row."""
    a, b = pair.views()
    a, b = a * pair.scale, b
    padding = -a.shape[1] % 8
    if padding:
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
    return (
        a.to(torch.bfloat16, memory_format=torch.contiguous_format),
        b.to(torch.bfloat16, memory_format=torch.contiguous_format),
    )


def _adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, lora: tuple[torch.Tensor, torch.Tensor] | None, expert: int
) -> torch.Tensor:
    y = F.linear(x, weight)
    if lora is None:
        return y
    a, b = lora
    return torch.addmm(y, F.linear(x, a[expert]), b[expert].t())


def _grouped(x: torch.Tensor, weight: torch.Tensor, pair: AdapterPair | None, offsets: torch.Tensor) -> torch.Tensor:
    operator = _grouped_mm_operator()
    assert operator is not None  # see grouped_mm_available()
    y = operator(x, weight.transpose(-2, -1), offs=offsets)
    if pair is None:
        return y
    a, b = _rounded(pair)
    low = operator(x, a.transpose(-2, -1), offs=offsets)
    return y + operator(low, b.transpose(-2, -1), offs=offsets)
