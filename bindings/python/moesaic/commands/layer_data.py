"""Random weights, adapters and inputs for `bench layer`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moesaic.commands.layer_case import LayerShape, Routing, route

# Elements between the windows of two neighbouring experts, see overlapping_weights(): a multiple of 64 bytes, and no
# multiple of any usual row length, so that no two experts have a row in common at the same place.
_WINDOW_STEP = 4160


def overlapping_weights(experts: int, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Random bf16 weights [E, rows, columns] in the memory of little more than one expert.

    Expert e is a window into one buffer, shifted by e steps: all experts differ, and packing them needs no second copy
    of the layer (the packed one is full-sized). Values have variance 1 / columns.
    """
    buffer = torch.randn(rows * columns + (experts - 1) * _WINDOW_STEP, generator=generator, dtype=torch.bfloat16)
    buffer /= columns**0.5
    return buffer.as_strided((experts, rows, columns), (_WINDOW_STEP, columns, 1))


@dataclass(frozen=True)
class Weights:
    """Base weights in the layout of transformers: gate_up [E, 2I, H] (gate rows first), down [E, H, I], bf16."""

    gate_up: torch.Tensor
    down: torch.Tensor


def make_weights(shape: LayerShape, generator: torch.Generator, *, full_copy: bool) -> Weights:
    """Random weights. `full_copy`: each expert has memory of its own, as PyTorch needs it; otherwise see
    overlapping_weights()."""
    gate_up = overlapping_weights(shape.experts, 2 * shape.intermediate, shape.hidden, generator)
    down = overlapping_weights(shape.experts, shape.hidden, shape.intermediate, generator)
    if full_copy:
        return Weights(gate_up.contiguous(), down.contiguous())
    return Weights(gate_up, down)


@dataclass(frozen=True)
class AdapterPair:
    """One adapted matrix in PEFT's layout, fp32 leaves that require a gradient.

    Attributes:
        a: [E * r, in], row e * r + i.
        b: [out, r * E], column i * E + e (rank-major).
        scale: delta W[e] = scale * B[e] A[e].
    """

    a: torch.Tensor
    b: torch.Tensor
    experts: int
    scale: float

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [E, r, in] and B [E, out, r], views through which gradients flow."""
        rank = self.a.shape[0] // self.experts
        a = self.a.view(self.experts, rank, self.a.shape[1])
        b = self.b.view(self.b.shape[0], rank, self.experts).permute(2, 0, 1)
        return a, b


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as PEFT trains it on fused experts: one A for gate and up."""

    gate_up: AdapterPair
    down: AdapterPair

    def parameters(self) -> list[torch.Tensor]:
        """The four leaves: A and B of gate_up, A and B of down."""
        return [self.gate_up.a, self.gate_up.b, self.down.a, self.down.b]


def make_adapter(shape: LayerShape, generator: torch.Generator) -> Adapter | None:
    """A random adapter with alpha = 2 r; None for rank 0. B is not zero, as if training had gone on for a while."""
    if shape.rank == 0:
        return None

    def pair(inputs: int, outputs: int) -> AdapterPair:
        a = torch.randn(shape.experts * shape.rank, inputs, generator=generator) / inputs**0.5
        b = 0.1 * torch.randn(outputs, shape.rank * shape.experts, generator=generator)
        return AdapterPair(a.requires_grad_(), b.requires_grad_(), shape.experts, 2.0)

    return Adapter(pair(shape.hidden, 2 * shape.intermediate), pair(shape.intermediate, shape.hidden))


@dataclass(frozen=True)
class Batch:
    """Inputs of one call: hidden and d_out [T, H] bf16, ids [T, k] int64, router weights [T, k] fp32; hidden and the
    router weights are leaves that require a gradient."""

    hidden: torch.Tensor
    ids: torch.Tensor
    router: torch.Tensor
    d_out: torch.Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return self.hidden.shape[0]

    @property
    def experts_hit(self) -> int:
        """Experts with at least one row."""
        return int(torch.unique(self.ids).numel())


def make_batch(shape: LayerShape, tokens: int, routing: Routing, generator: torch.Generator) -> Batch:
    """Random inputs; ValueError as route() raises it."""
    ids, router = route(routing, shape, tokens, generator)
    hidden = torch.randn(tokens, shape.hidden, generator=generator, dtype=torch.bfloat16)
    d_out = torch.randn(tokens, shape.hidden, generator=generator, dtype=torch.bfloat16)
    return Batch(hidden.requires_grad_(), ids, router.requires_grad_(), d_out)
