"""PEFT's LoRA on expert parameters, read by the engine as it lies.

PEFT parametrizes the weight it adapts, which materializes ``W + scaling * B A`` for all experts in every forward. For a
block on the engine that is replaced: the factors of the active adapters, PEFT's own parameters, are handed to the
experts function. Everything else is PEFT's: which adapters are active, disabled or merged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any

from torch import nn

from moesaic.hf.blocks import WEIGHTS, is_block, is_served
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


class _Activated:
    """Leaves `pairs` for the forward of `block` inside the context, beside what other parameters' wrappers left."""

    def __init__(self, block: nn.Module, name: str, pairs: list[LoraPair]) -> None:
        self._key, self._name, self._pairs = id(block), name, pairs
        self._outer: dict[str, list[LoraPair]] | None = None

    # Nothing is cached across calls: optimizers write through .data, and no version tells. Checkpointing leaves a
    # forward by an exception and may run another inside it, so what was there before comes back in any case.
    def __enter__(self) -> None:
        self._outer = _active.blocks.get(self._key)
        _active.blocks[self._key] = {**(self._outer or {}), self._name: self._pairs}

    def __exit__(self, *exception: object) -> None:
        if self._outer:
            _active.blocks[self._key] = self._outer
        else:
            del _active.blocks[self._key]


def _pair(wrapper: Any, adapter: str) -> LoraPair:
    """PEFT's own parameters: gradients reach them without a view between (but with PEFT 0.19.0), in their shapes and
    strides."""
    a, b, experts = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.num_experts
    scaling = wrapper.scaling[adapter]
    if wrapper._did_swap_in_out_features:
        return LoraPair(a, b, scaling, experts)
    # PEFT 0.19.0 takes the rows of a weight [E, out, in] for its inputs: what it adds is (b a)^T = a^T b^T.
    rows, columns = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
    return LoraPair(columns.permute(2, 1, 0), rows.transpose(1, 2), scaling)


def install() -> None:
    """Makes PEFT's ``ParamWrapper`` hand its adapters to the engine on blocks whose implementation is ours; on all
    others it does what it did. Nothing where PEFT is missing, or too old to adapt parameters."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:
        return
    if getattr(ParamWrapper, "_moesaic", False):
        return
    stock_activate = ParamWrapper._activate_lora
    stock_merge, stock_unmerge = ParamWrapper.merge, ParamWrapper.unmerge

    def activate_lora(self: Any, active_adapters: Sequence[str]) -> AbstractContextManager[None]:
        block = self.get_base_layer()
        if is_served(block) and self.parameter_name in WEIGHTS:
            lora_a = self.lora_A
            pairs = [_pair(self, adapter) for adapter in active_adapters if adapter in lora_a]
            return _Activated(block, self.parameter_name, pairs)
        context: AbstractContextManager[None] = stock_activate(self, active_adapters)
        return context

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


@contextmanager
def _writable_base(wrapper: Any) -> Iterator[None]:
    """PEFT merges by writing through ``.data``: the packed weights must follow."""
    block = wrapper.get_base_layer()
    if not is_block(block) or wrapper.parameter_name not in WEIGHTS:
        yield
        return
    with writable(block):
        yield
