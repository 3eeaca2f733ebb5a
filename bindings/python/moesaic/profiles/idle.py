"""Where threads have no work: between which phases of a recorded time line."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import Any

from moesaic.profiles.document import Document, is_leaf

__all__ = ["idle_between"]

_CALLS = ("forward", "backward")
#: Microseconds. What is shorter is the way from one task to the next.
_SHORTEST = 2.0
#: Half of what clocks tell apart.
_SAME_MOMENT = 5e-4


def idle_between(trace: Document, threads: int) -> list[dict[str, Any]]:
    """Time of the threads outside of any phase while a layer of experts is called, by the phases around it.

    Where there is none in the call, that side is "begin of forward" or "end of backward": time between `down_gemm` and
    "end of forward" is that of threads that waited for the last ones. Gaps from two microseconds on. Calls whose events
    did not all fit the recording are left out.

    Args:
        trace: the document's (`document.trace_of`).
        threads: of the engine; those that recorded nothing had no work at all.

    Returns:
        ``{"after", "before", "thread_ms", "times", "longest_ms"}`` for each pair, most time first.
    """
    workers = [thread for thread in trace["threads"] if thread["lane"] >= 0]
    complete = min((_end(thread["events"]) for thread in workers if thread["dropped"]), default=float("inf"))
    calls = [
        (begin, begin + duration, trace["ranges"][what])
        for thread in trace["threads"]
        for kind, begin, duration, what, *_ in thread["events"]
        if trace["kinds"][kind] == "range" and trace["ranges"][what] in _CALLS and begin + duration <= complete
    ]
    most = max((thread["lane"] + 1 for thread in workers), default=0)  # there may have been more threads before
    lanes: list[list[tuple[float, float, str]]] = [[] for _ in range(max(threads, most))]
    for thread in workers:
        lanes[thread["lane"]] += _phases(trace, thread["events"])
    found: dict[tuple[str, str], list[float]] = {}
    for lane in lanes:
        lane.sort()  # each thread that calls has a team of its own
        for begin, end, name in calls:
            inside = lane[bisect_left(lane, (begin,)) : bisect_left(lane, (end,))]
            around = [(begin, begin, f"begin of {name}"), *inside, (end, end, f"end of {name}")]
            for (_, from_us, after), (to_us, _, before) in itertools.pairwise(around):
                if to_us - from_us >= _SHORTEST:
                    found.setdefault((after, before), []).append(to_us - from_us)
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


def _end(events: list[list[Any]]) -> float:
    return max((begin + duration for _, begin, duration, *_ in events), default=0.0)


def _phases(trace: Document, events: list[list[Any]]) -> list[tuple[float, float, str]]:
    """Begin, end and name of a thread's phases. One fused with another follows it at once, and is part of it."""
    phases: list[tuple[float, float, str]] = []
    for kind, begin, duration, what, *_ in events:
        if trace["kinds"][kind] != "range" or not is_leaf(trace["ranges"][what]):
            continue
        if phases and abs(begin - phases[-1][1]) < _SAME_MOMENT:
            first, _, name = phases.pop()
            phases.append((first, begin + duration, name))
        else:
            phases.append((begin, begin + duration, trace["ranges"][what]))
    return phases
