"""One experts layer: packed weights, and forward and backward without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moesaic import _core, staging
from moesaic.lora import Layout, Lora, LoraGrad, flatten, unflatten
from moesaic.staging import on_cpu

__all__ = ["ExpertsLayer", "Grads", "Saved"]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What `ExpertsLayer.forward` leaves for `ExpertsLayer.backward`: tensors, which may be dropped or used again."""

    state: torch.Tensor
    """The engine's own, one block of bytes: routing, G, U, and the low-rank products of LoRA."""
    hidden: torch.Tensor
    """In CPU memory, as are the weights."""
    top_k_weights: torch.Tensor
    lora_tensors: tuple[torch.Tensor, ...]
    lora_layout: Layout
    devices: tuple[torch.device, ...] | None
    """Where the gradients go: of hidden, of top_k_weights, and of each of `lora_tensors`; None: all in CPU memory."""

    @property
    def nbytes(self) -> int:
        """Bytes that forward saved beside its own arguments."""
        return self.state.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Grads:
    """Gradients as `ExpertsLayer.backward` returns them, each in the dtype of what it belongs to."""

    hidden: torch.Tensor
    top_k_weights: torch.Tensor
    lora: tuple[LoraGrad, ...]
    """One for each adapter given to forward; empty where there was none."""


class ExpertsLayer:
    """The experts of one mixture-of-experts layer, frozen and packed once for the matrix units of this host.

    Args:
        gate_up_proj: ``[E, 2I, H]``, gate rows first; bf16, fp16 or fp32 (stored as bf16), any strides, any device.
        down_proj: ``[E, H, I]``, likewise. Both may be freed afterwards.
        weight_format: how the weights are stored: ``"bf16"``.
        activation: f in ``f(gate) * up``: ``"silu"``, or ``"gelu_tanh"``, ``torch.nn.functional.gelu`` by tanh.

    Forward and backward may be called from several threads at once; they are served in turn, without the Python lock.
    A copy (``copy.deepcopy``) shares the weights; pickling unpacks them.

    Raises:
        TypeError: a weight is no tensor, or an option no string.
        ValueError: a wrong shape, dtype, format or activation, or weights that require a gradient.
        MemoryError: memory cannot be had.
        UnsupportedHostError: MOESAIC_ISA names what this host lacks.
    """

    __slots__ = ("__weakref__", "_activation", "_core", "_weight_format")

    def __init__(
        self,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        weight_format: str = "bf16",
        activation: str = "silu",
    ) -> None:
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
            if isinstance(weight, torch.Tensor) and weight.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and the engine has none for base weights: "
                    f"freeze it with {name}.requires_grad_(False) and train LoRA adapters"
                )
        for name, value in (("weight_format", weight_format), ("activation", activation)):
            if not isinstance(value, str):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a str")
        self._core = _core.Layer(
            weight_format, on_cpu(gate_up_proj, "gate_up_proj"), on_cpu(down_proj, "down_proj"), activation
        )
        self._weight_format = weight_format
        self._activation = activation

    @property
    def num_experts(self) -> int:
        """E."""
        return self._core.num_experts

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._core.hidden_size

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self._core.intermediate_size

    @property
    def number(self) -> int:
        """The layer's name in profiles: how many were made before it in this process."""
        return self._core.number

    @property
    def weight_format(self) -> str:
        """How the weights are stored."""
        return self._weight_format

    @property
    def activation(self) -> str:
        """f in ``f(gate) * up``."""
        return self._activation

    @property
    def weight_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return self._core.weight_bytes

    def forward(
        self,
        hidden: torch.Tensor,
        top_k_ids: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora: Lora | Sequence[Lora] | None = None,
        save: bool = True,
    ) -> tuple[torch.Tensor, Saved | None]:
        """``out[t] = sum over j of top_k_weights[t, j] * expert[top_k_ids[t, j]](hidden[t])``, unknown to autograd.

        Args:
            hidden: ``[T, H]`` bf16 or fp32 (rounded to bf16 once).
            top_k_ids: ``[T, k]`` int64 or int32; -1 or E: skip.
            top_k_weights: ``[T, k]`` fp32 or bf16.
            lora: an adapter, or several, which add up.
            save: whether backward will follow.

        Returns:
            ``[T, H]`` in the dtype and on the device of `hidden`, and what backward needs (None without `save`).

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape, dtype or ids; the message names it.
            MemoryError: memory cannot be had.
        """
        _core.mark_entry()
        lora_tensors, lora_layout = flatten(lora)
        staging.check_tensors(hidden, top_k_ids, top_k_weights)
        out, state, host_hidden, host_weights, devices = staging.forward(
            self._core, hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, save
        )
        saved = None
        if state is not None:
            saved = Saved(state, host_hidden, host_weights, lora_tensors, lora_layout, devices)
        _core.mark_exit()
        return out, saved

    def backward(self, saved: Saved, d_out: torch.Tensor) -> Grads:
        """Gradients of hidden, top_k_weights and every LoRA tensor, each on the device of what it belongs to.

        Args:
            saved: what `forward` returned; it is only read, and may be used again.
            d_out: ``[T, H]`` bf16 or fp32, the gradient of forward's output.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or dtype; the message names it.
            MemoryError: memory cannot be had.
        """
        _core.mark_entry()
        if not isinstance(saved, Saved):
            raise TypeError(f"saved is a {type(saved).__name__}; expected what forward(..., save=True) returned")
        if not isinstance(d_out, torch.Tensor):
            raise TypeError(f"d_out is a {type(d_out).__name__}; expected a torch.Tensor")
        d_hidden, d_weights, *d_lora = staging.backward(
            self._core,
            (saved.state, saved.hidden, saved.top_k_weights, *saved.lora_tensors),
            saved.lora_layout,
            d_out,
            (True,) * (2 + len(saved.lora_tensors)),
            saved.devices,
        )
        assert d_hidden is not None and d_weights is not None  # asked for
        grads = Grads(d_hidden, d_weights, unflatten(d_lora, saved.lora_layout))
        _core.mark_exit()
        return grads

    def unpack(self, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights as they were given, ``[E, 2I, H]`` and ``[E, H, I]``, to save them or to compute elsewhere.

        Args:
            dtype: bf16 (what is stored, exactly), fp16 or fp32.
        """
        experts, hidden, intermediate = self.num_experts, self.hidden_size, self.intermediate_size
        gate_up_proj = torch.empty((experts, 2 * intermediate, hidden), dtype=dtype)
        down_proj = torch.empty((experts, hidden, intermediate), dtype=dtype)
        self._core.unpack(gate_up_proj, down_proj)
        return gate_up_proj, down_proj

    def __copy__(self) -> ExpertsLayer:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> ExpertsLayer:
        return self

    def __reduce__(self) -> tuple[type[ExpertsLayer], tuple[torch.Tensor, torch.Tensor, str, str]]:
        return ExpertsLayer, (*self.unpack(), self.weight_format, self.activation)

    def __repr__(self) -> str:
        return (
            f"ExpertsLayer(num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, weight_format={self.weight_format!r}, "
            f"activation={self.activation!r})"
        )
