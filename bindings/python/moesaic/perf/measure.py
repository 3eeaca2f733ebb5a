"""Measures the host for `Machine.measure`."""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moesaic import _core
from moesaic.perf.machine import Kernels, Machine, at_threads

_SECONDS = 0.01
"""Of one rate."""
_TIMES = 24
"""That each rate is measured at most, for others use caches, memory and siblings of cores in between."""
_KERNEL_RUNS, _PAUSE = 20, 0.1
_OVERLAPS = (1.0, 1.25, 1.5, 2.0, 3.0)
_STREAM_WIDTH = 2048
"""Of the matrices of `MachineProbe.stream`."""


def _counts(threads: int) -> list[int]:
    """1, 2, 4, ... and all."""
    counts = [1]
    while counts[-1] * 2 < threads:
        counts.append(counts[-1] * 2)
    return [*counts, threads] if threads > 1 else counts


def measure_machine(progress: Callable[[str], None] | None = None) -> Machine:
    """See `Machine.measure`."""
    tell = progress or (lambda text: None)
    topology = _core.topology()
    l1, l2 = topology["l1d"]["bytes"] or 32 << 10, topology["l2"]["bytes"] or 1 << 20
    shared = topology["l3"]["bytes"] or l2
    l3 = _core.last_level_cache_bytes() or shared
    threads, isa = _core.get_num_threads(), _core.isa()
    tiers = list(dict.fromkeys(name for name, runs in _core.kernel_tiers() if runs and name != "onednn"))
    if isa not in tiers:
        tiers.append(isa)
    # No compute probe of its own: oneDNN takes the widest instructions of the host.
    probes = {row["isa"] for row in _core.compute_probes() if row["available"]}
    best = next(row["isa"] for row in _core.compute_probes() if row["available"])

    tell("kernels")
    kernels = _in_cache(tiers)

    def undisturbed(rate: Callable[[], float]) -> float:
        return _undisturbed(rate, isa, kernels[isa])

    tell("latencies")
    latency = [_core.measure_latency(size, 0.02) for size in (l1 // 2, l2 // 2, _l3_block(l2, shared, 1), _far(l3))]
    caches: list[dict[int, float]] = [{}, {}, {}, {}]
    job, task = {}, {}
    compute: dict[str, dict[int, float]] = {tier: {} for tier in tiers}
    for n in _counts(threads):
        tell(f"{n} thread{'s' if n > 1 else ''}")
        probe = _core.MachineProbe(n)
        for level, size in enumerate((l1 // 2, l2 // 2, _l3_block(l2, shared, n))):
            caches[level][n] = undisturbed(partial(probe.read, size, _SECONDS))
        caches[3][n] = undisturbed(partial(probe.memory, _far(l3), 2 * _SECONDS))
        job[n], task[n] = probe.dispatch()
        for tier in tiers:
            own = tier if tier in probes else best
            compute[tier][n] = undisturbed(partial(probe.compute, own, _SECONDS))
    # A level never gives more than the one before it: what a probe missed there, the kernels would not find either.
    for level in (1, 2, 3):
        for n in caches[level]:
            caches[level][n] = min(caches[level][n], caches[level - 1][n])
    for tier in tiers:
        kernels[tier] = dataclasses.replace(
            kernels[tier], compute_gflops=compute[tier], direct_gbps=caches[3], unpack_gbps=caches[3]
        )
    machine = Machine(
        name=platform.node() or "here",
        source="measured",
        cpu=_core.cpu_name(),
        isa=isa,
        sockets=max(topology["packages"], 1),
        numa_nodes=max(len(topology["nodes"]), 1),
        cores=topology["usable_cores"],
        threads=threads,
        memory_bytes=sum(node["memory_bytes"] for node in topology["nodes"]) or 1,
        l1_bytes=l1,
        l2_bytes=l2,
        l3_bytes=l3,
        l1_gbps=caches[0],
        l2_gbps=caches[1],
        l3_gbps=caches[2],
        dram_gbps=caches[3],
        l1_ns=latency[0],
        l2_ns=max(latency[1], latency[0]),
        l3_ns=max(latency[2], latency[1]),
        dram_ns=max(latency[3], latency[2]),
        job_us=job,
        task_us=task,
        kernels=kernels,
    )
    tell("kernels, weights from memory")
    for tier in tiers:
        machine = _with_supply(machine, tier)
    return machine


def _in_cache(tiers: Sequence[str]) -> dict[str, Kernels]:
    """The tiers' kernels with operands in cache, each from the one of several runs, some time apart, in which all of
    it was fastest: a core whose sibling is busy is slower for seconds."""
    runs: dict[str, list[Kernels]] = {tier: [] for tier in tiers}
    for _ in range(_KERNEL_RUNS):
        for tier, found in runs.items():
            found.append(_kernels_of(tier))
        time.sleep(_PAUSE)

    def whole(kernels: Kernels) -> float:
        return kernels.undisturbed_ns + 6 * sum(map(sum, (*kernels.step_ns, *kernels.few_tile_ns)))

    return {tier: min(found, key=whole) for tier, found in runs.items()}


def _kernels_of(tier: str) -> Kernels:
    """One run; the figures by threads are still to come."""
    row = _core.measure_kernels(tier)
    return Kernels(
        left_panels=row["left_panels"],
        right_panels=row["right_panels"],
        step_ns=tuple(tuple(r[: row["right_panels"]]) for r in row["step_ns"][: row["left_panels"]]),
        few_tile_ns=tuple(map(tuple, row["few_tile_ns"])),
        cell_ns=row["cell_ns"],
        call_ns=row["call_ns"],
        unpack_tile_ns=row["unpack_tile_ns"],
        unpack_overlaps=row["unpack_overlaps"],
        overlap=_OVERLAPS[-1],
        pack_gbps=row["pack_gbps"],
        compute_gflops={},
        direct_gbps={},
        unpack_gbps={},
    )


def _undisturbed(rate: Callable[[], float], isa: str, kernels: Kernels) -> float:
    """The median of some rates before and after which nobody disturbed the host; without any, the third best of all."""
    found: list[float] = []
    undisturbed: list[float] = []
    before = kernels.undisturbed(isa)
    while len(found) < _TIMES and len(undisturbed) < _TIMES // 4:
        found.append(rate())
        after = kernels.undisturbed(isa)
        undisturbed += found[-1:] if before and after else []
        before = after
    return statistics.median(undisturbed) if undisturbed else sorted(found)[-3]


def _with_supply(machine: Machine, tier: str) -> Machine:
    """The machine with what a tier's kernels do with weights from memory. It is what makes the model say what they
    took: their rate with few rows, where memory decides; and how much of it products hide, from so many rows that both
    take about as long."""
    far, probe = _far(machine.l3_bytes), _core.MachineProbe(1)
    product_ns = machine.kernels[tier].step_ns[-1][0] / machine.kernels[tier].left_panels
    least = _least_rows(machine.kernels[tier])
    balanced = min(max(16 * round(1024 / machine.dram_gbps[1] / product_ns), least + 16), 192)
    most_ns = machine.kernels[tier].undisturbed_ns
    measured = {rows: probe.stream(tier, True, rows, far, most_ns) for rows in (least, balanced)}

    def error(overlap: float) -> float:
        some = _replaced(machine, tier, overlap=overlap)
        some = _replaced(some, tier, direct_gbps={1: _supply(some, tier, 1, "direct", measured[least])})
        return sum(abs(math.log(_stream_gbps(some, tier, 1, "direct", rows) / gbps)) for rows, gbps in measured.items())

    machine = _replaced(machine, tier, overlap=min(_OVERLAPS, key=error))
    rates: dict[str, dict[int, float]] = {"direct": {}, "unpack": {}}
    for n in sorted({1, machine.threads}):
        probe = _core.MachineProbe(n)
        for form, found in rates.items():
            found[n] = _supply(machine, tier, n, form, probe.stream(tier, form == "direct", least, far, most_ns))
    return _replaced(machine, tier, direct_gbps=rates["direct"], unpack_gbps=rates["unpack"])


def _least_rows(kernels: Kernels) -> int:
    """The fewest whole panels of rows that cells compute, and no form for few rows."""
    return 16 * (len(kernels.few_tile_ns[0]) // 16 + 1)


def _replaced(machine: Machine, tier: str, **figures: Any) -> Machine:
    """The machine with other figures of a tier's kernels."""
    return dataclasses.replace(
        machine, kernels={**machine.kernels, tier: dataclasses.replace(machine.kernels[tier], **figures)}
    )


def _supply(machine: Machine, tier: str, threads: int, form: str, measured: float) -> float:
    """The rate of weights from memory with which the model says what `MachineProbe.stream` measured with the least
    rows; where products hide the memory altogether, its bandwidth."""
    most = at_threads(machine.dram_gbps, threads)
    low, high, rows = most / 64, most, _least_rows(machine.kernels[tier])
    for _ in range(30):
        middle = math.sqrt(low * high)
        some = _replaced(machine, tier, **{f"{form}_gbps": {threads: middle}})
        low, high = (middle, high) if _stream_gbps(some, tier, threads, form, rows) < measured else (low, middle)
    return high


def _stream_gbps(machine: Machine, tier: str, threads: int, form: str, rows: int) -> float:
    """What the model says of `MachineProbe.stream`."""
    k = n = _STREAM_WIDTH
    problem = ((rows,) * threads, k, n, 2, 4, 2.0, form, True, False)
    configuration = (rows, n, rows, 32 if form == "direct" else n, k, "columns")
    _, ms, parts, _, _ = _core.TileEvaluator(machine.figures(threads, tier)).estimate(problem, configuration)
    others = sum(time for name, time in zip(_core.gemm_parts, parts, strict=True) if name in ("scheduling", "dispatch"))
    return threads * 2.0 * k * n / (ms - others) * 1e-6


def _l3_block(l2: int, l3: int, threads: int) -> int:
    """A thread's block that L3 holds and L2 does not."""
    return max(min(4 * l2, l3 // (2 * threads)), l2 + l2 // 4)


def _far(l3: int) -> int:
    """More than the caches hold."""
    return min(max(1 << 28, l3 + l3 // 2), 1 << 30)
