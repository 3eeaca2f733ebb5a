"""`moesaic bench profiling`: what it costs to be watched."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moesaic.commands import options
from moesaic.commands.output import CommandError, Tables, UsageError, print_json, stdout_for_json

SCHEMA = 2

#: How a step is watched, and what its time over that of an unwatched one should stay below. NVTX ranges are always
#: compiled in: an unwatched step has them without a tool, and `timers_and_nvtx` counts what that costs as well.
BARS = {"timers": 0.005, "timers_and_nvtx": 0.01, "collector": 0.03}
_WAYS = ("off", "timers", "collector")
_BLOCKS, _LOOPS = 500, 5
_EVICTED = 16 << 20  # more than a core's own caches

_DESCRIPTION = """\
Times a forward and a backward of one experts layer (rank-16 LoRA) in turn: unwatched, with timers on (NVTX ranges are
compiled in, and no tool is there), and with timers on and the NVTX collector recording every range.

ranges x cost: ranges and tasks of a step, times what each takes in the same process when the caches hold something
else, over the CPU time of the unwatched step. measured: the median over rounds of the step's time (wall clock; CPU time
of all threads) over that of the unwatched one in the same round, less one; its noise is three standard errors of that
median. The exit code is 1 where the first, or the second by more than its noise, is over a bar."""

_PRESET, _TOKENS, _REPS, _WARMUP = "qwen3-30b-a3b", 1024, 30, 3


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser("profiling", help="what profiling costs", description=_DESCRIPTION)
    parser.add_argument("--preset", default=_PRESET, metavar="NAME", help=f"a known layer (default {_PRESET})")
    parser.add_argument("--experts", type=options.positive, metavar="E", help="instead of the preset's")
    parser.add_argument("--tokens", type=options.positive, default=_TOKENS, metavar="T", help=f"default {_TOKENS}")
    parser.add_argument("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    parser.add_argument("--reps", type=options.positive, default=_REPS, metavar="R", help=f"rounds (default {_REPS})")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 where a bar is missed.

    Raises:
        UsageError: there is no such preset.
        CommandError: this build has no collector, or the measurement failed.
    """
    from moesaic.commands.layer_case import PRESETS
    from moesaic.profiles.system import COLLECTOR, library

    if args.preset not in PRESETS:
        raise UsageError(f"argument --preset: '{args.preset}' is none of {', '.join(PRESETS)}")
    collector = library(COLLECTOR)
    if collector is None:
        raise CommandError("this build has no collector (the NVTX headers were missing)")
    # NVTX looks for a tool once in a process: so in one of its own, which leaves its reports in a folder that goes.
    with tempfile.TemporaryDirectory(prefix="moesaic_bench_") as folder:
        environment = {
            **os.environ,
            "NVTX_INJECTION64_PATH": str(collector),
            "MOESAIC_NVTX_OUTPUT": str(Path(folder) / "ranges"),
        }
        wanted = {name: getattr(args, name) for name in ("preset", "experts", "tokens", "threads", "reps")}
        result = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(wanted)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if result.returncode != 0:
        raise CommandError(f"the measurement ended with exit code {result.returncode}")
    document = json.loads(result.stdout)
    if args.json:
        print_json(document)
    else:
        _show(document)
    return 0 if all(row["met"] for row in document["overhead"].values()) else 1


def measure(wanted: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the document that --json prints, in a process with the collector."""
    import gc

    import torch

    import moesaic
    from moesaic import _core
    from moesaic.commands.layer_case import PRESETS, LayerShape, Routing
    from moesaic.commands.layer_data import make_adapter, make_batch, make_weights
    from moesaic.commands.variants import Engine, timed
    from moesaic.profiles.document import SUMS, spread

    if not _core.mute_nvtx(True):
        raise RuntimeError("the collector was not loaded")
    if wanted["threads"] is not None:
        moesaic.set_num_threads(wanted["threads"])
    threads = moesaic.get_num_threads()
    torch.set_num_threads(threads)
    preset = PRESETS[wanted["preset"]]
    experts = wanted["experts"] or preset.experts
    shape = LayerShape(experts, preset.hidden, preset.intermediate, min(preset.top_k, experts), rank=16)
    progress("generating and packing the weights")
    generator = torch.Generator().manual_seed(0)
    weights = make_weights(shape, generator, full_copy=False)
    layer = moesaic.ExpertsLayer(weights.gate_up, weights.down)
    adapter = make_adapter(shape, generator)
    assert adapter is not None  # the rank is not 0
    engine = Engine(make_batch(shape, wanted["tokens"], Routing("uniform"), generator), layer, [adapter])

    def watched(way: str, what: Callable[[], float]) -> float:
        _core.mute_nvtx(way != "collector")
        _core.set_timers_enabled(way != "off")
        try:
            return what()
        finally:
            _core.set_timers_enabled(False)
            _core.mute_nvtx(True)

    def step(way: str) -> tuple[float, float]:
        before = time.process_time()
        wall_ms = watched(way, lambda: timed(engine, save=True).total_ms)
        return wall_ms, (time.process_time() - before) * 1e3

    for way in _WAYS * _WARMUP:
        step(way)
    _core.reset_timers()
    step("timers")
    ranges = sum(row["calls"] for row in _core.timers_snapshot() if row["name"] not in SUMS)
    tasks = _core.pool_snapshot()["tasks"]

    def cost(way: str, evicted: int) -> float:
        return statistics.median(watched(way, lambda: _core.time_ranges(_BLOCKS, evicted)) for _ in range(_LOOPS))

    warm, costs = ({way: cost(way, evicted) for way in _WAYS} for evicted in (0, _EVICTED))
    clock_ns = min(_core.time_clock(_BLOCKS) for _ in range(_LOOPS))
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    gc.collect()
    gc.disable()
    for i in range(wanted["reps"]):
        progress(f"round {i + 1} of {wanted['reps']}")
        turn = i % len(_WAYS)  # nobody is always first
        for way in _WAYS[turn:] + _WAYS[:turn]:
            times[way].append(step(way))
    wall, cpu = ({way: [pair[i] for pair in pairs] for way, pairs in times.items()} for i in (0, 1))
    step_ns = 1e6 * statistics.median(cpu["off"])
    of_pool = 2 * tasks * clock_ns
    added = {
        "timers": ranges * (costs["timers"] - costs["off"]) + of_pool,
        "timers_and_nvtx": ranges * costs["timers"] + of_pool,
        "collector": ranges * costs["collector"] + of_pool,
    }
    overheads = {}
    for name, bar in BARS.items():
        way = "collector" if name == "collector" else "timers"
        measured = {"wall": _overhead(wall[way], wall["off"]), "cpu": _overhead(cpu[way], cpu["off"])}
        estimate = added[name] / step_ns
        over = all(row["value"] - row["noise"] > bar for row in measured.values())
        overheads[name] = {"estimate": estimate, "measured": measured, "bar": bar, "met": estimate <= bar and not over}
    return {
        "schema": SCHEMA,
        "host": {"cpu": _core.cpu_name(), "isa": moesaic.isa(), "threads": threads},
        "preset": wanted["preset"],
        "experts": experts,
        "tokens": wanted["tokens"],
        "ranges_a_step": ranges,
        "tasks_a_step": tasks,
        "range_ns": costs,
        "range_in_cache_ns": warm,
        "clock_ns": clock_ns,
        "step_ms": {way: spread(values) for way, values in wall.items()},
        "step_cpu_ms": {way: spread(values) for way, values in cpu.items()},
        "overhead": overheads,
    }


def _overhead(watched: Sequence[float], alone: Sequence[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(watched, alone, strict=True)]
    middle = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return {"value": middle - 1.0, "noise": 3 * 1.2533 * deviation / math.sqrt(len(ratios))}


def _show(document: dict[str, Any]) -> None:
    host = document["host"]
    tables = Tables()
    tables.heading(f"{host['cpu']}, {host['isa']}, {host['threads']} threads")
    tables.table(
        f"{document['preset']}, {document['experts']} experts, {document['tokens']} tokens: "
        f"{document['ranges_a_step']:,} ranges and {document['tasks_a_step']:,} tasks a step",
        ["", "a range, ns", "in cache", "step, ms: min", "median", "max", "CPU time, ms: median"],
        [
            [
                way,
                *(f"{document[name][way]:.1f}" for name in ("range_ns", "range_in_cache_ns")),
                *(f"{values[key]:.1f}" for key in ("min", "median", "max")),
                f"{document['step_cpu_ms'][way]['median']:.1f}",
            ]
            for way, values in document["step_ms"].items()
        ],
    )
    tables.table(
        "overhead",
        ["", "ranges x cost", "measured: wall clock", "CPU time", "bar", ""],
        [
            [
                name.replace("_", " "),
                f"{row['estimate']:.2%}",
                *(f"{100 * way['value']:+.2f}% ± {100 * way['noise']:.2f}%" for way in row["measured"].values()),
                f"{row['bar']:.1%}",
                "met" if row["met"] else "missed",
            ]
            for name, row in document["overhead"].items()
        ],
    )


if __name__ == "__main__":
    with stdout_for_json(True):
        _document = measure(json.loads(sys.argv[1]), options.progress())
    print_json(_document)
