"""Checks of single fields: ValueError or TypeError with one sentence that names the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["at_least", "one_of", "whole"]


def whole(name: str, value: Any, least: int) -> int:
    """A whole number from `least` on. TypeError for another type, ValueError for a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected a whole number from {least} on")
    if value < least:
        raise ValueError(f"{name} is {value}; expected a whole number from {least} on")
    return value


def at_least(name: str, value: Any, least: float, *, exclusive: bool = False) -> float:
    """A finite number from `least` on (or above it). TypeError for another type, ValueError for a smaller one."""
    bound = f"above {least:g}" if exclusive else f"from {least:g} on"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number {bound}")
    if not math.isfinite(value) or value < least or (exclusive and value == least):
        raise ValueError(f"{name} is {value:g}; expected a finite number {bound}")
    return float(value)


def one_of(name: str, value: Any, options: Sequence[str]) -> str:
    """One of some words. ValueError for another."""
    if value not in options:
        raise ValueError(f"{name} is {value!r}; expected {', '.join(options[:-1])} or {options[-1]}")
    return str(value)
