"""Measures the host for `Machine.measure`.

Figures of one thread are the best of many short tries, spread over a second or more: a host is never faster than
itself, and others that use it disturb a core (its sibling, the caches, the memory) for that long. Those of several
threads are medians: one or the other is always disturbed, and the rest waits for it. But of weights from memory a good
moment's, the better quartile.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic import _core
from moesaic.perf.machine import Kernels, Machine, PerThread, at_threads

_ROUNDS = 12
"""In which everything takes its turn; twice for one thread, then with weights from memory."""
_SECONDS = 0.003
"""Of one try; where weights come from memory four times as long."""
_KERNEL_TURNS = 16
_OVERLAPS = (1.0, 1.5, 2.0, 3.0)
_CACHE_OVER_MEMORY = 1.2
"""How much faster L3 must be for its size to show."""
_STREAM_K, _STREAM_N = 2048, 512
"""Of the matrices of `MachineProbe.stream`."""
_FEW_ROWS = (1, 4, 8)
"""With which the forms for few rows are tried on weights from memory."""
_FEWEST_OF_CELLS = 64
"""Rows that the direct form leaves to cells wherever there are forms for few, at least (`AreStoredRows` in
cpu_kernels/gemm/tiles.h)."""

_Streams = dict[tuple[str, str, int], tuple[float, float]]
"""GB/s of weights by tier, form and rows: in the best milliseconds, and on average."""
_StreamRows = dict[str, tuple[int, ...]]
"""By form."""


def _counts(threads: int) -> list[int]:
    """1, 2, 4, ... and all."""
    counts = [1]
    while counts[-1] * 2 < threads:
        counts.append(counts[-1] * 2)
    return [*counts, threads] if threads > 1 else counts


@dataclasses.dataclass
class _Rates:
    """What each turn of one number of threads found: L1, L2, L3, memory; multiply-adds, by tier; a dispatch and a task;
    how uneven threads are; what they hand to each other; weights."""

    threads: int
    gbps: list[list[float]] = dataclasses.field(default_factory=list)
    gflops: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    dispatch_us: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    uneven: list[float] = dataclasses.field(default_factory=list)
    hand_over_ns: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    streams: dict[tuple[str, str, int], list[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def rate(self, turns: Sequence[float]) -> float:
        """What stands for the turns: the best of one thread, the median of several."""
        return max(turns) if self.threads == 1 else statistics.median(turns)

    def time(self, turns: Sequence[float]) -> float:
        return min(turns) if self.threads == 1 else statistics.median(turns)

    def caches(self) -> list[float]:
        """GB/s of L1, L2, L3 and memory. None gives more than the one before it: what a probe missed there, the kernels
        would not find either."""
        return list(itertools.accumulate(map(self.rate, zip(*self.gbps, strict=True)), min))


class _Host:
    """What is known before anything is measured, and the probes."""

    def __init__(self) -> None:
        self.topology = _core.topology()
        self.l1, self.l2 = self.topology["l1d"]["bytes"] or 32 << 10, self.topology["l2"]["bytes"] or 1 << 20
        self.shared_l3 = self.topology["l3"]["bytes"] or self.l2
        self.l3 = _core.last_level_cache_bytes() or self.shared_l3
        self.far = far_bytes(self.l3)
        self.threads, self.isa = _core.get_num_threads(), _core.isa()
        self.tiers = [name for name, runs in _core.kernel_tiers() if runs and (name != "onednn" or name == self.isa)]
        probes = [row["isa"] for row in _core.compute_probes() if row["available"]]
        # No compute probe of its own: oneDNN takes the widest instructions of the host.
        self.compute_probe = {tier: tier if tier in probes else probes[0] for tier in self.tiers}
        self.kernels = {tier: _core.KernelProbe(tier) for tier in self.tiers}
        self._loads = [_core.LatencyProbe(size) for size in (self.l1 // 2, self.l2 // 2, self._l3_block(1), self.far)]
        self.latency_ns = [math.inf] * len(self._loads)
        self.sentinel_ns = dict.fromkeys(self.tiers, math.inf)

    def one_thread(self) -> None:
        """A turn of what only one thread does."""
        for tier, probe in self.kernels.items():
            for _ in range(_KERNEL_TURNS):
                probe.turn()
            self.sentinel_ns[tier] = min(self.sentinel_ns[tier], _core.measure_cell(tier))
        self.latency_ns = [
            min(ns, load.measure(_SECONDS)) for ns, load in zip(self.latency_ns, self._loads, strict=True)
        ]

    def turn(self, probe: _core.MachineProbe, found: _Rates, rows: Mapping[str, _StreamRows]) -> None:
        """A turn of so many threads; with weights from memory for these rows of the tiers."""
        threads = found.threads
        blocks = (self.l1 // 2, self.l2 // 2, self._l3_block(threads))
        found.gbps.append([*(probe.read(block, _SECONDS) for block in blocks), probe.memory(3 * _SECONDS)])
        for tier, isa in self.compute_probe.items():
            found.gflops.setdefault(tier, []).append(probe.compute(isa, _SECONDS))
        found.dispatch_us.append(probe.dispatch())
        found.uneven.append(probe.uneven(self.isa) if threads > 1 else 1.0)
        found.hand_over_ns.append(probe.hand_over(self.isa) if threads > 1 else (0.0, 0.0))
        for tier, forms in rows.items():
            for form, counts in forms.items():
                for count in counts:
                    of_weights = probe.stream(tier, form == "direct", count, 4 * _SECONDS)
                    found.streams.setdefault((tier, form, count), []).append(of_weights)

    def l3_held(self, probe: _core.MachineProbe, gbps: Sequence[float]) -> int:
        """What of the last-level caches this process gets: a guest is told of all of its host's, which others fill
        too. The most, by halves, of which three quarters are read rather at L3's rate than at memory's."""
        held, least = self.l3, self.threads * self._l3_block(self.threads)
        if gbps[2] < _CACHE_OVER_MEMORY * gbps[3]:
            return held
        between = math.sqrt(gbps[2] * gbps[3])
        while held // 2 > least:
            size = held * 3 // 4
            if probe.read(size // self.threads, 4e-9 * size / gbps[3]) > between:
                break
            held //= 2
        return held

    def _l3_block(self, threads: int) -> int:
        """A thread's block that L3 holds and L2 does not."""
        return max(min(4 * self.l2, self.shared_l3 // (2 * threads)), self.l2 + self.l2 // 4)


def measure_machine(progress: Callable[[str], None] | None = None) -> Machine:
    """See `Machine.measure`."""
    tell = progress or (lambda text: None)
    host = _Host()
    found: dict[int, _Rates] = {}
    rows: dict[str, _StreamRows] = {}
    for n in _counts(host.threads):
        tell(f"{n} thread{'s' if n > 1 else ''}")
        probe = _core.MachineProbe(n, host.far)
        turns = found[n] = _Rates(n)
        if n == 1:
            for _ in range(_ROUNDS):
                host.one_thread()
                host.turn(probe, turns, {})
            for tier in host.tiers:
                row = host.kernels[tier].figures()
                rows[tier] = _stream_rows(
                    _per_thread(row), turns.caches()[3], row["unpack_overlaps"], row["most_few_rows"]
                )
        together = {tier: probe.kernels(tier) for tier in host.tiers} if 1 < n == host.threads else {}
        for _ in range(_ROUNDS):
            if n == 1:
                host.one_thread()
            host.turn(probe, turns, rows if n in (1, host.threads) else {})
            for one in together.values():
                one.turn()

    def by_threads(figure: Callable[[_Rates], float]) -> dict[int, float]:
        return {n: figure(rates) for n, rates in found.items()}

    caches = [by_threads(lambda rates, level=level: rates.caches()[level]) for level in range(4)]  # type: ignore[misc]
    kernels = {}
    for tier in host.tiers:
        row = host.kernels[tier].figures()
        per_thread = {1: _per_thread(row)}
        if tier in together:
            per_thread[host.threads] = _per_thread(together[tier].figures())
            # A thread alone is no slower than one of many: what its turns missed because of others, those may have met.
            per_thread[1] = per_thread[1].no_slower_than(per_thread[host.threads])
        kernels[tier] = Kernels(
            left_panels=row["left_panels"],
            right_panels=row["right_panels"],
            most_few_rows=row["most_few_rows"],
            most_stored_rows=row["most_stored_rows"],
            per_thread=per_thread,
            unpack_overlaps=row["unpack_overlaps"],
            sentinel_ns=host.sentinel_ns[tier],
            compute_gflops=by_threads(lambda rates, tier=tier: rates.rate(rates.gflops[tier])),  # type: ignore[misc]
            direct_gbps=caches[3],
            unpack_gbps=caches[3],
            few_direct_gbps=caches[3],
            few_unpack_gbps=caches[3],
        )
    latency = [max(host.latency_ns[: level + 1]) for level in range(4)]
    machine = Machine(
        name=platform.node() or "here",
        source="measured",
        cpu=_core.cpu_name(),
        isa=host.isa,
        sockets=max(host.topology["packages"], 1),
        numa_nodes=max(len(host.topology["nodes"]), 1),
        cores=host.topology["usable_cores"],
        threads=host.threads,
        memory_bytes=sum(node["memory_bytes"] for node in host.topology["nodes"]) or 1,
        l1_bytes=host.l1,
        l2_bytes=host.l2,
        l3_bytes=host.l3_held(probe, turns.caches()),
        l1_gbps=caches[0],
        l2_gbps=caches[1],
        l3_gbps=caches[2],
        dram_gbps=caches[3],
        l1_ns=latency[0],
        l2_ns=latency[1],
        l3_ns=latency[2],
        dram_ns=latency[3],
        job_us=by_threads(lambda rates: rates.time([job for job, _ in rates.dispatch_us])),
        task_us=by_threads(lambda rates: rates.time([task for _, task in rates.dispatch_us])),
        uneven=by_threads(lambda rates: statistics.median(rates.uneven)),
        claim_ns=by_threads(lambda rates: statistics.median(claim for claim, _ in rates.hand_over_ns)),
        fetch_ns=by_threads(lambda rates: statistics.median(fetch for _, fetch in rates.hand_over_ns)),
        kernels=kernels,
    )
    streams = {
        n: {key: _good_moment(rates) for key, rates in found[n].streams.items()} for n in sorted({1, host.threads})
    }
    for tier in host.tiers:
        machine = _with_supply(machine, tier, streams)
    return machine


def _good_moment(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of what was measured in turns the better quartiles."""
    best, mean = (statistics.quantiles(some, n=4)[2] for some in zip(*rates, strict=True))
    return best, mean


def _per_thread(row: _core.KernelRow) -> PerThread:
    return PerThread(
        step_ns=tuple(tuple(r[: row["right_panels"]]) for r in row["step_ns"][: row["left_panels"]]),
        few_tile_ns=tuple(map(tuple, row["few_tile_ns"])),
        cell_ns=row["cell_ns"],
        again_ns=row["again_ns"],
        call_ns=row["call_ns"],
        l2_tile_ns=row["l2_tile_ns"],
        unpack_tile_ns=row["unpack_tile_ns"],
        pack_gbps=row["pack_gbps"],
        overlap=_OVERLAPS[-1],
        unpack_overlap=_OVERLAPS[-1],
    )


def _with_supply(machine: Machine, tier: str, measured: Mapping[int, _Streams]) -> Machine:
    """The machine with what a tier's kernels do with weights from memory, by threads: how much of it products hide,
    and the rates at which they take them."""
    apart = machine.kernels[tier].unpack_overlaps  # vectors unpack before products, which then are as in direct form
    few = _FEW_ROWS if _has_few(machine, tier) else ()
    for n, streams in measured.items():
        for form in ("direct", "unpack"):
            found = {rows: gbps for (name, some, rows), gbps in streams.items() if (name, some) == (tier, form)}
            of_few = {rows: found.pop(rows)[1] for rows in few if rows in found}
            if of_few:
                machine, _ = _with_rate(machine, tier, n, f"few_{form}_gbps", of_few)
            if not found:  # any number of rows is few to the unpack form
                machine = _copied(machine, tier, n, f"few_{form}_gbps", f"{form}_gbps")
                continue
            best = {rows: gbps for rows, (gbps, _) in found.items()}
            if form == "direct" or apart:
                names = ("overlap", "unpack_overlap") if form == "direct" else ("unpack_overlap",)
                tried = (_overlapping(machine, tier, n, names, p) for p in _OVERLAPS)
                rated = (_with_rate(one, tier, n, f"{form}_gbps", best) for one in tried)
                machine = min(rated, key=operator.itemgetter(1))[0]
            least = min(found)
            # How well things overlap the best moments tell; the rate of few rows is that of longer ones.
            machine, _ = _with_rate(machine, tier, n, f"{form}_gbps", {least: found[least][1]})
            if not of_few:
                machine = _copied(machine, tier, n, f"{form}_gbps", f"few_{form}_gbps")
    return machine


def _has_few(machine: Machine, tier: str) -> bool:
    """Whether the tier has forms for few rows."""
    return bool(machine.kernels[tier].per_thread[1].few_tile_ns[0])


def _copied(machine: Machine, tier: str, threads: int, rate: str, to: str) -> Machine:
    """The machine with a rate of weights from memory that stands for another one, too."""
    kernels = machine.kernels[tier]
    return _replaced(machine, tier, **{to: {**getattr(kernels, to), threads: getattr(kernels, rate)[threads]}})


def _with_rate(
    machine: Machine, tier: str, threads: int, name: str, measured: Mapping[int, float]
) -> tuple[Machine, float]:
    """The machine with the rate of weights from memory, `name`, with which the model says best what
    `MachineProbe.stream` measured, by rows, and how badly it does.

    What was measured is taken to be 7% uncertain, and the rate to be within some 20% of the memory's own: it is not
    told by rows whose products take much longer than the memory."""
    most = at_threads(machine.dram_gbps, threads)
    form = name.removeprefix("few_").removesuffix("_gbps")

    def fitted(share: float) -> tuple[Machine, float]:
        figure = {**getattr(machine.kernels[tier], name), threads: share * most}
        some = _replaced(machine, tier, **{name: figure})
        errors = [math.log(_stream_gbps(some, tier, threads, form, rows) / gbps) for rows, gbps in measured.items()]
        return some, sum((error / 0.07) ** 2 for error in errors) + (math.log(share) / 0.2) ** 2

    return min((fitted(1.02**-step) for step in range(100)), key=lambda some: some[1])


def _stream_rows(kernels: PerThread, dram_gbps: float, matrix_unit: bool, most_few: int) -> _StreamRows:
    """Rows with which the kernels are tried on weights from memory, by form: some of the forms for few, if there are
    any, which are all that the unpack form needs; the fewest beyond them that cells take; so many that products take
    about as long as the memory; twice as many. A matrix unit's wait for activations from L2, and for what is unpacked:
    half as many, too."""
    few = _FEW_ROWS if kernels.few_tile_ns[0] else ()
    least = max(most_few + 16, _FEWEST_OF_CELLS) if few else 16
    product_ns = (kernels.step_ns[-1][0] + (kernels.l2_tile_ns if matrix_unit else 0.0)) / len(kernels.step_ns)
    balanced = min(max(16 * round(1024 / dram_gbps / product_ns), least + 16), 192)
    half = 16 * round(balanced / 32)
    more = (least, *([half] if matrix_unit and half > 2 * least else []), balanced, 2 * balanced)
    return {"direct": (*few, *more), "unpack": few or more}


def _overlapping(machine: Machine, tier: str, threads: int, names: Sequence[str], overlap: float) -> Machine:
    per_thread = machine.kernels[tier].per_thread
    figures: dict[str, Any] = dict.fromkeys(names, overlap)
    changed = dataclasses.replace(per_thread[threads], **figures)
    return _replaced(machine, tier, per_thread={**per_thread, threads: changed})


def _replaced(machine: Machine, tier: str, **figures: Any) -> Machine:
    """The machine with other figures of a tier's kernels."""
    return dataclasses.replace(
        machine, kernels={**machine.kernels, tier: dataclasses.replace(machine.kernels[tier], **figures)}
    )


def _stream_gbps(machine: Machine, tier: str, threads: int, form: str, rows: int) -> float:
    """What the model says of `MachineProbe.stream`."""
    k, n = _STREAM_K, _STREAM_N
    problem = ((rows,) * threads, k, n, 2, 4, 2.0, form, True, False)
    depth = 32 * _core.unpack_slice(machine.kernels[tier].unpack_overlaps, k // 32, -(-rows // 16), machine.l2_bytes)
    sliced = form == "unpack" and depth > 0
    few = rows <= machine.kernels[tier].most_few_rows
    columns = n if form == "unpack" else 128 if few else 32
    padded = 16 * -(-rows // 16)
    configuration = (padded, n, padded, columns, depth if sliced else k, "columns")
    _, ms, parts, _, _ = _core.TileEvaluator(machine.figures(threads, tier)).estimate(problem, configuration)
    others = sum(time for name, time in zip(_core.gemm_parts, parts, strict=True) if name in ("scheduling", "dispatch"))
    return threads * 2.0 * k * n / (ms - others) * 1e-6


def far_bytes(l3: int) -> int:
    """More than the last-level caches hold, also where a guest gets more of them than it seems."""
    return min(max(1 << 28, l3 + l3 // 2), 1 << 30)
