"""The experts layer in fp32, one expert at a time: what `bench layer --verify` compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moesaic.commands.layer_case import LayerShape
from moesaic.commands.layer_data import Adapter, AdapterPair, Batch, Weights

# What a verification may cost, in FLOP of the reference: some ten seconds on two cores.
_FLOP_BUDGET = 1e12


@dataclass(frozen=True)
class LayerResult:
    """An output and its gradients. Rows of tokens that are not checked are zero in d_hidden and d_router.

    Attributes:
        output: [n, H] of the checked tokens.
        d_hidden: [T, H].
        d_router: [T, k].
        d_lora: one for each of Adapter.parameters(), in their layout; empty without an adapter.
    """

    output: torch.Tensor
    d_hidden: torch.Tensor
    d_router: torch.Tensor
    d_lora: Sequence[torch.Tensor]


def checked_tokens(shape: LayerShape, tokens: int) -> torch.Tensor:
    """Indices of the tokens to check: all that the budget allows, evenly spread."""
    cost = (
        18 * shape.top_k * shape.hidden * shape.intermediate
    )  # forward, and gradients of the operands of each product
    count = min(tokens, max(1, int(_FLOP_BUDGET // cost)))
    return torch.arange(count) * tokens // count


def masked_gradient(batch: Batch, checked: torch.Tensor) -> torch.Tensor:
    """The batch's d_out with zeros for tokens that are not checked: then all gradients, those of the adapter too, come
    from the checked tokens alone."""
    d_out = torch.zeros_like(batch.d_out)
    d_out[checked] = batch.d_out[checked]
    return d_out


def reference(batch: Batch, weights: Weights, adapter: Adapter | None, checked: torch.Tensor) -> LayerResult:
    """Output of the checked tokens, and the gradients for masked_gradient(), in fp32 on operands rounded to bf16."""
    hidden, router, d_out = batch.hidden.detach().float(), batch.router.detach(), batch.d_out.float()
    output = torch.zeros_like(hidden)
    d_hidden, d_router = torch.zeros_like(hidden), torch.zeros_like(router)
    d_lora = [] if adapter is None else [torch.zeros_like(p, requires_grad=False) for p in adapter.parameters()]
    ids = torch.full_like(batch.ids, -1)
    ids[checked] = batch.ids[checked]
    for expert in torch.unique(ids[checked]).tolist():
        rows, slots = torch.where(ids == expert)
        x = hidden[rows].requires_grad_()
        w = router[rows, slots].requires_grad_()
        pairs = [] if adapter is None else [_leaves(adapter.gate_up, expert), _leaves(adapter.down, expert)]
        with torch.enable_grad():
            gate_up = F.linear(x, weights.gate_up[expert].float())
            if adapter is not None:
                gate_up = gate_up + adapter.gate_up.scale * (x @ pairs[0][0].t()) @ pairs[0][1].t()
            gate, up = gate_up.chunk(2, dim=-1)
            z = F.silu(gate) * up
            y = F.linear(z, weights.down[expert].float())
            if adapter is not None:
                y = y + adapter.down.scale * (z @ pairs[1][0].t()) @ pairs[1][1].t()
            weighted = y * w[:, None]
        output.index_add_(0, rows, weighted.detach())
        dx, dw, *d_pairs = torch.autograd.grad(
            weighted, [x, w, *(leaf for pair in pairs for leaf in pair)], d_out[rows]
        )
        d_hidden.index_add_(0, rows, dx)
        d_router[rows, slots] += dw
        if adapter is not None:
            for i, pair in enumerate((adapter.gate_up, adapter.down)):
                d_a, d_b = AdapterPair(d_lora[2 * i], d_lora[2 * i + 1], pair.experts, pair.scale).views()
                d_a[expert], d_b[expert] = d_pairs[2 * i], d_pairs[2 * i + 1]
    return LayerResult(output[checked], d_hidden, d_router, d_lora)


def errors(result: LayerResult, expected: LayerResult) -> dict[str, float | None]:
    """Relative L2 errors; d_lora: the largest of the four, None without an adapter."""
    d_lora = [relative_l2(a, b) for a, b in zip(result.d_lora, expected.d_lora, strict=True)]
    return {
        "output": relative_l2(result.output, expected.output),
        "d_hidden": relative_l2(result.d_hidden, expected.d_hidden),
        "d_lora": max(d_lora) if d_lora else None,
        "d_router": relative_l2(result.d_router, expected.d_router),
    }


def relative_l2(value: torch.Tensor, expected: torch.Tensor) -> float:
    """||value - expected|| / ||expected||; where nothing is expected, the norm of the value."""
    norm = torch.linalg.vector_norm(expected.double())
    error = torch.linalg.vector_norm(value.detach().double() - expected.double())
    return float(error / norm) if norm > 0 else float(error)


def _leaves(pair: AdapterPair, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] and B [out, r] of one expert as the engine takes them: rounded to bf16."""
    a, b = pair.views()
    a, b = (v[expert].detach().to(torch.bfloat16).float().requires_grad_() for v in (a, b))
    return a, b
