"""Threads, memory and instruction set of this process."""

from __future__ import annotations

import operator
from typing import TypedDict

from moesaic import _core

__all__ = ["MemoryStats", "get_num_threads", "isa", "memory_stats", "set_num_threads", "trim_memory"]


class MemoryStats(TypedDict):
    """What the arena holds. Outputs, saved tensors and gradients come from it; packed weights do not."""

    in_use_bytes: int
    """In tensors that are alive."""
    cached_bytes: int
    """Kept for reuse."""
    peak_in_use_bytes: int
    """The most in use at once since the process began."""
    blocks_in_use: int
    allocations: int
    """Blocks ever asked for."""
    reused: int
    """Of them, served from what was kept."""


def set_num_threads(n: int) -> None:
    """Sets the number of threads that compute, the calling one among them. Waits for work under way.

    Args:
        n: at least 1; may exceed the number of cores. Results are bitwise the same for any number.

    Raises:
        TypeError: `n` is no whole number.
        ValueError: `n` is out of range.
    """
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"n is {n!r}, expected a whole number") from None
    _core.set_num_threads(n)


def get_num_threads() -> int:
    """The number of threads that compute. Default: MOESAIC_NUM_THREADS, else the cores this process may use."""
    return _core.get_num_threads()


def isa() -> str:
    """The instruction set in use: ``"amx_bf16"``, ``"avx512_bf16"``, ``"avx512"``, ``"portable"`` or ``"onednn"``;
    MOESAIC_ISA forces one.

    Raises:
        UnsupportedHostError: MOESAIC_ISA names what this host lacks.
    """
    return _core.isa()


def memory_stats() -> MemoryStats:
    """What the recycling arena holds now."""
    return _core.memory_stats()


def trim_memory() -> int:
    """Returns all memory that the arena keeps for reuse to the system, and the scratch memory of past calls.

    It does so by itself for what is not used again: kept and used memory together stay below 1.25 times the most that
    was in use at once lately, plus 64 MiB.

    Returns:
        Bytes that the arena returned.
    """
    return _core.trim_memory()
