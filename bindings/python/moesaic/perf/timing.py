"""GEMMs really run, with configurations of the evaluator: the measured mode, and the check of the analytic one."""

from __future__ import annotations

import itertools
import math
import operator
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence

from moesaic import _core
from moesaic.perf.gemm_evaluator import Configuration, GemmEstimate, problem_of
from moesaic.perf.machine import Machine
from moesaic.perf.shapes import GemmShape

FINALISTS = 16
"""Candidates that the measured mode runs."""
_FAR = 1.3
"""Times the least prediction: what is predicted slower is not run."""
_SECONDS, _LAST_SECONDS = 2.25, 2.0
"""In which all but two of them stay behind; and in which these run on."""
_LEAST_SECONDS = 0.3
"""Of runs that stand for a shape: others disturb a host for some milliseconds that no sentinel notices."""
TURNS = 12
"""In which those are made of all shapes: others disturb it for seconds, too."""
UNTIMED = 1
"""Runs until code and page tables are where they stay."""


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


def far_bytes(l3: int) -> int:
    """More than the last-level caches hold, also where a guest gets more of them than it seems."""
    return min(max(1 << 28, l3 + l3 // 2), 1 << 30)


def far_weights() -> _core.FarWeights:
    """More weights than the caches hold. Shapes that take turns share them."""
    return _core.FarWeights(far_bytes(_core.last_level_cache_bytes()))


class ShapeTimer:
    """The operands of one shape, for any number of configurations.

    Args:
        isa: tier of kernels, one that runs here.
        shape: the GEMM.
        far: weights come from memory, as they do in a model; None: from wherever they stay.
    """

    def __init__(self, isa: str, shape: GemmShape, far: _core.FarWeights | None) -> None:
        self.isa, self._shape, self._far = isa, shape, far
        self._forms: dict[str, _core.GroupedGemm] = {}
        self._random = random.Random(0)

    def measure(self, configurations: Sequence[Configuration], count: int) -> list[list[float]]:
        """Milliseconds of each configuration in `count` rounds, in each of which all take their turn, in another order
        each time: what others do to the host meets all of them."""
        times: list[list[float]] = [[] for _ in configurations]
        order = list(range(len(configurations)))
        for _ in range(count):
            self._random.shuffle(order)
            for i in order:
                times[i] += self.passes(configurations[i], 1)
        return times

    def passes(self, configuration: Configuration, count: int) -> list[float]:
        """Milliseconds of so many passes of one configuration, one after the other, each with weights from memory (if
        they are `far`), and with inputs, tiles and results where operators before leave them, in other threads' caches.

        Those would make passes depend on the ones before: in a row of them, packing pays for the threads that have read
        what the pass before packed, more or less as it happens (0.5 or 1.6 us a tile), and threads find what they wrote
        in their own caches once they come to the same tasks in each pass, which takes some. (AMX, 16 threads, 448 x
        1,920 x 640, tasks of 32 rows, the first, second, third, fifth, ninth pass and later ones: 458, 487, 363, 336,
        305 and 300 us.) In a model what lies there by then are other operators' data."""
        form = configuration.form
        if form not in self._forms:
            self._forms[form] = _core.GroupedGemm(self.isa, problem_of(self._shape, form), self._far)
        return self._forms[form].measure([configuration.as_tuple()], count)[0]


def time_in_turns(
    isa: str,
    cases: Sequence[tuple[GemmShape, Configuration]],
    quiet: Callable[[], bool],
    count: int,
    seconds: float,
    progress: Callable[[str], None],
    before_turn: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Milliseconds of at least `count` runs of each case before and after which the host was `quiet`, of as many as
    there are in a while; fewer, or none, where so many seconds a case are over first. All cases take their turn a few
    times, `TURNS`: what others do for seconds then meets all of them, and whatever is done `before_turn`."""
    far = far_weights()
    timers = [ShapeTimer(isa, shape, far) for shape, _ in cases]
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(1, TURNS + 1):
        before_turn()
        progress(f"turn {turn} of {TURNS}: {len(cases)} products")
        for timer, row, (_, configuration) in zip(timers, times, cases, strict=True):
            timer.passes(configuration, UNTIMED)
            begin = time.perf_counter()
            before = quiet()
            while (now := time.perf_counter() - begin) < seconds / TURNS and (
                now < _LEAST_SECONDS / TURNS or len(row) * TURNS < count * turn
            ):
                found = timer.passes(configuration, 1)
                after = quiet()
                if before and after:
                    row += found
                before = after
    return times


def relative(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each configuration the median, over rounds, of its time as a share of the round's median.

    What others do to the host for longer than a round takes cancels, as it does not in medians of times."""
    middles = [statistics.median(row) for row in zip(*times, strict=True)]
    return [statistics.median(map(operator.truediv, row, middles)) for row in times]


def finalists(ranked: Sequence[GemmEstimate], count: int = FINALISTS) -> list[GemmEstimate]:
    """What is worth running of all candidates, best first: the best of each kind, then the second best of each.

    A kind is who computes what: form, rows and columns of a task, rows of a call. The best candidates are often many of
    one kind, which take the same time, and the model is wrong about kinds."""
    kinds: dict[tuple[object, ...], list[GemmEstimate]] = {}
    for answer in ranked:
        if answer.milliseconds <= _FAR * ranked[0].milliseconds:
            c = answer.configuration
            kinds.setdefault((c.form, c.task_rows, c.task_columns, c.call_rows), []).append(answer)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return [answer for answer in in_turn if answer is not None][:count]


def fastest(timer: ShapeTimer, ranked: Sequence[GemmEstimate]) -> tuple[GemmEstimate, float]:
    """The finalist that runs fastest and its median in milliseconds, in about four seconds, more where a pass takes
    tens of milliseconds: rounds in which all take their turn; the slower half stays behind, again and again, but for
    the first of `ranked`. The last two run as long as all before, for what others do to a host lasts for seconds, and
    what they took before counts as well."""
    left, first = finalists(ranked), ranked[0]
    timer.measure([answer.configuration for answer in left], 1)  # first touch of results and scratch memory
    seconds = _SECONDS / max(1, math.ceil(math.log2(len(left))) - 1)
    times: list[list[float]] = [[] for _ in left]
    while True:
        until = time.perf_counter() + (seconds if len(left) > 2 else _LAST_SECONDS)
        while not times[0] or time.perf_counter() < until:
            for row, more in zip(times, timer.measure([answer.configuration for answer in left], 1), strict=True):
                row += more
        scores = relative(times)
        kept = sorted(range(len(left)), key=scores.__getitem__)[: (len(left) + 1) // 2]
        if len(kept) == 1:
            return left[kept[0]], statistics.median(times[kept[0]])
        if all(left[i] is not first for i in kept):
            kept[-1] = next(i for i, answer in enumerate(left) if answer is first)
        left, times = [left[i] for i in kept], [times[i] for i in kept]
