"""Holds predictions against this host: products, layers and training steps that no rate was fitted to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moesaic import _core
from moesaic.perf.calibration import (
    CALIBRATION_MODEL,
    CALIBRATION_STEP,
    MOST_SECONDS,
    TURNS,
    LayerCase,
    MeasuredLayer,
    Statistic,
    alone,
    calibration_cases,
    fit,
    fit_in_model,
    measure_layers,
    sentinel,
)
from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.layer_model import ExpertsShape, LayerModel
from moesaic.perf.machine import Machine
from moesaic.perf.measure import ROUNDS, Measurement
from moesaic.perf.products import Products
from moesaic.perf.rates import LayerRates, rates_path
from moesaic.perf.shapes import GemmShape

if TYPE_CHECKING:
    from moesaic.commands.training_step import RecordedCall, TrainingStep

__all__ = ["BARS", "CheckPlan", "Pair", "gemm_shapes", "layer_cases", "run_check", "summarise"]

SCHEMA = 1

BARS: dict[str, tuple[float, float | None]] = {
    "gemm": (0.08, 0.20),
    "layer forward": (0.08, None),
    "layer backward": (0.08, None),
    "skewed routing": (0.15, None),
    "step": (0.10, None),
}
"""By group: the median error that is allowed, and the 95th percentile. For skewed routing it is the largest error."""


_DISTURBED = "others used the host all the time"


@dataclass(frozen=True)
class Pair:
    """A prediction and what was measured, in milliseconds."""

    group: str
    name: str
    predicted_ms: float
    measured_ms: float
    spread: float
    """The median of the repetitions over their least."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1.0


@dataclass(frozen=True)
class CheckPlan:
    """What is run.

    Attributes:
        repetitions: of everything.
        statistic: what is taken of them: the median, or the least where others use the host.
        full: also layers of a gigabyte and more.
        recalibrate: fit the rates of the layers anew, even where some are kept.
        parts: which groups: 'gemm', 'layer', 'step'.
        seconds: for the repetitions of a case, until they are undisturbed.
        disturbed: all repetitions count, whatever others do to the host.
    """

    repetitions: int = 25
    statistic: Statistic = statistics.median
    full: bool = False
    recalibrate: bool = False
    parts: Sequence[str] = ("gemm", "layer", "step")
    seconds: float = MOST_SECONDS
    disturbed: bool = False


def gemm_shapes() -> Sequence[GemmShape]:
    """The shapes that `moesaic tune --check` holds the evaluator's choices against."""
    from moesaic.commands.tune_check import held_out_shapes

    return held_out_shapes()


def layer_cases(*, full: bool) -> tuple[LayerCase, ...]:
    """Layers that predictions are held against; none of them, nor one of their sizes, is among the calibration's."""
    demo = ExpertsShape(32, 512, 256, 8, 16)
    middle = ExpertsShape(48, 1280, 704, 6, 8)
    cases = [LayerCase(demo, tokens, "uniform") for tokens in (8, 512, 2048)]
    cases += [LayerCase(demo, 512, "zipf"), LayerCase(demo, 1024, "concentrated:8")]
    cases += [LayerCase(middle, tokens, "uniform") for tokens in (4, 128, 600)]
    cases += [LayerCase(replace(middle, rank=0), 300, "zipf"), LayerCase(middle, 200, "concentrated:6")]
    cases += [LayerCase(ExpertsShape(20, 1000, 440, 4, 24), 160, "uniform")]  # off the grid
    if full:
        qwen = ExpertsShape(128, 2048, 768, 8, 16)
        cases += [LayerCase(qwen, tokens, "uniform") for tokens in (4, 16, 128, 1024, 4096)]
        cases += [LayerCase(qwen, 4096, "zipf"), LayerCase(qwen, 4096, "concentrated:16")]
        cases += [LayerCase(qwen, 128, "zipf"), LayerCase(replace(qwen, rank=0), 2048, "uniform")]
        cases += [LayerCase(ExpertsShape(8, 4096, 14336, 2, 16), 512, "uniform")]
    return tuple(cases)


def run_check(plan: CheckPlan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Describes this host, runs everything and returns the document that `moesaic predict --check --json` prints.

    Args:
        plan: what is run.
        progress: is told what is run.
    """
    threads = _core.get_num_threads()
    measurement = Measurement(progress)
    measurement.rounds(ROUNDS)
    machine = measurement.machine()
    pairs: list[Pair] = []
    left_out: dict[str, str] = {}
    rates: LayerRates | None = None
    quiet = (lambda: True) if plan.disturbed else sentinel(machine)
    if "gemm" in plan.parts:
        pairs, machine = _gemms(machine, threads, measurement, plan, quiet, progress)
        missing = len(gemm_shapes()) - len(pairs)
        if missing:
            left_out["gemm"] = f"{missing} of {len(gemm_shapes())} shapes: {_DISTURBED}"
    del measurement  # and its memory
    evaluator = GemmEvaluator(machine, threads)
    if "layer" in plan.parts or "step" in plan.parts:
        start = LayerModel(Products(evaluator), LayerRates.derived(machine, threads))
        path = rates_path(machine, threads)
        rates = None if plan.recalibrate else _kept(path)
        new = rates is None
        calibrates = start.products.fits(CALIBRATION_STEP.shape.weight_bytes)
        steps: _Steps | None = None
        if "step" in plan.parts or (new and calibrates):
            try:
                steps = _Steps(plan, progress, calibrates=calibrates)
            except ImportError as error:
                for name, wanted in (("step", "step" in plan.parts), ("in_model", new and calibrates)):
                    if wanted:
                        left_out[name] = f"transformers or PEFT is missing: {error}"
        cases = list(calibration_cases(machine.l3_bytes)) if new else []
        fitted = len(cases)
        if "layer" in plan.parts:
            cases += layer_cases(full=plan.full)
        measured = measure_layers(
            cases,
            plan.repetitions,
            plan.statistic,
            quiet,
            plan.seconds,
            progress,
            after_turn=steps.turn if steps is not None else lambda: None,
        )
        if rates is None:
            rates = fit(start, measured[:fitted])
        model = LayerModel(start.products, rates)
        if steps is not None:
            rates = steps.fit_in_model(model)
            model = LayerModel(start.products, rates)
        if new:
            try:
                rates.save(path)
            except OSError as error:
                left_out["keeping the rates"] = str(error)
        for one in measured[fitted:]:
            if one.undisturbed or plan.statistic is min:
                pairs += _layer(model, one)
            else:
                left_out[str(one.case)] = _DISTURBED
        if steps is not None:
            pairs += steps.pairs(model)
    return {
        "schema": SCHEMA,
        "machine": {"name": machine.name, "cpu": machine.cpu, "isa": machine.isa, "identity": machine.identity},
        "description": machine.to_json(),
        "threads": threads,
        "statistic": "median" if plan.statistic is statistics.median else "least",
        "disturbed": plan.disturbed,
        "rates": None if rates is None else {name: getattr(rates, name) for name in LayerRates.names()},
        "pairs": [
            {
                "group": pair.group,
                "name": pair.name,
                "predicted_ms": pair.predicted_ms,
                "measured_ms": pair.measured_ms,
                "error": pair.error,
                "spread": pair.spread,
            }
            for pair in pairs
        ],
        "summary": summarise(pairs),
        "left_out": left_out,
    }


def summarise(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """By group: how many, the distribution of the errors' sizes, and whether the bars hold."""
    rows = []
    for group, (median_bar, p95_bar) in BARS.items():
        errors = sorted(abs(pair.error) for pair in pairs if pair.group == group)
        if not errors:
            continue
        median, p95, worst = statistics.median(errors), errors[math.ceil(0.95 * len(errors)) - 1], errors[-1]
        holds = (worst if group == "skewed routing" else median) <= median_bar and (p95_bar is None or p95 <= p95_bar)
        rows.append(
            {
                "group": group,
                "count": len(errors),
                "median": median,
                "p95": p95,
                "worst": worst,
                "bias": statistics.fmean(pair.error for pair in pairs if pair.group == group),
                "bar": median_bar,
                "p95_bar": p95_bar,
                "holds": holds,
            }
        )
    return rows


def _kept(path: Any) -> LayerRates | None:
    try:
        return LayerRates.load(path)
    except (OSError, ValueError):
        return None


def _gemms(
    machine: Machine,
    threads: int,
    measurement: Measurement,
    plan: CheckPlan,
    quiet: Callable[[], bool],
    progress: Callable[[str], None],
) -> tuple[list[Pair], Machine]:
    """Grouped GEMMs on all threads, weights from memory, in the configuration that the evaluator chooses, while the
    host is quiet; a shape for which it never was is left out.

    The host is described anew, in turn with them: the description that predicts them, returned as well, is of the same
    minutes, as what a shared host gives changes within some."""
    from moesaic.perf.timing import time_in_turns

    chooser = GemmEvaluator(machine, threads, False)
    cases = [(shape, chooser.evaluate(shape).configuration) for shape in gemm_shapes()]
    measurement.forget()
    found = time_in_turns(
        chooser.isa,
        cases,
        quiet,
        plan.repetitions,
        plan.seconds,
        progress,
        before_turn=lambda: measurement.rounds(1),
    )
    machine = measurement.machine()
    evaluator = GemmEvaluator(machine, threads, False)
    pairs = []
    for (shape, configuration), times in zip(cases, found, strict=True):
        if not times:
            continue
        name = f"{configuration.form} {shape.groups} x {shape.m} x {shape.k} x {shape.n} {shape.output}"
        predicted = evaluator.estimate(shape, configuration).milliseconds
        pairs.append(Pair("gemm", name, predicted, plan.statistic(times), statistics.median(times) / min(times)))
    return pairs, machine


def _layer(model: LayerModel, measured: MeasuredLayer) -> list[Pair]:
    """Forward and backward of a layer."""
    case = measured.case
    of_case = alone(model, case.shape, measured.rows)
    forward = of_case.forward(case.shape, measured.rows).milliseconds
    backward = of_case.backward(case.shape, measured.rows).milliseconds
    return [
        Pair(
            f"layer {way}" if case.routing == "uniform" else "skewed routing",
            f"{case}, {way}",
            predicted,
            time,
            measured.spread,
        )
        for way, predicted, time in (
            ("forward", forward, measured.forward_ms),
            ("backward", backward, measured.backward_ms),
        )
    ]


class _Steps:
    """The experts inside of training steps, through transformers and PEFT: each call of the engine by the statistic of
    its own repetitions, for nobody leaves a host alone during a whole step. If the plan has steps, those of the model
    of `make demo` are predicted. Another model's run in turn with them, and its calls alone: `in_model` is fitted to
    both, if a layer of it fits the last-level cache.

    Raises:
        ImportError: transformers or PEFT is missing.
    """

    _RANK, _TOKENS = 16, (512, 192)

    def __init__(self, plan: CheckPlan, progress: Callable[[str], None], *, calibrates: bool) -> None:
        from moesaic.commands.training_step import MODELS, TrainingStep, build_model

        progress("training steps")
        self._plan, self._progress, self._turn, self._done = plan, progress, 0, 0
        self._calibration: TrainingStep | None = None
        self._of_calibration: list[tuple[list[float], list[float]]] = []
        self._measured: list[tuple[int, TrainingStep, list[list[float]]]] = []
        if calibrates:
            model = build_model(CALIBRATION_MODEL, CALIBRATION_STEP.shape.rank)
            self._calibration = TrainingStep(model, CALIBRATION_STEP.tokens)
        if "step" in plan.parts:
            model = build_model(MODELS["demo"], self._RANK)
            self._measured = [(tokens, TrainingStep(model, tokens), []) for tokens in self._TOKENS]

    def turn(self) -> None:
        """So many of the repetitions that they are spread evenly over the turns. What is timed runs behind the same
        untimed, which fills the caches as it does in a training."""
        from moesaic.commands.training_step import engine_calls_ms

        self._turn += 1
        self._progress(f"turn {self._turn} of {TURNS}: training steps")

        def behind_the_same(run: Callable[[], object]) -> list[float]:
            run()
            return engine_calls_ms(run)

        wanted = math.ceil(self._plan.repetitions * self._turn / TURNS)
        for _ in range(self._done, wanted):
            if (step := self._calibration) is not None:
                inside = behind_the_same(step.run)
                step.run_alone()
                self._of_calibration.append((inside, step.run_alone()))
            for _, step, runs in self._measured:
                runs.append(behind_the_same(step.run))
        self._done = wanted

    def fit_in_model(self, model: LayerModel) -> LayerRates:
        """The model's rates with `in_model` of the same minutes."""
        if self._calibration is None:
            return replace(model.rates, in_model=1.0, in_model_backward=1.0)
        return fit_in_model(model, CALIBRATION_STEP.shape, self._of_calibration, self._plan.statistic)

    def pairs(self, model: LayerModel) -> list[Pair]:
        """The experts' part of each step of the demo's model."""
        pairs = []
        for tokens, step, runs in self._measured:
            predicted = 0.0
            for call in step.calls:
                shape = self._shape(call)
                rows = call.ids.flatten().bincount(minlength=shape.experts).tolist()
                of_step = LayerModel(model.products.with_resident(shape.weight_bytes * len(step.calls)), model.rates)
                predicted += of_step.forward(shape, rows).milliseconds - model.rates.unit_ms("python")
                predicted += of_step.backward(shape, rows).milliseconds - model.rates.unit_ms("python_backward")
            of_calls = list(zip(*runs, strict=True))
            spread = sum(map(statistics.median, of_calls)) / sum(map(min, of_calls))
            name = f"demo model, {tokens} tokens, {len(step.calls)} layers"
            pairs.append(Pair("step", name, predicted, sum(map(self._plan.statistic, of_calls)), spread))
        return pairs

    def _shape(self, call: RecordedCall) -> ExpertsShape:
        layer = call.layer
        sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
        return ExpertsShape(*sizes, call.ids.shape[1], self._RANK)
