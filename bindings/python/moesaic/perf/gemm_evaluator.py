"""The tile evaluator in Python: the time of a GEMM on a machine, and the blocking that reaches it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from moesaic import _core
from moesaic.perf.cache import Cache
from moesaic.perf.machine import Machine
from moesaic.perf.shapes import TYPES, WEIGHTS, GemmShape

log = logging.getLogger("moesaic.perf")

PARTS: tuple[str, ...] = _core.gemm_parts
Space = Literal["pruned", "published"]
Mode = Literal["analytic", "measured"]
_ALL = 10_000
"""More than any shape has candidates."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Two levels of tiles and the order of the loops; see ``cpu_kernels/tile_evaluator/gemm_model.h``."""

    form: str
    task_rows: int
    task_columns: int
    call_rows: int
    call_columns: int
    call_depth: int
    order: str

    def as_tuple(self) -> tuple[int, int, int, int, int, str]:
        """What `_core` takes."""
        return (
            self.task_rows,
            self.task_columns,
            self.call_rows,
            self.call_columns,
            self.call_depth,
            self.order,
        )


@dataclasses.dataclass(frozen=True)
class GemmEstimate:
    """What the evaluator says about a shape."""

    milliseconds: float
    parts: dict[str, float]
    """Milliseconds by part, which add up to the whole: arithmetic, l1, l2, l3, dram, packing, edge, scheduling,
    dispatch."""
    bound: str
    """The largest part."""
    configuration: Configuration
    candidates: int
    """Configurations that were looked at."""
    source: str = "analytic"
    """"analytic" or "measured"."""


class GemmEvaluator:
    """Times of GEMMs on one machine, by the same model that chooses the kernels' blocking.

    Args:
        machine: the machine.
        threads: of the engine on it; None: all that the machine's figures reach to.
        cache: where answers are kept; None: the one in MOESAIC_CACHE_DIR; False: in memory only.
        isa: tier of kernels; None: the machine's.
        space: "pruned": configurations that differ and are not bad by rule. "published": 20 tiles of L2 x 30 of L1 x 3
            orders, 1,800 a shape.
        mode: "analytic": what the model finds best. "measured": the best few really run on this host, and the fastest
            taken, with its measured time.

    Raises:
        ValueError: more threads than the machine has, or an unknown tier; measuring for a machine that is not this
        host.
    """

    def __init__(
        self,
        machine: Machine,
        threads: int | None = None,
        cache: Cache | Literal[False] | None = None,
        *,
        isa: str | None = None,
        space: Space = "pruned",
        mode: Mode = "analytic",
    ) -> None:
        if space not in ("pruned", "published"):
            raise ValueError(f"space is {space!r}, expected 'pruned' or 'published'")
        if mode not in ("analytic", "measured"):
            raise ValueError(f"mode is {mode!r}, expected 'analytic' or 'measured'")
        self.machine = machine
        self.threads = threads if threads is not None else machine.threads
        self.isa = isa or machine.isa
        self.space: Space = space
        self.mode: Mode = mode
        self.cache: Cache | None = None if cache is False else cache if cache is not None else Cache()
        if mode == "measured":
            from moesaic.perf.timing import require_this_host

            require_this_host(machine, self.isa, self.threads)
        self._core = _core.TileEvaluator(machine.figures(self.threads, self.isa))
        self.prefix = f"v{_core.gemm_model_version}.{machine.identity}.{self.isa}.t{self.threads}.{space}.{mode}."
        """How the keys of this evaluator's answers begin."""
        self._answers: dict[GemmShape, tuple[str, GemmEstimate]] = {}
        self._counts = True
        self.candidates = 0
        """Configurations looked at so far."""

    def evaluate(self, shape: GemmShape) -> GemmEstimate:
        """The best configuration of a shape and its time.

        Raises:
            ValueError: the shape makes no sense.
        """
        known = self._answers.get(shape)
        if known is not None:
            if self.cache is not None and self._counts:
                self.cache.count(known[0])
            return known[1]
        return self.evaluate_many([shape])[0]

    def evaluate_many(self, shapes: Sequence[GemmShape]) -> list[GemmEstimate]:
        """The same for several, in parallel on the engine's threads."""
        missing: dict[GemmShape, None] = {}
        for shape in shapes:
            if self._look_up(shape) is None:
                missing.setdefault(shape)
        if missing:
            self._compute(list(missing))
        return [self._answers[shape][1] for shape in shapes]

    def known(self, shape: GemmShape) -> bool:
        """Whether the answer is there already; counts as no use."""
        return shape in self._answers or (self.cache is not None and self.cache.has(self.key(shape)))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, looking up counts as no use: for filling the cache ahead of use, and for showing it."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def key(self, shape: GemmShape) -> str:
        """The shape's key in the cache: version, machine, tier, threads, shape."""
        return self.prefix + shape.key

    def history(self) -> list[GemmShape]:
        """Every shape that was ever asked for in this cache, by any process and for any machine, most used first."""
        if self.cache is None:
            return []
        uses: dict[GemmShape, int] = {}
        for key, count in self.cache.uses().items():
            # version . identity . tier . threads . space . mode . shape
            with contextlib.suppress(ValueError):
                shape = GemmShape.from_key(key.split(".", 6)[-1])
                uses[shape] = uses.get(shape, 0) + count
        return sorted(uses, key=lambda shape: -uses[shape])

    def estimate(self, shape: GemmShape, configuration: Configuration) -> GemmEstimate:
        """The time of a given configuration.

        Raises:
            ValueError: the kernels cannot run it.
        """
        row = self._core.estimate(problem_of(shape, configuration.form), configuration.as_tuple())
        return _estimate(row, configuration.form)

    def rank(self, shape: GemmShape, count: int) -> list[GemmEstimate]:
        """The best `count` configurations, best first."""
        found = []
        for form in _forms(shape):
            rows = self._core.rank(problem_of(shape, form), self.space, count)
            found += [_estimate(row, form) for row in rows]
        return sorted(found, key=lambda e: e.milliseconds)[:count]

    def _look_up(self, shape: GemmShape) -> GemmEstimate | None:
        known = self._answers.get(shape)
        if known is not None:
            if self.cache is not None and self._counts:
                self.cache.count(known[0])
            return known[1]
        if self.cache is None:
            return None
        key = self.key(shape)
        answer = _from_json(self.cache.get(key, count=self._counts))
        log.debug("%s %s", "hit" if answer is not None else "miss", key)
        if answer is not None:
            self._answers[shape] = (key, answer)
        return answer

    def _compute(self, shapes: list[GemmShape]) -> None:
        best = self._measure(shapes) if self.mode == "measured" else self._choose(shapes)
        new = {}
        for shape, answer in best.items():
            key = self.key(shape)
            self._answers[shape] = (key, answer)
            new[key] = _to_json(answer)
        if self.cache is not None:
            self.cache.put(new)

    def _choose(self, shapes: list[GemmShape]) -> dict[GemmShape, GemmEstimate]:
        problems = [(shape, form) for shape in shapes for form in _forms(shape)]
        rows = self._core.choose([problem_of(shape, form) for shape, form in problems], self.space)
        best: dict[GemmShape, GemmEstimate] = {}
        for (shape, form), row in zip(problems, rows, strict=True):
            answer = _estimate(row, form)
            self.candidates += answer.candidates
            if shape not in best or answer.milliseconds < best[shape].milliseconds:
                best[shape] = answer
        return best

    def _measure(self, shapes: list[GemmShape]) -> dict[GemmShape, GemmEstimate]:
        from moesaic.perf.timing import ShapeTimer, far_weights, fastest

        far = far_weights()
        best = {}
        for shape in shapes:
            ranked = self.rank(shape, _ALL)
            self.candidates += ranked[0].candidates
            timer = ShapeTimer(self.isa, shape, far)
            answer, milliseconds = fastest(timer, ranked)
            scale = milliseconds / answer.milliseconds
            parts = {name: value * scale for name, value in answer.parts.items()}
            best[shape] = dataclasses.replace(answer, milliseconds=milliseconds, parts=parts, source="measured")
        return best


def _forms(shape: GemmShape) -> tuple[str, ...]:
    if shape.form is not None:
        return (shape.form,)
    # A row-major bf16 result is what only the unpack form writes.
    return ("unpack",) if shape.output == "bf16" else ("direct", "unpack")


def problem_of(shape: GemmShape, form: str) -> tuple[Any, ...]:
    """A shape as `_core` takes it."""
    return (
        shape.group_rows,
        shape.k,
        shape.n,
        TYPES[shape.input],
        TYPES[shape.output],
        WEIGHTS[shape.weights],
        form,
        shape.packed,
        shape.cached,
    )


def _estimate(row: tuple[Any, ...], form: str) -> GemmEstimate:
    configuration, milliseconds, parts, bound, candidates = row
    by_name = dict(zip(PARTS, parts, strict=True))
    return GemmEstimate(milliseconds, by_name, PARTS[bound], Configuration(form, *configuration), candidates)


def _to_json(answer: GemmEstimate) -> list[Any]:
    configuration = answer.configuration
    return [
        answer.milliseconds,
        [answer.parts[name] for name in PARTS],
        answer.bound,
        [configuration.form, *configuration.as_tuple()],
        answer.candidates,
        answer.source,
    ]


def _from_json(value: Any) -> GemmEstimate | None:
    """None where the entry is not what `_to_json` wrote: it is computed again."""
    try:
        milliseconds, parts, bound, configuration, candidates, source = value
        return GemmEstimate(
            float(milliseconds),
            dict(zip(PARTS, map(float, parts), strict=True)),
            bound if bound in PARTS else PARTS[0],
            Configuration(*configuration),
            int(candidates),
            str(source),
        )
    except (TypeError, ValueError):
        return None
