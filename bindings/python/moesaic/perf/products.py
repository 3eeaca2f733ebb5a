"""Thread time of products with base weights, asked of the tile evaluator at a few numbers of rows."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.layer_plan import round_up
from moesaic.perf.machine import Machine
from moesaic.perf.shapes import GemmShape

__all__ = ["Answer", "Counted", "Evaluates", "Products", "ShapeRecorder"]


class Answer(Protocol):
    """What the model takes of an evaluator's answer."""

    @property
    def milliseconds(self) -> float:
        """All of it."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Its parts."""

    @property
    def bound(self) -> str:
        """The largest of them."""


class Evaluates(Protocol):
    """A `GemmEvaluator`, or what takes its place."""

    @property
    def threads(self) -> int:
        """Threads of one device."""

    @property
    def machine(self) -> Machine:
        """The device."""

    def evaluate(self, shape: GemmShape) -> Answer:
        """Time of a product."""


@dataclass(frozen=True)
class _NoTime:
    milliseconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=lambda: {"scheduling": 0.0, "dispatch": 0.0, "dram": 0.0})
    bound: str = "dispatch"


class Counted:
    """An evaluator that counts how many of its answers were there before they were asked for."""

    def __init__(self, evaluator: GemmEvaluator) -> None:
        self._evaluator = evaluator
        self.machine, self.threads = evaluator.machine, evaluator.threads
        self.hits = self.misses = 0

    def evaluate(self, shape: GemmShape) -> Answer:
        """The evaluator's answer."""
        if self._evaluator.known(shape):
            self.hits += 1
        else:
            self.misses += 1
        return self._evaluator.evaluate(shape)


class ShapeRecorder:
    """In an evaluator's place: keeps what is asked, so that all of it can be evaluated at once."""

    def __init__(self, evaluator: Evaluates) -> None:
        self.machine, self.threads = evaluator.machine, evaluator.threads
        self.shapes: dict[GemmShape, None] = {}

    def evaluate(self, shape: GemmShape) -> Answer:
        """No time."""
        self.shapes[shape] = None
        return _NoTime()


# Rows at which products are evaluated. Between them time is linear in the rows, from 16 on in whole panels of 16.
_GRID = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384)
_USABLE = 0.75  # of the last-level cache
_EACH_THREAD = 4  # groups in a question: enough that scheduling plays no part, and activations stay in cache


class Products:
    """Thread milliseconds of one product of `rows` rows, while all threads compute such products.

    Args:
        evaluator: whom to ask.
        precise: False: the closed formula alone, the larger of flops / ceiling and bytes / bandwidth.
        resident_bytes: weights of everything that is computed before the same weights are used again; what is less
            than the last-level cache holds is found there again.
    """

    def __init__(self, evaluator: Evaluates, *, precise: bool = True, resident_bytes: float = float("inf")) -> None:
        self.evaluator = evaluator
        self.threads = evaluator.threads
        self.figures = evaluator.machine.figures(self.threads)
        self.peak_gflops: float = self.figures["compute_gflops"]
        self._precise = precise
        self._resident_bytes = resident_bytes
        self._from_cache = resident_bytes <= _USABLE * self.figures["l3_bytes"]
        self._known: dict[tuple[str, int, int, int], float] = {}

    def asking(self, evaluator: Evaluates) -> Products:
        """The same questions to another evaluator."""
        return Products(evaluator, precise=self._precise, resident_bytes=self._resident_bytes)

    def with_resident(self, resident_bytes: float) -> Products:
        """The same where so many bytes of weights lie between two uses."""
        return Products(self.evaluator, precise=self._precise, resident_bytes=resident_bytes)

    def thread_ms(self, form: str, rows: int, k: int, n: int) -> float:
        """One product [rows, k] x [k, n] on one thread of all."""
        if rows <= 16:
            points: Sequence[int] = _GRID[:5]
            at = rows
        else:
            points, at = _GRID, round_up(rows, 16)
        high = bisect.bisect_left(points, at)
        if high == len(points):
            return self._at(form, points[-1], k, n) * at / points[-1]
        above = self._at(form, points[high], k, n)
        if points[high] == at:
            return above
        below = self._at(form, points[high - 1], k, n)
        return below + (above - below) * (at - points[high - 1]) / (points[high] - points[high - 1])

    def _at(self, form: str, rows: int, k: int, n: int) -> float:
        key = (form, rows, k, n)
        if key not in self._known:
            self._known[key] = self._evaluated(form, rows, k, n) if self._precise else self._closed(rows, k, n)
        return self._known[key]

    def _closed(self, rows: int, k: int, n: int) -> float:
        bandwidth = self.figures["gbps"][2 if self._from_cache else 3]
        arithmetic = 2.0 * rows * k * n / self.peak_gflops
        ms: float = max(arithmetic, 2.0 * k * n / bandwidth) * self.threads * 1e-6
        return ms

    def _evaluated(self, form: str, rows: int, k: int, n: int) -> float:
        groups = _EACH_THREAD * self.threads
        answer = self.evaluator.evaluate(shape_of(form, rows, k, n, groups))
        parts = answer.parts
        ms = answer.milliseconds - parts["scheduling"] - parts["dispatch"]
        if self._from_cache and parts["dram"] > 0:
            # The evaluator takes weights from memory, and adds times that overlap as the cube root of their cubes.
            apart = 0.0 if self.figures["unpack_overlaps"] else parts["packing"]
            together = ms - apart
            dram = together * (parts["dram"] / together) ** (1 / 3)
            faster = min(self.figures[f"{form}_gbps"] / self.figures["gbps"][2], 1.0)
            ms = apart + (together**3 - dram**3 * (1.0 - faster**3)) ** (1 / 3)
        return ms * self.threads / groups


def shape_of(form: str, rows: int, k: int, n: int, groups: int) -> GemmShape:
    """The question for one product of the engine: activations lie in tiles already."""
    output = "fp32" if form == "direct" else "bf16"
    return GemmShape(groups=groups, m=rows, k=k, n=n, output=output, form=form, packed=True)
