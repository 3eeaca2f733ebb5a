"""LoRA adapters of an experts layer, as the engine reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Lora", "LoraGrad", "LoraPair", "LoraPairGrad"]


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """One low-rank change of a projection: ``delta[e] = scale * b[e] @ a[e]``.

    Args:
        a: ``[E, r, in]``, fp32 or bf16, any strides (a view of a parameter will do; nothing is copied).
        b: ``[E, out, r]``, fp32 or bf16, any strides.
        scale: ``alpha / r``, or ``alpha / sqrt(r)`` for rsLoRA.
        experts: E, where a and b are the two matrices in which PEFT keeps the adapters of all experts: a ``[E * r,
            in]``, row ``e * r + k``; b ``[out, r * E]``, column ``k * E + e``. They are read as they lie, and the
            gradients have their shapes, without views that autograd would have to go through.

    The tensors are read anew in every forward and backward. Shapes and dtypes are checked there.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: experts is less than 1.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    experts: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.a, torch.Tensor):
            raise TypeError(f"a is a {type(self.a).__name__}; expected a torch.Tensor")
        if not isinstance(self.b, torch.Tensor):
            raise TypeError(f"b is a {type(self.b).__name__}; expected a torch.Tensor")
        if not isinstance(self.scale, (float, int)):
            raise TypeError(f"scale is a {type(self.scale).__name__}; expected a float")
        if self.experts is not None:
            if not isinstance(self.experts, int):
                raise TypeError(f"experts is a {type(self.experts).__name__}; expected an int or None")
            if self.experts < 1:
                raise ValueError(f"experts is {self.experts}; expected at least 1")


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """One adapter of an experts layer. Each pair may be None, and each has a rank and a scale of its own.

    Args:
        gate_up: one ``a`` shared by gate and up (PEFT): a ``[E, r, H]``, b ``[E, 2I, r]``, gate rows first.
        gate: a ``[E, r, H]``, b ``[E, I, r]``. May stand beside ``gate_up``: contributions add up.
        up: as ``gate``.
        down: a ``[E, r, I]``, b ``[E, H, r]``.

    Raises:
        TypeError: a field is neither a LoraPair nor None.
    """

    gate_up: LoraPair | None = None
    gate: LoraPair | None = None
    up: LoraPair | None = None
    down: LoraPair | None = None

    def __post_init__(self) -> None:
        for field, pair in zip(FIELDS, (self.gate_up, self.gate, self.up, self.down), strict=True):
            if pair is not None and not isinstance(pair, LoraPair):
                raise TypeError(f"{field} is a {type(pair).__name__}; expected a moesaic.LoraPair or None")


@dataclass(frozen=True, slots=True, eq=False)
class LoraPairGrad:
    """Gradients of a LoraPair, each in the dtype and the strides of its tensor; None where none was asked for."""

    a: torch.Tensor | None
    b: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LoraGrad:
    """Gradients of a Lora; None where it has no pair."""

    gate_up: LoraPairGrad | None = None
    gate: LoraPairGrad | None = None
    up: LoraPairGrad | None = None
    down: LoraPairGrad | None = None


FIELDS = ("gate_up", "gate", "up", "down")

#: One entry for each pair, ``(adapter, index in FIELDS, scale, experts or 0)``: what the adapters hold besides tensors.
Layout = tuple[tuple[int, int, float, int], ...]


def flatten(lora: Lora | Sequence[Lora] | None) -> tuple[tuple[torch.Tensor, ...], Layout]:
    """Adapters as a flat tuple of tensors ``(a, b, a, b, ...)``, which autograd can see, and what each pair is.

    Raises:
        TypeError: `lora` is no Lora and no sequence of them.
    """
    if lora is None:
        return (), ()
    if isinstance(lora, Lora):
        lora = (lora,)
    elif not isinstance(lora, (list, tuple, Sequence)):  # those two first: the general question takes longer
        raise TypeError(f"lora is a {type(lora).__name__}; expected a moesaic.Lora, a sequence of them, or None")
    tensors: list[torch.Tensor] = []
    layout: list[tuple[int, int, float, int]] = []
    for n, adapter in enumerate(lora):
        if not isinstance(adapter, Lora):
            raise TypeError(f"lora[{n}] is a {type(adapter).__name__}; expected a moesaic.Lora")
        for index, pair in enumerate((adapter.gate_up, adapter.gate, adapter.up, adapter.down)):
            if pair is not None:
                tensors += (pair.a, pair.b)
                layout.append((n, index, pair.scale, pair.experts or 0))
    return tuple(tensors), tuple(layout)


def unflatten(grads: Sequence[torch.Tensor | None], layout: Layout) -> tuple[LoraGrad, ...]:
    """The inverse of `flatten`, for gradients: one LoraGrad for each adapter that has a pair, up to the last one."""
    adapters: list[dict[str, LoraPairGrad]] = [{} for _ in range(layout[-1][0] + 1)] if layout else []
    for n, (adapter, index, *_) in enumerate(layout):
        adapters[adapter][FIELDS[index]] = LoraPairGrad(grads[2 * n], grads[2 * n + 1])
    return tuple(LoraGrad(**pairs) for pairs in adapters)
