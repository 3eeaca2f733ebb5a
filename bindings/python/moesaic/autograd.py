"""The experts layer as a differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic import _core, staging
from moesaic.layer import ExpertsLayer
from moesaic.lora import Layout, Lora, flatten

__all__ = ["moe_experts"]


class _MoeExperts(torch.autograd.Function):
    """Everything that backward needs goes through `save_for_backward`, the engine's own state too.

    So activation checkpointing and hooks for saved tensors can drop it, move it, or bring it back as another tensor.
    Nothing else is kept between calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        core: _core.Layer,
        lora_layout: Layout,
        hidden: torch.Tensor,
        top_k_ids: torch.Tensor,
        top_k_weights: torch.Tensor,
        *lora_tensors: torch.Tensor,
    ) -> torch.Tensor:
        out, state, host_hidden, host_weights, ctx.devices = staging.forward(
            core, hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, True
        )
        ctx.save_for_backward(state, host_hidden, host_weights, *lora_tensors)
        ctx.core = core
        ctx.lora_layout = lora_layout
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _core.mark_entry()
        needs = ctx.needs_input_grad
        if d_out is None:
            return (None,) * len(needs)
        state, hidden, top_k_weights, *lora_tensors = ctx.saved_tensors
        d_hidden, d_weights, d_lora = staging.backward(
            ctx.core,
            state,
            hidden,
            top_k_weights,
            tuple(lora_tensors),
            ctx.lora_layout,
            d_out,
            (needs[2], needs[4], *needs[5:]),
            ctx.devices,
        )
        grads = (None, None, d_hidden, None, d_weights, *d_lora)
        _core.mark_exit()
        if torch.is_grad_enabled():  # create_graph=True
            # Of GPU tensors, copies were saved that autograd knows nothing of: hence the last argument.
            inputs = (d_out, hidden, top_k_weights, *lora_tensors, torch.empty(0, requires_grad=True))
            return _NoSecondDerivative.apply(len(grads), *grads, *inputs)  # type: ignore[no-untyped-call, no-any-return]
        return grads


class _NoSecondDerivative(torch.autograd.Function):
    """Gives gradients on as functions of what they depend on, whose own derivative is an error.

    `once_differentiable` would let them pass for constants where d_out requires no gradient, and the second derivative
    would silently lack a term.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *grads_and_inputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return grads_and_inputs[:count]

    @staticmethod
    def backward(ctx: Any, *d_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("moesaic.moe_experts can be differentiated only once; its gradients have no derivative")


def moe_experts(
    hidden: torch.Tensor,
    top_k_ids: torch.Tensor,
    top_k_weights: torch.Tensor,
    layer: ExpertsLayer,
    lora: Lora | Sequence[Lora] | None = None,
) -> torch.Tensor:
    """``out[t] = sum over j of top_k_weights[t, j] * expert[top_k_ids[t, j]](hidden[t])``, differentiable once.

    Gradients reach `hidden`, `top_k_weights` and each LoRA tensor that requires one, in its own dtype and strides.
    Where nothing requires a gradient, or under ``torch.no_grad()``, nothing is saved. Tensors may be on a GPU, each on
    its own: they are copied to the CPU in the order of the current stream, and results back.

    Args:
        hidden: ``[T, H]`` bf16 or fp32 (rounded to bf16 once).
        top_k_ids: ``[T, k]`` int64 or int32; -1 or E: skip.
        top_k_weights: ``[T, k]`` fp32 or bf16.
        layer: the packed experts.
        lora: an adapter, or several, which add up; read anew in forward and in backward.

    Returns:
        ``[T, H]`` in the dtype and on the device of `hidden`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or ids; the message names it.
        MemoryError: memory cannot be had; of a GPU and of what is pinned for it, PyTorch's own errors.
    """
    _core.mark_entry()
    if not isinstance(layer, ExpertsLayer):
        raise TypeError(f"layer is a {type(layer).__name__}; expected a moesaic.ExpertsLayer")
    lora_tensors, lora_layout = flatten(lora)
    staging.check_tensors(hidden, top_k_ids, top_k_weights)
    core = layer._core
    out: torch.Tensor
    if torch.is_grad_enabled() and (
        hidden.requires_grad or top_k_weights.requires_grad or any(t.requires_grad for t in lora_tensors)
    ):
        out = _MoeExperts.apply(  # type: ignore[no-untyped-call]
            core, lora_layout, hidden, top_k_ids, top_k_weights, *lora_tensors
        )
    else:
        out = staging.forward(core, hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, False)[0]
    _core.mark_exit()
    return out
