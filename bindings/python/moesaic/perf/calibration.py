"""Runs layers on this host: to calibrate what the units of their work cost, and to hold predictions against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import moesaic
from moesaic import _core
from moesaic.commands.layer_case import LayerShape, parse_routing
from moesaic.commands.layer_data import make_adapter, make_batch, make_weights
from moesaic.perf.layer_model import ExpertsShape, LayerModel, Work
from moesaic.perf.layer_plan import ceil_div
from moesaic.perf.rates import LayerRates

__all__ = ["LayerCase", "MeasuredLayer", "Statistic", "calibrate", "calibration_cases", "fit", "measure_layer"]

Statistic = Callable[[Sequence[float]], float]


_PRIOR_WEIGHT = 0.03  # against the relative error of one group of phases in one case
MOST_SECONDS = 12.0
"""For the repetitions of a case, if three are done."""


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
)


def calibration_cases(l3_bytes: int) -> tuple[LayerCase, ...]:
    """The cases above, and layers twice as large as the last-level cache with 4, 32 and 96 rows an expert."""
    experts = max(16, ceil_div(2 * l3_bytes, 6 * 1536 * 640))
    return (
        *_IN_CACHE,
        *(
            LayerCase(ExpertsShape(experts, 1536, 640, 4, rank), experts * rows // 4)
            for rows, rank in ((4, 0), (4, 16), (32, 16), (96, 0), (96, 16))
        ),
    )


# Phases of the engine whose thread times add up to a group of the model; P is inside lora_pass.
_TIMERS: dict[str, tuple[str, ...]] = {
    "routing": ("routing",),
    "pack_input": ("gather", "pack_input"),
    "gate_up": ("gate_up_gemm", "gate_up_lora"),
    "activation": ("activation",),
    "down": ("down_gemm", "down_lora"),
    "merge": ("merge",),
    "scatter_pack": ("D1_scatter", "D2_pack"),
    "down_backward": ("D3_gemm", "D4_lora_grad"),
    "activation_backward": ("A1_silu_backward",),
    "gate_up_backward": (
        "GU1_base_pass_gate", "GU1_base_pass_up", "GU2_pack_for_lora", "P", "dB", "dA", "dX_lora",
    ),
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
        undisturbed: whether some of the timed repetitions were; else these are times of a host that others use.
    """

    case: LayerCase
    rows: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    spread: float
    phases: Mapping[str, float]
    undisturbed: bool = True


def measure_layer(
    case: LayerCase,
    repetitions: int,
    statistic: Statistic = statistics.median,
    undisturbed: Callable[[], bool] = lambda: True,
    seconds: float = MOST_SECONDS,
) -> MeasuredLayer:
    """Runs forward and backward of a case, as `ExpertsLayer` offers them, with an adapter in PEFT's layout.

    Args:
        case: what is run.
        repetitions: timed ones; as many again are profiled, in turn with them.
        statistic: what is taken of the repetitions: the median, or the least on a host that others use.
        undisturbed: whether nobody else uses the host just now. Repetitions before or after which somebody does are
            made again; where they all are, they count for want of better ones.
        seconds: for the repetitions, timed and profiled ones each, if three are done.
    """
    s = case.shape
    shape = LayerShape(s.experts, s.hidden, s.intermediate, s.top_k, s.rank)
    generator = torch.Generator().manual_seed(0)
    weights = make_weights(shape, generator, full_copy=False)
    layer = moesaic.ExpertsLayer(weights.gate_up, weights.down)
    adapter = make_adapter(shape, generator)
    batch = make_batch(shape, case.tokens, parse_routing(case.routing), generator)
    hidden, router = batch.hidden.detach(), batch.router.detach()
    lora = None
    if adapter is not None:
        pairs = []
        for pair in (adapter.gate_up, adapter.down):
            a, b = pair.views()
            pairs.append(moesaic.LoraPair(a.detach(), b.detach(), pair.scale))
        lora = moesaic.Lora(gate_up=pairs[0], down=pairs[1])

    def call() -> tuple[float, float]:
        start = _core.clock_ns()
        _, saved = layer.forward(hidden, batch.ids, router, lora)
        middle = _core.clock_ns()
        assert saved is not None
        layer.backward(saved, batch.d_out)
        return (middle - start) * 1e-6, (_core.clock_ns() - middle) * 1e-6

    call()

    def profiled() -> dict[str, float]:
        with moesaic.profile() as profile:
            call()
        by_name: dict[str, float] = {}
        for row in profile.phases():
            by_name[row["name"]] = by_name.get(row["name"], 0.0) + row["thread_ms"]
        return {group: sum(by_name.get(name, 0.0) for name in names) for group, names in _TIMERS.items()}

    times, any_undisturbed = repeat_undisturbed(call, repetitions, undisturbed, seconds)
    phases, _ = repeat_undisturbed(profiled, repetitions, undisturbed, seconds)
    forward, backward = [f for f, _ in times], [b for _, b in times]
    whole = [f + b for f, b in times]
    rows = torch.bincount(batch.ids.flatten(), minlength=s.experts)
    return MeasuredLayer(
        case,
        tuple(int(r) for r in rows),
        statistic(forward),
        statistic(backward),
        statistics.median(whole) / min(whole),
        {group: statistic([phase[group] for phase in phases]) for group in _TIMERS},
        any_undisturbed,
    )


T = TypeVar("T")


def repeat_undisturbed(
    run: Callable[[], T], repetitions: int, undisturbed: Callable[[], bool], seconds: float
) -> tuple[list[T], bool]:
    """Results of so many undisturbed runs, fewer where so many seconds are over first; those of all runs, and False,
    where none was undisturbed."""
    every: list[T] = []
    found: list[T] = []
    until = time.perf_counter() + seconds
    before = undisturbed()
    while len(found) < repetitions and (len(every) < 3 or time.perf_counter() < until):
        every.append(run())
        after = undisturbed()
        if before and after:
            found.append(every[-1])
        before = after
    return found or every, bool(found)


def calibrate(
    model: LayerModel,
    repetitions: int = 7,
    statistic: Statistic = statistics.median,
    progress: Callable[[str], None] = lambda text: None,
    cases: Sequence[LayerCase] | None = None,
    seconds: float = MOST_SECONDS,
) -> LayerRates:
    """Rates of this host, in some ten seconds.

    Args:
        model: for this machine and as many threads as the engine uses; its rates are where the fit begins.
        repetitions: of each case.
        statistic: as for measure_layer().
        progress: is told which case is run.
        cases: what is run; None: calibration_cases().
        seconds: as for measure_layer().
    """
    measured = []
    undisturbed = sentinel(model)
    for case in cases or calibration_cases(model.products.figures["l3_bytes"]):
        progress(f"calibrating: {case}")
        measured.append(measure_layer(case, repetitions, statistic, undisturbed, seconds))
    return fit(model, measured)


def sentinel(model: LayerModel) -> Callable[[], bool]:
    """Whether nobody else uses the host that the model describes just now."""
    machine = model.products.evaluator.machine
    return lambda: machine.kernels[machine.isa].undisturbed(machine.isa)


def fit(model: LayerModel, measured: Sequence[MeasuredLayer]) -> LayerRates:
    """The rates, none negative, with the least relative errors of all groups of phases; then `call`, with those of the
    whole calls."""
    units = [name for name in LayerRates.names() if name not in ("task", "call")]
    amounts: list[Work] = []
    times = []
    for one in measured:
        for backward in (False, True):
            of_case = alone(model, one.case.shape)
            for group, work in of_case.work(one.case.shape, one.rows, backward=backward).items():
                if one.phases[group] > 0:
                    amounts.append(work)
                    times.append(one.phases[group])
    scale = np.array([model.rates.unit_ms(unit) for unit in units])
    matrix = np.array([[work.get(unit, 0.0) for unit in units] for work in amounts]) * scale / np.array(times)[:, None]
    # What the cases hardly tell apart stays near the rates of the model.
    prior = _PRIOR_WEIGHT * np.eye(len(units))
    found = _non_negative_least_squares(
        np.vstack([matrix, prior]), np.concatenate([np.ones(len(times)), np.full(len(units), _PRIOR_WEIGHT)])
    )
    rates = replace(
        model.rates,
        **{unit: getattr(model.rates, unit) * float(factor) for unit, factor in zip(units, found, strict=True)},
        call=0.0,
    )
    over = []
    for one in measured:
        without = alone(LayerModel(model.products, rates), one.case.shape)
        over.append(one.forward_ms - without.forward(one.case.shape, one.rows).milliseconds)
        over.append(one.backward_ms - without.backward(one.case.shape, one.rows).milliseconds)
    return replace(rates, call=max(statistics.median(over), 0.0) * 1e3)


def alone(model: LayerModel, shape: ExpertsShape) -> LayerModel:
    """The model where nothing but calls of this layer follow each other."""
    return LayerModel(model.products.with_resident(shape.weight_bytes), model.rates)


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
