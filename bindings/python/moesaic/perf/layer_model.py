"""Time of one experts layer, forward and backward, as the engine computes it.

Every phase of the engine (`moe/phases.cc`) is work in a few units, and a rate for each: products with the base weights,
whose time is the tile evaluator's; narrow products with the adapters; elements packed, activated, merged, copied.
Added up over the phases of a job's stages this is how long the job keeps a thread busy; the schedule of all jobs on
the pool (`layer_plan`) makes a duration of it, with what cores idle meanwhile. So streaming and arithmetic limits,
chunks of hot experts and skewed routing need no terms of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic.perf.fields import whole
from moesaic.perf.layer_plan import (
    TOKENS_PER_MERGE,
    Cut,
    Job,
    JobCut,
    Stage,
    ceil_div,
    cut_jobs,
    round_up,
    run_jobs,
)
from moesaic.perf.products import Products
from moesaic.perf.rates import LayerRates

__all__ = ["ExpertsShape", "LayerModel", "LayerPrediction", "ShapeLayers", "job_slots"]

_MIB = 1 << 20


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
    """

    def __init__(self, products: Products, rates: LayerRates) -> None:
        self.products = products
        self.rates = rates
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
        jobs = cut_jobs(rows, shard.hidden, shard.intermediate)
        groups: dict[str, Work] = {}
        for (count, first), times in Counter((job.rows, job.first) for job in jobs).items():
            for _, phase, work in self._stages(shard, Job(0, count, first), backward=backward):
                of_all = {unit: shards * times * amount for unit, amount in work.items()}
                _add(groups.setdefault(phase, {}), of_all)
        for phase, work in _outside_jobs(shape, rows, shards, backward=backward):
            _add(groups.setdefault(phase, {}), work)
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
        jobs = cut_jobs(rows, shard.hidden, shard.intermediate)
        phases: dict[str, float] = {}
        chains: list[list[Stage]] = []
        known: dict[tuple[int, bool], tuple[list[Stage], list[tuple[str, float]]]] = {}
        for job in jobs:
            key = (job.rows, job.first)
            if key not in known:
                known[key] = self._chain(shard, job, backward=backward)
            chain, times = known[key]
            chains.append(chain)
            for phase, ms in times:
                phases[phase] = phases.get(phase, 0.0) + shards * ms
        slots = job_slots(shard, jobs, threads, shards, backward=backward)
        cut = JobCut.choose(shards * len(jobs), shard.hidden, shard.intermediate, threads, shards * slots)
        cut = replace(cut, tail_jobs=cut.tail_jobs // shards)
        schedule = run_jobs(chains, cut, max(threads // shards, 1), slots, rates.unit_ms("task"))
        wall, busy = schedule.makespan_ms, shards * schedule.busy_ms
        for phase, work in _outside_jobs(shape, rows, shards, backward=backward):
            ms = rates.thread_ms(work)
            phases[phase] = phases.get(phase, 0.0) + ms
            tasks = ceil_div(sum(rows) // shape.top_k, TOKENS_PER_MERGE) if phase.startswith("merge") else threads
            wall += ms * ceil_div(max(tasks, 1), threads) / max(tasks, 1)
            busy += ms
        serial = rates.thread_ms({"slot": sum(rows)})
        phases["routing"], busy = serial, busy + serial
        wall += serial + rates.unit_ms("call")
        flops, dram = self.limits(shape, rows, backward=backward)
        idle = wall * threads - busy
        return LayerPrediction(wall, phases, idle, shards * len(jobs), shards * schedule.tasks, flops, dram)

    def _chain(self, shape: ExpertsShape, job: Job, *, backward: bool) -> tuple[list[Stage], list[tuple[str, float]]]:
        chain: list[Stage] = []
        times = []
        for cut, phase, work in self._stages(shape, job, backward=backward):
            ms = self.rates.thread_ms(work)
            times.append((phase, ms))
            if chain and chain[-1].cut is cut:
                chain[-1] = Stage(cut, chain[-1].thread_ms + ms)
            else:
                chain.append(Stage(cut, ms))
        return chain, times

    def _stages(self, shape: ExpertsShape, job: Job, *, backward: bool) -> list[tuple[Cut, str, Work]]:
        """(what its parts are ranges of, group of phases, work) in the order in which a job is computed."""
        h, i, r, rows = shape.hidden, shape.intermediate, shape.padded_rank, job.rows
        lanes = round_up(rows, 16)  # what elementwise kernels compute
        lora = shape.rank > 0
        # An intermediate of the adapters has two bf16 parts: of ranks up to 16 they share one step of a contraction.
        parts = 1 if shape.rank <= 16 else 2
        extra = parts * r
        low = self._low(lanes, r) if lora else None
        narrow = self._low(lanes, round_up(shape.rank, 16)) if lora else None  # without padding to a whole tile

        def product(form: str, k: int, n: int) -> Work:
            ms = self.products.thread_ms(form, rows, k, n, again=not job.first)
            return {form: ms.compute, f"{form}_stream": ms.stream}

        stages: list[tuple[Cut, str, Work]] = []
        if not backward:
            stages.append((Cut.WHOLE, "pack_input", {"pack": lanes * h}))
            if low:
                stages.append((Cut.WHOLE, "gate_up", {"low": low(h), "rank": rows * shape.rank}))
            stages.append((Cut.INTERMEDIATE, "gate_up", product("direct", h + extra, 2 * i)))
            stages.append((Cut.INTERMEDIATE, "activation", {"swiglu_forward": lanes * i}))
            if low:
                stages.append((Cut.WHOLE, "down", {"low": low(i), "rank": rows * shape.rank}))
            stages.append((Cut.HIDDEN, "down", product("unpack", i + extra, h)))
            return stages
        stages.append((Cut.WHOLE, "scatter_pack", {"pack": lanes * h}))
        if low:
            stages.append((Cut.WHOLE, "down_backward", {"low": low(h), "rank": 3 * rows * shape.rank}))
        stages.append((Cut.INTERMEDIATE, "down_backward", product("direct", h + extra, i)))
        stages.append((Cut.INTERMEDIATE, "activation_backward", {"swiglu_backward": lanes * i}))
        if low and narrow:
            stages.append((Cut.INTERMEDIATE, "activation_backward", {"transpose": 3 * round_up(rows, 32) * i}))
            # dA of down takes both parts of Q, dB of gate and up one of U each.
            stages.append((Cut.INTERMEDIATE, "down_backward", {"low": parts * low(i)}))
            stages.append((Cut.INTERMEDIATE, "gate_up_backward", {"low": 2 * low(i)}))
            if not job.first:
                stages.append((Cut.INTERMEDIATE, "down_backward", {"partial": i * r}))
                stages.append((Cut.INTERMEDIATE, "gate_up_backward", {"partial": 2 * i * r}))
            stages.append((Cut.WHOLE, "gate_up_backward", {"low": low(2 * i), "rank": 2 * rows * shape.rank}))
            # dA of gate and up takes rows of X gathered anew, dB of down the tiles of dO transposed.
            stages.append((Cut.HIDDEN, "gate_up_backward", {"pack": lanes * h, "low": 2 * narrow(h)}))
            stages.append((Cut.HIDDEN, "down_backward", {"transpose": round_up(rows, 32) * h, "low": low(h)}))
        stages.append((Cut.HIDDEN, "gate_up_backward", product("unpack", 2 * i + extra, h)))
        return stages

    def _low(self, rows: int, rank: int) -> Callable[[int], float]:
        """Milliseconds at the compute ceiling of one thread of rows x rank x `size`."""
        flops = 2.0 * round_up(rows, 16) * rank
        return lambda size: flops * size / (self.products.peak_gflops / self.threads * 1e6)

    def limits(self, shape: ExpertsShape, rows: Sequence[int], *, backward: bool) -> tuple[float, float]:
        """Flops of a call, and the bytes that must cross the memory bus at least once."""
        count, hit = sum(rows), sum(1 for r in rows if r > 0)
        flops = 6.0 * count * shape.hidden * shape.intermediate
        flops += (4.0 if backward else 2.0) * count * shape.lora_values
        saved = count * (4.0 * shape.intermediate + 4.0 * shape.rank)
        dram = shape.weight_bytes * hit / shape.experts + 4.0 * shape.lora_values * hit + saved
        dram += 4.0 * count / shape.top_k * shape.hidden
        return flops, dram + (4.0 * shape.lora_values * shape.experts if backward else 0.0)


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


def _outside_jobs(shape: ExpertsShape, rows: Sequence[int], shards: int, *, backward: bool) -> list[tuple[str, Work]]:
    """Work of the tasks that belong to no job: adapters, and the merge."""
    hit = sum(1 for r in rows if r > 0)
    inputs = shape.rank * (shape.hidden + 2 * shape.intermediate)
    down = shape.rank * (shape.hidden + shape.intermediate)
    if not backward:
        work: list[tuple[str, Work]] = [
            ("gate_up", {"lora_pack": hit * inputs}),
            ("down", {"lora_pack": hit * down}),
        ]
        merge = "merge"
    else:
        work = [
            ("gate_up_backward", {"lora_pack": hit * inputs, "lora_write": shape.experts * inputs}),
            ("down_backward", {"lora_pack": hit * down, "lora_write": shape.experts * down}),
        ]
        merge = "merge_backward"
    if shape.rank == 0:
        work = []
    tokens = sum(rows) / shape.top_k
    return [*work, (merge, {"merge": shards * sum(rows) * shape.hidden, "merge_token": tokens * shape.hidden})]


def job_slots(shape: ExpertsShape, jobs: Sequence[Job], threads: int, shards: int, *, backward: bool) -> int:
    """Jobs of each shard whose activations fit the scratch memory at a time: Pass::Allocate() of the engine."""
    rows = round_up(max((job.rows for job in jobs), default=1), 32)
    h, i, r = round_up(shape.hidden, 32), round_up(shape.intermediate, 32), shape.padded_rank
    values = h + i + 4 * r if not backward else h + 2 * i + 13 * r
    job_bytes = 2 * rows * values + (4 * ceil_div(i, 128) * rows if backward else 0)
    budget = (20 + 5 * threads) * _MIB
    return min(max(budget // (job_bytes * shards), 1), max(len(jobs), 1))


def _add(to: Work, amounts: Mapping[str, float]) -> None:
    for unit, amount in amounts.items():
        to[unit] = to.get(unit, 0.0) + amount
