"""Attention: the engine's where it has a form for it, else PyTorch's."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from moesaic import _core, forward_mode
from moesaic.nn import autograd, checked

__all__ = ["MANY_QUERIES", "attention", "is_served"]

MANY_QUERIES = 16
"""A block of the engine's form for many, which lays out all keys and values. Fewer read these where they lie."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    key_mask: torch.Tensor | None = None,
    causal: bool = False,
    first_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` for each head.

    The engine computes it in bf16: of 16 queries and more with their gradients (scores and sums in fp32, e^score
    rounded before it is divided, probabilities and gradients of scores rounded where they are multiplied); of fewer, as
    decoding has them, where no gradient is wanted, D is a multiple of 32, the heads of all sequences follow each other
    in memory and `first_keys` is None (in fp32 but for the result).
    ``torch.nn.functional.scaled_dot_product_attention`` everywhere else. Differentiable once where the engine computes
    it.

    Args:
        q: ``[B, heads, T, D]``, bf16 or fp32.
        k: ``[B, key heads, S, D]``: as many heads as q, or a divisor of them, each for so many of q's side by side.
        v: ``[B, key heads, S, D]``.
        scale: None: 1 / sqrt(D).
        key_mask: bool ``[B, S]``: which keys are seen; None: all. A query that sees none gives 0.
        causal: the last query sees all keys, each one before it one less; T is at most S. A NaN in a value that is not
            seen may pass through, as in PyTorch.
        first_keys: int64 ``[B, T]``: each query sees no key before this one; None: all. So sequences that share a row
            and windows are described: with `causal`, query t of a sequence that begins at s has s, and t - n + 1 where
            n keys are seen at most. The engine leaves out keys that a block of queries does not see: time grows with
            what is seen, not with T S. A query that sees none gives 0.

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
        divides = tensor.shape[1] == heads or (tensor.shape[1] > 0 and heads % tensor.shape[1] == 0)
        same = (tensor.shape[0], tensor.shape[3]) == (batch, size) and tensor.shape[1:3] == k.shape[1:3]
        if not same or not divides:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; expected [{batch}, {heads}, S, {size}], as q and k have it, "
                f"or a divisor of {heads} heads"
            )
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} rows; expected at most k's {k.shape[2]}: the last query sees the last key"
        )
    _check_choice(key_mask, "key_mask", torch.bool, (batch, k.shape[2]))
    _check_choice(first_keys, "first_keys", torch.int64, (batch, q.shape[2]))
    if scale is None:
        scale = size**-0.5
    elif not isinstance(scale, (int, float)):
        raise TypeError(f"scale is a {type(scale).__name__}; expected a number")
    elif not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number")
    if heads == 0:
        return q.clone()  # PyTorch 2.11 divides by their number
    if not is_served(q, k, v) or (first_keys is not None and q.shape[2] < MANY_QUERIES):
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if causal and q.shape[2] > 1:
            queries, keys = q.shape[2], k.shape[2]
            seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
            mask = seen if mask is None else mask & seen
        if first_keys is not None:
            seen = torch.arange(k.shape[2], device=q.device) >= first_keys[:, None, :, None]
            mask = seen if mask is None else mask & seen
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=k.shape[1] != heads)
    bias = None
    if key_mask is not None:
        bias = torch.zeros(key_mask.shape, dtype=torch.float32, device="cpu").masked_fill_(~key_mask, -math.inf)
    if q.shape[2] < MANY_QUERIES:
        few = q.reshape(-1, *q.shape[2:])
        if few.stride(2) != 1:
            few = few.contiguous()
        out = _core.few_queries_attention(
            few, _one_after_the_other(k), _one_after_the_other(v), batch, scale, bias, causal
        )
        return out.view(batch, -1, heads, size).transpose(1, 2)
    rows = [_rows_of(tensor) for tensor in (q, k, v)]
    first = None if first_keys is None else first_keys.contiguous()
    out = autograd.attention(rows[0], rows[1], rows[2], bias, first, heads, k.shape[1], scale, causal)
    return out.view(batch, -1, heads, size).transpose(1, 2)


def _check_choice(choice: torch.Tensor | None, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Raises where what says which keys are seen is of another kind."""
    if choice is None:
        return
    if not isinstance(choice, torch.Tensor) or choice.dtype != dtype:
        came = getattr(choice, "dtype", type(choice).__name__)
        raise TypeError(f"{name} is {came}; expected a tensor of {dtype}")
    if not choice.is_cpu:
        raise ValueError(f"{name} is on {choice.device}; expected a CPU tensor")
    if tuple(choice.shape) != shape:
        raise ValueError(f"{name} has shape {list(choice.shape)}; expected {list(shape)}")


def _rows_of(heads: torch.Tensor) -> torch.Tensor:
    """``[B, rows, heads D]``; a view wherever it can be one."""
    rows = heads.transpose(1, 2).flatten(2)
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


def _one_after_the_other(heads: torch.Tensor) -> torch.Tensor:
    """``[B key heads, S, D]``, for heads that follow each other."""
    return heads.as_strided((heads.shape[0] * heads.shape[1], *heads.shape[2:]), heads.stride()[1:])


def _heads_follow_each_other(heads: torch.Tensor) -> bool:
    """Whether the heads of all sequences follow each other at one distance, with contiguous rows."""
    batch, count, _, _ = heads.shape
    return not heads.is_neg() and heads.stride(3) == 1 and (batch == 1 or heads.stride(0) == count * heads.stride(1))


def is_served(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the engine computes attention of such tensors: of numbers in memory, which tracers and functorch's
    transforms do not have, and without tangents; of few queries where no gradient is wanted."""
    tensors = (q, k, v)
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors) or torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        return False
    if torch._C._are_functorch_transforms_active() or any(forward_mode.has_tangent(t) for t in tensors):
        return False
    if q.dtype != torch.bfloat16 or q.numel() == 0 or k.numel() == 0:
        return False
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if q.shape[2] >= MANY_QUERIES:
        return not (wanted and torch.compiler.is_compiling())  # which does not look into our backward
    return not wanted and q.shape[3] % 32 == 0 and _heads_follow_each_other(k) and _heads_follow_each_other(v)
