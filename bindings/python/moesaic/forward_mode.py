"""Forward-mode differentiation (`torch.autograd.forward_ad`), which the engine does not have."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["has_tangent", "is_on", "refuse"]


def is_on() -> bool:
    """Whether tensors may have tangents at all."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether one is to be carried along."""
    return is_on() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def refuse(tensor: torch.Tensor, name: str) -> None:
    """Raises NotImplementedError for a tensor with a tangent: a result without one would be wrong."""
    if has_tangent(tensor):
        raise NotImplementedError(
            f"{name} has a tangent of torch.autograd.forward_ad; expected none: moesaic has no forward-mode derivatives"
        )
