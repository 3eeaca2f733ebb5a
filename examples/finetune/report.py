"""What the example shows: progress, curves, tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

STYLES = {"stock": "cyan", "moesaic": "magenta"}
LABELS = {"stock": "stock (grouped_mm)", "moesaic": "moesaic"}


@dataclass
class Result:
    """What a training run reported."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Median over the steps but the first two, which warm up."""
        return statistics.median(self.seconds[2:] or self.seconds)

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Of training: forward, backward and the optimizer's step."""
        return tokens_per_step / self.step_seconds


@dataclass(frozen=True)
class Check:
    """Something that must hold."""

    name: str
    holds: bool
    detail: str


def progress(console: Console) -> Progress:
    """A bar for one training run."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def curves(results: Mapping[str, Result], width: int = 64, height: int = 12) -> Text:
    """The losses over the steps, drawn with braille dots: 2 x 4 of them a character. Where the curves coincide the last
    one hides those before."""
    series = {name: result.losses for name, result in results.items()}
    low, high = min(map(min, series.values())), max(map(max, series.values()))
    steps = max(map(len, series.values()))
    dots: dict[tuple[int, int], int] = {}
    owners: dict[tuple[int, int], str] = {}
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    for name, losses in series.items():
        for x in range(2 * width):
            position = x * (steps - 1) / max(1, 2 * width - 1)
            left = min(int(position), len(losses) - 1)
            right = min(left + 1, len(losses) - 1)
            loss = losses[left] + (losses[right] - losses[left]) * (position - left)
            y = round((high - loss) / max(high - low, 1e-9) * (4 * height - 1))
            cell = (y // 4, x // 2)
            dots[cell] = dots.get(cell, 0) | bits[y % 4][x % 2]
            owners[cell] = name
    text = Text()
    for row in range(height):
        label = {0: f"{high:7.3f} ", height - 1: f"{low:7.3f} "}.get(row, " " * 8)
        text.append(label, "dim")
        for column in range(width):
            cell = (row, column)
            text.append(chr(0x2800 + dots.get(cell, 0)), STYLES.get(owners.get(cell, ""), ""))
        text.append("\n")
    text.append(" " * 8 + "1".ljust(width - len(str(steps))) + f"{steps}  step\n", "dim")
    for name in series:
        text.append(f"        ⣿ {LABELS[name]}", STYLES[name])
    return text


def save_curves(results: Mapping[str, Result], path: Path) -> bool:
    """The same as a PNG; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    looks = {
        "stock": {"color": "#0891b2", "linewidth": 3.0, "alpha": 0.5},
        "moesaic": {"color": "#c026d3", "linewidth": 1.2},
    }
    for name, result in results.items():
        axes.plot(range(1, len(result.losses) + 1), result.losses, label=LABELS[name], **looks[name])
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def comparison(results: Mapping[str, Result], tokens_per_step: int) -> Table:
    """Speed and memory of the runs, and their ratio."""
    table = Table(box=SIMPLE_HEAD, title="training, side by side", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(LABELS[name], justify="right", style=STYLES[name])
    both = "stock" in results and "moesaic" in results
    if both:
        table.add_column("ratio", justify="right")

    def add(label: str, values: Mapping[str, float], unit: str, more_is_better: bool) -> None:
        row = [label, *(f"{values[name]:,.1f} {unit}" for name in results)]
        if both:
            ratio = values["moesaic"] / values["stock"] if more_is_better else values["stock"] / values["moesaic"]
            row.append(f"{ratio:.2f}x")
        table.add_row(*row)

    speeds = {name: result.tokens_per_second(tokens_per_step) for name, result in results.items()}
    add("speed", speeds, "tokens/s", more_is_better=True)
    add("a step (median)", {n: 1e3 * r.step_seconds for n, r in results.items()}, "ms", more_is_better=False)
    for key, label in (("loaded_bytes", "memory before training"), ("peak_bytes", "memory at its peak")):
        add(label, {n: r.facts[key] / 2**20 for n, r in results.items()}, "MiB", more_is_better=False)
    return table


def phases(rows: Sequence[Mapping[str, Any]], threads: int) -> Table:
    """Where the engine's time went; ranges around whole steps are left out. Phases of different experts overlap, so it
    is the threads' time that adds up; that of a phase fused with another one is apportioned by their flops."""
    table = Table(
        box=SIMPLE_HEAD,
        title=f"the engine's time by phase: thread time of {threads} threads, all steps and layers",
        caption="~ fused with another phase: time apportioned by flops",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    for column in ("calls", "ms", "share", "GFLOP/s\na thread"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [row for row in rows if row["category"] != "run"]
    parents = {row["category"] for row in rows}
    total = sum(row["thread_ms"] for row in rows if row["name"] not in parents) or 1.0
    headings: set[str] = {"layer"}
    for row in rows:
        name, category, milliseconds = row["name"], row["category"], row["thread_ms"]
        # forward and backward stand for themselves, backward_down is inside, GU3_lora_pass_gate inside that.
        depth = 0 if category in ("forward", "backward") else 1 if category.startswith("backward_") else 2
        if category not in headings:
            headings.add(category)
            table.add_row("  " * depth + category, style="bold")
        if name in parents:
            continue
        share = milliseconds / total
        table.add_row(
            "  " * (depth + 1) + name,
            f"{row['calls']:,}",
            f"{'~' if row['apportioned'] else ''}{milliseconds:,.1f}",
            f"{share:.1%}",
            f"{row['flops'] / milliseconds / 1e6:,.1f}" if row["flops"] and milliseconds else "",
            style="" if share >= 0.01 else "dim",
        )
    return table


def checks(found: Sequence[Check]) -> Panel:
    """The verdict."""
    lines = []
    for check in found:
        line = Text("✓ " if check.holds else "✗ ", "green" if check.holds else "bold red")
        line.append(f"{check.name}: ", "default")
        line.append(check.detail, "dim" if check.holds else "red")
        lines.append(line)
    good = all(check.holds for check in found)
    return Panel(Group(*lines), title="checks", title_align="left", border_style="green" if good else "red")
