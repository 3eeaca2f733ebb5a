"""What a training step is made of, experts and everything else, from the events of torch.profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

__all__ = ["ATTENTION", "PARTS", "attention_modules", "step_parts"]

#: The parts of a step; what belongs to none of the others is "other".
PARTS = ("experts", "attention", "optimizer", "data_loading", "other")

#: The name of the range around the forward of an attention module.
ATTENTION = "moesaic::attention"

_NODE = "autograd::engine::evaluate_function: "
#: What the name of an event begins with, and the part that it belongs to with all that it calls.
_NAMES = (
    (ATTENTION, "attention"),
    ("aten::scaled_dot_product", "attention"),
    ("_Attention", "attention"),
    ("_MoeExperts", "experts"),
    (_NODE + "_MoeExperts", "experts"),
    ("Optimizer.", "optimizer"),
    ("enumerate(DataLoader)", "data_loading"),
)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model, by the names of their classes: projections, rotation and product."""
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def step_parts(events: Iterable[Any], wall_ms: float) -> dict[str, float]:
    """Milliseconds of each part of one step, which together are its wall clock.

    Only the thread on which the step runs counts, and of each event what its children do not account for, so nothing
    counts twice. A node of the backward belongs to the part in whose forward it was made. Operations that activation
    checkpointing repeats inside backward are those of the forward again, and are told apart in the same way.

    Args:
        events: ``torch.profiler.profile(...).events()`` of the step.
        wall_ms: its duration; what no part accounts for is "other".
    """
    ordered = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    main = _main_thread(ordered)
    parts: dict[int, str | None] = {}
    made_in: dict[int, str] = {}
    total = dict.fromkeys(PARTS, 0.0)
    for event in ordered:
        if event.thread != main or event.is_async:
            continue
        part = _part_of(event, parts, made_in)
        parts[id(event)] = part
        if event.sequence_nr >= 0 and not event.name.startswith(_NODE):
            # Composite operations carry the number of the node that the innermost one makes, and come before it.
            made_in[event.sequence_nr] = part or "other"
        total[part or "other"] += event.self_cpu_time_total / 1e3
    total["other"] = max(0.0, wall_ms - sum(ms for part, ms in total.items() if part != "other"))
    return total


def _main_thread(events: Sequence[Any]) -> int | None:
    """The thread with the most time in events that no other event contains."""
    times: dict[int, float] = {}
    for event in events:
        if event.cpu_parent is None and not event.is_async:
            times[event.thread] = times.get(event.thread, 0.0) + event.cpu_time_total
    return max(times, key=lambda thread: times[thread], default=None)


def _part_of(event: Any, parts: dict[int, str | None], made_in: dict[int, str]) -> str | None:
    for prefix, part in _NAMES:
        if event.name.startswith(prefix):
            return part
    if event.name.startswith(_NODE):
        return made_in.get(event.sequence_nr)
    return parts.get(id(event.cpu_parent)) if event.cpu_parent is not None else None
