"""Fills the cache with the answers for shapes that will be asked for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.shapes import GemmShape


@dataclasses.dataclass(frozen=True)
class PrewarmReport:
    """What `prewarm` did."""

    shapes: int
    """Different ones."""
    candidates: int
    """Configurations looked at."""
    hits: int
    """Shapes whose answer was there."""
    misses: int
    evaluate_ms: float
    cache_bytes: int
    """Size of the cache's file."""


def prewarm(evaluator: GemmEvaluator, shapes: Iterable[GemmShape], progress: bool = False) -> PrewarmReport:
    """Evaluates shapes, each once, in parallel. They count as no uses.

    Args:
        evaluator: whose cache keeps the answers.
        shapes: duplicates are left out.
        progress: shows a bar on stderr, where that is a terminal and rich is installed.
    """
    different = list(dict.fromkeys(shapes))
    before = evaluator.candidates
    misses = sum(not evaluator.known(shape) for shape in different)
    start = time.perf_counter()
    with evaluator.uncounted():
        if progress:
            _with_bar(evaluator, different)
        else:
            evaluator.evaluate_many(different)
    elapsed = (time.perf_counter() - start) * 1e3
    size = evaluator.cache.stats().bytes if evaluator.cache is not None else 0
    return PrewarmReport(len(different), evaluator.candidates - before, len(different) - misses, misses, elapsed, size)


_BATCH = 64


def _with_bar(evaluator: GemmEvaluator, shapes: list[GemmShape]) -> None:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        evaluator.evaluate_many(shapes)
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluating", total=len(shapes))
        for first in range(0, len(shapes), _BATCH):
            batch = shapes[first : first + _BATCH]
            evaluator.evaluate_many(batch)
            bar.advance(task, len(batch))
