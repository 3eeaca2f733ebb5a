"""The packed weights of a dense layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic import _core
from moesaic.lora import LoraPair

__all__ = ["PackedLinear", "fingerprint"]

_DTYPES = (torch.bfloat16, torch.float32)


def fingerprint(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a tensor does: address, version, and up to 64 values spread over its two or three dimensions,
    because neither of the first two tells of a write through ``.data`` (PEFT merges that way)."""
    version = 0 if parameter.is_inference() else parameter._version
    values = parameter
    if not parameter.is_cpu:
        each = 8 if parameter.dim() < 3 else 4
        values = parameter.detach()[
            tuple(slice(None, None, max(1, -(-size // each))) for size in parameter.shape)
        ].cpu()
    return (parameter.data_ptr(), version, parameter.dtype, parameter.shape, _core.sample_of(values))


class PackedLinear:
    """``x W^T + bias`` with W packed once for the matrix units of this host; forward and backward read the same copy.

    Args:
        weight: ``[N, K]`` as torch's Linear has it, bf16 or fp32, any strides. One that requires no gradient may be
            freed afterwards. One that requires a gradient is kept, and packed anew in every call with gradients enabled
            (nothing tells reliably that an optimizer wrote it), else where its address, its version or a sample of its
            values changed.
        bias: ``[N]`` bf16 or fp32, or None; kept, and read in every call.
        lora: low-rank changes ``scale * b @ a`` with a ``[r, K]`` and b ``[N, r]``, bf16 or fp32, which add up; read in
            every call. With bf16 weights they are rounded to bf16, and one more step of the GEMM; with fp32 weights, or
            factors of another dtype, PyTorch computes them. They enter before the activation.

    The inputs of the functions must have the dtype of `weight`: bf16 is multiplied as bf16 with fp32 sums, fp32 as
    fp32. A copy shares the weights; pickling unpacks them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a wrong shape, dtype or device.
        MemoryError: memory cannot be had.
    """

    __slots__ = ("__weakref__", "_core", "_fingerprint", "_is_new", "bias", "lora", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        lora: LoraPair | Sequence[LoraPair] = (),
    ) -> None:
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"weight is a {type(weight).__name__}; expected a torch.Tensor")
        if weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(f"weight has shape {list(weight.shape)}; expected [N, K], neither of them 0")
        if weight.dtype not in _DTYPES:
            raise ValueError(f"weight is {weight.dtype}; expected torch.bfloat16 or torch.float32")
        if bias is not None and not isinstance(bias, torch.Tensor):
            raise TypeError(f"bias is a {type(bias).__name__}; expected a torch.Tensor or None")
        if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype not in _DTYPES):
            raise ValueError(
                f"bias has shape {list(bias.shape)} and is {bias.dtype}; expected [{weight.shape[0]}], "
                "torch.bfloat16 or torch.float32"
            )
        pairs = (lora,) if isinstance(lora, LoraPair) else tuple(lora)
        for pair in pairs:
            if not isinstance(pair, LoraPair):
                raise TypeError(f"lora holds a {type(pair).__name__}; expected moesaic.LoraPair")
            if pair.experts is not None:
                raise ValueError(f"lora has experts = {pair.experts}; expected None: a dense layer has one matrix")
            if not (pair.a.is_floating_point() and pair.b.is_floating_point()):
                raise ValueError(f"lora has a {pair.a.dtype} and b {pair.b.dtype}; expected floating-point numbers")
            if pair.a.dim() != 2 or pair.b.dim() != 2 or pair.a.shape[0] != pair.b.shape[1]:
                raise ValueError(
                    f"lora has a {list(pair.a.shape)} and b {list(pair.b.shape)}; expected [r, K] and [N, r]"
                )
            if pair.a.shape[1] != weight.shape[1] or pair.b.shape[0] != weight.shape[0]:
                raise ValueError(
                    f"lora has a {list(pair.a.shape)} and b {list(pair.b.shape)}; expected [r, {weight.shape[1]}] and "
                    f"[{weight.shape[0]}, r]"
                )
        #: The weight, where it requires a gradient; else None.
        self.weight = weight if weight.requires_grad else None
        self.bias = bias
        self.lora = pairs
        self._core = _core.PackedMatrix(weight.detach())
        self._fingerprint = None if self.weight is None else fingerprint(weight)
        self._is_new = True

    @property
    def out_features(self) -> int:
        """N."""
        return self._core.rows

    @property
    def in_features(self) -> int:
        """K."""
        return self._core.columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what they multiply."""
        return torch.bfloat16 if self._core.is_bf16 else torch.float32

    @property
    def weight_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._core.bytes

    def packed(self) -> _core.PackedMatrix:
        """The packed weights as they are now: made anew if `weight` may have changed."""
        weight = self.weight
        if weight is None:
            return self._core
        trains = torch.is_grad_enabled() and weight.requires_grad and not self._is_new
        self._is_new = False
        if trains or fingerprint(weight) != self._fingerprint:
            self._core = _core.PackedMatrix(weight.detach())
            self._fingerprint = fingerprint(weight)
        return self._core

    def unpack(self) -> torch.Tensor:
        """W as it was packed, ``[N, K]``."""
        weight = torch.empty((self.out_features, self.in_features), dtype=self.dtype)
        self._core.unpack(weight)
        return weight

    def __copy__(self) -> PackedLinear:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PackedLinear:
        return self

    def __reduce__(self) -> tuple[type[PackedLinear], tuple[Any, ...]]:
        return PackedLinear, (self.unpack() if self.weight is None else self.weight, self.bias, self.lora)

    def __repr__(self) -> str:
        return (
            f"PackedLinear(in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dtype={self.dtype})"
        )
