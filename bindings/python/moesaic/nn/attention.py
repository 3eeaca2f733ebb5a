"""Attention without a causal mask: the engine's where no gradient is wanted, else PyTorch's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from moesaic import _core, forward_mode
from moesaic.nn import checked

__all__ = ["attention", "is_served"]

_LEAST_QUERIES = 16
"""A block of the engine's. Fewer do not pay for laying out all keys and values."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` for each head.

    The engine computes it in bf16 (scores and sums in fp32, e^score rounded before it is divided) for 16 queries and
    more where no gradient is wanted; ``torch.nn.functional.scaled_dot_product_attention`` everywhere else, gradients
    included.

    Args:
        q: ``[B, heads, T, D]``, bf16 or fp32.
        k: ``[B, heads, S, D]``.
        v: ``[B, heads, S, D]``.
        scale: None: 1 / sqrt(D).
        key_mask: bool ``[B, S]``: which keys are seen; None: all. A query that sees none gives 0.

    Returns:
        ``[B, heads, T, D]``; of the engine with the heads of a query side by side in memory.

    Raises:
        TypeError, ValueError: a wrong type, shape or dtype; the message names the argument.
        NotImplementedError: a tangent of `torch.autograd.forward_ad`.
    """
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        checked.check(tensor, name)
        if tensor.dim() != 4 or tensor.dtype != q.dtype:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and is {tensor.dtype}; expected 4 dimensions, {q.dtype}"
            )
    batch, heads, _, size = q.shape
    for tensor, name in ((k, "k"), (v, "v")):
        if (*tensor.shape[:2], tensor.shape[3]) != (batch, heads, size) or tensor.shape[2] != k.shape[2]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; expected [{batch}, {heads}, S, {size}], as q and k have it"
            )
    if key_mask is not None:
        if not isinstance(key_mask, torch.Tensor) or key_mask.dtype != torch.bool:
            raise TypeError(
                f"key_mask is {getattr(key_mask, 'dtype', type(key_mask).__name__)}; expected a bool tensor"
            )
        if not key_mask.is_cpu:
            raise ValueError(f"key_mask is on {key_mask.device}; expected a CPU tensor")
        if tuple(key_mask.shape) != (batch, k.shape[2]):
            raise ValueError(f"key_mask has shape {list(key_mask.shape)}; expected [{batch}, {k.shape[2]}]")
    if scale is None:
        scale = size**-0.5
    elif not isinstance(scale, (int, float)):
        raise TypeError(f"scale is a {type(scale).__name__}; expected a number")
    elif not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number")
    if heads == 0:
        return q.clone()  # PyTorch 2.11 divides by their number
    if not is_served(q, k, v):
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    bias = None
    if key_mask is not None:
        bias = torch.zeros(key_mask.shape, dtype=torch.float32, device="cpu").masked_fill_(~key_mask, -math.inf)
    rows = [_rows_of(tensor) for tensor in (q, k, v)]
    out = _core.attention(rows[0], rows[1], rows[2], heads, scale, bias)
    return out.view(batch, -1, heads, size).transpose(1, 2)


def _rows_of(heads: torch.Tensor) -> torch.Tensor:
    """``[B, rows, heads D]``; a view wherever it can be one."""
    rows = heads.transpose(1, 2).flatten(2)
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def is_served(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the engine computes attention of such tensors: of numbers in memory, which tracers do not have, where no
    gradient is wanted, backward or forward."""
    tensors = (q, k, v)
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors) or torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        return False
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    wanted = wanted or any(forward_mode.has_tangent(t) for t in tensors)
    some = q.shape[2] >= _LEAST_QUERIES and q.numel() > 0 and k.numel() > 0
    return q.dtype == torch.bfloat16 and some and not wanted
