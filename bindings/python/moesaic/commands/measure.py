"""Statistics, and the ceilings of the host while something is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic import _core
from moesaic.commands.layer_case import Work
from moesaic.commands.variants import Call

# A repetition whose two probes differ by more than this ran on a host that changed its speed meanwhile.
PROBE_TOLERANCE = 0.1

_COMPUTE_SECONDS = 0.02
_READ_SECONDS = 0.04


@dataclass(frozen=True)
class Ceiling:
    """What the host can do: GFLOP/s on registers, GB/s read from memory."""

    compute_gflops: float
    read_gbps: float

    def limit_ms(self, flops: int, bytes_moved: int) -> float:
        """The least time for that much work: the larger of flops / compute and bytes / bandwidth."""
        return max(flops / (self.compute_gflops * 1e6), bytes_moved / (self.read_gbps * 1e6))


def by_clock(probe: Callable[[], float], clock: Callable[[], float]) -> float:
    """A probe's rate by another clock than the wall's: what it would be if nobody else had the processor meanwhile."""
    wall, own = time.perf_counter(), clock()
    rate = probe()
    return rate * (time.perf_counter() - wall) / (clock() - own)


class CeilingProbe:
    """Probes the ceilings on as many threads as the engine uses: on its own threads, so nothing else may run on them
    meanwhile."""

    def __init__(self, isa: str, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            isa: the engine's tier; a tier without a probe of its own is held against the host's best.
            threads: 1, or the number of threads of the engine's pool.
            clock: whose seconds the rates are for.
        """
        available = [probe["isa"] for probe in _core.compute_probes() if probe["available"]]
        self._isa = isa if isa in available else available[0]
        self.threads = threads
        self._read = _core.ReadProbe(threads)
        self._clock = clock

    def measure(self) -> Ceiling:
        """Probes both, in some 70 ms."""
        return Ceiling(
            by_clock(lambda: _core.measure_compute(self._isa, self.threads, _COMPUTE_SECONDS), self._clock),
            by_clock(lambda: self._read.measure(_READ_SECONDS), self._clock),
        )


@dataclass(frozen=True)
class Repetition:
    """One call of the engine, and the ceilings before and after it."""

    call: Call
    before: Ceiling
    after: Ceiling

    def steady(self) -> bool:
        """Whether both probes agree."""
        return _close(self.before.compute_gflops, self.after.compute_gflops) and _close(
            self.before.read_gbps, self.after.read_gbps
        )

    def ceiling(self) -> Ceiling:
        """The mean of both probes."""
        return Ceiling(
            (self.before.compute_gflops + self.after.compute_gflops) / 2,
            (self.before.read_gbps + self.after.read_gbps) / 2,
        )


def median_ceiling(repetitions: Sequence[Repetition]) -> Ceiling:
    """The medians over all probes of all repetitions."""
    probes = [probe for repetition in repetitions for probe in (repetition.before, repetition.after)]
    return Ceiling(
        statistics.median(probe.compute_gflops for probe in probes),
        statistics.median(probe.read_gbps for probe in probes),
    )


def fraction_of_limit(repetitions: Sequence[Repetition], flops: Work, bytes_moved: Work) -> dict[str, float | None]:
    """Median over the steady repetitions of limit / time, each limit from its own probes; None where no repetition was
    steady or backward was not run."""
    forward, backward = [], []
    for repetition in repetitions:
        if not repetition.steady():
            continue
        ceiling = repetition.ceiling()
        forward.append(ceiling.limit_ms(flops.forward, bytes_moved.forward) / repetition.call.forward_ms)
        if repetition.call.backward_ms is not None:
            backward.append(ceiling.limit_ms(flops.backward, bytes_moved.backward) / repetition.call.backward_ms)
    return {
        "forward": statistics.median(forward) if forward else None,
        "backward": statistics.median(backward) if backward else None,
    }


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= PROBE_TOLERANCE * max(a, b)
