"""Predicts a run of a model: prefill, decode or a training step, on one machine or several that share it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from moesaic.perf.communication import Topology
from moesaic.perf.fields import one_of, whole
from moesaic.perf.footprint import adapter_parameters, memory_bytes
from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.inference import Inference
from moesaic.perf.layer_model import LayerModel, ShapeLayers
from moesaic.perf.machine import Machine
from moesaic.perf.model import Block, Operator, Transformer, Workload
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.products import Counted, Products, ShapeRecorder
from moesaic.perf.rates import LayerRates
from moesaic.perf.routing import RoutingLaw
from moesaic.perf.strategy import STRATEGIES, Strategy, best_blocks

__all__ = [
    "BlockTime",
    "Inference",
    "Parallelism",
    "Prewarming",
    "Simulation",
    "SimulationConfig",
    "SimulationResult",
    "StepTime",
    "run_simulation",
]

SCHEMA = 1
_ROUTING_DRAWS = 4  # with fine granularity
_ADAM_BYTES = 28  # of a parameter in a step of AdamW: four values read, three written


@dataclass(frozen=True)
class Parallelism:
    """How devices share the model.

    Attributes:
        strategy: for every block; 'auto' takes the fastest for each, and in as many pieces as hide most communication.
        routing: how tokens choose experts.
        overlap: whether communication may be hidden behind computing.
    """

    strategy: Strategy = "auto"
    routing: str = "uniform"
    overlap: bool = True

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        RoutingLaw.parse(self.routing)


@dataclass(frozen=True)
class SimulationConfig:
    """How it is simulated.

    Attributes:
        enable_gemm_prewarm: evaluate all products of the run at once, in parallel, before it.
        use_precise_evaluator: the tile evaluator and the engine's schedule; False: closed formulas only.
        granularity: 'fine': every decoded token, and experts layers with several draws of the routing; 'coarse': one
            draw,
            the first and the last token, and a line between them.
        max_simulated_tokens: decoded tokens simulated one by one; what is beyond them goes on as the last ones did.
    """

    enable_gemm_prewarm: bool = True
    use_precise_evaluator: bool = True
    granularity: Literal["coarse", "fine"] = "fine"
    max_simulated_tokens: int = 64

    def __post_init__(self) -> None:
        one_of("granularity", self.granularity, ("coarse", "fine"))
        whole("max_simulated_tokens", self.max_simulated_tokens, 1)


@dataclass(frozen=True)
class BlockTime:
    """One kind of block in one pass.

    Attributes:
        name: attention, ffn, experts or head.
        count: how many of them.
        strategy: that was taken.
        pieces: in which communication overlaps with computing.
        milliseconds: of one block, with what of its communication nothing hides.
        compute_ms, communication_ms: of one block.
        reason: why this strategy.
        operators: of one block, on the device that has most to do.
    """

    name: str
    count: int
    strategy: str
    pieces: int
    milliseconds: float
    compute_ms: float
    communication_ms: float
    reason: str
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class StepTime:
    """One pass through the model: 'prefill', 'decode', 'forward', 'recompute', 'backward' or 'optimizer'."""

    name: str
    count: int
    tokens: int
    milliseconds: float
    compute_ms: float
    communication_ms: float
    single_device_ms: float
    blocks: tuple[BlockTime, ...]


@dataclass(frozen=True)
class Prewarming:
    """What prewarming did before the run, and the look-ups of the run itself."""

    shapes: int
    milliseconds: float
    hits: int
    misses: int


@dataclass(frozen=True)
class SimulationResult:
    """A prediction.

    Attributes:
        milliseconds: of the whole run.
        tokens_per_second: prompt, decoded or trained tokens.
        steps: passes, in order.
        parallel_efficiency: time on one device / (devices x time).
        memory: bytes on each device, by what holds them.
        prewarming: look-ups.
        simulated_ms: what the simulation itself took.
    """

    milliseconds: float
    tokens_per_second: float
    steps: tuple[StepTime, ...]
    parallel_efficiency: float
    memory: Mapping[str, float]
    prewarming: Prewarming
    simulated_ms: float
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document that `moesaic predict --json` prints."""
        return {"schema": SCHEMA, **asdict(self)}


def run_simulation(
    topology: Topology,
    model: TransformerConfig | Mapping[str, Any] | str | Path,
    inference: Inference,
    parallelism: Parallelism | None = None,
    hardware: Machine | GemmEvaluator | str | os.PathLike[str] = "here",
    config: SimulationConfig | None = None,
    rates: LayerRates | None = None,
) -> SimulationResult:
    """Predicts a run.

    Args:
        topology: devices and their connections.
        model: its sizes, the contents of a config.json, or that file.
        inference: what is run.
        parallelism: how the devices share it.
        hardware: what each device is: a machine, its name or file, or an evaluator with its cache.
        config: how it is simulated.
        rates: of the engine's layers there; None: calibrated ones that are stored, else derived from the machine.

    Raises:
        ValueError, TypeError: something is missing or makes no sense; one line that names the field.
        OSError: a file cannot be read.
    """
    begin = time.perf_counter()
    run = Simulation(
        topology,
        model if isinstance(model, TransformerConfig) else TransformerConfig.load(model),
        inference,
        parallelism or Parallelism(),
        _evaluator_of(hardware),
        config or SimulationConfig(),
        rates,
    )
    return run.result(begin)


def _evaluator_of(hardware: Machine | GemmEvaluator | str | os.PathLike[str]) -> GemmEvaluator:
    if isinstance(hardware, GemmEvaluator):
        return hardware
    return GemmEvaluator(hardware if isinstance(hardware, Machine) else Machine.find(os.fspath(hardware)))


class Simulation:
    """One simulation; arguments as those of run_simulation()."""

    def __init__(
        self,
        topology: Topology,
        model: TransformerConfig,
        inference: Inference,
        parallelism: Parallelism,
        evaluator: GemmEvaluator,
        config: SimulationConfig,
        rates: LayerRates | None,
    ) -> None:
        self._topology, self._model, self._inference = topology, model, inference
        self._parallelism, self._evaluator, self._config = parallelism, evaluator, config
        if parallelism.strategy == "expert" and topology.size > 1 and not model.experts:
            raise ValueError("strategy is 'expert'; the model has no experts")
        resident = (
            6.0 * model.experts * model.hidden_size * model.moe_intermediate_size * model.moe_layers / topology.size
        )
        self._counted = counted = Counted(evaluator)
        products = Products(counted, resident_bytes=resident)
        layers = LayerModel(products, rates or LayerRates.of(evaluator.machine, evaluator.threads))
        self._transformer = Transformer(
            model,
            counted,
            layers,
            RoutingLaw.parse(parallelism.routing),
            lora_rank=inference.lora_rank,
            precise=config.use_precise_evaluator,
        )

    def result(self, begin: float) -> SimulationResult:
        """Prewarms, runs and adds up. @param begin  when the simulation began"""
        shapes, prewarm_ms = self.prewarm() if self._config.enable_gemm_prewarm else (0, 0.0)
        before = self._lookups()
        steps = self._steps()
        after = self._lookups()
        total = sum(step.milliseconds * step.count for step in steps)
        single = sum(step.single_device_ms * step.count for step in steps)
        counted = [step for step in steps if step.name not in ("recompute", "backward", "optimizer")]
        return SimulationResult(
            milliseconds=total,
            tokens_per_second=sum(step.tokens * step.count for step in counted) / total * 1e3,
            steps=tuple(steps),
            parallel_efficiency=single / (self._topology.size * total),
            memory=memory_bytes(
                self._model,
                self._inference,
                self._topology.size,
                self._evaluator.threads,
                self._evaluator.machine.numa_nodes,
            ),
            prewarming=Prewarming(shapes, prewarm_ms, after[0] - before[0], after[1] - before[1]),
            simulated_ms=(time.perf_counter() - begin) * 1e3,
            inputs=self._inputs(),
        )

    def _lookups(self) -> tuple[int, int]:
        """Hits and misses so far."""
        return self._counted.hits, self._counted.misses

    # Passes.

    def _steps(self) -> list[StepTime]:
        steps = [self._pass(name, work, count) for name, work, count in self.passes()]
        if self._inference.phase == "train":
            steps.append(self._optimizer())
        return steps

    def passes(self) -> list[tuple[str, Workload, int]]:
        """Name, workload and number of the passes through the model."""
        return self._training_passes() if self._inference.phase == "train" else self._inference_passes()

    def _inference_passes(self) -> list[tuple[str, Workload, int]]:
        run = self._inference
        passes = []
        if run.phase == "prefill":
            tokens = run.batch * run.tokens
            passes.append(("prefill", Workload(tokens, (run.tokens + 1) / 2, tokens, logits=run.batch), 1))
        left = run.decode_tokens
        simulated = min(left, self._config.max_simulated_tokens)
        if left == 0:
            counts = {}
        elif self._config.granularity == "fine":
            counts = dict.fromkeys(range(simulated), 1)
            counts[simulated - 1] += left - simulated
        else:  # a line between the first token and the last: each stands for half of them
            counts = {0: left} if simulated == 1 else {0: left // 2, simulated - 1: left - left // 2}
        for at, count in counts.items():
            context = run.tokens + at + 1
            passes.append(("decode", Workload(run.batch, context, run.batch * context, logits=run.batch), count))
        return passes

    def _training_passes(self) -> list[tuple[str, Workload, int]]:
        run = self._inference
        tokens = run.batch * run.tokens
        work = Workload(tokens, (run.tokens + 1) / 2, tokens, logits=tokens)
        backward = ("backward", replace(work, backward=True), 1)
        return [("forward", work, 1), *([("recompute", work, 1)] if run.recompute else []), backward]

    def optimizer_ms(self) -> float:
        """AdamW over the adapters, on one device."""
        count = _ADAM_BYTES * adapter_parameters(self._model, self._inference.lora_rank)
        gbps: float = self._evaluator.machine.figures(self._evaluator.threads)["gbps"][3]
        return count / (gbps * 1e6)

    def _optimizer(self) -> StepTime:
        alone = self.optimizer_ms()
        ms = alone / self._topology.size  # its parameters are shared
        return StepTime("optimizer", 1, 0, ms, ms, 0.0, alone, ())

    def _pass(self, name: str, work: Workload, count: int) -> StepTime:
        devices = self._topology.size
        blocks = [self._block_time(block) for block in self.blocks(work)]
        compute = sum(block.compute_ms * block.count for block in blocks)
        communication = sum(block.communication_ms * block.count for block in blocks)
        total = single = sum(block.milliseconds * block.count for block in blocks)
        if devices > 1:
            single = sum(block.compute_ms("single") * block.count for block in self._blocks(self._transformer, work, 1))
        return StepTime(name, count, work.tokens, total, compute, communication, single, tuple(blocks))

    def blocks(self, work: Workload) -> list[Block]:
        """The blocks of one pass, with every strategy."""
        return self._blocks(self._transformer, work, self._topology.size)

    def _blocks(self, transformer: Transformer, work: Workload, devices: int) -> list[Block]:
        """The blocks of a pass; with fine granularity experts layers share a few draws of the routing."""
        draws = min(_ROUTING_DRAWS, max(self._model.moe_layers, 1)) if self._config.granularity == "fine" else 1
        blocks = transformer.blocks(work, devices)
        for i, block in enumerate(blocks):
            if block.name == "experts" and draws > 1:
                others = [transformer.experts_block(work, devices, draw) for draw in range(1, draws)]
                counts = [block.count // draws + (1 if d < block.count % draws else 0) for d in range(draws)]
                drawn = [replace(b, count=n) for b, n in zip([block, *others], counts, strict=True)]
                return blocks[:i] + drawn + blocks[i + 1 :]
        return blocks

    def _block_time(self, block: Block) -> BlockTime:
        found = {name: self._shared(block, name) for name in self.allowed(block)}
        best = min(found, key=lambda name: found[name][1])
        pieces, total = found[best]
        operators, communication = block.strategies[best]
        return BlockTime(
            name=block.name,
            count=block.count,
            strategy=best,
            pieces=pieces,
            milliseconds=total,
            compute_ms=block.compute_ms(best),
            communication_ms=communication.milliseconds(self._topology),
            reason=self._reason(block, best, found),
            operators=operators,
        )

    def allowed(self, block: Block) -> list[str]:
        """Strategies of a block that may be taken: where one is asked for that cannot share it, its nearest
        relative."""
        names, wanted = list(block.strategies), self._parallelism.strategy
        if len(names) == 1 or wanted == "auto":
            return names
        return [wanted] if wanted in names else ["hybrid" if "hybrid" in names else "column"]

    def _shared(self, block: Block, strategy: str) -> tuple[int, float]:
        """Pieces, and milliseconds of one block."""
        compute = block.compute_ms(strategy)
        communication = block.strategies[strategy][1]
        if not communication.operations or not self._parallelism.overlap:
            return 1, compute + communication.milliseconds(self._topology)
        overhead = self.piece_ms(block, strategy)
        return best_blocks(compute, lambda share: communication.milliseconds(self._topology, share), overhead)

    def piece_ms(self, block: Block, strategy: str) -> float:
        """What computing a block in one piece more costs: its operators are dispatched once more."""
        return self._transformer.dispatch_ms * len(block.strategies[strategy][0])

    def _reason(self, block: Block, best: str, found: Mapping[str, tuple[int, float]]) -> str:
        if best == "single":
            return "one device: nothing to share"
        communication = block.strategies[best][1].milliseconds(self._topology)
        pieces, total = found[best]
        compute = block.compute_ms(best)
        text = (
            f"{best} in {pieces} piece{'s' if pieces > 1 else ''}: {total:.3f} ms, {compute:.3f} of them computing "
            f"and {max(total - compute, 0.0):.3f} waiting for {communication:.3f} of communication"
        )
        for name in sorted(found, key=lambda name: found[name][1]):
            if name != best:
                communicates = block.strategies[name][1].milliseconds(self._topology) - communication
                slower = "communicates" if communicates > block.compute_ms(name) - compute else "computes"
                text += f"; {name} {found[name][1]:.3f}, it {slower} more"
        return text if self._parallelism.strategy == "auto" else f"{text}; asked for"

    # Before and after.

    def prewarm(self) -> tuple[int, float]:
        """Evaluates all products of the run at once."""
        begin = time.perf_counter()
        recorder = ShapeRecorder(self._evaluator)
        layers = self._transformer.layers
        products = layers.products.asking(recorder)
        transformer = self._transformer.asking(recorder, ShapeLayers(products, layers.rates))
        different = {replace(work, context=0.0, keys=0.0): None for _, work, _ in self.passes()}
        for work in different:
            for count in {1, self._topology.size}:
                self._blocks(transformer, work, count)
        self._evaluator.evaluate_many(list(recorder.shapes))
        return len(recorder.shapes), (time.perf_counter() - begin) * 1e3

    def _inputs(self) -> dict[str, Any]:
        return {
            "model": asdict(self._model),
            "inference": asdict(self._inference),
            "parallelism": asdict(self._parallelism),
            "topology": asdict(self._topology),
            "machine": {"name": self._evaluator.machine.name, "source": self._evaluator.machine.source},
            "threads": self._evaluator.threads,
            "config": asdict(self._config),
        }
