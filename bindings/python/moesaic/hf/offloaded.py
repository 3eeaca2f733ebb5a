"""Experts blocks whose weights accelerate keeps.

Where a device map puts a module on ``"cpu"`` or ``"disk"`` beside a GPU, accelerate leaves meta tensors in it, keeps
the weights in a map of its own, and copies them to the GPU in each forward. The engine wants them once, in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["is_offloaded", "reclaim"]


def is_offloaded(block: nn.Module) -> bool:
    """Whether accelerate keeps the weights of `block`."""
    return any(True for _ in _offloading_hooks(block))


def reclaim(block: nn.Module) -> None:
    """Makes what accelerate keeps of `block` ordinary tensors in host memory again, whose only owner is the block.

    The hook stays, and moves only the inputs from now on: this may happen inside the forward that it wraps.
    """
    for hook in _offloading_hooks(block):
        for tensors in (block._parameters, block._buffers):
            for name, tensor in tensors.items():
                if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter):
                    continue  # released: its values are in the engine
                try:
                    value = hook.weights_map[name]
                except KeyError:  # a buffer, which stays where it is
                    continue
                value = value.detach().to("cpu", tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                tensors[name] = value
                _forget(hook.weights_map, name)
        hook.offload = False


def _offloading_hooks(block: nn.Module) -> Iterator[Any]:
    hook = getattr(block, "_hf_hook", None)
    for single in getattr(hook, "hooks", (hook,)):  # accelerate.hooks.SequentialHook has several
        if getattr(single, "offload", False) is True and getattr(single, "weights_map", None) is not None:
            yield single


def _forget(weights: Any, name: str) -> None:
    """Drops the map's own reference: it would keep released weights alive. A view by prefix leads to the whole map, and
    that may have files besides."""
    if hasattr(weights, "prefix") and hasattr(weights, "dataset"):
        weights, name = weights.dataset, weights.prefix + name
    held = getattr(weights, "state_dict", weights)
    if isinstance(held, dict):
        held.pop(name, None)
