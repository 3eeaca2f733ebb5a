"""Experts blocks of transformers: which modules they are, and why the engine cannot serve some of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from moesaic.hf.offloaded import is_offloaded
from moesaic.hf.operators import has_values_of, is_plain

__all__ = [
    "IMPLEMENTATION",
    "WEIGHTS",
    "activation",
    "find_blocks",
    "implementation",
    "is_block",
    "is_served",
    "refusal",
    "require_module",
    "weight",
]

#: The name under which transformers knows the engine: ``experts_implementation="moesaic"``.
IMPLEMENTATION = "moesaic"

#: The parameters of a block that the engine packs: ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]``.
WEIGHTS = ("gate_up_proj", "down_proj")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}


def is_block(module: nn.Module) -> bool:
    """Whether `module` is an experts block: one whose class transformers decorates with
    ``use_experts_implementation``."""
    return (
        hasattr(type(module), "_apply_gate")
        and hasattr(module, "is_transposed")
        and hasattr(getattr(module, "config", None), "_experts_implementation")
    )


def require_module(model: object) -> None:
    """Refuses what is no module, a name of a model for example. TypeError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(name, block)`` of every experts block in `model`, each once, in the order of ``named_modules``."""
    return ((name, module) for name, module in model.named_modules() if is_block(module))


def implementation(block: nn.Module) -> str | None:
    """The experts implementation that `block` is set to; None stands for transformers' default."""
    config: Any = block.config
    name: str | None = config._experts_implementation
    return name


def is_served(module: nn.Module) -> bool:
    """Whether `module` is an experts block that is set to the engine. In every forward: the configuration of
    transformers takes microseconds to read, and is read once."""
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_transposed"):
        return False
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == IMPLEMENTATION


def weight(block: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter itself: never what a parametrization on it would compute."""
    return block._parameters.get(name)


def refusal(block: nn.Module) -> str | None:
    """Why the engine cannot compute what `block` stands for; None where it can. Dimensions come from the parameters'
    shapes, because the names of the attributes differ between models."""
    for reason in (_refused_layout(block), _refused_gate(block), _refused_weights(block)):
        if reason:
            return reason
    return None


def _refused_layout(block: Any) -> str | None:
    flags = (  # older versions of transformers lack some of them
        (not getattr(block, "has_gate", True), "its experts have no gate projection (has_gate is False)"),
        (getattr(block, "has_bias", False), "its projections have a bias (has_bias)"),
        (block.is_transposed, "its weights are stored transposed, [E, in, out] (is_transposed)"),
        (not getattr(block, "is_concatenated", True), "its gate and up rows are interleaved (is_concatenated)"),
        (getattr(block, "has_post_expert_norm", False), "each expert is followed by a norm (has_post_expert_norm)"),
    )
    return next((reason for refused, reason in flags if refused), None)


def _refused_gate(block: Any) -> str | None:
    # transformers puts its own _apply_gate on classes that do not bring one.
    if not type(block)._apply_gate.__module__.startswith("transformers.integrations."):
        return f"{type(block).__name__} overrides _apply_gate, so its gate is not act_fn(gate) * up"
    if activation(block) is None:
        act_fn = getattr(block, "act_fn", None)
        name = getattr(act_fn, "__name__", type(act_fn).__name__)
        return f"its activation is {name}; the engine computes SiLU, and GELU by tanh"
    return None


def activation(block: Any) -> str | None:
    """The name that `moesaic.ExpertsLayer` has for the activation of `block`; None where it has none."""
    act_fn = getattr(block, "act_fn", None)
    if act_fn is None or not is_plain(act_fn):
        return None
    return next((name for name, known in _ACTIVATIONS.items() if has_values_of(act_fn, known, rtol=1e-4)), None)


def _refused_weights(block: nn.Module) -> str | None:
    for name in WEIGHTS:
        parameter = weight(block, name)
        if parameter is None:
            if name in getattr(block, "parametrizations", ()):
                return f"{name} is parametrized, and the engine reads it only once"
            return f"it has no parameter {name}"
        if parameter.dtype not in _DTYPES:
            hint = "; load it de-quantized" if parameter.element_size() == 1 else ""
            return f"{name} is stored as {_dtype(parameter)}; expected bfloat16, float16 or float32{hint}"
        if parameter.dim() != 3:
            return f"{name} has shape {tuple(parameter.shape)}; expected three dimensions"
        if parameter.is_meta and not is_offloaded(block):
            return f"{name} is on the meta device (offloaded, or not loaded yet); expected data"
    gate_up, down = (tuple(block._parameters[name].shape) for name in WEIGHTS)  # type: ignore[union-attr]
    if gate_up != (down[0], 2 * down[2], down[1]):
        return f"gate_up_proj has shape {gate_up} and down_proj {down}; expected [E, 2I, H] and [E, H, I]"
    return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
