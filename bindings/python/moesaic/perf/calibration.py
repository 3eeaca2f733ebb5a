"""Runs layers on this host: to calibrate what the units of their work cost, and to hold predictions against."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import moesaic
from moesaic import _core
from moesaic.commands.layer_case import LayerShape, parse_routing
from moesaic.commands.layer_data import Adapter, Batch, make_adapter, make_batch, make_weights
from moesaic.perf.layer_model import ExpertsShape, LayerModel, LayerPrediction, Work
from moesaic.perf.layer_plan import ceil_div
from moesaic.perf.machine import Machine
from moesaic.perf.rates import LayerRates

__all__ = [
    "LayerCase",
    "LayerRun",
    "MeasuredLayer",
    "Statistic",
    "calibration_cases",
    "fit",
    "fit_in_model",
    "measure_layers",
]

Statistic = Callable[[Sequence[float]], float]


_PRIOR_WEIGHT = 0.03  # against the relative error of a group of phases of mean share in one case
MOST_SECONDS = 12.0
"""For the repetitions of a case, if one is done in each turn that is to make some."""
TURNS = 12
"""In which the repetitions of all cases are made: on a shared host a call takes up to a seventh longer for some
seconds, of which each turn is one sample."""
_SETTLED_CALLS, _SETTLED_MS = 8, 8.0
"""Untimed forwards and backwards before a turn's: so many; fewer, but one, where these take as many milliseconds."""


@dataclass(frozen=True)
class LayerCase:
    """A layer and what goes through it; routing as `bench layer` takes it."""

    shape: ExpertsShape
    tokens: int
    routing: str = "uniform"

    def __str__(self) -> str:
        s = self.shape
        return f"E{s.experts} H{s.hidden} I{s.intermediate} k{s.top_k} r{s.rank} T{self.tokens} {self.routing}"


# What LayerRates are fitted to, and no prediction is held against: 2 to 600 rows an expert, with and without adapters,
# with weights that the last-level cache holds.
_IN_CACHE = (
    LayerCase(ExpertsShape(16, 768, 512, 2, 0), 16),
    LayerCase(ExpertsShape(16, 768, 512, 2, 16), 32),
    LayerCase(ExpertsShape(16, 768, 512, 2, 64), 128),
    LayerCase(ExpertsShape(8, 1024, 384, 2, 0), 256),
    LayerCase(ExpertsShape(8, 1024, 384, 2, 16), 512),
    LayerCase(ExpertsShape(8, 512, 640, 2, 32), 600, "concentrated:2"),
    LayerCase(ExpertsShape(64, 640, 288, 4, 16), 64),
    LayerCase(ExpertsShape(24, 896, 320, 8, 8), 96),
    # As many jobs as keep all cores of a large host busy, each with its own.
    LayerCase(ExpertsShape(40, 640, 288, 4, 16), 1400),
    LayerCase(ExpertsShape(48, 576, 384, 4, 0), 3600),
    # Much of whose products is their results.
    LayerCase(ExpertsShape(24, 1536, 192, 4, 0), 900),
)


def calibration_cases(l3_bytes: int) -> tuple[LayerCase, ...]:
    """The cases above; a layer that fills two fifths of the last-level cache, with 4 rows an expert; and layers twice
    as large as that cache with 4, 32 and 96."""
    experts = max(16, ceil_div(2 * l3_bytes, 6 * 1536 * 640))
    fill = max(8, ceil_div(2 * l3_bytes, 5 * 6 * 768 * 384))
    return (
        *_IN_CACHE,
        LayerCase(ExpertsShape(fill, 768, 384, 4, 0), fill),
        *(
            LayerCase(ExpertsShape(experts, 1536, 640, 4, rank), experts * rows // 4)
            for rows, rank in ((4, 0), (4, 16), (32, 16), (96, 0), (96, 16))
        ),
    )


CALIBRATION_MODEL = {
    "hidden_size": 640,
    "intermediate_size": 1280,
    "moe_intermediate_size": 288,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "num_experts": 24,
    "num_experts_per_tok": 6,
}
"""Whose training steps `in_model` is fitted to: as `training_step.MODELS`."""
CALIBRATION_STEP = LayerCase(
    ExpertsShape(
        experts=CALIBRATION_MODEL["num_experts"],
        hidden=CALIBRATION_MODEL["hidden_size"],
        intermediate=CALIBRATION_MODEL["moe_intermediate_size"],
        top_k=CALIBRATION_MODEL["num_experts_per_tok"],
        rank=16,
    ),
    tokens=300,
)
"""Its layers, and the tokens of a step."""


# Phases of the engine whose thread times add up to a group of the model; P is inside lora_pass.
_TIMERS: dict[str, tuple[str, ...]] = {
    "routing": ("routing",),
    "pack_input": ("gather", "pack_input"),
    "gate_up": ("gate_up_gemm",),
    "gate_up_lora": ("gate_up_lora",),
    "activation": ("activation",),
    "down": ("down_gemm",),
    "down_lora": ("down_lora",),
    "merge": ("merge",),
    "scatter_pack": ("D1_scatter", "D2_pack"),
    "down_backward": ("D3_gemm",),
    "down_lora_backward": ("D4_lora_grad",),
    "activation_backward": ("A1_silu_backward",),
    "gate_up_backward": ("GU1_base_pass_gate", "GU1_base_pass_up"),
    "gate_up_lora_backward": ("GU2_pack_for_lora", "P", "dB", "dA", "dX_lora"),
    "merge_backward": ("GU4_merge",),
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredLayer:
    """What a case took here.

    Attributes:
        rows: of each expert.
        forward_ms, backward_ms: of a call.
        spread: the median of forward and backward over their least: 1 on a host that nobody else uses.
        phases: thread milliseconds of the groups of phases.
        python_ms: of a forward and of a backward, what passes before the engine begins and after it ends.
        undisturbed: whether some of the timed repetitions were; else these are times of a host that others use.
    """

    case: LayerCase
    rows: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    spread: float
    phases: Mapping[str, float]
    undisturbed: bool = True
    python_ms: tuple[float, float] = (0.0, 0.0)


class LayerRun:
    """A case made ready: forward and backward as `ExpertsLayer` offers them, with an adapter in PEFT's layout.

    Args:
        case: what is run.
        layer: its packed weights.
        adapter: None: without one.
        batch: of the case's tokens.
    """

    def __init__(self, case: LayerCase, layer: moesaic.ExpertsLayer, adapter: Adapter | None, batch: Batch) -> None:
        self.case, self._layer = case, layer
        self._hidden, self._ids, self._router = batch.hidden.detach(), batch.ids, batch.router.detach()
        self._d_out = batch.d_out
        self._lora = None
        if adapter is not None:
            pairs = []
            for pair in (adapter.gate_up, adapter.down):
                a, b = pair.views()
                pairs.append(moesaic.LoraPair(a.detach(), b.detach(), pair.scale))
            self._lora = moesaic.Lora(gate_up=pairs[0], down=pairs[1])
        rows = torch.bincount(self._ids.flatten(), minlength=case.shape.experts)
        self.rows = tuple(int(r) for r in rows)
        """Of each expert."""

    def call(self) -> tuple[float, float]:
        """Milliseconds of forward and backward."""
        start = _core.clock_ns()
        _, saved = self._layer.forward(self._hidden, self._ids, self._router, self._lora)
        middle = _core.clock_ns()
        assert saved is not None
        self._layer.backward(saved, self._d_out)
        return (middle - start) * 1e-6, (_core.clock_ns() - middle) * 1e-6

    def settle(self) -> None:
        """Calls until everything is where it is from call to call."""
        spent = 0.0
        for _ in range(_SETTLED_CALLS):
            spent += sum(self.call())
            if spent >= _SETTLED_MS:
                break

    def profiled(self) -> tuple[float, dict[str, float], list[float]]:
        """Milliseconds of forward and backward, thread milliseconds of each group of phases, and milliseconds of
        forward and backward outside of the engine."""
        with moesaic.profile() as profile:
            whole = sum(self.call())
            calls, _ = _core.calls()
        python = [
            (call["end_ns"] - call["engine_end_ns"] + call["engine_begin_ns"] - call["begin_ns"]) * 1e-6
            for call in calls[-2:]
        ]
        by_name: dict[str, float] = {}
        for row in profile.phases():
            by_name[row["name"]] = by_name.get(row["name"], 0.0) + row["thread_ms"]
        groups = {group: sum(by_name.get(name, 0.0) for name in names) for group, names in _TIMERS.items()}
        return whole, groups, python


def make_run(case: LayerCase, layers: dict[tuple[int, int, int], moesaic.ExpertsLayer]) -> LayerRun:
    """A case with random weights, of which `layers` has those that cases of the same sizes share; what is missing is
    added."""
    s = case.shape
    shape = LayerShape(s.experts, s.hidden, s.intermediate, s.top_k, s.rank)
    sizes = (s.experts, s.hidden, s.intermediate)
    if sizes not in layers:
        weights = make_weights(shape, torch.Generator().manual_seed(0), full_copy=False)
        layers[sizes] = moesaic.ExpertsLayer(weights.gate_up, weights.down)
    generator = torch.Generator().manual_seed(1)
    adapter = make_adapter(shape, generator)
    batch = make_batch(shape, case.tokens, parse_routing(case.routing), generator)
    return LayerRun(case, layers[sizes], adapter, batch)


def fit_in_model(
    model: LayerModel,
    shape: ExpertsShape,
    repetitions: Sequence[tuple[Sequence[float], Sequence[float]]],
    statistic: Statistic = statistics.median,
) -> LayerRates:
    """The rates with `in_model` and `in_model_backward`: so many times as long calls take inside of a training step as
    the same ones right after each other, apart from what a call costs: `call` without `python` in the step, where the
    engine alone is timed, and all of `call` outside. 1 where a layer does not fit the last-level cache, or takes no
    longer than a call costs.

    Args:
        model: with all other rates fitted.
        shape: of each layer of the step.
        repetitions: milliseconds of each call in a step, all forwards, then all backwards, without Python; and of the
            same ones alone, with it.
        statistic: what is taken of them.
    """
    rates = replace(model.rates, in_model=1.0, in_model_backward=1.0)
    if not model.products.fits(shape.weight_bytes):
        return rates
    inside, alone_ms = (
        [statistic(call) for call in zip(*some, strict=True)] for some in zip(*repetitions, strict=True)
    )
    count = len(inside) // 2
    found: dict[str, float] = {}
    for suffix, calls in (("", slice(count)), ("_backward", slice(count, None))):
        call, python = rates.unit_ms(f"call{suffix}"), rates.unit_ms(f"python{suffix}")
        in_step = sum(inside[calls]) - count * (call - python)
        by_themselves = sum(alone_ms[calls]) - count * call
        if min(in_step, by_themselves) > 0.0:
            found[f"in_model{suffix}"] = in_step / by_themselves
    return replace(rates, **found)


def measure_layers(
    cases: Sequence[LayerCase],
    repetitions: int,
    statistic: Statistic = statistics.median,
    undisturbed: Callable[[], bool] = lambda: True,
    seconds: float = MOST_SECONDS,
    progress: Callable[[str], None] = lambda text: None,
    after_turn: Callable[[], None] = lambda: None,
) -> list[MeasuredLayer]:
    """Runs forward and backward of all cases, in a few turns, `TURNS`: what others do to the caches and to the memory
    for some seconds then meets all of them, those that rates are fitted to and those that predictions are held against.

    Args:
        cases: what is run. All of their weights are in memory at a time, those of the same sizes once.
        repetitions: timed ones of each; as many again are profiled, in turn with them.
        statistic: what is taken of the repetitions: the median, or the least on a host that others use.
        undisturbed: whether nobody else uses the host just now. Repetitions before or after which somebody does are
            made again; where they all are, they count for want of better ones.
        seconds: for a case's repetitions, timed and profiled ones each, if a few are done.
        progress: is told which case is run.
        after_turn: whatever else is to be measured in the same minutes.
    """
    layers: dict[tuple[int, int, int], moesaic.ExpertsLayer] = {}
    runs = []
    for case in cases:
        progress(f"packing: {case}")
        runs.append(make_run(case, layers))
    timed = [_Repeated(run.call, repetitions) for run in runs]
    profiled = [_Repeated(run.profiled, repetitions) for run in runs]
    for turn in range(TURNS):
        for run, times, phases in zip(runs, timed, profiled, strict=True):
            progress(f"turn {turn + 1} of {TURNS}: {run.case}")
            if any(some.wants(turn) for some in (times, phases)):
                run.settle()
            for some in (times, phases):
                some.turn(turn, undisturbed, seconds / TURNS)
        after_turn()
    return [_measured(run, statistic, times, phases) for run, times, phases in zip(runs, timed, profiled, strict=True)]


def _measured(
    run: LayerRun,
    statistic: Statistic,
    timed: _Repeated[tuple[float, float]],
    profiled: _Repeated[tuple[float, dict[str, float], list[float]]],
) -> MeasuredLayer:
    times, phases = timed.results(statistic), profiled.results(statistic)
    whole = [f + b for f, b in times]
    timers = statistic([ms for ms, _, _ in phases]) / statistic(whole)  # what they take themselves
    forward_python, backward_python = zip(*(python for _, _, python in phases), strict=True)
    return MeasuredLayer(
        run.case,
        run.rows,
        statistic([f for f, _ in times]),
        statistic([b for _, b in times]),
        statistics.median(whole) / min(whole),
        {group: statistic([phase[group] for _, phase, _ in phases]) / timers for group in _TIMERS},
        bool(timed.undisturbed),
        (statistic(forward_python), statistic(backward_python)),
    )


T = TypeVar("T")


class _Repeated(Generic[T]):
    """Results of so many undisturbed runs, in turns.

    Args:
        run: what is repeated.
        repetitions: that are wanted.
    """

    def __init__(self, run: Callable[[], T], repetitions: int) -> None:
        self._run, self._repetitions = run, repetitions
        self.every: list[T] = []
        self.undisturbed: list[T] = []

    def wants(self, turn: int) -> bool:
        """Whether the turn's share of the repetitions, and that of all before it, is not there yet."""
        return len(self.undisturbed) < ceil_div(self._repetitions * (turn + 1), TURNS)

    def turn(self, turn: int, undisturbed: Callable[[], bool], seconds: float) -> None:
        """Runs until the turn's share of the repetitions is there, or so many seconds are over."""
        until = time.perf_counter() + seconds
        before, first = undisturbed(), True
        while self.wants(turn) and (first or time.perf_counter() < until):
            result = self._run()
            after, first = undisturbed(), False
            self.every.append(result)
            if before and after:
                self.undisturbed.append(result)
            before = after

    def results(self, statistic: Statistic) -> list[T]:
        """Of the undisturbed runs; of all of them where none was, or where the least is taken: what others do only adds
        to a time, and the least of many disturbed runs is below that of a single undisturbed one."""
        return self.every if statistic is min or not self.undisturbed else self.undisturbed


def sentinel(machine: Machine) -> Callable[[], bool]:
    """Whether nobody else uses the host that is described just now."""
    return lambda: machine.kernels[machine.isa].undisturbed(machine.isa)


def fit(model: LayerModel, measured: Sequence[MeasuredLayer]) -> LayerRates:
    """The rates, none negative, with the least squares of the relative errors of all groups of phases, each times the
    group's share of its call; then, with the least errors of whole calls, what these take beyond their schedules."""
    of_calls = ("task", "call", "python", "waiting", "in_model")
    units = [name for name in LayerRates.names() if name.removesuffix("_backward") not in of_calls]
    amounts: list[Work] = []
    times, shares = [], []
    for one in measured:
        for backward in (False, True):
            groups = alone(model, one.case.shape, one.rows).work(one.case.shape, one.rows, backward=backward)
            busy = sum(one.phases[group] for group in groups)
            for group, work in groups.items():
                if one.phases[group] > 0:
                    amounts.append(work)
                    times.append(one.phases[group])
                    shares.append(one.phases[group] / busy)
    scale = np.array([model.rates.unit_ms(unit) for unit in units])
    matrix = np.array([[work.get(unit, 0.0) for unit in units] for work in amounts]) * scale / np.array(times)[:, None]
    weights = np.sqrt(np.array(shares) / np.mean(shares))
    # What the cases hardly tell apart stays near the rates of the model.
    prior = _PRIOR_WEIGHT * np.eye(len(units))
    found = _non_negative_least_squares(
        np.vstack([matrix * weights[:, None], prior]), np.concatenate([weights, np.full(len(units), _PRIOR_WEIGHT)])
    )
    rates = replace(
        model.rates,
        **{unit: getattr(model.rates, unit) * float(factor) for unit, factor in zip(units, found, strict=True)},
        call=0.0,
        call_backward=0.0,
        waiting=0.0,
        waiting_backward=0.0,
    )
    of_ways: dict[str, float] = {}
    for i, (way, suffix) in enumerate((("forward", ""), ("backward", "_backward"))):
        calls, in_python = [], []
        for one in measured:
            ms: float = getattr(one, f"{way}_ms")
            predict = getattr(alone(LayerModel(model.products, rates), one.case.shape, one.rows), way)
            predicted: LayerPrediction = predict(one.case.shape, one.rows)
            # Busy as it really was: apart from what the phases differ by.
            busy = sum(one.phases[group] for group in predicted.phases)
            calls.append((ms, (busy + predicted.idle_ms) / model.threads))
            in_python.append((one.python_ms[i], 1 / ms))
        python = _weighted_median(in_python)
        call, waiting = _beyond_schedule(calls, python)
        of_ways |= {f"call{suffix}": call * 1e3, f"python{suffix}": python * 1e3, f"waiting{suffix}": waiting}
    return replace(rates, **of_ways)


def _beyond_schedule(calls: Sequence[tuple[float, float]], least: float) -> tuple[float, float]:
    """What a call takes besides its schedule: milliseconds, no less than `least`, and a share of the schedule, none
    below 0, with the least sum of relative errors.

    Args:
        calls: milliseconds that they took, and of their schedules.
        least: milliseconds.
    """
    over = [(ms - schedule, 1 / ms) for ms, schedule in calls]
    shares = [((ms - least) / schedule - 1, schedule / ms) for ms, schedule in calls]
    # The errors are least where two of the calls have none, or on the border.
    found = [(max(_weighted_median(over), least), 0.0), (least, max(_weighted_median(shares), 0.0))]
    for (ms, schedule), (other_ms, other) in itertools.combinations(calls, 2):
        if schedule != other:
            share = (ms - other_ms) / (schedule - other) - 1
            if share >= 0 and (fixed := ms - (1 + share) * schedule) >= least:
                found.append((fixed, share))

    def error(of: tuple[float, float]) -> float:
        return sum(abs(of[0] + (1 + of[1]) * schedule - ms) / ms for ms, schedule in calls)

    return min(found, key=error)


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight): the value with the least sum of weighted distances."""
    ordered = sorted(weighted)
    half = 0.5 * sum(weight for _, weight in ordered)
    below = itertools.accumulate(weight for _, weight in ordered)
    return next(value for (value, _), sum_ in zip(ordered, below, strict=True) if sum_ >= half)


def alone(model: LayerModel, shape: ExpertsShape, rows: Sequence[int]) -> LayerModel:
    """The model where nothing but calls of this layer with the same rows follow each other."""
    hit = sum(1 for count in rows if count > 0)
    products = model.products.with_resident(shape.weight_bytes * hit / shape.experts)
    return LayerModel(products, model.rates, alone=True)


def _non_negative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with the least |matrix x - target|, by coordinate descent: small, convex, and without a library."""
    gram, right = matrix.T @ matrix, matrix.T @ target
    x = np.zeros(matrix.shape[1])
    for _ in range(2000):
        before = x.copy()
        for j in range(len(x)):
            if gram[j, j] > 0:
                x[j] = max(0.0, x[j] + (right[j] - gram[j] @ x) / gram[j, j])
        if np.abs(x - before).max(initial=0.0) < 1e-9:
            break
    return x
