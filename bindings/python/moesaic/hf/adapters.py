"""PEFT's LoRA on expert parameters, read by the engine as it lies.

PEFT parametrizes the weight it adapts, which materializes ``W + scaling * B A`` for all experts in every forward. For a
block on the engine that is replaced: the factors of the active adapters are handed to the experts function, as views of
PEFT's own parameters, and gradients reach these through the views. Everything else is PEFT's: which adapters are
active, disabled or merged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

from torch import nn

from moesaic.hf.blocks import IMPLEMENTATION, WEIGHTS, implementation, is_block
from moesaic.hf.packing import writable
from moesaic.lora import Lora, LoraPair

__all__ = ["active_adapters", "install"]


class _Active(threading.local):
    """Adapters of the blocks whose forward runs now on this thread: ``{id(block): {parameter name: pairs}}``."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[str, list[LoraPair]]] = {}


_active = _Active()


def active_adapters(block: nn.Module) -> list[Lora]:
    """The adapters that PEFT has active on `block` in the forward that runs now on this thread."""
    pairs = _active.blocks.get(id(block), {})
    gate_up, down = (pairs.get(name, []) for name in WEIGHTS)
    # Contributions add up, so it does not matter which pairs share a Lora.
    return [Lora(gate_up=g, down=d) for g, d in zip_longest(gate_up, down)]


@contextmanager
def _activated(block: nn.Module, name: str, pairs: list[LoraPair]) -> Iterator[None]:
    # Nothing is cached across calls: optimizers write through .data, and no version tells. Checkpointing leaves a
    # forward by an exception and may run another inside it, so what was there before comes back in any case.
    outer = _active.blocks.get(id(block), {})
    _active.blocks[id(block)] = {**outer, name: pairs}
    try:
        yield
    finally:
        if outer:
            _active.blocks[id(block)] = outer
        else:
            del _active.blocks[id(block)]


def _pair(wrapper: Any, adapter: str) -> LoraPair:
    """``A [E*r, in]`` (row ``e*r + k``) and ``B [out, r*E]`` (column ``k*E + e``) as views ``[E, r, in]`` and ``[E,
    out, r]``. Autograd returns their gradients in these strides, which PEFT's parameters take without a copy."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    experts = wrapper.num_experts
    return LoraPair(
        a.reshape(experts, -1, a.shape[1]),
        b.reshape(b.shape[0], -1, experts).permute(2, 0, 1),
        wrapper.scaling[adapter],
    )


def install() -> bool:
    """Makes PEFT's ``ParamWrapper`` hand its adapters to the engine on blocks whose implementation is ours; on all
    others it does what it did. Returns False where PEFT is missing, or too old to adapt parameters."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        return False
    if getattr(ParamWrapper, "_moesaic", False):
        return True
    stock_activate = ParamWrapper._activate_lora
    stock_merge, stock_unmerge = ParamWrapper.merge, ParamWrapper.unmerge

    @contextmanager
    def activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        block = self.get_base_layer()
        context: AbstractContextManager[None]
        if is_block(block) and implementation(block) == IMPLEMENTATION and self.parameter_name in WEIGHTS:
            pairs = [_pair(self, adapter) for adapter in active_adapters if adapter in self.lora_A]
            context = _activated(block, self.parameter_name, pairs)
        else:
            context = stock_activate(self, active_adapters)
        with context:
            yield

    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        with _writable_base(self):
            stock_merge(self, *args, **kwargs)

    def unmerge(self: Any) -> None:
        with _writable_base(self):
            stock_unmerge(self)

    merge.__doc__, unmerge.__doc__ = stock_merge.__doc__, stock_unmerge.__doc__
    ParamWrapper._activate_lora = activate_lora
    ParamWrapper.merge, ParamWrapper.unmerge = merge, unmerge
    ParamWrapper._moesaic = True
    return True


@contextmanager
def _writable_base(wrapper: Any) -> Iterator[None]:
    """PEFT merges by writing through ``.data``: the packed weights must follow."""
    block = wrapper.get_base_layer()
    if not is_block(block) or wrapper.parameter_name not in WEIGHTS:
        yield
        return
    with writable(block):
        yield
