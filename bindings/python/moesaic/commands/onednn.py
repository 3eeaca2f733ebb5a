"""oneDNN's matrix products on weights that were packed before: the best that calls of a library can do.

It is the oneDNN inside PyTorch: always there, recent, and on the threads that PyTorch and the engine use. Where it
has no bf16 instructions, its fp32 ones stand in, on twice the bytes; `dtype()` tells.
"""

from __future__ import annotations

import functools

import torch

from moesaic.commands.output import first_line

# What oneDNN is told beside the operands: nothing fused behind the product.
_NO_POST_OP: tuple[str, list[float], str] = ("none", [], "")


@functools.cache
def unavailable() -> str | None:
    """Why this PyTorch cannot run these products; None: it can."""
    if not torch._C._has_mkldnn:
        return "this PyTorch was built without oneDNN"
    try:
        PackedWeight(torch.zeros(16, 32, dtype=dtype()), 16).product(torch.zeros(16, 32, dtype=dtype()))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"the oneDNN of PyTorch {torch.__version__} has no product on packed weights: {first_line(error)}"
    return None


def version() -> str:
    """Of PyTorch's oneDNN, as its build says."""
    lines = torch.__config__.show().splitlines()
    return next((line.split("MKL-DNN")[1].split()[0] for line in lines if "MKL-DNN v" in line), "unknown")


@functools.cache
def dtype() -> torch.dtype:
    """The type of its products here: bf16 where the host has such instructions, else fp32.

    oneDNN has bf16 products on every AVX-512 host, but without the instructions they are several times slower than its
    fp32 ones.
    """
    from moesaic import _core

    own = any(runs for name, runs in _core.kernel_tiers() if name in ("amx_bf16", "avx512_bf16"))
    return torch.bfloat16 if own and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class PackedWeight:
    """A weight [out, in] in the layout that oneDNN likes best for products with about `rows` rows."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype()).contiguous(), rows)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] of dtype() times the transposed weight, in the same type."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, *_NO_POST_OP)
        return out


class PlainWeight:
    """The same on the weight [out, in] as it lies (any strides): what oneDNN does with it is part of each product."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self._weight = weight.to(dtype())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As PackedWeight.product."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, *_NO_POST_OP)
        return out
