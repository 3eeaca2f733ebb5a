"""Measures the host for `Machine.measure`.

Figures of one thread are the best of many short tries, spread over a second or more: a host is never faster than
itself, and others that use it disturb a core (its sibling, the caches, the memory) for that long. Those of several
threads are medians: one or the other is always disturbed, and the rest waits for it. But how well weights from memory
overlap with products a good moment tells, the better quartile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from moesaic import _core
from moesaic.perf.gemm_evaluator import Configuration, GemmEvaluator, problem_of
from moesaic.perf.machine import Kernels, Machine, PerThread, at_threads
from moesaic.perf.shapes import GemmShape
from moesaic.perf.timing import UNTIMED, ShapeTimer, far_bytes, far_weights

ROUNDS = 4
"""In which everything takes its turn."""
_SECONDS = 0.003
"""Of one try."""
_STREAM_SECONDS, _OTHER_STREAM_SECONDS = 0.012, 0.004
"""Where weights come from memory: with the kernels of the host's own tier, and with those of the others."""
_KERNEL_TURNS, _OTHER_KERNEL_TURNS = 32, 8
"""In a round, on one thread."""
_TOGETHER_TURNS = 3
"""In a round, on all threads, of the host's own tier."""
_OVERLAPS = (1.0, 1.5, 2.0, 3.0)
_UNIT_UNPACKS = 1.2
"""How well memory overlaps with what the unpack form computes on a matrix unit. Streams on all threads do not tell, for
unpacking takes more by itself, on all of them, than in the form. (16 AMX threads: streams say 1, 1.5 or 2; in five runs
of 12 to 80 products 90% of the choices are within 5% of the best with 1.15 and 1.25, 88% with 1.5 and 87% with 2.)"""
_FEW_OVERLAPS = (2.5, 4.0, 6.0)
_CACHE_OVER_MEMORY = 1.2
"""How much faster L3 must be for its size to show."""
_STREAM_K, _STREAM_N = 2048, 512
"""Of the matrices of `MachineProbe.stream`."""
_FEW_ROWS = (1, 4, 8)
"""With which the forms for few rows are tried on weights from memory."""
_RATE_STEPS = range(-15, 100)
"""Of 2%, by which the rate of weights may be above that of the memory, 1.35 times at most, or below. (16 AMX threads,
eight descriptions: 0.89 to 0.98 times in the direct form, that most in the other.)"""
_COARSE = 8
"""Of these steps between two that are tried first."""
_FEWEST_OF_CELLS = 64
"""Rows that the direct form leaves to cells wherever there are forms for few, at least (`AreStoredRows` in
cpu_kernels/gemm/tiles.h)."""

_PRODUCTS = tuple(
    GemmShape(groups=groups, m=m, k=k, n=n, form=form, output=output)
    for form, groups, m, k, n, output in (
        # None is one that the model is held against. Rows of the direct form are whole panels: tiers with forms for few
        # rows have those for others, to which the factor does not belong.
        ("direct", 1, 48, 3200, 1152, "fp32"),
        ("direct", 1, 64, 1280, 2432, "bf16"),
        ("direct", 1, 128, 2816, 1920, "fp32"),
        ("direct", 1, 144, 1536, 1024, "bf16"),
        ("direct", 1, 224, 1152, 896, "fp32"),
        ("direct", 1, 512, 1024, 1280, "bf16"),
        ("direct", 1, 1536, 512, 1024, "fp32"),
        ("direct", 2, 80, 2304, 1664, "fp32"),
        ("direct", 4, 208, 512, 1792, "fp32"),
        ("direct", 8, 96, 768, 1536, "bf16"),
        ("unpack", 1, 52, 2688, 1408, "bf16"),
        ("unpack", 1, 99, 2048, 1536, "fp32"),
        ("unpack", 1, 160, 1152, 2048, "bf16"),
        ("unpack", 1, 320, 1536, 768, "fp32"),
        ("unpack", 1, 420, 1408, 896, "bf16"),
        ("unpack", 1, 1006, 640, 896, "bf16"),
        ("unpack", 1, 2048, 384, 896, "fp32"),
        ("unpack", 4, 73, 896, 2176, "bf16"),
        ("unpack", 8, 128, 640, 1152, "bf16"),
        ("unpack", 16, 48, 1280, 768, "fp32"),
    )
)
"""Products that say what whole ones take, `direct_factor` and `unpack_factor`: many, for a single one is a tenth off,
or a fifth."""
_IN_TASKS = (("direct", 512, "fp32"), ("direct", 1280, "bf16"), ("unpack", 896, "bf16"))
"""Form, K and input of products in equal tasks, which say how uneven threads are and what packing takes where others
have read what lay there before: by themselves both come out different than in products."""
_FACTOR_STEPS = range(-35, 31)
"""Of 2%, in which these are searched."""
_PRODUCT_RUNS, _PRODUCT_SECONDS = 3, 0.01
"""Of each in a turn, at least, after some until its operands are where they stay."""

_T = TypeVar("_T")
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
    what reading another's tiles takes; weights."""

    threads: int
    gbps: list[list[float]] = dataclasses.field(default_factory=list)
    gflops: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    dispatch_us: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    fetch_ns: list[float] = dataclasses.field(default_factory=list)
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
        self._loads = [_core.LatencyProbe(size) for size in (self.l1 // 2, self.l2 // 2, self._l3_block(1), self.far)]
        self.begin()

    def begin(self) -> None:
        """Forgets what one thread did."""
        self.kernels = {tier: _core.KernelProbe(tier) for tier in self.tiers}
        self.latency_ns = [math.inf] * len(self._loads)
        self.sentinel_ns = dict.fromkeys(self.tiers, math.inf)

    def one_thread(self) -> None:
        """A turn of what only one thread does."""
        for tier, probe in self.kernels.items():
            for _ in range(_KERNEL_TURNS if tier == self.isa else _OTHER_KERNEL_TURNS):
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
        found.fetch_ns.append(probe.fetch(self.isa) if threads > 1 else 0.0)
        for tier, forms in rows.items():
            seconds = _STREAM_SECONDS if tier == self.isa else _OTHER_STREAM_SECONDS
            for form, counts in forms.items():
                for count in counts:
                    of_weights = probe.stream(tier, form == "direct", count, seconds)
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


def _for_a_turn(run: Callable[[int], list[_T]]) -> list[_T]:
    """What `run` finds in so many passes of a product as a turn has."""
    run(UNTIMED)
    found: list[_T] = []
    until = time.perf_counter() + _PRODUCT_SECONDS
    while len(found) < _PRODUCT_RUNS or time.perf_counter() < until:
        found += run(1)
    return found


@dataclasses.dataclass
class _Product:
    """One of `_PRODUCTS` in the evaluator's configuration, on all threads, with weights from memory."""

    shape: GemmShape
    configuration: Configuration
    timer: ShapeTimer
    milliseconds: list[float] = dataclasses.field(default_factory=list)

    def turn(self) -> None:
        self.milliseconds += _for_a_turn(functools.partial(self.timer.passes, self.configuration))


def _products(machine: Machine, far: _core.FarWeights) -> list[_Product]:
    """Those of `_PRODUCTS` that take longer where computing does: none that the forms for few rows compute."""
    slower = dataclasses.replace(machine, direct_factor={1: 2.0}, unpack_factor={1: 2.0})
    evaluator = GemmEvaluator(machine, cache=False)
    found = []
    for shape in _PRODUCTS:
        answer = evaluator.evaluate(shape)
        configuration = answer.configuration
        if GemmEvaluator(slower, cache=False).estimate(shape, configuration).milliseconds != answer.milliseconds:
            found.append(_Product(shape, configuration, ShapeTimer(evaluator.isa, shape, far)))
    return found


@dataclasses.dataclass
class _EqualTasks:
    """A product on all threads in equal tasks, with weights from memory: of each pass what packing takes, and the
    longest task over the mean."""

    shape: GemmShape
    configuration: Configuration
    gemm: _core.GroupedGemm
    passes: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def turn(self) -> None:
        self.passes += _for_a_turn(functools.partial(self.gemm.measure_passes, self.configuration.as_tuple()))

    def claim_ns(self, machine: Machine, threads: int) -> float:
        """What a tile takes, where others have read what lay there before, beside what packing takes in any case."""

        def packing_ms(shape: GemmShape, ns: float) -> float:
            some = _claiming(machine, threads, ns)
            return GemmEvaluator(some, cache=False).estimate(shape, self.configuration).parts["packing"]

        other = packing_ms(dataclasses.replace(self.shape, packed=True), 0.0)  # part of the tasks
        free, thousand = packing_ms(self.shape, 0.0) - other, packing_ms(self.shape, 1000.0) - other
        measured = statistics.median(packing for packing, _ in self.passes) - machine.job_us[threads] * 1e-3
        return max(0.0, 1000.0 * (measured - free) / (thousand - free))


def _in_tasks(tasks: int, form: str, k: int, given: str) -> GemmShape:
    """A product for so many equal tasks."""
    # Of each task where one thread reads what it has packed: no few rows, and no more results than a host has room for.
    panels = max(3, min(4, 64 // tasks), math.ceil(16 / tasks))
    return GemmShape(groups=1, m=16 * panels * tasks, k=k, n=128 * tasks, form=form, input=given)


def _cut(shape: GemmShape, form: str, tasks: int, readers: int) -> Configuration:
    """So many equal tasks, of which `readers`, all or one, read the same activations."""
    rows, columns = (
        math.ceil(size / parts / unit) * unit
        for size, parts, unit in ((shape.m, tasks // readers, 16), (shape.n, readers, 128))
    )
    return Configuration(form, rows, columns, rows, columns, shape.k, "columns")


def _equal_tasks(isa: str, tasks: int, readers: Sequence[int], far: _core.FarWeights) -> list[_EqualTasks]:
    """Those of `_IN_TASKS`, for each number of readers."""
    found = []
    for form, k, given in _IN_TASKS:
        shape = _in_tasks(tasks, form, k, given)
        gemm = _core.GroupedGemm(isa, problem_of(shape, form), far)
        found += [_EqualTasks(shape, _cut(shape, form, tasks, n), gemm) for n in readers]
    return found


class Measurement:
    """Describes this host by what rounds of probes found so far, those of all numbers of threads one after the other:
    whatever others do to the host for longer than a round meets all figures.

    One round takes one to three seconds. Rounds may have anything between them. Keeps `far_bytes` of memory for each
    number of threads that is tried, and once more for products.

    Args:
        progress: is told what is being measured.
    """

    def __init__(self, progress: Callable[[str], None] | None = None) -> None:
        self._tell = progress or (lambda text: None)
        self._host = host = _Host()
        self._probes: dict[int, _core.MachineProbe] = {}
        for n in _counts(host.threads):
            self._tell(f"memory of {n} thread{'s' if n > 1 else ''}")
            self._probes[n] = _core.MachineProbe(n, host.far)
        self._products: list[_Product] = []
        # In as many tasks as threads, all of which, or none but one, read the same activations; in fewer tasks.
        self._shared: list[_EqualTasks] = []
        self._fewer: dict[int, list[_EqualTasks]] = {}
        self._far: _core.FarWeights | None = None
        # Rows with which the kernels are tried on weights from memory; between one and all threads only those that
        # the memory bounds.
        self._rows: dict[str, _StreamRows] = {}
        self._fewest: dict[str, _StreamRows] = {}
        self.forget()

    def forget(self) -> None:
        """Begins anew, as if no round had been."""
        host = self._host
        host.begin()
        for product in self._products:
            product.milliseconds.clear()
        for tasks in self._all_tasks():
            tasks.passes.clear()
        self._found = {n: _Rates(n) for n in self._probes}
        everyone = host.threads
        self._together = {tier: self._probes[everyone].kernels(tier) for tier in host.tiers} if everyone > 1 else {}

    def _all_tasks(self) -> Iterator[_EqualTasks]:
        return itertools.chain(self._shared, *self._fewer.values())

    def rounds(self, count: int) -> None:
        """So many more rounds."""
        host = self._host
        if not self._rows:
            if host.threads > 1:
                self._far = far = far_weights()
                self._shared = _equal_tasks(host.isa, host.threads, (host.threads, 1), far)
                fewer = [n for n in self._probes if 1 < n < host.threads]
                self._fewer = {n: _equal_tasks(host.isa, n, (n,), far) for n in fewer}
            rows = self._first_rows()
            self._fewest = {host.isa: {form: _fewest(counts) for form, counts in rows[host.isa].items()}}
            self._rows = rows
        for i in range(count):
            self._tell(f"describing this host: {i + 1} of {count}")
            host.one_thread()
            for n, probe in self._probes.items():
                host.turn(probe, self._found[n], self._rows if n in (1, host.threads) else self._fewest)
            for tier, kernels in self._together.items():
                for _ in range(_TOGETHER_TURNS if tier == host.isa else 1):
                    kernels.turn()
            if self._far is not None and not self._products and len(self._found[host.threads].fetch_ns) > 1:
                self._products = _products(self.machine(), self._far)
            for product in self._products:
                product.turn()
            for tasks in self._all_tasks():
                tasks.turn()

    def _first_rows(self) -> dict[str, _StreamRows]:
        """By tier with how many rows the kernels are tried on weights from memory, from a few rounds of one thread."""
        host, found = self._host, _Rates(1)
        for _ in range(ROUNDS):
            host.one_thread()
            host.turn(self._probes[1], found, {})
        rows = {}
        for tier, kernels in host.kernels.items():
            row = kernels.figures(_product_ns(found.rate(found.gflops[tier])))
            each = _per_thread(row)
            l2, dram = found.caches()[1], found.caches()[3]
            rows[tier] = _stream_rows(each, l2, dram, row["unpack_overlaps"], row["most_few_rows"])
        return rows

    def machine(self) -> Machine:
        """The description, after two rounds at least."""
        host, found = self._host, self._found

        def by_threads(figure: Callable[[_Rates], float]) -> dict[int, float]:
            return {n: figure(rates) for n, rates in found.items()}

        caches = [by_threads(lambda rates, level=level: rates.caches()[level]) for level in range(4)]  # type: ignore[misc]
        kernels = {}
        for tier in host.tiers:
            ceilings = by_threads(lambda rates, tier=tier: rates.rate(rates.gflops[tier]))  # type: ignore[misc]
            row = host.kernels[tier].figures(_product_ns(ceilings[1]))
            per_thread = {1: _per_thread(row)}
            if tier in self._together:
                of_each = _product_ns(ceilings[host.threads] / host.threads)
                per_thread[host.threads] = _per_thread(self._together[tier].figures(of_each))
                # A thread alone is no slower than one of many: what its turns missed because of others, those may have
                # met.
                per_thread[1] = per_thread[1].no_slower_than(per_thread[host.threads])
            kernels[tier] = Kernels(
                left_panels=row["left_panels"],
                right_panels=row["right_panels"],
                most_few_rows=row["most_few_rows"],
                most_stored_rows=row["most_stored_rows"],
                per_thread=per_thread,
                unpack_overlaps=row["unpack_overlaps"],
                sentinel_ns=host.sentinel_ns[tier],
                compute_gflops=ceilings,
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
            l3_bytes=host.l3_held(self._probes[host.threads], found[host.threads].caches()),
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
            uneven=self._uneven(),
            direct_factor={1: 1.0},
            unpack_factor={1: 1.0},
            claim_ns={1: 0.0},
            fetch_ns=by_threads(lambda rates: statistics.median(rates.fetch_ns)),
            kernels=kernels,
        )
        streams = {n: {key: _of_turns(rates) for key, rates in some.streams.items()} for n, some in found.items()}
        for tier in host.tiers:
            machine = _with_supply(machine, tier, streams)
        if host.threads > 1:
            claims = [one.claim_ns(machine, host.threads) for one in self._shared]
            machine = _claiming(machine, host.threads, statistics.median(claims))
        return self._with_factors(machine)

    def _uneven(self) -> dict[int, float]:
        """Of so many equal tasks the longest over the mean."""
        found = {1: 1.0}
        if self._host.threads > 1:
            for n, some in {**self._fewer, self._host.threads: self._shared}.items():
                found[n] = statistics.median(uneven for one in some for _, uneven in one.passes)
        return found

    def _with_factors(self, machine: Machine) -> Machine:
        """The machine with the factor of each form with which the model says best what its products took."""
        for form in ("direct", "unpack"):
            measured = [
                (one, statistics.median(one.milliseconds))
                for one in self._products
                if one.milliseconds and one.configuration.form == form
            ]
            if measured:
                tried = (_with_factor(machine, self._host.threads, form, 1.02**step) for step in _FACTOR_STEPS)
                machine = min(tried, key=lambda some: _error(some, measured))
        return machine


def _with_factor(machine: Machine, threads: int, form: str, factor: float) -> Machine:
    """The machine with what computing in products of a form takes on so many threads, over what its parts take."""
    figures: dict[str, Any] = {f"{form}_factor": {1: 1.0, threads: factor}}
    return dataclasses.replace(machine, **figures)


def _error(machine: Machine, measured: Iterable[tuple[_Product, float]]) -> float:
    """How far the model is off what products took, in all."""
    estimate = GemmEvaluator(machine, cache=False).estimate
    return sum(abs(math.log(estimate(one.shape, one.configuration).milliseconds / ms)) for one, ms in measured)


def _claiming(machine: Machine, threads: int, ns: float) -> Machine:
    """The machine with what packing a tile takes on so many threads, where others have written it and its rows."""
    return dataclasses.replace(machine, claim_ns={1: 0.0, threads: ns})


def _of_turns(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the best moments of each turn the better quartile, of the means the median."""
    best, mean = zip(*rates, strict=True)
    return statistics.quantiles(best, n=4)[2], statistics.median(mean)


def _product_ns(gflops: float) -> float:
    """What a thread that computes so much takes for a product of two tiles."""
    return 2.0 * 16 * 16 * 32 / gflops


def _per_thread(row: _core.KernelRow) -> PerThread:
    return PerThread(
        step_ns=tuple(tuple(of_left[: row["right_panels"]]) for of_left in row["step_ns"][: row["left_panels"]]),
        few_tile_ns=tuple(map(tuple, row["few_tile_ns"])),
        cell_ns=row["cell_ns"],
        again_ns=row["again_ns"],
        call_ns=row["call_ns"],
        unpack_tile_ns=row["unpack_tile_ns"],
        pack_gbps=row["pack_gbps"],
        overlap=_OVERLAPS[-1],
        unpack_overlap=_OVERLAPS[-1],
        few_overlap=_FEW_OVERLAPS[0],
    )


def _with_supply(machine: Machine, tier: str, measured: Mapping[int, _Streams]) -> Machine:
    """The machine with what a tier's kernels do with weights from memory, by threads: how much of it products hide,
    and the rates at which they take them."""
    apart = machine.kernels[tier].unpack_overlaps  # vectors unpack before products, which then are as in direct form
    few = _FEW_ROWS if _has_few(machine, tier) else ()
    for n, streams in measured.items():
        found: dict[str, dict[int, tuple[float, float]]] = {"direct": {}, "unpack": {}}
        of_few: dict[str, dict[int, float]] = {"direct": {}, "unpack": {}}
        for (name, form, rows), rates in streams.items():
            if name != tier:
                continue
            if rows in few:
                of_few[form][rows] = rates[1]
            else:
                found[form][rows] = rates
        machine = _with_few(machine, tier, n, of_few)
        for form, others in found.items():
            if not others:
                if of_few[form]:  # any number of rows is few to the unpack form
                    machine = _copied(machine, tier, n, f"few_{form}_gbps", f"{form}_gbps")
                continue
            best = {rows: gbps for rows, (gbps, _) in others.items()}
            if (form == "direct" or apart) and n in machine.kernels[tier].per_thread:
                names = ("overlap", "unpack_overlap") if form == "direct" else ("unpack_overlap",)
                overlaps = _OVERLAPS if form == "direct" or n == 1 else (_UNIT_UNPACKS,)
                tried = (_overlapping(machine, tier, n, names, p) for p in overlaps)
                rated = (_with_rate(one, tier, n, f"{form}_gbps", best) for one in tried)
                machine = min(rated, key=operator.itemgetter(1))[0]
            least = min(others)
            # How well things overlap the best moments tell; the rate of few rows is that of longer ones.
            machine, _ = _with_rate(machine, tier, n, f"{form}_gbps", {least: others[least][1]})
            if not of_few[form]:
                machine = _copied(machine, tier, n, f"{form}_gbps", f"few_{form}_gbps")
    return machine


def _with_few(machine: Machine, tier: str, threads: int, measured: Mapping[str, Mapping[int, float]]) -> Machine:
    """The machine with what the forms for few rows do with weights from memory, by form and rows."""

    def rated(overlap: float) -> tuple[Machine, float]:
        some, all_errors = machine, 0.0
        if threads in machine.kernels[tier].per_thread:
            some = _overlapping(machine, tier, threads, ("few_overlap",), overlap)
        for form, rates in measured.items():
            if rates:
                some, error = _with_rate(some, tier, threads, f"few_{form}_gbps", rates)
                all_errors += error
        return some, all_errors

    overlaps = _FEW_OVERLAPS if threads in machine.kernels[tier].per_thread else _FEW_OVERLAPS[:1]
    return min(map(rated, overlaps), key=operator.itemgetter(1))[0]


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

    What was measured is taken to be 7% uncertain, and the rate to be within some 20% of the memory's own, for rows
    whose products take much longer than the memory do not tell it. Kernels whose requests are spread evenly may exceed
    the memory's rate."""
    most = at_threads(machine.dram_gbps, threads)
    form = name.removeprefix("few_").removesuffix("_gbps")

    def fitted(step: int) -> tuple[Machine, float]:
        share = 1.02**-step
        figure = {**getattr(machine.kernels[tier], name), threads: share * most}
        some = _replaced(machine, tier, **{name: figure})
        told = _stream_gbps(some, tier, threads, form, measured)
        errors = [math.log(told[rows] / gbps) for rows, gbps in measured.items()]
        return some, sum((error / 0.07) ** 2 for error in errors) + (math.log(share) / 0.2) ** 2

    near = min(_RATE_STEPS[::_COARSE], key=lambda step: fitted(step)[1])
    steps = range(max(near - _COARSE + 1, _RATE_STEPS.start), min(near + _COARSE, _RATE_STEPS.stop))
    return min(map(fitted, steps), key=operator.itemgetter(1))


def _stream_rows(kernels: PerThread, l2_gbps: float, dram_gbps: float, matrix_unit: bool, most_few: int) -> _StreamRows:
    """Rows with which the kernels are tried on weights from memory, by form: some of the forms for few, if there are
    any, which are all that the unpack form needs; the fewest beyond them that cells take; so many that products take
    about as long as the memory; twice as many. A matrix unit's wait for activations from L2, and for what is unpacked:
    half as many, too."""
    few = _FEW_ROWS if kernels.few_tile_ns[0] else ()
    least = max(most_few + 16, _FEWEST_OF_CELLS) if few else 16
    product_ns = (kernels.step_ns[-1][0] + (1024 / l2_gbps if matrix_unit else 0.0)) / len(kernels.step_ns)
    balanced = min(max(16 * round(1024 / dram_gbps / product_ns), least + 16), 192)
    half = 16 * round(balanced / 32)
    more = (least, *([half] if matrix_unit and half > 2 * least else []), balanced, 2 * balanced)
    return {"direct": (*few, *more), "unpack": few or more}


def _fewest(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Of the rows those that the memory bounds: of the forms for few, and of the fewest that cells take."""
    few = tuple(count for count in counts if count in _FEW_ROWS)
    return (*few, *counts[len(few) : len(few) + 1])


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


def _stream_gbps(machine: Machine, tier: str, threads: int, form: str, of_rows: Iterable[int]) -> dict[int, float]:
    """What the model says of `MachineProbe.stream`, by rows."""
    k, n = _STREAM_K, _STREAM_N
    kernels = machine.kernels[tier]
    evaluator = _core.TileEvaluator(machine.figures(threads, tier))
    found = {}
    for rows in of_rows:
        problem = ((rows,) * threads, k, n, 2, 4, 2.0, form, True, False)
        depth = 32 * _core.unpack_slice(kernels.unpack_overlaps, k // 32, -(-rows // 16), machine.l2_bytes)
        sliced = form == "unpack" and depth > 0
        padded = 16 * -(-rows // 16)
        once = kernels.unpack_overlaps and padded <= 16 * kernels.right_panels
        columns = 256 if form == "unpack" else 128 if once or rows <= kernels.most_few_rows else 32
        configuration = (padded, n, padded, columns, depth if sliced else k, "columns")
        _, ms, parts, _, _ = evaluator.estimate(problem, configuration)
        times = zip(_core.gemm_parts, parts, strict=True)
        others = sum(time for name, time in times if name in ("scheduling", "dispatch"))
        found[rows] = threads * 2.0 * k * n / (ms - others) * 1e-6
    return found
