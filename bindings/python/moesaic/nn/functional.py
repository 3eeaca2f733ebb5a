"""Fused dense layers, the norms, gates, attention and rotary embeddings beside them, and losses over a vocabulary.

Tensors are on the CPU, bf16 or fp32, ``[..., features]`` with any number of leading dimensions; all of one call have
one dtype, that of the packed weights. Sums and statistics are fp32. Vectors (bias, gamma, beta) are bf16 or fp32.
Results are bitwise the same for any number of threads; a row's last bits may differ between calls of few rows (on some
tiers up to 64), whose sums are taken in another order, and of many. Gradients reach every tensor that requires one:
inputs, norms' vectors, LoRA, the bias, and the weight if it required a gradient when it was packed. Those of the
weight, of the bias and, in fp32, of LoRA are PyTorch's products of what the engine leaves; all others are the engine's.

Every function raises TypeError or ValueError for a wrong type, shape, dtype or option, and NotImplementedError for a
tangent of `torch.autograd.forward_ad`; the message names the argument.

All are differentiable once, `rotary` any number of times. `attention` takes ``[B, heads, T, D]``; in fp32, and of less
than 16 queries that want a gradient, it is PyTorch's.
"""

from __future__ import annotations

import torch

from moesaic.nn import checked
from moesaic.nn.attention import attention
from moesaic.nn.autograd import Fusion, rows_of
from moesaic.nn.autograd import silu_mul as _silu_mul
from moesaic.nn.linear import PackedLinear
from moesaic.nn.log_probs import TokenLogProbs, gemm_log_probs, log_probs
from moesaic.nn.rotary import rotary

__all__ = [
    "TokenLogProbs",
    "attention",
    "gemm_bias",
    "gemm_bias_add_layernorm",
    "gemm_bias_add_rmsnorm",
    "gemm_bias_gelu",
    "gemm_bias_gelu_add_layernorm",
    "gemm_log_probs",
    "layernorm",
    "log_probs",
    "rmsnorm",
    "rotary",
    "silu_mul",
]


def gemm_bias(x: torch.Tensor, w: PackedLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """``x W^T + bias``, plus `residual` if there is one.

    Args:
        x: ``[..., K]``.
        w: the packed weights.
        residual: ``[..., N]``, or None.

    Returns:
        ``[..., N]`` in the dtype of `x`.
    """
    return checked.linear(Fusion(), x, w, residual)


def gemm_bias_add_layernorm(
    x: torch.Tensor,
    w: PackedLinear,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-12,
) -> torch.Tensor:
    """``LayerNorm(x W^T + bias + residual)`` over the last dimension.

    Args:
        x: ``[..., K]``.
        w: the packed weights.
        residual: ``[..., N]``.
        gamma: ``[N]``.
        beta: ``[N]``.
        eps: added to the variance.

    Returns:
        ``[..., N]`` in the dtype of `x`.
    """
    return checked.linear(
        Fusion(norm="layernorm", eps=checked.epsilon(eps)), x, w, checked.required(residual, "residual"), gamma, beta
    )


def gemm_bias_add_rmsnorm(
    x: torch.Tensor, w: PackedLinear, residual: torch.Tensor, gamma: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """``RMSNorm(x W^T + bias + residual)`` over the last dimension; arguments as `gemm_bias_add_layernorm`."""
    return checked.linear(
        Fusion(norm="rmsnorm", eps=checked.epsilon(eps)), x, w, checked.required(residual, "residual"), gamma
    )


def gemm_bias_gelu(x: torch.Tensor, w: PackedLinear, approximate: str = "none") -> torch.Tensor:
    """``GELU(x W^T + bias)``.

    Args:
        x: ``[..., K]``.
        w: the packed weights.
        approximate: "none": with erf; "tanh": the approximation by tanh. As ``torch.nn.functional.gelu``.

    Returns:
        ``[..., N]`` in the dtype of `x`.
    """
    return checked.linear(Fusion(checked.gelu(approximate)), x, w)


def gemm_bias_gelu_add_layernorm(
    x: torch.Tensor,
    w: PackedLinear,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-12,
    approximate: str = "none",
) -> torch.Tensor:
    """``LayerNorm(GELU(x W^T + bias) + residual)``; arguments as `gemm_bias_add_layernorm` and `gemm_bias_gelu`."""
    fusion = Fusion(checked.gelu(approximate), "layernorm", checked.epsilon(eps))
    return checked.linear(fusion, x, w, checked.required(residual, "residual"), gamma, beta)


def layernorm(
    x: torch.Tensor,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    eps: float = 1e-5,
    inplace: bool = False,
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * gamma + beta`` over the last dimension.

    Args:
        x: ``[..., N]``.
        gamma: ``[N]``, or None for ones.
        beta: ``[N]``, or None for zeros.
        eps: added to the variance.
        inplace: write to `x` and return it; not where a gradient would need it.
    """
    return checked.norm(Fusion(norm="layernorm", eps=checked.epsilon(eps)), x, gamma, beta, inplace)


def rmsnorm(
    x: torch.Tensor, gamma: torch.Tensor | None = None, eps: float = 1e-6, inplace: bool = False
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * gamma`` over the last dimension; arguments as `layernorm`."""
    return checked.norm(Fusion(norm="rmsnorm", eps=checked.epsilon(eps)), x, gamma, None, inplace)


def silu_mul(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """``silu(gate) * up`` of ``x = [gate; up]`` along the last dimension.

    Args:
        x: ``[..., 2 I]``.
        inplace: write to the gate half of `x`; not where a gradient would need it.

    Returns:
        ``[..., I]`` in the dtype of `x`; with `inplace` a view of `x`.
    """
    checked.check(x, "x")
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"x has {x.shape[-1]} features; expected an even number, [gate; up]")
    if not inplace:
        return _silu_mul(rows_of(x)).view(*x.shape[:-1], x.shape[-1] // 2)
    checked.check_inplace(x)
    rows = x.view(-1, x.shape[-1])
    half = x.shape[-1] // 2
    with torch.no_grad():
        _silu_mul(rows, rows[:, :half])
    return x[..., :half]
