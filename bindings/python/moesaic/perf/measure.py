"""Measures the host for `Machine.measure`."""

from __future__ import annotations

import platform
from collections.abc import Callable

from moesaic import _core
from moesaic.perf.machine import Kernels, Machine

_SECONDS = 0.04
"""Of one rate."""


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

    tell("latencies")
    latency = [_core.measure_latency(size, 0.02) for size in (l1 // 2, l2 // 2, _l3_block(l2, shared, 1), _far(l3))]
    caches: list[dict[int, float]] = [{}, {}, {}, {}]
    job, task = {}, {}
    rates: dict[str, list[dict[int, float]]] = {tier: [{}, {}, {}] for tier in tiers}
    for n in _counts(threads):
        tell(f"{n} thread{'s' if n > 1 else ''}")
        probe = _core.MachineProbe(n)
        for level, size in enumerate((l1 // 2, l2 // 2, _l3_block(l2, shared, n))):
            caches[level][n] = probe.read(size, _SECONDS)
        caches[3][n] = probe.memory(_far(l3), 2 * _SECONDS)
        job[n], task[n] = probe.dispatch()
        for tier in tiers:
            compute, direct, unpack = rates[tier]
            compute[n] = probe.compute(tier if tier in probes else best, _SECONDS)
            if tier == isa and n in (1, threads):
                direct[n] = probe.stream(tier, True, _far(l3))
                unpack[n] = probe.stream(tier, False, _far(l3))
    # A level never gives more than the one before it: what a probe missed there, the kernels would not find either.
    for level in (1, 2, 3):
        for n in caches[level]:
            caches[level][n] = min(caches[level][n], caches[level - 1][n])
    kernels = {}
    for tier in tiers:
        tell(f"kernels, {tier}")
        row = _core.measure_kernels(tier)
        steps = tuple(tuple(r[: row["right_panels"]]) for r in row["step_ns"][: row["left_panels"]])
        compute, direct, unpack = rates[tier]
        for n in direct:
            slower = max(1.0, n * compute[1] / compute[n])
            products = steps[-1][0] / row["left_panels"] * slower
            direct[n] = _supply(direct[n] / n, products, 0.0, caches[3][n] / n) * n
            products = steps[0][1] / 2 * slower
            unpack[n] = (
                _supply(
                    unpack[n] / n,
                    max(products, row["unpack_tile_ns"] * slower) if row["unpack_overlaps"] else products,
                    0.0 if row["unpack_overlaps"] else row["unpack_tile_ns"] * slower,
                    caches[3][n] / n,
                )
                * n
            )
        kernels[tier] = Kernels(
            left_panels=row["left_panels"],
            right_panels=row["right_panels"],
            step_ns=steps,
            cell_ns=row["cell_ns"],
            call_ns=row["call_ns"],
            unpack_tile_ns=row["unpack_tile_ns"],
            unpack_overlaps=row["unpack_overlaps"],
            pack_gbps=row["pack_gbps"],
            compute_gflops=compute,
            direct_gbps=direct or caches[3],  # other tiers: as fast as memory
            unpack_gbps=unpack or caches[3],
        )
    return Machine(
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


def _supply(gbps: float, overlapped_ns: float, before_ns: float, most: float) -> float:
    """The rate at which memory supplied the weights of a pass with 16 rows that ran at `gbps`, beside other work for
    each tile of 1 KB: the model's way of overlapping, backwards. `most`: the bandwidth; where the other work hides it,
    too."""
    whole = 1024 / gbps - before_ns
    rest = whole**3 - overlapped_ns**3
    if whole <= 0 or rest < 0.1 * whole**3:
        return most
    return float(min(1024 / rest ** (1 / 3), most))


def _l3_block(l2: int, l3: int, threads: int) -> int:
    """A thread's block that L3 holds and L2 does not."""
    return max(min(4 * l2, l3 // (2 * threads)), l2 + l2 // 4)


def _far(l3: int) -> int:
    """More than the caches hold."""
    return min(max(1 << 28, l3 + l3 // 2), 1 << 30)
