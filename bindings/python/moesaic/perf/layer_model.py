"""Time of one experts layer, forward and backward, as the engine computes it.

Every phase of the engine (`moe/phases.cc`) is work in a few units, and a rate for each: products with the base weights,
whose time is the tile evaluator's; narrow products with the adapters; elements packed, activated, merged, copied.
Added up over the phases of a job's stages this is how long the job keeps a thread busy; the schedule of all jobs on
the pool (`layer_plan`) makes a duration of it, with what cores idle meanwhile. So streaming and arithmetic limits,
chunks of hot experts and skewed routing need no terms of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic import _core
from moesaic.perf.fields import whole
from moesaic.perf.layer_plan import (
    Cut,
    Job,
    JobCut,
    Stage,
    ceil_div,
    cut_jobs,
    round_up,
    run_jobs,
)
from moesaic.perf.machine import at_threads
from moesaic.perf.products import Products
from moesaic.perf.rates import LayerRates

__all__ = ["ExpertsShape", "LayerModel", "LayerPrediction", "ShapeLayers", "job_slots"]

_MIB = 1 << 20
_LORA_GROUP = 16  # experts whose adapters are packed together, where memory is enough


@dataclass(frozen=True)
class ExpertsShape:
    """One experts layer and its adapter: E experts, hidden size H, intermediate size I, top-k, LoRA rank r (0:
    without), one A for gate and up."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "intermediate", "top_k"):
            whole(name, getattr(self, name), 1)
        whole("rank", self.rank, 0)
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}; expected at most {self.experts} (experts)")

    @property
    def padded_rank(self) -> int:
        """The rank in whole tiles."""
        return round_up(self.rank, 32)

    @property
    def lora_values(self) -> int:
        """Elements of one expert's adapter."""
        return self.rank * (2 * self.hidden + 3 * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """Packed base weights of all experts, bf16."""
        return 6 * self.experts * round_up(self.hidden, 32) * round_up(self.intermediate, 16)


@dataclass(frozen=True)
class LayerPrediction:
    """One call.

    Attributes:
        milliseconds: from the call to its return.
        phases: thread time of each group of phases.
        idle_ms: time of all threads in which they wait for work.
        jobs, tasks: how many there are.
        flops: that the call needs, adapters included.
        dram_bytes: that must cross the memory bus at least once.
    """

    milliseconds: float
    phases: Mapping[str, float]
    idle_ms: float
    jobs: int
    tasks: int
    flops: float
    dram_bytes: float


Work = dict[str, float]
"""Amounts by unit: the fields of LayerRates."""


class LayerModel:
    """Predicts calls of layers on one machine.

    Args:
        products: times of products with base weights.
        rates: what the other units cost.
        alone: calls of the layer follow each other; else those of others, and other operators, come between.
    """

    def __init__(self, products: Products, rates: LayerRates, *, alone: bool = False) -> None:
        self.products = products
        self.rates = rates
        self.alone = alone
        self.threads = products.threads
        self._numa_nodes = products.evaluator.machine.numa_nodes

    def forward(self, shape: ExpertsShape, rows: Sequence[int]) -> LayerPrediction:
        """One forward with saved state.

        Args:
            shape: of the layer.
            rows: of each expert; T k in all, fewer where slots are skipped.
        """
        return self._predict(shape, rows, backward=False)

    def backward(self, shape: ExpertsShape, rows: Sequence[int]) -> LayerPrediction:
        """One backward with all gradients; arguments as for forward()."""
        return self._predict(shape, rows, backward=True)

    def work(self, shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> dict[str, Work]:
        """What a call amounts to, by group of phases: a group's thread time is the sum of amounts times rates."""
        shards = self._shards(shape)
        shard = _shard_of(shape, shards)
        jobs = _jobs_of(shard, rows)
        chunks = not all(job.first for job in jobs)
        in_place = adapters_in_place(shape, rows, shards)
        if in_place:
            shard = replace(shard, rank=0)
        groups: dict[str, Work] = {}
        sharers = _sharers(len(jobs), self.threads // shards)
        for job, times in Counter(jobs).items():
            stages = self._stages(shard, job, sharers, backward=backward, chunks=chunks)
            for phase, work in (part for _, parts in stages for part in parts):
                of_all = {unit: shards * times * amount for unit, amount in work.items()}
                _add(groups.setdefault(phase, {}), of_all)
        for outside in _outside_jobs(shape, rows, self.threads, shards, backward=backward, in_place=in_place):
            _add(groups.setdefault(outside.phase, {}), outside.work)
        if not backward:
            groups["routing"] = {"slot": sum(rows)}
        return groups

    def _shards(self, shape: ExpertsShape) -> int:
        """NUMA nodes that share each expert: blocks of 32 rows of I are dealt among them."""
        return max(1, min(self._numa_nodes, self.threads, ceil_div(shape.intermediate, 32)))

    def _predict(self, shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> LayerPrediction:
        if len(rows) != shape.experts:
            raise ValueError(f"rows has {len(rows)} entries; expected {shape.experts} (experts)")
        rates, threads, shards = self.rates, self.threads, self._shards(shape)
        # To each node its shard is an expert with a smaller I, and all nodes are equal: one is as long as all of them.
        shard = _shard_of(shape, shards)
        jobs = _jobs_of(shard, rows)
        chunks = not all(job.first for job in jobs)
        in_place = adapters_in_place(shape, rows, shards)
        if in_place:
            shard = replace(shard, rank=0)  # to its jobs it is as if there were no adapters
        phases: dict[str, float] = {}
        chains: list[list[Stage]] = []
        sharers = _sharers(len(jobs), threads // shards)
        known: dict[Job, tuple[list[Stage], list[tuple[str, float]]]] = {}
        for job in jobs:
            if job not in known:
                known[job] = self._chain(shard, job, sharers, backward=backward, chunks=chunks)
            chain, times = known[job]
            chains.append(chain)
            for phase, ms in times:
                phases[phase] = phases.get(phase, 0.0) + shards * ms
        slots = job_slots(shard, jobs, threads, shards, backward=backward, keeps_z=in_place and backward)
        cut = JobCut.choose(shards * len(jobs), shard.hidden, shard.intermediate, threads, shards * slots)
        cut = replace(cut, tail_jobs=cut.tail_jobs // shards)
        uneven = self.products.evaluator.machine.uneven
        schedule = run_jobs(
            chains,
            cut,
            max(threads // shards, 1),
            slots,
            rates.unit_ms("task"),
            lambda n: at_threads(uneven, n),
            [_core.parts_of_long_job(job.rows, shards * sum(rows), threads) for job in jobs],
        )
        wall, busy = schedule.makespan_ms, shards * schedule.busy_ms
        for outside in _outside_jobs(shape, rows, threads, shards, backward=backward, in_place=in_place):
            ms = rates.thread_ms(outside.work)
            phases[outside.phase] = phases.get(outside.phase, 0.0) + ms
            wall += self._outside_ms(ms, outside.tasks)
            busy += ms
        if not backward:
            serial = rates.thread_ms({"slot": sum(rows)})
            phases["routing"], busy, wall = serial, busy + serial, wall + serial
        if not self.alone and self.products.fits(shape.weight_bytes):
            # What does not fit the caches finds nothing there in either case.
            factor = rates.in_model_backward if backward else rates.in_model
            phases = {phase: factor * ms for phase, ms in phases.items()}
            wall, busy = factor * wall, factor * busy
        wall *= 1.0 + (rates.waiting_backward if backward else rates.waiting)
        wall += rates.unit_ms("call_backward" if backward else "call")
        flops, dram = self.limits(shape, rows, backward=backward)
        idle = wall * threads - busy
        return LayerPrediction(wall, phases, idle, shards * len(jobs), shards * schedule.tasks, flops, dram)

    def _outside_ms(self, ms: float, tasks: int | None) -> float:
        """Milliseconds in which all threads do so many equal tasks, before anything else begins."""
        if tasks is None:
            return ms / self.threads
        uneven = at_threads(self.products.evaluator.machine.uneven, min(tasks, self.threads))
        return ms / tasks * (ceil_div(tasks, self.threads) - 1.0 + uneven)

    def _chain(
        self, shape: ExpertsShape, job: Job, sharers: float, *, backward: bool, chunks: bool
    ) -> tuple[list[Stage], list[tuple[str, float]]]:
        chain: list[Stage] = []
        times = []
        for cut, parts in self._stages(shape, job, sharers, backward=backward, chunks=chunks):
            of_stage = [(phase, self.rates.thread_ms(work)) for phase, work in parts]
            times += of_stage
            chain.append(Stage(cut, sum(ms for _, ms in of_stage)))
        return chain, times

    def _stages(
        self, shape: ExpertsShape, job: Job, sharers: float, *, backward: bool, chunks: bool
    ) -> list[tuple[Cut, list[tuple[str, Work]]]]:
        stages = _JobStages(self.products, shape, job, sharers)
        return stages.backward(chunks=chunks) if backward else stages.forward()

    def limits(self, shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> tuple[float, float]:
        """Flops of a call, and the bytes that must cross the memory bus at least once."""
        count, hit = sum(rows), sum(1 for r in rows if r > 0)
        flops = 6.0 * count * shape.hidden * shape.intermediate
        flops += (4.0 if backward else 2.0) * count * shape.lora_values
        saved = count * (4.0 * shape.intermediate + 4.0 * shape.rank)
        dram = shape.weight_bytes * hit / shape.experts + 4.0 * shape.lora_values * hit + saved
        dram += 4.0 * count / shape.top_k * shape.hidden
        return flops, dram + (4.0 * shape.lora_values * shape.experts if backward else 0.0)


class _JobStages:
    """The stages of one job as the engine has them (`moe/forward.cc`, `moe/backward.cc`; a test compares how many tasks
    they are): what a stage's parts are ranges of, and its work by group of phases."""

    def __init__(self, products: Products, shape: ExpertsShape, job: Job, sharers: float) -> None:
        self._products, self._shape, self._job = products, shape, job
        self._others = sharers - 1  # threads that read what the first one packed
        self._lanes = round_up(job.rows, 16)  # rows that elementwise kernels compute
        # An intermediate of the adapters has two bf16 parts: of ranks up to 16 they share one step of a contraction.
        self._parts = 1 if shape.rank <= 16 else 2
        self._found: list[tuple[Cut, list[tuple[str, Work]]]] = []

    def forward(self) -> list[tuple[Cut, list[tuple[str, Work]]]]:
        """PackInput; GateUp, with the activation; DownLora; Down."""
        h, i, rank = self._shape.hidden, self._shape.intermediate, self._shape.rank
        self._begin(Cut.WHOLE)
        self._add("pack_input", {"pack": self._lanes * h, "pack_job": 1.0, "claimed": self._claimed(h)})
        if rank:
            self._add("gate_up_lora", {**self._low(h), "rank": self._job.rows * rank})
        self._begin(Cut.INTERMEDIATE)
        self._add_product("gate_up", "gate_up_lora", "direct", h, 2 * i)
        activation = {"swiglu_forward": self._lanes * i, "forward_block": ceil_div(i, 32), "claimed": self._claimed(i)}
        self._add("activation", activation)
        self._begin(Cut.WHOLE)
        if rank:
            self._add("down_lora", {**self._low(i), "rank": self._job.rows * rank})
        self._begin(Cut.HIDDEN)
        self._add_product("down", "down_lora", "unpack", i, h)
        return self._found

    def backward(self, *, chunks: bool) -> list[tuple[Cut, list[tuple[str, Work]]]]:
        """ScatterAndPack; DownBase, with the gradients that run along I; SumIntermediate, where some experts have
        several chunks; GateUpLora; SumHidden; GateUpBase."""
        h, i, rank, rows = self._shape.hidden, self._shape.intermediate, self._shape.rank, self._job.rows
        whole, padded = round_up(rows, 32), self._shape.padded_rank
        self._begin(Cut.WHOLE)
        self._add("scatter_pack", {"pack": self._lanes * h, "pack_job": 1.0, "claimed": self._claimed(h)})
        if rank:
            self._add("down_lora_backward", {**self._low(h), "rank": 3 * rows * rank})
        self._begin(Cut.INTERMEDIATE)
        self._add_product("down_backward", "down_lora_backward", "direct", h, i)
        activation = {"swiglu_backward": self._lanes * i, "backward_block": ceil_div(i, 32)}
        self._add("activation_backward", {**activation, "claimed": self._claimed(2 * i)})
        if rank:
            self._add("activation_backward", {"transpose": 3 * whole * i})
            # dA of down takes both parts of Q, dB of gate and up one of U each.
            self._add("down_lora_backward", self._low(i, self._parts))
            self._add("gate_up_lora_backward", self._low(2 * i))
        if rank and chunks:
            self._begin(Cut.INTERMEDIATE)
            more = 0 if self._job.first else i * padded
            self._add("down_lora_backward", {"partial": more})
            self._add("gate_up_lora_backward", {"partial": 2 * more})
        self._begin(Cut.WHOLE)
        if rank:
            self._add("gate_up_lora_backward", {**self._low(2 * i), "rank": 2 * rows * rank})
            # dA of gate and up takes rows of X gathered anew, and both parts of P without padding to a whole tile; dB
            # of down the tiles of dO, transposed.
            narrow = round_up(rank, 16) / padded
            self._begin(Cut.HIDDEN)
            self._add("gate_up_lora_backward", {"pack": self._lanes * h, **self._low(h, 2 * narrow)})
            self._add("down_lora_backward", {"transpose": whole * h, **self._low(h)})
        self._begin(Cut.HIDDEN)
        self._add_product("gate_up_backward", "gate_up_lora_backward", "unpack", 2 * i, h)
        return self._found

    def _begin(self, cut: Cut) -> None:
        self._found.append((cut, []))

    def _add(self, phase: str, work: Work) -> None:
        self._found[-1][1].append((phase, work))

    def _add_product(self, phase: str, phase_of_lora: str, form: str, k: int, n: int) -> None:
        """A base product, with the adapter as a further part of its contraction, whose time the engine's timers divide
        by the flops of the two."""
        work, of_lora = self._product(form, k, n), self._shape.rank / (k + self._shape.rank)
        self._add(phase, {unit: (1.0 - of_lora) * amount for unit, amount in work.items()})
        if of_lora > 0.0:
            self._add(phase_of_lora, {unit: of_lora * amount for unit, amount in work.items()})

    def _product(self, form: str, k: int, n: int) -> Work:
        k += self._parts * self._shape.padded_rank
        ms = self._products.thread_ms(form, self._job.rows, k, n, again=not self._job.first)
        tiles = ceil_div(self._job.rows, 16) * ceil_div(k, 32)
        work = {
            form: ms.compute,
            f"{form}_stream": ms.stream,
            "cache": ms.cache,
            "packing": ms.packing,
            "handed": self._others * tiles,
        }
        if self._job.first:
            work["cache_filled"] = ms.cache * self._products.filled
        if form == "unpack":
            work["result"] = self._job.rows * n
        return work

    def _claimed(self, size: int) -> float:
        """Tiles of activations that others have read since they were last written: where threads share the job."""
        return min(self._others, 1.0) * ceil_div(self._job.rows, 16) * ceil_div(size, 32)

    def _low(self, size: int, times: float = 1.0) -> Work:
        """Narrow products of rows x (padded rank) x size: milliseconds at the compute ceiling of one thread, so many
        times; and blocks of 32 of size."""
        flops = 2.0 * self._products.lanes(self._job.rows) * self._shape.padded_rank * size
        ms = flops * self._products.threads / (self._products.peak_gflops * 1e6)
        return {"low": times * ms, "low_block": ceil_div(size, 32)}


class ShapeLayers(LayerModel):
    """Predicts nothing: asks for all products of a call, for an evaluator that records shapes."""

    def _predict(self, shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> LayerPrediction:
        self.work(shape, rows, backward=backward)
        return LayerPrediction(0.0, {}, 0.0, 0, 0, 0.0, 0.0)


def _shard_of(shape: ExpertsShape, shards: int) -> ExpertsShape:
    """What the NUMA node with most of an expert has of it."""
    if shards == 1:
        return shape
    return replace(shape, intermediate=32 * ceil_div(ceil_div(shape.intermediate, 32), shards))


def _jobs_of(shard: ExpertsShape, rows: Sequence[int]) -> list[Job]:
    """In the order in which the engine begins them."""
    return cut_jobs(rows, shard.hidden, shard.intermediate, _LORA_GROUP if shard.rank else None)


def _sharers(jobs: int, threads: int) -> float:
    """Threads that work on each job: where all have one, a job stays with its own."""
    return max(threads / max(jobs, 1), 1.0)


def adapters_in_place(shape: ExpertsShape, rows: Sequence[int], shards: int) -> bool:
    """Whether the engine uses adapters in PEFT's layout where they lie, instead of packing them."""
    if shape.rank == 0 or shards > 1 or not any(rows):
        return False
    if not all(job.first for job in cut_jobs(rows, shape.hidden, shape.intermediate)):
        return False
    return _core.adapters_in_place(rows, shape.rank, shape.rank)


@dataclass(frozen=True)
class _Outside:
    """Work of tasks that belong to no job; None: of so many small ones that all threads have equally much."""

    phase: str
    work: Work
    tasks: int | None = None


def _in_place(shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> list[_Outside]:
    """Elements of adapters that are read where they lie, and of their products: B in vectors of sixteen experts, if one
    of them has rows. Where a rank's experts are no whole vectors, these lie across two cache lines."""
    h, i, rank, count, lanes = shape.hidden, shape.intermediate, shape.rank, sum(rows), 16
    hit = sum(1 for r in rows if r > 0)
    firsts = range(0, shape.experts, lanes)
    vector = lanes if shape.experts % lanes == 0 else 2 * lanes
    swept = vector * sum(1 for first in firsts if any(rows[first : first + lanes]))
    found = []

    def add(phase: str, read: int, written: int, dims: int, ranks: int, tasks: int | None) -> None:
        """So many parameters of a rank that are read, gradients of a rank that are written, elements of a row, and
        ranks that products for gradients have."""
        work: Work = {"sweep": rank * read, "sweep_product": count * rank * dims, "sweep_row": count * dims}
        if backward:  # the gradients of all experts are products of the rows, too
            work = {
                "sweep": rank * (read + written),
                "sweep_product": 2 * count * ranks * dims,
                "sweep_row": 2 * count * dims,
            }
        found.append(_Outside(f"{phase}_lora_backward" if backward else f"{phase}_lora", work, tasks))

    for phase, a, matrices, b in (("gate_up", h, 2, i), ("down", i, 1, h)):
        # Of A each expert is a task, but what is along I is done by its job; of B sweeps of so many features, whose
        # gradients are products of whole vectors of ranks.
        a_tasks = None if phase == "down" else shape.experts if backward else hit
        b_tasks = matrices * _core.sweeps_in_place(shape.experts, b, rank)
        add(phase, hit * a, shape.experts * a, a, rank, a_tasks)
        gradients = matrices * vector * len(firsts) * b
        add(phase, matrices * swept * b, gradients, matrices * b, round_up(rank, lanes), b_tasks)
    return found


def _outside_jobs(
    shape: ExpertsShape, rows: Sequence[int], threads: int, shards: int, *, backward: bool, in_place: bool
) -> list[_Outside]:
    """Adapters, and the merge."""
    hit = sum(1 for r in rows if r > 0)
    suffix = "_backward" if backward else ""
    found = []
    if in_place:
        found = _in_place(shape, rows, backward=backward)
    elif shape.rank:
        h, i = shape.hidden, shape.intermediate
        for phase, size in (("gate_up", h + 2 * i), ("down", i + h)):
            phase += f"_lora{suffix}"
            found.append(_Outside(phase, {"lora_pack": hit * round_up(shape.rank, 16) * size}))  # whole panels
            if backward:
                found.append(_Outside(phase, {"lora_write": shape.experts * shape.rank * size}))
    tokens = sum(rows) // shape.top_k
    merged = (2 if in_place else shards) * sum(rows) * shape.hidden
    merge: Work = {"merge": merged, "merge_token": sum(rows) / shape.top_k * shape.hidden}
    tasks = max(ceil_div(tokens, _core.tokens_per_merge(tokens, threads)), 1)
    return [*found, _Outside(f"merge{suffix}", merge, tasks)]


def job_slots(
    shape: ExpertsShape, jobs: Sequence[Job], threads: int, shards: int, *, backward: bool, keeps_z: bool = False
) -> int:
    """Jobs of each shard whose activations fit the scratch memory at a time: Pass::Allocate() of the engine. A test
    compares it with the engine.

    Args:
        keeps_z: backward keeps Z, for adapters in place.
    """
    rows = round_up(max((job.rows for job in jobs), default=1), 32)
    h, i, rank = shape.hidden, shape.intermediate, shape.rank
    split = _tile_bytes(rows, rank) * (1 if rank <= 16 else 2)
    job_bytes = _tile_bytes(rows, h) + _tile_bytes(rows, i) + 2 * split
    if keeps_z:
        job_bytes += _tile_bytes(rows, i)
    if backward:
        # dU; partial sums of dw; P, U, V and Q along the rows; sums of further chunks.
        job_bytes += _tile_bytes(rows, i) + 4 * ceil_div(i, 128) * rows
        job_bytes += 6 * _tile_bytes(shape.padded_rank, rows)
        if not all(job.first for job in jobs):
            job_bytes += 3 * 4 * round_up(i, 32) * shape.padded_rank
    budget = min((20 + 5 * threads) * _MIB, _left_by_adapters(shape, rows, threads, shards, backward=backward))
    return min(max(budget // (job_bytes * shards), 1), max(len(jobs), 1))


def _left_by_adapters(shape: ExpertsShape, rows: int, threads: int, shards: int, *, backward: bool) -> int:
    """Bytes of scratch memory that neither packed adapters, their gradients nor the threads' own take: Pass::BindLora()
    and Pass::StageScratchBytes(). Of adapters in place, which leave enough, rank is 0."""
    h, i, padded = shape.hidden, shape.intermediate, shape.padded_rank
    adapters = 0
    if shape.rank:
        along_h = 1024 * ceil_div(h, 32) * (1 if shape.rank <= 16 else padded // 16)
        along_i = 1024 * ceil_div(i, 16) * (padded // 32)
        expert = shards * _adapter_pitch(2 * along_h + 3 * along_i)
        if backward:
            expert += shards * _adapter_pitch(
                4 * round_up(shape.rank, 16) * (2 * round_up(h, 32) + 3 * round_up(i, 32))
            )
        group, in_flight, budget = 16, 2 if threads <= 4 else 3, (36 + 2 * threads) * _MIB
        while group > 1 and in_flight * group * expert > budget:
            group //= 2
        groups = min(max(budget // (group * expert), 1), ceil_div(shape.experts, group))
        adapters = groups * group * expert
    of_thread = (
        256 * (round_up(i, 32) + padded) + max(8 * padded * rows, 384 * max(rows, 1024), 1088 * rows, 294912) + 256
    )
    return (64 + 8 * threads - 12) * _MIB - adapters - threads * of_thread


def _adapter_pitch(size: int) -> int:
    return round_up(size, 4096) + 64


def _tile_bytes(rows: int, columns: int) -> int:
    """TileMatrix::Activations: never a multiple of four panels from a column to the next, which would share sets of a
    cache."""
    panels = ceil_div(rows, 16)
    return 1024 * (panels + (panels % 4 == 0)) * ceil_div(columns, 32) if panels else 0


def _add(to: Work, amounts: Mapping[str, float]) -> None:
    for unit, amount in amounts.items():
        to[unit] = to.get(unit, 0.0) + amount
