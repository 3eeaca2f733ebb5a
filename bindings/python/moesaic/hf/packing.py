"""The packed weights of an experts block: made once, kept with the block, made anew when its parameters change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moesaic.hf.blocks import WEIGHTS, activation, refusal, weight
from moesaic.hf.offloaded import reclaim
from moesaic.hf.released import ReleasedParameter, ReleasedWeight, is_released, release_block, restore_block
from moesaic.layer import ExpertsLayer
from moesaic.nn.linear import fingerprint

__all__ = ["drop", "pack", "packed_layer", "release", "writable"]

_KEY = "_moesaic_packed"
_lock = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What a block keeps in its ``__dict__``."""

    layer: ExpertsLayer
    fingerprints: tuple[tuple[Any, ...], ...]
    act_fn: Any
    """The block's activation, which `layer` has by name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return self  # a copy of a block shares the weights as long as they are the same

    def __reduce__(self) -> Any:
        return _nothing, ()  # a pickled block packs its weights again


def _nothing() -> None:
    return None


def _fingerprint(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a parameter does, or the packed weights that a released one stands for."""
    return (id(parameter.source.layer),) if isinstance(parameter, ReleasedWeight) else fingerprint(parameter)


def packed_layer(block: nn.Module, weight_format: str | None = None) -> ExpertsLayer:
    """The packed weights of `block`, packed now if they are not yet, or if its parameters changed since.

    A change is noticed by address, version and a sample of 64 values of each parameter. A write through ``.data`` that
    misses all of them is not noticed: call ``moesaic.hf.prepare(model)`` after one.

    Args:
        block: an experts block.
        weight_format: how to store them; None: as they are, or "bf16".

    Raises:
        ValueError: the engine cannot serve this block, with the reason.
        MemoryError: memory cannot be had.
    """
    layer = _fresh_layer(block, weight_format)
    if layer is not None:
        return layer
    with _lock:
        layer = _fresh_layer(block, weight_format)
        if layer is not None:
            return layer
        packed: Packed | None = block.__dict__.get(_KEY)
        return pack(block, weight_format or ("bf16" if packed is None else packed.layer.weight_format))


def _fresh_layer(block: nn.Module, weight_format: str | None) -> ExpertsLayer | None:
    packed: Packed | None = block.__dict__.get(_KEY)
    if packed is None or weight_format not in (None, packed.layer.weight_format):
        return None
    for name, before in zip(WEIGHTS, packed.fingerprints, strict=True):
        parameter = weight(block, name)
        if parameter is None or _fingerprint(parameter) != before:
            return None
    function = getattr(block, "act_fn", None)
    if function is not packed.act_fn:  # of a copy of the block, or somebody has put another one there
        if activation(block) != packed.layer.activation:
            return None
        block.__dict__[_KEY] = replace(packed, act_fn=function)
    return packed.layer


def pack(block: nn.Module, weight_format: str) -> ExpertsLayer:
    """Packs the weights of `block`, whether they are packed already or not; a released block is released again.

    Raises: as `packed_layer`.
    """
    reason = refusal(block)
    if reason:
        raise ValueError(f"the moesaic engine cannot serve {type(block).__name__}: {reason}")
    reclaim(block)
    was_released = is_released(block)
    if was_released:
        restore_block(block)
    drop(block)
    gate_up, down = (block._parameters[name] for name in WEIGHTS)
    assert gate_up is not None and down is not None  # or it would have been refused
    with torch.no_grad():
        function = activation(block)
        assert function is not None  # likewise
        layer = ExpertsLayer(gate_up.detach(), down.detach(), weight_format, function)
        block.__dict__[_KEY] = Packed(layer, (_fingerprint(gate_up), _fingerprint(down)), block.act_fn)
    if was_released:
        release(block)
    return layer


def drop(block: nn.Module) -> None:
    """Forgets the packed weights of `block`. Released parameters go on holding them."""
    block.__dict__.pop(_KEY, None)


def release(block: nn.Module) -> int:
    """Frees the parameters of a packed block; returns the bytes."""
    packed: Packed = block.__dict__[_KEY]
    freed = release_block(block, packed.layer, writable)
    fingerprints = tuple(_fingerprint(block._parameters[name]) for name in WEIGHTS)  # type: ignore[arg-type]
    block.__dict__[_KEY] = replace(packed, fingerprints=fingerprints)
    return freed


@contextmanager
def writable(block: nn.Module) -> Iterator[None]:
    """Inside, the parameters of `block` are ordinary ones; afterwards they are packed anew, and released again if they
    were."""
    if not is_released(block):
        drop(block)
        yield
        return
    released: ReleasedParameter = next(p for p in block._parameters.values() if isinstance(p, ReleasedParameter))
    weight_format = released.source.layer.weight_format
    restore_block(block)
    try:
        yield
    finally:
        pack(block, weight_format)
        release(block)
