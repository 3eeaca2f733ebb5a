"""The document of a profile: what is in it, how it is made from what the engine counted, how it is read back.

docs/PROFILING.md describes every field. Times are milliseconds, unless the name says otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moesaic.profiles.archive import PROFILE

if TYPE_CHECKING:
    from moesaic._core import CallRecord, PoolTotals, RangeStats, ThreadTrace

__all__ = [
    "SCHEMA",
    "Document",
    "EmptyRunError",
    "ProfileError",
    "account",
    "by_layer",
    "call_summary",
    "first_ns",
    "is_leaf",
    "key_of",
    "load",
    "pool_ms",
    "rates",
    "trace_of",
]

SCHEMA = 3
Document = dict[str, Any]

#: Ranges around calls of the engine and whatever else a program does, in benchmarks and trainers.
OUTER = frozenset({"full_train_loop", "forward_only", "backward_only"})
#: Ranges that only hold others; their time is that of their steps.
PARENTS = OUTER | frozenset(
    {"forward", "backward", "backward_down", "backward_activation", "backward_gate_up", "GU3_lora_pass_gate"}
    | {"GU3_lora_pass_up", "sample"}
)
#: Those of them that no timer watches: their times are those of their steps, added up.
SUMS = PARENTS - OUTER - {"forward", "backward", "sample"}
#: Copies between the host and a GPU: their time is the device's, not a thread's.
TRANSFERS = frozenset({"device_to_host", "host_to_device"})
EVENT_KINDS = ("range", "idle", "steal", "queue")
IDLE_KINDS = ("stealing", "waiting", "parked")


class ProfileError(Exception):
    """A profile that cannot be read, in one line."""


class EmptyRunError(ProfileError):
    """One of a run in which the engine did nothing."""


def key_of(row: Mapping[str, Any] | RangeStats) -> str:
    """A phase's name where it stands alone: the steps of GU3 have the same names for gate and for up."""
    return f"{row['category']}/{row['name']}" if row["category"].startswith("GU3_") else row["name"]


def is_leaf(name: str) -> bool:
    """Whether a phase's thread time counts once when phases are added up."""
    return name not in PARENTS and name not in TRANSFERS


def rates(row: Mapping[str, Any], threads: int, ceiling: Mapping[str, float] | None) -> dict[str, float | None]:
    """GFLOP/s and GB/s of a phase on all threads together, as if all of them did nothing else, and the fraction of the
    ceiling: the larger of the two. Of copies to and from a GPU, their own GB/s."""
    if row["name"] in TRANSFERS:
        threads, ceiling = 1, None
    seconds = row["thread_ms"] / 1e3 / max(threads, 1)
    if seconds <= 0:
        return {"gflops": None, "gbps": None, "fraction_of_ceiling": None}
    gflops, gbps = row["flops"] / seconds / 1e9, row["bytes"] / seconds / 1e9
    fraction = None
    if ceiling is not None and (gflops > 0 or gbps > 0):
        fraction = max(gflops / ceiling["compute_gflops"], gbps / ceiling["read_gbps"])
    return {"gflops": gflops or None, "gbps": gbps or None, "fraction_of_ceiling": fraction}


def pool_ms(pool: PoolTotals) -> dict[str, float]:
    """Sums of the pool; counts as they are, times in ms."""
    values = cast("dict[str, int]", pool)
    return {
        name.replace("_ns", "_ms"): value / 1e6 if name.endswith("_ns") else value for name, value in values.items()
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """min, median, mean, std (population) and max; zeros for no values."""
    if not values:
        return {"min": 0.0, "median": 0.0, "mean": 0.0, "std": 0.0, "max": 0.0}
    return {
        "min": min(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "max": max(values),
    }


def python_ns(call: CallRecord) -> int:
    """Time of a call outside the engine."""
    return (call["engine_begin_ns"] - call["begin_ns"]) + (call["end_ns"] - call["engine_end_ns"])


def call_summary(calls: Sequence[CallRecord]) -> dict[str, Any]:
    """Calls of one kind, without the first of each layer; how long they took, and how long outside the engine."""
    return {
        "calls": len(calls),
        "tokens": sum(call["tokens"] for call in calls),
        "jobs": sum(call["jobs"] for call in calls),
        "joins": sum(call["pool"]["runs"] for call in calls),
        "wall_ms": spread([(call["end_ns"] - call["begin_ns"]) / 1e6 for call in calls]),
        "python_us": spread([python_ns(call) / 1e3 for call in calls]),
    }


def account(calls: Iterable[CallRecord]) -> dict[str, float]:
    """Where threads x wall clock of the calls went. The parts add up to `threads_x_wall_ms`.

    python: outside the engine, times all threads. serial: the caller prepares alone; serial_idle: the others meanwhile.
    busy: in tasks. stealing, waiting, parked: idle inside the pool's runs.
    """
    total = dict.fromkeys(
        ("threads_x_wall", "python", "serial", "serial_idle", "busy", "stealing", "waiting", "parked"), 0
    )
    for call in calls:
        threads, pool = call["threads"], call["pool"]
        serial = call["engine_end_ns"] - call["engine_begin_ns"] - pool["wall_ns"]
        total["threads_x_wall"] += threads * (call["end_ns"] - call["begin_ns"])
        total["python"] += threads * python_ns(call)
        total["serial"] += serial
        total["serial_idle"] += (threads - 1) * serial
        for name in ("busy", "stealing", "waiting", "parked"):
            total[name] += pool[f"{name}_ns"]  # type: ignore[literal-required]
    return {f"{name}_ms": value / 1e6 for name, value in total.items()}


#: Of one range in one layer, its first calls apart: calls, thread_ns, flops, bytes. Keys: layer, first, place of range.
LayerSums = Mapping[tuple[int, bool, int], tuple[int, int, float, float]]


def first_ns(sums: LayerSums, ranges: Sequence[RangeStats]) -> list[int]:
    """Thread time of each range inside the first call of a layer."""
    places = {row["name"]: place for place, row in enumerate(ranges) if row["name"] in SUMS}
    total = [0] * len(ranges)
    for (_, first, place), (_, thread_ns, _, _) in sums.items():
        if first:
            total[place] += thread_ns
    for place in reversed(range(len(ranges))):  # a sum comes before what it holds
        if ranges[place]["category"] in places:
            total[places[ranges[place]["category"]]] += total[place]
    return total


def by_layer(calls: Sequence[CallRecord], sums: LayerSums, ranges: Sequence[RangeStats]) -> list[dict[str, Any]]:
    """One row for each layer and kind, the first call of each apart; rates of its phases are for `rates` to add."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for call in calls:
        row = rows.setdefault(
            (call["layer"], call["kind"]),
            {"first_ms": None, "times": [], "busy": 0, "lanes": 0, "phases": {}},
        )
        wall = (call["end_ns"] - call["begin_ns"]) / 1e6
        if call["first"]:
            row["first_ms"] = wall
            continue
        row["times"].append(wall)
        row["busy"] += call["pool"]["busy_ns"]
        row["lanes"] += call["pool"]["lane_ns"]
    for (layer, first, place), (count, thread_ns, flops, size) in sums.items():
        kind = "forward" if ranges[place]["category"] == "forward" else "backward"  # and what that holds
        if (layer, kind) not in rows or not is_leaf(ranges[place]["name"]):
            continue
        phase = rows[layer, kind]["phases"].setdefault(
            place,
            {"name": key_of(ranges[place]), "calls": 0, "thread_ms": 0.0, "first_ms": 0.0, "flops": 0.0, "bytes": 0.0},
        )
        if first:
            phase["first_ms"] += thread_ns / 1e6
        else:
            phase.update(calls=count, thread_ms=thread_ns / 1e6, flops=flops, bytes=size)
    return [
        {
            "layer": layer,
            "kind": kind,
            "first_ms": row["first_ms"],
            "calls": len(row["times"]),
            "wall_ms": spread(row["times"]),
            "busy_fraction": row["busy"] / row["lanes"] if row["lanes"] else None,
            "phases": [phase for _, phase in sorted(row["phases"].items())],
        }
        for (layer, kind), row in sorted(rows.items())
    ]


def trace_of(threads: Sequence[ThreadTrace], ranges: Sequence[RangeStats], origin_ns: int) -> Document:
    """Events for the document: ``[kind, begin_us, duration_us, what, expert, rows, flops, bytes]``, times from
    `origin_ns`, `what` an index into `ranges` or `idle_kinds`, a lane (steal) or a length (queue)."""
    return {
        "ranges": [key_of(row) for row in ranges],
        "categories": [row["category"] for row in ranges],
        "kinds": list(EVENT_KINDS),
        "idle_kinds": list(IDLE_KINDS),
        "threads": [
            {
                "os_id": thread["os_id"],
                "lane": thread["lane"],
                "name": thread["name"],
                "dropped": thread["dropped"],
                "events": [
                    [kind, (begin - origin_ns) / 1e3, (end - begin) / 1e3, what, expert, rows, flops, size]
                    for kind, begin, end, what, expert, rows, flops, size in sorted(
                        thread["events"], key=lambda event: (event[1], -event[2])
                    )
                ],
            }
            for thread in sorted(threads, key=lambda thread: (thread["lane"] < 0, thread["lane"], thread["os_id"]))
            if thread["events"]
        ],
    }


_FIELDS: dict[str, Any] = {
    "schema": int,
    "wall_ms": (int, float),
    "threads": int,
    "phases": list,
    "steps": list,
    "account": dict,
}


def load(path: str | os.PathLike[str]) -> Document:
    """Reads a profile.

    Raises:
        ProfileError: there is no such file, it is no complete profile, or of another schema.
        EmptyRunError: it is of a run in which the engine did nothing.
    """
    path = Path(path)
    if path.is_dir():  # an archive of a run (archive.py)
        path = path / PROFILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: not a complete JSON document ({error})") from error
    if not isinstance(document, dict) or "schema" not in document or "phases" not in document:
        raise ProfileError(f"{path}: JSON, but not a profile")
    if document["schema"] != SCHEMA:
        raise ProfileError(f"{path}: a profile of schema {document['schema']!r}; this version reads schema {SCHEMA}")
    for name, kind in _FIELDS.items():
        if not isinstance(document.get(name), kind):
            raise ProfileError(f"{path}: a profile without a usable '{name}'")
    if not document["phases"]:
        raise EmptyRunError(f"{path}: an empty run: no phase of the engine was executed in it")
    return document
