"""Which phase got slower between two profiles, and whether that is more than noise."""

from __future__ import annotations

import math
import statistics
from typing import Any

from moesaic.profiles.document import PARENTS, Document, key_of

__all__ = ["compare"]

# Medians that differ by less than this many standard errors are called the same.
_SIGNIFICANT = 3.0
_FEWEST_STEPS = 3
# Standard error of the median of a normal sample over that of its mean, and of the MAD over the standard deviation.
_MEDIAN_ERROR = 1.2533
_MAD_TO_DEVIATION = 1.4826


def compare(before: Document, after: Document) -> list[dict[str, Any]]:
    """One row for each phase and for the whole step, the largest change first.

    A phase's time is its thread time in a step, the median over steady steps. Its noise is three standard errors of
    the difference of the two medians, from the median absolute deviations. Without steps the whole run counts as one,
    and the noise is not known.

    Returns:
        Rows of ``phase, before_ms, after_ms, change_ms, change (a fraction), noise_ms, verdict``, where the verdict is
        "slower", "faster", "same", or "?" while the noise is not known.
    """
    left, right = _samples(before), _samples(after)
    rows = [_row(name, left.get(name, [0.0]), right.get(name, [0.0])) for name in sorted({*left, *right})]
    return sorted(rows, key=lambda row: -abs(row["change_ms"]))


def _samples(document: Document) -> dict[str, list[float]]:
    """Times by phase, one for each steady step; a phase that did not run in a step took nothing."""
    steps = [step for step in document["steps"] if not step["first"]] or document["steps"]
    if not steps:
        rows = {key_of(row): [row["thread_ms"]] for row in document["phases"] if row["name"] not in PARENTS}
        return {"(wall clock)": [document["wall_ms"]], **rows}
    names = {name for step in steps for name in step["phases"] if name not in PARENTS}
    samples = {name: [step["phases"].get(name, 0.0) for step in steps] for name in names}
    samples["(wall clock)"] = [step["wall_ms"] for step in steps]
    return samples


def _error(sample: list[float]) -> float:
    middle = statistics.median(sample)
    spread = statistics.median(abs(value - middle) for value in sample)
    return _MEDIAN_ERROR * _MAD_TO_DEVIATION * spread / math.sqrt(len(sample))


def _row(name: str, before: list[float], after: list[float]) -> dict[str, Any]:
    a, b = statistics.median(before), statistics.median(after)
    noise = None
    if min(len(before), len(after)) >= _FEWEST_STEPS:
        noise = _SIGNIFICANT * math.hypot(_error(before), _error(after))
    if noise is None:
        verdict = "?"
    elif abs(b - a) <= noise:
        verdict = "same"
    else:
        verdict = "slower" if b > a else "faster"
    return {
        "phase": name,
        "before_ms": a,
        "after_ms": b,
        "change_ms": b - a,
        "change": (b - a) / a if a > 0 else None,
        "noise_ms": noise,
        "verdict": verdict,
    }
