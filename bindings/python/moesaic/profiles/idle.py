"""Where threads have no task: between which phases of a recorded time line."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from moesaic.profiles.document import Document, is_leaf

__all__ = ["idle_between"]

_CALLS = ("forward", "backward")
_SAME_MOMENT = 5e-4  # microseconds: half of what clocks tell apart


def idle_between(trace: Document) -> list[dict[str, Any]]:
    """Idle time of the workers inside of a layer's calls, by the phases that the thread was in before and after it.

    Where there is none in the call, that side is "begin of forward" or "end of backward": idle time between `down_gemm`
    and "end of forward" is that of threads that waited for the last ones.

    Args:
        trace: the document's (`document.trace_of`).

    Returns:
        ``{"after", "before", "thread_ms", "times", "longest_ms"}`` for each pair, most time first.
    """
    calls = sorted(
        (begin, begin + duration, trace["ranges"][what])
        for thread in trace["threads"]
        for kind, begin, duration, what, *_ in thread["events"]
        if trace["kinds"][kind] == "range" and trace["ranges"][what] in _CALLS
    )
    found: dict[tuple[str, str], list[float]] = {}
    for thread in trace["threads"]:
        names, begins = _phases(trace, thread["events"])
        for kind, begin, duration, *_ in thread["events"]:
            call = bisect_right(calls, begin, key=lambda row: row[0]) - 1
            if trace["kinds"][kind] != "idle" or call < 0 or calls[call][1] <= begin:
                continue
            call_begin, call_end, name = calls[call]
            after, before = f"begin of {name}", f"end of {name}"
            place = bisect_right(begins, begin)
            if place > 0 and begins[place - 1] >= call_begin:
                after = names[place - 1]
            if place < len(begins) and begins[place] < call_end:
                before = names[place]
            found.setdefault((after, before), []).append(duration)
    rows = [
        {
            "after": after,
            "before": before,
            "thread_ms": sum(times) / 1e3,
            "times": len(times),
            "longest_ms": max(times) / 1e3,
        }
        for (after, before), times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["thread_ms"])


def _phases(trace: Document, events: list[list[Any]]) -> tuple[list[str], list[float]]:
    """Names and begins of a thread's phases. One that is fused with another follows it at once, and is left out."""
    names: list[str] = []
    begins: list[float] = []
    last_end = 0.0
    for kind, begin, duration, what, *_ in events:
        if trace["kinds"][kind] != "range" or not is_leaf(trace["ranges"][what]):
            continue
        if not names or abs(begin - last_end) > _SAME_MOMENT:
            names.append(trace["ranges"][what])
            begins.append(begin)
        last_end = begin + duration
    return names, begins
