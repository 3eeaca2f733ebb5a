"""`bench layer --sweep`: one axis at a time, tokens, threads and ranks; a table as CSV, a plot as PNG."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.commands.layer_bench import Point

AXES = ("tokens", "threads", "rank")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
RANKS = (4, 8, 16, 32, 64)

_COLUMNS = (
    "axis",
    *AXES,
    "forward_ms",
    "backward_ms",
    "forward_limit_ms",
    "backward_limit_ms",
    "forward_fraction_of_limit",
    "backward_fraction_of_limit",
    "tokens_per_s",
    "saved_bytes",
)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


def points(values: Mapping[str, Sequence[int]]) -> list[Point]:
    """The cases of a sweep: along each axis, the other two at their first value. A point on several axes stands
    once."""
    base = {axis: values[axis][0] for axis in AXES}
    found = [Point(**{**base, axis: value}) for axis in AXES for value in values[axis]]
    # One number of threads after the other: changing it costs more than anything else does.
    return sorted(dict.fromkeys(found), key=lambda point: point.threads != base["threads"])


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each axis and case on it, sorted along the axis."""
    cases = document["cases"]
    base = cases[0]
    table: list[dict[str, Any]] = []
    for axis in AXES:
        others = [other for other in AXES if other != axis]
        on_axis = [case for case in cases if all(case[other] == base[other] for other in others)]
        table.extend(_row(axis, case) for case in sorted(on_axis, key=lambda case: int(case[axis])))
    return table


def _row(axis: str, case: dict[str, Any]) -> dict[str, Any]:
    own = case["moesaic"]
    row: dict[str, Any] = {"axis": axis, **{name: case[name] for name in AXES}}
    for way in ("forward", "backward"):
        times = own[f"{way}_ms"]
        row[f"{way}_ms"] = None if times is None else times["median"]
        row[f"{way}_limit_ms"] = case["limit_ms"][way]
        row[f"{way}_fraction_of_limit"] = own["fraction_of_limit"][way]
    return {**row, "tokens_per_s": own["tokens_per_s"], "saved_bytes": own["saved_bytes"]}


def write_csv(document: dict[str, Any], path: Path) -> None:
    """Times are medians; what was not measured is empty."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows(document))


def write_png(document: dict[str, Any], path: Path) -> bool:
    """Medians, with their limits dotted, along every axis that has two values or more.

    Returns:
        False where matplotlib is not installed: nothing is written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    table = rows(document)
    axes = [axis for axis in AXES if sum(row["axis"] == axis for row in table) > 1] or ["tokens"]
    host, base = document["host"], document["cases"][0]
    figure = Figure(figsize=(5 * len(axes), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, panel in zip(axes, figure.subplots(1, len(axes), squeeze=False)[0], strict=True):
        along = [row for row in table if row["axis"] == axis]
        for way, color in (("forward", "C0"), ("backward", "C1")):
            if any(row[f"{way}_ms"] is None for row in along):
                continue
            values = [row[axis] for row in along]
            panel.plot(values, [row[f"{way}_ms"] for row in along], color, marker="o", label=way)
            panel.plot(values, [row[f"{way}_limit_ms"] for row in along], color, linestyle=":", label=f"limit, {way}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks([row[axis] for row in along], [f"{row[axis]:,}" for row in along])
        panel.set_xlabel(axis)
        panel.set_ylabel("ms")
        panel.set_title(", ".join(f"{other} {base[other]:,}" for other in AXES if other != axis), fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    shape = f"E {base['experts']}, H {base['hidden']}, I {base['intermediate']}, k {base['top_k']}, {base['routing']}"
    figure.suptitle(f"{shape}; {host['cpu']}, {host['isa']}", fontsize=10)
    figure.savefig(path, dpi=120)
    return True
