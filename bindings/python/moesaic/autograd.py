"""The experts layer as a differentiable function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic import _core, forward_mode, staging
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
        prepared: tuple[torch.Tensor, torch.Tensor | None] | None,
        core: _core.Layer,
        lora_layout: Layout,
        top_k_ids: torch.Tensor,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        *lora_tensors: torch.Tensor,
    ) -> torch.Tensor:
        """With `prepared`, output and state: they are filled when autograd is done with them, see `moe_experts`."""
        devices = None
        if prepared is not None:
            out, state = prepared
        else:
            out, state, hidden, top_k_weights, devices = staging.forward(
                core, hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, True
            )
        ctx.save_for_backward(state, hidden, top_k_weights, *lora_tensors)
        ctx.call = (core, lora_layout, devices)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _core.mark_entry()
        needs = ctx.needs_input_grad
        if d_out is None:
            return (None,) * len(needs)
        create_graph = torch.is_grad_enabled()
        core, lora_layout, devices = ctx.call
        saved = ctx.saved_tensors
        grads: tuple[torch.Tensor | None, ...] = staging.backward(core, saved, lora_layout, d_out, needs, devices)
        _core.mark_exit()
        if create_graph:
            # Of GPU tensors, copies were saved that autograd knows nothing of: hence the last argument.
            inputs = (d_out, *saved[1:], torch.empty(0, requires_grad=True))
            return differentiable_once("moesaic.moe_experts", grads, inputs)
        return grads


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: str, count: int, *grads_and_inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.function = function
        return grads_and_inputs[:count]

    @staticmethod
    def backward(ctx: Any, *d_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError(f"{ctx.function} can be differentiated only once; its gradients have no derivative")


def differentiable_once(
    function: str, grads: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `function` as functions of the inputs that they depend on, whose own derivative is an error.

    `once_differentiable` would let them pass for constants where d_out requires no gradient, and the second derivative
    would silently lack a term.
    """
    apply: Any = _NoSecondDerivative.apply
    found: tuple[torch.Tensor | None, ...] = apply(function, len(grads), *grads, *inputs)
    return found


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
        NotImplementedError: a tensor has a tangent of `torch.autograd.forward_ad`.
        MemoryError: memory cannot be had; of a GPU and of what is pinned for it, PyTorch's own errors.
    """
    _core.mark_entry()
    if not isinstance(layer, ExpertsLayer):
        raise TypeError(f"layer is a {type(layer).__name__}; expected a moesaic.ExpertsLayer")
    lora_tensors, lora_layout = flatten(lora)
    staging.check_tensors(hidden, top_k_ids, top_k_weights)
    if forward_mode.is_on():
        for name, tensor in (
            ("hidden", hidden),
            ("top_k_weights", top_k_weights),
            *(("lora", t) for t in lora_tensors),
        ):
            forward_mode.refuse(tensor, name)
    core = layer._core
    out: torch.Tensor
    if not torch.is_grad_enabled() or not (
        hidden.requires_grad or top_k_weights.requires_grad or any(t.requires_grad for t in lora_tensors)
    ):
        out = staging.forward(core, hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, False)[0]
        _core.mark_exit()
        return out
    arguments = (core, lora_layout, top_k_ids, hidden, top_k_weights, *lora_tensors)
    if hidden.is_cpu and _may_compute_later():
        try:
            made, state, call = core.prepare_forward(hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, True)
        except ValueError:
            pass  # another tensor is on a GPU, or is functorch's, or this is an error that will come again
        else:
            out = _apply((made, state), *arguments)  # type: ignore[no-untyped-call]
            call.run()
            _core.mark_exit()
            return out
    out = _MoeExperts.apply(None, *arguments)  # type: ignore[no-untyped-call]
    _core.mark_exit()
    return out


def _may_compute_later() -> bool:
    """Whether the engine may fill output and state when autograd's bookkeeping for them is done.

    In a large layer that is the faster order: after a pass over the weights no cache holds anything of autograd's, and
    its bookkeeping behind the engine takes four times as long as before it. Two look at what is not filled yet: hooks
    for saved tensors (checkpointing, offloading), which get the state while it is saved, and a profiler, in which the
    function's event would not hold the engine's time. Transformations (`torch.func`) are `Function.apply`'s to refuse.
    """
    return (
        _top_hooks(False) is None
        and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        and not torch._C._are_functorch_transforms_active()
    )


# Private to PyTorch, which has no other way to ask; one that lacks it says as if there were hooks.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: True)
# Function.apply without what it does for transformations, which is a third of its time.
_apply = super(torch.autograd.Function, _MoeExperts).apply
