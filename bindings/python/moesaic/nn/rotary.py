"""Rotary embeddings: queries and keys turned by the angles of their positions, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moesaic import _core, forward_mode
from moesaic.nn import checked
from moesaic.nn.autograd import rows_of

__all__ = ["is_served", "rotary", "turned"]


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x cos + rotate_half(x) sin`` with ``rotate_half([x1; x2]) = [-x2; x1]``, as transformers has it.

    Products and their sum are rounded to the dtype of `x`, as PyTorch's are: the result is the same to the last bit,
    but for products and results in bf16 that are denormal, and for the sign of a gradient that is 0. Differentiable in
    `x`, any number of times, one gradient at a time; the engine computes it for D a multiple of 32, PyTorch for others.

    Args:
        x: ``[B, heads, T, D]``, bf16 or fp32, D even.
        cos: ``[B, T, D]`` or ``[1, T, D]``, in the dtype of `x`; it gets no gradient.
        sin: as `cos`.

    Returns:
        ``[B, heads, T, D]``; of the engine with the heads of a token side by side in memory.

    Raises:
        TypeError, ValueError: a wrong type, shape or dtype, or angles that require a gradient; the message names the
            argument.
        NotImplementedError: a tangent of `torch.autograd.forward_ad`.
    """
    checked.check(x, "x")
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"x has shape {list(x.shape)}; expected [B, heads, T, D] with an even D")
    for angles, name in ((cos, "cos"), (sin, "sin")):
        checked.check(angles, name)
        if angles.dtype != x.dtype:
            raise ValueError(f"{name} is {angles.dtype}; expected {x.dtype}, as x is")
        if angles.shape not in _shapes(x):
            raise ValueError(f"{name} has shape {list(angles.shape)}; expected {list(_shapes(x)[1])}, or 1 in front")
        if angles.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and gets none here; expected a tensor without")
    if is_served(x, cos, sin):
        return turned(x, cos, sin)
    half = x.shape[3] // 2
    return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin[:, None]


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`rotary` by the engine, of what `is_served`."""
    batch, heads, tokens, size = x.shape
    rows = rows_of(x.transpose(1, 2).flatten(2))
    sequences = max(cos.shape[0], sin.shape[0])
    cos, sin = (rows_of(angles.expand(sequences, -1, -1)) for angles in (cos, sin))
    if torch.is_grad_enabled() and x.requires_grad:
        out = _Rotary.apply(rows, cos, sin, False)  # type: ignore[no-untyped-call]
    else:
        out = _core.rotary(rows, cos, sin)
    result: torch.Tensor = out.view(batch, tokens, heads, size).transpose(1, 2)
    return result


def is_served(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the engine turns such tensors: of numbers in memory, which tracers and functorch's transforms do not
    have, without tangents, and angles without gradients."""
    tensors = (x, cos, sin)
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors) or torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if any(forward_mode.has_tangent(t) or not t.is_cpu or t.dtype != x.dtype or t.is_neg() for t in tensors):
        return False
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dim() != 4 or x.numel() == 0 or x.shape[3] % 32 != 0:
        return False
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return False
    return all(angles.shape in _shapes(x) for angles in (cos, sin))


class _Rotary(torch.autograd.Function):
    """Rows ``[T, heads D]``; its gradient is the same by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        return _core.rotary(x, cos, sin, back)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d_x = _Rotary.apply(rows_of(d_out), cos, sin, not ctx.back)  # type: ignore[no-untyped-call]
        return d_x, None, None, None


def _shapes(x: torch.Tensor) -> tuple[torch.Size, torch.Size]:
    """Of angles: of one sequence for all, and of each."""
    return torch.Size((1, *x.shape[2:])), torch.Size((x.shape[0], *x.shape[2:]))
