"""`moesaic tune --check`: the evaluator's choices against what really runs fastest here."""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from moesaic import _core
from moesaic.commands.options import progress
from moesaic.commands.output import Tables, UsageError

if TYPE_CHECKING:
    from moesaic.perf import GemmShape, Machine
    from moesaic.perf.gemm_evaluator import Configuration, GemmEstimate
    from moesaic.perf.timing import ShapeTimer

SCHEMA = 1
_FINALS = 10
"""The best of all candidates, which are run again in turn with the evaluator's choices."""
_BARS = {
    "analytic within 5%": ("analytic", 1.05, 0.90),
    "analytic within 15%": ("analytic", 1.15, 1.0),
    "measured within 3%": ("measured", 1.03, 0.95),
}
_SHAPES_IN_TURN = 2
"""Of which the choices are those of one description."""
_SCAN_ROUNDS, _FINAL_ROUNDS = 9, 75  # of every candidate; of the best of them
_DUEL_ROUNDS, _DUEL_SECONDS = 15, 8.0  # at least; for more than these
_CERTAIN = 0.005  # half the width of a ratio's 95% interval, at which its duel ends


def held_out_shapes() -> list[GemmShape]:
    """Shapes that no figure of a machine was made from."""
    from moesaic.perf import GemmShape

    with resources.files("moesaic.perf").joinpath("held_out.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        GemmShape(
            groups=int(row["groups"]),
            m=int(row["m"]),
            k=int(row["k"]),
            n=int(row["n"]),
            form=row["form"],
            input=row["input"],
            output=row["output"],
        )
        for row in rows
    ]


def described_in_turn() -> Callable[[], Machine]:
    """This host by all rounds so far, one more with each call: beside others a host changes for minutes at a time, a
    check takes longer than that, and one round alone says little. Keeps what a `Measurement` does, some GiB on many
    threads."""
    from moesaic.perf.measure import ROUNDS, Measurement

    measurement = Measurement(progress())
    measurement.rounds(ROUNDS - 1)

    def describe() -> Machine:
        measurement.rounds(1)
        return measurement.machine()

    return describe


def check(describe: Callable[[], Machine], count: int) -> dict[str, Any]:
    """Runs it on the first `count` shapes; the document that --json prints. `ok`: every bar holds. The machine's
    identity there is that of its last description.

    Args:
        describe: the machine, as it is before the next shapes are chosen for.
        count: of shapes.
    """
    from moesaic import perf
    from moesaic.perf.timing import ShapeTimer, far_weights, require_this_host

    machine = describe()
    evaluator = perf.GemmEvaluator(machine, cache=False)
    try:
        require_this_host(machine, evaluator.isa, evaluator.threads)
    except ValueError as error:
        raise UsageError(str(error)) from None
    shapes = held_out_shapes()[:count]
    far = far_weights()
    tell = progress()
    rows = []
    for i, shape in enumerate(shapes):
        name = f"{shape.form} {shape.groups} x {shape.m} x {shape.k} x {shape.n} {shape.output}"
        if i > 0 and i % _SHAPES_IN_TURN == 0:
            machine = describe()
            evaluator = perf.GemmEvaluator(machine, cache=False)
        tell(f"{i + 1} of {len(shapes)}: {name}")
        timer = ShapeTimer(evaluator.isa, shape, far)
        rows.append(_compare(timer, shape, evaluator.rank(shape, 10_000)))
    tell("")
    bars = _judge(rows)
    return {
        "schema": SCHEMA,
        "machine": {
            "name": machine.name,
            "identity": machine.identity,
            "isa": evaluator.isa,
            "threads": evaluator.threads,
        },
        "ok": bool(rows) and all(bar["held"] for bar in bars),
        "bars": bars,
        "shapes": rows,
    }


def _compare(timer: ShapeTimer, shape: GemmShape, ranked: Sequence[GemmEstimate]) -> dict[str, Any]:
    """Runs all candidates; then the ten best of them, the model's choice and that of the measured mode; then these two
    and the fastest of all once more. Always in rounds, and what counts of a round are ratios."""
    from moesaic.perf.timing import fastest, relative

    configurations = [answer.configuration for answer in ranked]
    begin = _core.clock_ns()
    measured = fastest(timer, ranked)[0].configuration
    measuring_s = (_core.clock_ns() - begin) * 1e-9
    scanned = relative(timer.measure(configurations, _SCAN_ROUNDS))
    order = sorted(range(len(scanned)), key=scanned.__getitem__)[:_FINALS]
    finals = list(dict.fromkeys([configurations[0], measured, *(configurations[i] for i in order)]))
    scores = relative(timer.measure(finals, _FINAL_ROUNDS))
    best = finals[scores.index(min(scores))]
    # Of a dozen equally fast ones some look 3% faster than they are: what counts are runs made after the choice.
    duel = list(dict.fromkeys([configurations[0], measured, best]))
    times = _duel(timer, duel)
    ratios = [_ratio(row, times[0])[0] for row in times]
    winner = ratios.index(min(ratios))
    (analytic, of_analytic), (of_measure, of_measured) = (
        _ratio(times[i], times[winner]) for i in (0, duel.index(measured))
    )
    sizes = {name: getattr(shape, name) for name in ("groups", "m", "k", "n", "form", "input", "output")}
    return {
        **sizes,
        "candidates": len(ranked),
        "rounds": len(times[0]),
        "predicted_ms": ranked[0].milliseconds,
        "analytic_ms": statistics.median(times[0]),
        "best_ms": statistics.median(times[winner]),
        "spread": statistics.median(times[winner]) / min(times[winner]),
        "analytic": analytic,
        "measured": of_measure,
        "analytic_uncertainty": of_analytic,
        "measured_uncertainty": of_measured,
        "measuring_s": measuring_s,
        "chosen": vars(configurations[0]),
        "measured_choice": vars(measured),
        "fastest": vars(duel[winner]),
        "fastest_predicted_ms": next(a.milliseconds for a in ranked if a.configuration == duel[winner]),
    }


def _duel(timer: ShapeTimer, configurations: Sequence[Configuration]) -> list[list[float]]:
    """Rounds until all ratios to the first are certain enough, or the seconds are over."""
    until = time.perf_counter() + _DUEL_SECONDS
    times = timer.measure(configurations, _DUEL_ROUNDS)
    while time.perf_counter() < until and any(_ratio(row, times[0])[1] > _CERTAIN for row in times):
        for row, more in zip(times, timer.measure(configurations, _DUEL_ROUNDS), strict=True):
            row += more
    return times


def _ratio(times: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Median of the rounds' ratios, and half the width of its 95% interval, which order statistics give."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    half = round(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    low, high = ratios[max(middle - half, 0)], ratios[min(middle + half, len(ratios) - 1)]
    return statistics.median(ratios), 0.5 * (high - low)


def _judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = []
    for name, (which, ratio, share) in _BARS.items():
        found = sum(row[which] <= ratio for row in rows) / max(len(rows), 1)
        bars.append({"bar": name, "share": found, "expected": share, "held": found >= share})
    return bars


def show(document: dict[str, Any]) -> None:
    """The document for people."""

    def text(c: dict[str, Any]) -> str:
        task, call = f"{c['task_rows']}x{c['task_columns']}", f"{c['call_rows']}x{c['call_columns']}x{c['call_depth']}"
        return f"{task} {call} {c['order']}"

    tables = Tables()
    rows = [
        [
            f"{row['groups']} x {row['m']} x {row['k']} x {row['n']}",
            f"{row['form']} {row['output']}",
            f"{row['predicted_ms']:.3f}",
            f"{row['analytic_ms']:.3f}",
            f"{row['best_ms']:.3f}",
            f"{row['analytic']:.3f} ± {row['analytic_uncertainty']:.3f}",
            f"{row['measured']:.3f} ± {row['measured_uncertainty']:.3f}",
            text(row["chosen"]),
            text(row["fastest"]),
        ]
        for row in document["shapes"]
    ]
    header = ["groups x M x K x N", "form", "predicted", "chosen", "best ms", "ratio", "measured", "chosen", "fastest"]
    tables.table("choices of the evaluator against the fastest of all candidates", header, rows)
    for bar in document["bars"]:
        sign = "✓" if bar["held"] else "✗"
        tables.line(f"{sign} {bar['bar']}: {bar['share']:.0%} of the shapes; the bar is {bar['expected']:.0%}")
