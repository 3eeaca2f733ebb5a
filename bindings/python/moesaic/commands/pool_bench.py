"""`moesaic bench pool`: what the thread pool itself costs, beside an OpenMP region in the same run."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from moesaic.commands import options
from moesaic.commands.output import Tables, print_json, stdout_for_json

SCHEMA = 1
SOURCES = ("own", "openmp")

_DESCRIPTION = """\
Times the thread pool with both of its sources of threads, own ones (C++ programs) and the process's OpenMP team (beside
PyTorch), and a bare OpenMP region, in turn. empty job: one empty task a thread, jobs back to back. wake: every thread
asleep before, until all of them are in the job. edge: one task of a chain. tasks: 10,000 without edges, empty and of
1 us. steal: from the end of a task until a task that it made ready starts on another worker. idle: time of the whole
process from 2 ms after the last job on, in cores."""

# libgomp's threads wait actively for some milliseconds after a region: they must sleep before others are measured.
_SETTLE_SECONDS = 0.03
_ROUNDS = 5
_JOBS = 2000
_WAKES = 10
_CHAINS, _CHAIN_LENGTH = 4, 1000
_GRAPHS, _TASKS, _TASK_US = 2, 10_000, 1.0
_STEALS = 100
_IDLE_AFTER_SECONDS, _IDLE_SECONDS = 0.002, 0.1


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser("pool", help="what the thread pool costs", description=_DESCRIPTION)
    parser.add_argument("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    parser.add_argument("--rounds", type=options.positive, default=_ROUNDS, metavar="R", help=f"default {_ROUNDS}")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0."""
    import moesaic

    with stdout_for_json(args.json):
        document = measure(args.threads or moesaic.get_num_threads(), args.rounds, options.progress())
    if args.json:
        print_json(document)
    else:
        _show(document)
    return 0


def measure(threads: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the document that --json prints."""
    from moesaic import _core

    probes = {source: _core.PoolProbe(threads, source) for source in SOURCES}
    samples: dict[str, dict[str, list[float]]] = {source: {} for source in SOURCES}
    regions: list[float] = []

    def add(source: str, name: str, values: Sequence[float]) -> None:
        samples[source].setdefault(name, []).extend(values)

    for probe in probes.values():
        probe.empty_jobs(1)  # starts the threads
    for i in range(rounds):
        for source, probe in probes.items():
            progress(f"round {i + 1} of {rounds}: {source}")
            time.sleep(_SETTLE_SECONDS)
            add(source, "empty_job_us", probe.empty_jobs(_JOBS))
            add(source, "edge_us", probe.edges(_CHAINS, _CHAIN_LENGTH))
            add(source, "tasks_empty_us", probe.small_tasks(_GRAPHS, _TASKS, 0.0))
            add(source, "tasks_1us_us", probe.small_tasks(_GRAPHS, _TASKS, _TASK_US))
            add(source, "steal_us", probe.steals(_STEALS))
            add(source, "wake_us", probe.wakes(_WAKES, _SETTLE_SECONDS))
            probe.empty_jobs(1)
            add(source, "idle_cores", [_cores_in_use()])
        progress(f"round {i + 1} of {rounds}: OpenMP region")
        time.sleep(_SETTLE_SECONDS)
        regions.extend(_core.empty_openmp_regions(_JOBS, threads))
    return {
        "schema": SCHEMA,
        "host": {"cpu": _core.cpu_name(), "threads": threads},
        "tasks": _TASKS,
        "pool": {
            source: {name: percentiles(values) for name, values in measured.items() if values}
            for source, measured in samples.items()
        },
        "openmp_region": {"us": percentiles(regions), "wait_policy": os.environ.get("OMP_WAIT_POLICY")},
    }


def _cores_in_use() -> float:
    time.sleep(_IDLE_AFTER_SECONDS)
    busy, start = time.process_time(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    return (time.process_time() - busy) / (time.perf_counter() - start)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 (the nearest value, no interpolation), min and max of at least one value, and how many there are."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "min": ordered[0],
        "max": ordered[last],
        "count": len(ordered),
    }


_ROWS = (
    ("empty_job_us", "empty job, us"),
    ("wake_us", "wake from sleep, us"),
    ("edge_us", "edge, us"),
    ("tasks_empty_us", "10,000 empty tasks, us"),
    ("tasks_1us_us", "10,000 tasks of 1 us, us"),
    ("steal_us", "steal, us"),
    ("idle_cores", "in use when idle, cores"),
)


def _show(document: dict[str, Any]) -> None:
    host, region = document["host"], document["openmp_region"]
    rows = []
    for name, label in _ROWS:
        for source in SOURCES:
            values = document["pool"][source].get(name)
            cells = ["-"] * 4 if values is None else [f"{values[key]:,.3f}" for key in ("p50", "p99", "min", "max")]
            rows.append([label, source, *cells])
    cells = [f"{region['us'][key]:,.3f}" for key in ("p50", "p99", "min", "max")]
    rows.append(["empty OpenMP region, us", f"waits: {region['wait_policy'] or 'default'}", *cells])
    tables = Tables()
    tables.heading(f"{host['cpu']}, {host['threads']} thread{'s' if host['threads'] != 1 else ''}")
    tables.table("Thread pool", ["", "threads", "p50", "p99", "min", "max"], rows)
