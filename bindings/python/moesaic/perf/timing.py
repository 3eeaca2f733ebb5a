"""GEMMs really run, with configurations of the evaluator: the measured mode, and the check of the analytic one."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence

from moesaic import _core
from moesaic.perf.gemm_evaluator import Configuration, GemmEstimate, problem_of
from moesaic.perf.machine import Kernels, Machine
from moesaic.perf.shapes import GemmShape

FINALISTS = 6
"""Candidates that the measured mode runs."""
_BUDGET_MS = 500.0
"""Of running the candidates of one shape in turn."""
_MOST_SECONDS = 5.0
"""Of the same, until nobody disturbs it."""
_LEAST, _MOST = 5, 41
"""Times that each is run."""
_MOST_WEIGHT_BYTES = 1 << 30


def require_this_host(machine: Machine, isa: str, threads: int) -> None:
    """Refuses to time anything for another machine.

    Raises:
        ValueError: the machine is not this host, or the engine runs on another number of threads.
    """
    if machine.source != "measured" or machine.name != (platform.node() or "here") or machine.cpu != _core.cpu_name():
        raise ValueError(f"machine is {machine.name!r}, expected this host: nothing can be measured for another one")
    if threads != _core.get_num_threads():
        raise ValueError(f"threads is {threads}, expected the engine's {_core.get_num_threads()} to measure with")
    if isa not in [name for name, runs in _core.kernel_tiers() if runs]:
        raise ValueError(f"isa is {isa!r}, expected a tier that runs here")


class ShapeTimer:
    """The operands of one shape, for any number of configurations. Weights come from memory, as they do in a model:
    there are as many copies as exceed the caches.

    Args:
        isa: tier of kernels, one that runs here.
        shape: the GEMM.
        l3_bytes: of the last-level caches; 0: weights come from wherever they stay.
    """

    def __init__(self, isa: str, shape: GemmShape, l3_bytes: int) -> None:
        self.isa, self._shape = isa, shape
        self._weight_bytes = min(l3_bytes + l3_bytes // 2, _MOST_WEIGHT_BYTES)
        self._forms: dict[str, _core.GroupedGemm] = {}

    def undisturbed(
        self, kernels: Kernels, configurations: Sequence[Configuration], count: int, seconds: float
    ) -> list[list[float]]:
        """Milliseconds of up to `count` runs of each configuration, in turn, before and after which the host was
        undisturbed (`Kernels.undisturbed`); fewer, or none, where so many seconds are over first."""
        times: list[list[float]] = [[] for _ in configurations]
        self.measure(configurations, 1)  # first touch of results and scratch memory
        until = time.perf_counter() + seconds
        before = kernels.undisturbed(self.isa)
        while time.perf_counter() < until and any(len(row) < count for row in times):
            for row, configuration in zip(times, configurations, strict=True):
                if len(row) >= count:
                    continue
                found = self.measure([configuration], 1)[0]
                after = kernels.undisturbed(self.isa)
                if before and after:
                    row += found
                before = after
        return times

    def measure(self, configurations: Sequence[Configuration], count: int) -> list[list[float]]:
        """Milliseconds of `count` runs of each configuration, in turn. Those of one form take turns with each other."""
        times: list[list[float]] = [[] for _ in configurations]
        for form in dict.fromkeys(c.form for c in configurations):
            if form not in self._forms:
                problem = problem_of(self._shape, form)
                self._forms[form] = _core.GroupedGemm(self.isa, problem, self._weight_bytes)
        forms = {c.form for c in configurations}
        for _ in range(count if len(forms) > 1 else 1):
            for form in sorted(forms):
                at = [i for i, c in enumerate(configurations) if c.form == form]
                rounds = 1 if len(forms) > 1 else count
                rows = self._forms[form].measure([configurations[i].as_tuple() for i in at], rounds)
                for i, row in zip(at, rows, strict=True):
                    times[i] += row
        return times


def repetitions(milliseconds: float, candidates: int, budget_ms: float = _BUDGET_MS) -> int:
    """How often each of some candidates is run, that take about so long each."""
    return max(_LEAST, min(_MOST, int(budget_ms / max(milliseconds * candidates, 1e-3))))


def best_of(timer: ShapeTimer, kernels: Kernels, ranked: Sequence[GemmEstimate]) -> tuple[GemmEstimate, float]:
    """The candidate that runs fastest, and its median in milliseconds: while nobody disturbs the host, if that happens
    in some seconds."""
    count = repetitions(ranked[0].milliseconds, len(ranked))
    configurations = [answer.configuration for answer in ranked]
    runs = timer.undisturbed(kernels, configurations, count, _MOST_SECONDS)
    if not all(runs):
        runs = timer.measure(configurations, count)
    medians = [statistics.median(row) for row in runs]
    at = medians.index(min(medians))
    return ranked[at], medians[at]
