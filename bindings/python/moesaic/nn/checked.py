"""The functions of `moesaic.nn.functional` on any fusion, with their checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moesaic import forward_mode
from moesaic.lora import LoraPair
from moesaic.nn.autograd import Fusion, fused_linear, rows_of
from moesaic.nn.linear import PackedLinear

__all__ = ["check", "check_inplace", "epsilon", "gelu", "linear", "norm", "required"]

_DTYPES = (torch.bfloat16, torch.float32)
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def linear(
    fusion: Fusion,
    x: torch.Tensor,
    w: PackedLinear,
    residual: torch.Tensor | None = None,
    gamma: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    lora: Sequence[LoraPair] = (),
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``norm(activation(x W^T + bias + LoRA + addend) + residual)``.

    Args:
        addend: ``[rows, N]``, rows of all leading dimensions of `x` together.
        lora: beside those of `w`. In bf16 the engine computes both, else PyTorch.
        bias: instead of that of `w`.
    """
    if not isinstance(w, PackedLinear):
        raise TypeError(f"w is a {type(w).__name__}; expected a moesaic.nn.PackedLinear")
    check(x, "x", w.in_features)
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype}; expected {w.dtype}, as w was packed")
    if residual is not None:
        check(residual, "residual", w.out_features)
        shape = (*x.shape[:-1], w.out_features)
        if residual.shape != shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual has shape {list(residual.shape)} and is {residual.dtype}; "
                f"expected {list(shape)} and {x.dtype}, as x and w give it"
            )
    if fusion.norm != "none":
        _check_vector(required(gamma, "gamma"), "gamma", w.out_features)
    if fusion.norm == "layernorm":
        _check_vector(required(beta, "beta"), "beta", w.out_features)
    bias = w.bias if bias is None else bias
    pairs = [pair for pair in (*w.lora, *lora) if pair.a.shape[0] > 0]
    served = x.dtype == torch.bfloat16 and all(t.dtype in _DTYPES for pair in pairs for t in (pair.a, pair.b))
    change = _sum_of(pairs) if pairs and served else None
    if change is None:
        for pair in pairs:
            low = F.linear(rows_of(x).to(pair.a.dtype), pair.a) * pair.scale
            delta = F.linear(low.to(pair.b.dtype), pair.b).to(x.dtype)
            addend = delta if addend is None else addend + delta
    if forward_mode.is_on():
        adapters = [(tensor, "w.lora") for pair in pairs for tensor in (pair.a, pair.b)]
        for tensor, name in ((w.weight, "w.weight"), (bias, "w.bias"), (addend, "w.lora"), *adapters):
            if tensor is not None:
                forward_mode.refuse(tensor, name)
    return fused_linear(fusion, w.packed(), x, w.weight, bias, addend, residual, gamma, beta, lora=change)


def _sum_of(pairs: Sequence[LoraPair]) -> LoraPair:
    """Changes of one weight that add up, as one change."""
    scale = pairs[0].scale
    if len(pairs) == 1:
        return LoraPair(rows_of(pairs[0].a), rows_of(pairs[0].b), scale)
    if all(pair.scale == scale for pair in pairs):
        a = [pair.a for pair in pairs]
    else:  # in fp32: it is rounded once, where it is multiplied
        a, scale = [pair.a.float() * pair.scale for pair in pairs], 1.0
    return LoraPair(torch.cat(a), torch.cat([pair.b for pair in pairs], dim=1), scale)


def norm(
    fusion: Fusion, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, inplace: bool
) -> torch.Tensor:
    """The norm of `x` alone."""
    check(x, "x")
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None:
            _check_vector(vector, name, x.shape[-1])
    if not inplace:
        return fused_linear(fusion, None, x, None, None, None, None, gamma, beta)
    check_inplace(x, gamma, beta)
    rows = x.view(-1, x.shape[-1])
    with torch.no_grad():
        fused_linear(fusion, None, rows, None, None, None, None, gamma, beta, out=rows)
    return x


def required(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    """`tensor`, which must not be None."""
    if tensor is None:
        raise TypeError(f"{name} is None; expected a torch.Tensor")
    return tensor


def check(tensor: torch.Tensor, name: str, features: int | None = None) -> None:
    """Type, last dimension, dtype and device of an input."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    shape = tensor.shape
    if not shape or shape[-1] == 0 or (features is not None and shape[-1] != features):
        expected = "[..., features]" if features is None else f"[..., {features}]"
        raise ValueError(f"{name} has shape {list(shape)}; expected {expected}")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}; expected torch.bfloat16 or torch.float32")
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; expected a CPU tensor")
    forward_mode.refuse(tensor, name)


def _check_vector(vector: torch.Tensor, name: str, size: int) -> None:
    check(vector, name)
    if vector.shape != (size,):
        raise ValueError(f"{name} has shape {list(vector.shape)}; expected [{size}]")


def check_inplace(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Whether `x` may be overwritten."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        raise ValueError("inplace is True, and a gradient is required, which needs x as it was; expected False")
    if not x.is_contiguous():
        raise ValueError("inplace is True, and x is not contiguous; expected contiguous memory")


def gelu(approximate: str) -> str:
    """The activation's name in a `Fusion`."""
    if approximate not in _GELU:
        raise ValueError(f'approximate is {approximate!r}; expected "none" or "tanh"')
    return _GELU[approximate]


def epsilon(eps: float) -> float:
    """`eps`, checked."""
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps is a {type(eps).__name__}; expected a float")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}; expected 0 or more")
    return float(eps)
