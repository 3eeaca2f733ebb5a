"""Thread time of products with base weights, asked of the tile evaluator at a few numbers of rows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moesaic import _core
from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.layer_plan import round_up
from moesaic.perf.machine import Machine
from moesaic.perf.shapes import GemmShape

__all__ = ["Answer", "Counted", "Evaluates", "ProductMs", "Products", "ShapeRecorder", "resident_share"]


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
    parts: Mapping[str, float] = field(
        default_factory=lambda: {"scheduling": 0.0, "dispatch": 0.0, "dram": 0.0, "l3": 0.0, "packing": 0.0}
    )
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


# Rows at which products are evaluated. Between them time is linear in the rows that count.
_GRID = (1, 2, 4, 8, 12, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384)
# The same of rows that are no whole panels.
_STORED_GRID = tuple(rows if rows <= 32 else rows - 1 for rows in _GRID)
_FEW = 16
_USABLE = 0.6  # of the last-level cache
_EACH_THREAD = 4  # groups in a question: enough that scheduling plays no part, and activations stay in cache


@dataclass(frozen=True)
class ProductMs:
    """Thread milliseconds of a product: what reading from memory takes of it, what reading from the last-level cache
    takes, what unpacking weights and storing results takes, and everything else."""

    compute: float
    stream: float
    cache: float
    packing: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.stream + self.cache + self.packing

    def scaled(self, factor: float) -> ProductMs:
        """So many times as much."""
        return ProductMs(self.compute * factor, self.stream * factor, self.cache * factor, self.packing * factor)

    def towards(self, other: ProductMs, share: float) -> ProductMs:
        """Between the two: this one at share 0, the other one at 1."""
        return ProductMs(
            self.compute + (other.compute - self.compute) * share,
            self.stream + (other.stream - self.stream) * share,
            self.cache + (other.cache - self.cache) * share,
            self.packing + (other.packing - self.packing) * share,
        )


class Products:
    """Thread milliseconds of one product of `rows` rows, while all threads compute such products.

    Args:
        evaluator: whom to ask.
        resident_bytes: weights of everything that is computed before the same weights are used again. What is less than
            the last-level cache holds is found there again, of more a part (`resident_share`).
    """

    def __init__(self, evaluator: Evaluates, *, resident_bytes: float = float("inf")) -> None:
        self.evaluator = evaluator
        self.threads = evaluator.threads
        self.figures = evaluator.machine.figures(self.threads)
        self.peak_gflops: float = self.figures["compute_gflops"]
        self._resident_bytes = resident_bytes
        times = resident_bytes / (_USABLE * self.figures["l3_bytes"])
        self._from_cache = resident_share(times)
        self.filled = min(times, 1.0)
        """Of the last-level cache that the weights may use, what they fill."""
        self._known: dict[tuple[str, int, int, int, bool], ProductMs] = {}

    def fits(self, weight_bytes: float) -> bool:
        """Whether so many bytes of weights fit what they may use of the last-level cache."""
        return weight_bytes <= _USABLE * float(self.figures["l3_bytes"])

    def asking(self, evaluator: Evaluates) -> Products:
        """The same questions to another evaluator."""
        return Products(evaluator, resident_bytes=self._resident_bytes)

    def with_resident(self, resident_bytes: float) -> Products:
        """The same where so many bytes of weights lie between two uses."""
        return Products(self.evaluator, resident_bytes=resident_bytes)

    def thread_ms(self, form: str, rows: int, k: int, n: int, *, again: bool = False) -> ProductMs:
        """One product [rows, k] x [k, n] on one thread of all.

        Args:
            form: 'direct' or 'unpack'.
            rows: of the activations.
            k: the contraction.
            n: columns.
            again: other rows have just been multiplied with the same weights, which the last-level cache still holds.
        """
        at = self._rows_that_count(form, rows)
        points: Sequence[int] = _STORED_GRID if form == "direct" and self._are_transposed(at) else _GRID
        high = bisect.bisect_left(points, at)
        if high == len(points):
            return self._at(form, points[-1], k, n, again).scaled(at / points[-1])
        above = self._at(form, points[high], k, n, again)
        if points[high] == at:
            return above
        below = self._at(form, points[high - 1], k, n, again)
        return below.towards(above, (at - points[high - 1]) / (points[high] - points[high - 1]))

    def _rows_that_count(self, form: str, rows: int) -> int:
        """Rows that a product takes as long as: each, eight at a time, or whole panels of 16."""
        exact = len(self.figures["few_tile_ns"][0]) > 0
        if rows <= _FEW or (exact and form == "unpack"):
            return rows
        return self._direct_rows(rows)

    def _are_transposed(self, rows: int) -> bool:
        """Whether the direct form transposes weights for so many rows; others are few, or cells take them."""
        few: int = self.figures["most_few_rows"]
        return rows > few and _core.are_stored_rows(rows, few, self.figures["most_stored_rows"])

    def _direct_rows(self, rows: int) -> int:
        """Of the direct form: eight at a time up to `most_few_rows`, each up to `most_stored_rows`; else whole panels,
        as in the unpack form of a tier without forms for few."""
        if rows <= self.figures["most_few_rows"]:
            return round_up(rows, 8)
        return rows if rows <= self.figures["most_stored_rows"] else round_up(rows, 16)

    def lanes(self, rows: int) -> float:
        """Rows that a narrow product takes as long as: whole panels of 16, but for few rows where a tier has a form for
        them."""
        few: list[float] = self.figures["few_tile_ns"][0]
        if rows > len(few):
            return self._direct_rows(rows)
        whole: float = self.figures["step_ns"][0][0]
        return float(min(16 * few[rows - 1] / whole, round_up(rows, 16)))

    def _at(self, form: str, rows: int, k: int, n: int, again: bool) -> ProductMs:
        cached = 1.0 if again else self._from_cache
        if 0.0 < cached < 1.0:
            return self._answer(form, rows, k, n, False).towards(self._answer(form, rows, k, n, True), cached)
        return self._answer(form, rows, k, n, cached > 0.0)

    def _answer(self, form: str, rows: int, k: int, n: int, cached: bool) -> ProductMs:
        key = (form, rows, k, n, cached)
        if key not in self._known:
            self._known[key] = self._evaluated(form, rows, k, n, cached)
        return self._known[key]

    def _evaluated(self, form: str, rows: int, k: int, n: int, cached: bool) -> ProductMs:
        groups = _EACH_THREAD * self.threads
        answer = self.evaluator.evaluate(shape_of(form, rows, k, n, groups, cached=cached))
        parts, scale = answer.parts, self.threads / groups
        stream, cache, packing = (parts[name] * scale for name in ("dram", "l3", "packing"))
        whole = (answer.milliseconds - parts["scheduling"] - parts["dispatch"]) * scale
        return ProductMs(whole - stream - cache - packing, stream, cache, packing)


def resident_share(times: float) -> float:
    """Of so many times a cache's size that are read over and over in the same order, the share that is found there
    again, where a line that is brought takes the place of any: x = exp(-(1 - x) times). 1 of what fits, 0.20 of twice
    as much, 0.06 of three times, and none where it would be less than a hundredth."""
    if times <= 1.0:
        return 1.0
    share = 0.0
    for _ in range(200):
        share = math.exp((share - 1.0) * times)
    return share if share > 0.01 else 0.0


def shape_of(form: str, rows: int, k: int, n: int, groups: int, *, cached: bool = False) -> GemmShape:
    """The question for one product of the engine: activations lie in tiles already."""
    output = "fp32" if form == "direct" else "bf16"
    return GemmShape(groups=groups, m=rows, k=k, n=n, output=output, form=form, packed=True, cached=cached)
