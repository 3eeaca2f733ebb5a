"""What a user would run instead of moesaic with PyTorch alone: experts in plain PyTorch, each in its own best way;
and the same on weights that oneDNN has packed.

The first two follow transformers' implementations ("eager" and "grouped_mm"), with LoRA as two narrow products beside
each base product; PEFT itself materialises W + B A for every expert, which is slower by far. Adapters are rounded to
bf16 once a call, like autocast does; router weights are taken as bf16, as Qwen's models give them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from moesaic.commands import onednn
from moesaic.commands.layer_data import Adapter, AdapterPair, Batch, Weights
from moesaic.commands.variants import UnavailableError, Variant

# (rows of an expert, number of the expert) -> their product with a base weight.
_Linear = Callable[[torch.Tensor, int], torch.Tensor]


class TorchLoop(Variant):
    """One expert after the other, on the rows routed to it."""

    dtype = torch.bfloat16

    def __init__(self, batch: Batch, weights: Weights, adapter: Adapter | None) -> None:
        super().__init__(batch, [] if adapter is None else [adapter])
        self._adapter = adapter
        self._gate_up, self._down = self._linears(weights)

    def _linears(self, weights: Weights) -> tuple[_Linear, _Linear]:
        return (
            lambda x, expert: F.linear(x, weights.gate_up[expert]),
            lambda x, expert: F.linear(x, weights.down[expert]),
        )

    def forward(self) -> torch.Tensor:
        """The output [T, H]."""
        batch, adapter = self.batch, self._adapter
        hidden = batch.hidden.to(self.dtype)
        out = torch.zeros_like(hidden)
        router = batch.router.to(hidden.dtype)
        gate_up_lora = None if adapter is None else _rounded(adapter.gate_up, self.dtype)
        down_lora = None if adapter is None else _rounded(adapter.down, self.dtype)
        for expert in torch.unique(batch.ids).tolist():
            rows, slots = torch.where(batch.ids == expert)
            x = hidden[rows]
            gate, up = _adapted(self._gate_up, x, gate_up_lora, expert).chunk(2, dim=-1)
            z = F.silu(gate) * up
            y = _adapted(self._down, z, down_lora, expert)
            out.index_add_(0, rows, y * router[rows, slots, None])
        return out.to(batch.hidden.dtype)


class OneDnn(TorchLoop):
    """The loop on weights that oneDNN packed before, for forward and once more, transposed, for backward: the best that
    calls of a library can do."""

    def __init__(self, batch: Batch, weights: Weights, adapter: Adapter | None) -> None:
        """
        Raises:
            UnavailableError: this PyTorch has no such products.
        """
        reason = onednn.unavailable()
        if reason is not None:
            raise UnavailableError(reason)
        self.dtype = onednn.dtype()
        super().__init__(batch, weights, adapter)

    def _linears(self, weights: Weights) -> tuple[_Linear, _Linear]:
        rows = max(1, self.batch.ids.numel() // self.batch.experts_hit)

        def packed(weight: torch.Tensor) -> _Linear:
            pairs = [(onednn.PackedWeight(w, rows), onednn.PackedWeight(w.t(), rows)) for w in weight]
            return lambda x, expert: _PackedLinear.apply(x, *pairs[expert])  # type: ignore[no-untyped-call]

        return packed(weights.gate_up), packed(weights.down)


class _PackedLinear(torch.autograd.Function):
    """x W^T on two packed copies of a frozen W."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: onednn.PackedWeight, transposed: onednn.PackedWeight
    ) -> torch.Tensor:
        ctx.transposed = transposed
        return weight.product(x)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transposed.product(d_y.contiguous()), None, None


class TorchGroupedMm(Variant):
    """All experts at once: rows sorted by expert, grouped_mm for every product."""

    def __init__(self, batch: Batch, weights: Weights, adapter: Adapter | None) -> None:
        super().__init__(batch, [] if adapter is None else [adapter])
        self._weights = weights
        self._adapter = adapter

    def forward(self) -> torch.Tensor:
        """The output [T, H]."""
        batch, weights, adapter = self.batch, self._weights, self._adapter
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


def _rounded(pair: AdapterPair, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in], times the scale, and B [E, out, r], contiguous in `dtype`, the rank padded with zeros to whole 16
    bytes, which grouped_mm wants of every row."""
    a, b = pair.views()
    a, b = a * pair.scale, b
    padding = -a.shape[1] % 8
    if padding:
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
    return a.to(dtype, memory_format=torch.contiguous_format), b.to(dtype, memory_format=torch.contiguous_format)


def _adapted(
    linear: _Linear, x: torch.Tensor, lora: tuple[torch.Tensor, torch.Tensor] | None, expert: int
) -> torch.Tensor:
    y = linear(x, expert)
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
    a, b = _rounded(pair, torch.bfloat16)
    low = operator(x, a.transpose(-2, -1), offs=offsets)
    return y + operator(low, b.transpose(-2, -1), offs=offsets)
