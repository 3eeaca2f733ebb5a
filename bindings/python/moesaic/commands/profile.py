"""`moesaic profile`: runs a program under the profiler, shows what was recorded, compares two recordings."""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic.commands.options import add_json
from moesaic.commands.output import CommandError, Tables, UsageError, print_json
from moesaic.profiler import SUFFIXES
from moesaic.profiles import document as doc
from moesaic.profiles.compare import compare
from moesaic.profiles.idle import idle_between
from moesaic.profiles.system import USAGE

_DESCRIPTION = """\
Runs a program and reports where the engine's time went, as in `moesaic profile -o run.json -- python train.py`.
With `show run.json` it prints a recording again or turns it into another form, and with `diff a.json b.json` it says
which phase got slower, and by how much more than its noise. The exit code is the program's; 1 if there is nothing to
report."""
_MOST_IDLE = 8  # rows


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("profile", help="see where a program's time goes", description=_DESCRIPTION)
    parser.add_argument("-o", "--output", metavar="FILE", help="write it: .json, .html or .perfetto-trace")
    add_json(parser)
    parser.add_argument(
        "--nvtx", action="store_true", help="also load the NVTX collector, and print its summary of all ranges"
    )
    parser.add_argument("--layers", action="store_true", help="also each phase of each layer")
    parser.add_argument(
        "what", nargs=argparse.REMAINDER, metavar="-- COMMAND... | show FILE | diff FILE FILE", help="what to do"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Does what the command line says and returns the exit code."""
    what: list[str] = args.what
    if args.output is not None:
        _check_output(args.output)
    if what[:1] == ["--"]:
        if len(what) == 1:
            raise UsageError("profile: no command after --")
        return _run_program(args, what[1:])
    if what[:1] == ["show"] and len(what) >= 2:
        return _show(args, what[1:])
    if what[:1] == ["diff"] and len(what) >= 3:
        return _diff(args, what[1:])
    raise UsageError("profile: expected -- COMMAND..., show FILE or diff FILE FILE")


def _trailing(args: argparse.Namespace, rest: list[str], count: int) -> list[str]:
    """`rest` without the options that stand behind the files."""
    parser = argparse.ArgumentParser(prog="moesaic profile", add_help=False, exit_on_error=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", action="store_true")
    try:
        options, files = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise UsageError(f"profile: {error}") from error
    args.json = args.json or options.json
    args.layers = args.layers or options.layers
    if options.output is not None:
        _check_output(options.output)
        args.output = options.output
    if len(files) != count:
        raise UsageError(f"profile: expected {count} file{'s' if count > 1 else ''}, got {' '.join(files) or 'none'}")
    return files


def _load(path: str) -> doc.Document:
    try:
        return doc.load(path)
    except doc.ProfileError as error:
        raise CommandError(str(error)) from error


def _write(document: doc.Document, path: str) -> None:
    from moesaic.profiler import write

    if Path(path).suffix == ".perfetto-trace" and not document.get("trace"):
        raise CommandError(f"{path}: there is no time line in this profile")
    try:
        write(document, path)
    except OSError as error:
        raise CommandError(f"{path}: {error}") from error


def _check_output(path: str) -> None:
    if Path(path).suffix not in SUFFIXES:
        raise UsageError(f"-o {path}: expected a name that ends in .json, .html or .perfetto-trace")
    if not Path(path).absolute().parent.is_dir():  # before a program runs for hours
        raise CommandError(f"-o {path}: there is no such folder")


@contextlib.contextmanager
def _reading(*paths: str) -> Iterator[None]:
    """Whoever edits a profile may leave out or change what is read only here."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CommandError(f"{' or '.join(paths)}: not as schema {doc.SCHEMA} says ({what})") from error


def _show(args: argparse.Namespace, rest: list[str]) -> int:
    (path,) = _trailing(args, rest, 1)
    document = _load(path)
    with _reading(path):
        _report(document, args)
    return 0


def _report(document: dict[str, Any], args: argparse.Namespace) -> None:
    """To the file that was asked for, and to the terminal."""
    if args.output:
        _write(document, args.output)
    if args.json:
        print_json(document)
    else:
        print_document(document, layers=args.layers)


def _diff(args: argparse.Namespace, rest: list[str]) -> int:
    paths = _trailing(args, rest, 2)
    before, after = (_load(path) for path in paths)
    with _reading(*paths):
        rows = compare(before, after)
    if args.json:
        print_json({"schema": 1, "rows": rows})
        return 0
    tables = Tables()
    tables.table(
        "thread ms a step, median",
        ("phase", "before", "after", "change", "noise", ""),
        [
            (
                row["phase"],
                f"{row['before_ms']:.3f}",
                f"{row['after_ms']:.3f}",
                f"{row['change_ms']:+.3f} ms" + (f" ({row['change']:+.1%})" if row["change"] is not None else ""),
                f"± {row['noise_ms']:.3f} ms" if row["noise_ms"] is not None else "not known",
                row["verdict"],
            )
            for row in rows
        ],
    )
    if any(row["noise_ms"] is None for row in rows):
        tables.line("noise is known from three steady steps on in both profiles")
    return 0


def _run_program(args: argparse.Namespace, command: list[str]) -> int:
    from moesaic.profiles.system import COLLECTOR, library, preload

    if shutil.which(command[0]) is None:
        raise CommandError(f"{command[0]}: no such program")
    collector = library(COLLECTOR)
    if args.nvtx and collector is None:
        raise CommandError("--nvtx: this build has no collector (the NVTX headers were missing)")
    with tempfile.TemporaryDirectory(prefix="moesaic_profile_") as folder:
        recorded, ranges = Path(folder) / "run.json", Path(folder) / "ranges"
        environment = dict(os.environ, MOESAIC_PROFILE=str(recorded))
        preload(environment)
        if collector is not None:
            # Ranges of programs that use the engine without Python are seen through NVTX alone.
            if args.nvtx or not _is_python(command[0]):
                environment.setdefault("NVTX_INJECTION64_PATH", str(collector))
            environment["MOESAIC_NVTX_OUTPUT"] = str(ranges)
        began = time.perf_counter()
        code = _call(command, environment, stdout_is_ours=args.json)
        wall_ms = (time.perf_counter() - began) * 1e3
        document = None
        if recorded.exists() and recorded.stat().st_size > 0:
            document = _load_own(recorded)
        elif ranges.with_suffix(".csv").exists():
            document = _from_ranges(ranges.with_suffix(".csv"), wall_ms)
        else:
            killed = ", or it was killed before it could write" if code >= 128 else ""
            raise CommandError(f"{command[0]} ended with {code}, and nothing of the engine ran in it{killed}")
        if document is None or not document["phases"]:
            raise CommandError(f"{command[0]} ended with {code}, and nothing of the engine ran in it")
        _report(document, args)
        if args.nvtx and not args.json and ranges.with_suffix(".txt").exists():
            print("\n" + ranges.with_suffix(".txt").read_text(encoding="utf-8"), end="")
    return code


def _is_python(program: str) -> bool:
    return "python" in Path(shutil.which(program) or program).resolve().name


def _call(command: list[str], environment: dict[str, str], *, stdout_is_ours: bool) -> int:
    """The program's exit code; 128 + n where signal n ended it. Ctrl-C is the program's to answer."""
    try:
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr if stdout_is_ours else None)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror or error}") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _load_own(path: Path) -> doc.Document | None:
    """None: nothing of the engine ran."""
    try:
        return doc.load(path)
    except doc.EmptyRunError:
        return None
    except doc.ProfileError as error:
        raise CommandError(str(error).removeprefix(f"{path}: ")) from error


def _from_ranges(path: Path, wall_ms: float) -> doc.Document:
    """A document of what NVTX told: calls and times of the phases, and what the system counted of the whole program."""
    phases = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            domain, _, name = row["Range"].partition(":")
            if domain != "moesaic":
                continue
            phase = dict.fromkeys(
                ("min_thread_ms", "max_thread_ms", "span_ms", "threads", "gflops", "gbps", "fraction_of_ceiling")
            )
            work = {"first_ms": 0.0, "flops": 0.0, "bytes": 0.0, "apportioned": False}
            thread_ms = int(row["Total Time (ns)"]) / 1e6
            phases.append(
                {
                    "name": name,
                    "category": "nvtx",
                    "calls": int(row["Instances"]),
                    "thread_ms": thread_ms,
                    **phase,
                    **work,
                }
            )
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "schema": doc.SCHEMA,
        "cpu": "",
        "isa": "",
        "threads": 0,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "wall_ms": wall_ms,
        "ceiling": None,
        "phases": phases,
        "pool": {},
        "account": doc.account([]),
        "calls": {kind: doc.call_summary([]) for kind in ("forward", "backward")},
        "first_calls": {kind: doc.call_summary([]) for kind in ("forward", "backward")},
        "calls_dropped": 0,
        "layers": [],
        "steps": [],
        "system": {
            "context_switches": usage.ru_nvcsw + usage.ru_nivcsw,
            "voluntary_switches": usage.ru_nvcsw,
            "involuntary_switches": usage.ru_nivcsw,
            "page_faults": usage.ru_minflt + usage.ru_majflt,
            "major_faults": usage.ru_majflt,
        },
        "system_sources": dict.fromkeys(USAGE, "getrusage"),
        "system_refused": [],
        "trace": None,
    }


def _cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _rates(row: dict[str, Any]) -> tuple[str, str, str]:
    fraction = row["fraction_of_ceiling"]
    return _cell(row["gflops"], 1), _cell(row["gbps"], 1), _cell(None if fraction is None else 100 * fraction, 1)


def _depths(rows: list[dict[str, Any]]) -> list[int]:
    """How many phases hold each one."""
    depths: dict[str, int] = {}
    result = []
    for row in rows:
        result.append(depths.get(row["category"], -1) + 1)
        depths.setdefault(row["name"], result[-1])
    return result


def print_document(document: doc.Document, layers: bool = False) -> None:
    """The terminal's view of a profile; `layers`: with each phase of each layer."""
    tables = Tables()
    ceiling = document["ceiling"]
    limits = f"; ceilings {ceiling['compute_gflops']:.0f} GFLOP/s, {ceiling['read_gbps']:.1f} GB/s" if ceiling else ""
    host = f"{document['cpu']} {document['isa']}, {document['threads']} threads"
    if not document["cpu"]:  # a program that uses the engine without Python
        host = "ranges that the program gave to NVTX"
    tables.heading(f"{host}, wall clock {document['wall_ms']:.1f} ms{limits}")
    depths = _depths(document["phases"])
    tables.table(
        "phases (* apportioned by flops)",
        ("phase", "calls", "thread ms", "first calls", "min", "max", "span", "GFLOP/s", "GB/s", "% ceiling"),
        [
            (
                "  " * depth + row["name"] + (" *" if row["apportioned"] else ""),
                "-" if row["name"] in doc.SUMS else f"{row['calls']:,}",
                _cell(row["thread_ms"]),
                _cell(row["first_ms"]),
                _cell(row["min_thread_ms"]),
                _cell(row["max_thread_ms"]),
                _cell(row["span_ms"], 0),
                *_rates(row),
            )
            for row, depth in zip(document["phases"], depths, strict=True)
        ],
    )
    total = document["account"]["threads_x_wall_ms"]
    if total > 0:
        tables.table(
            "threads x wall clock of the calls",
            ("", "ms", "%"),
            [
                (name.removesuffix("_ms").replace("_", " "), _cell(value), f"{100 * value / total:.1f}")
                for name, value in document["account"].items()
            ],
        )
        pool = document["pool"]
        counts = (("joins", "runs"), ("tasks", "tasks"), ("steals", "steals"), ("parks", "parks"))
        tables.line(", ".join(f"{title} {pool[name]:.0f}" for title, name in counts))
        _print_idle(tables, document)
        tables.table(
            "calls",
            ("", "calls", "jobs", "joins", "median ms", "min", "max", "outside the engine, us", "min"),
            [
                (
                    f"{'first ' if group == 'first_calls' else ''}{kind}",
                    *(f"{row[key]:,}" for key in ("calls", "jobs", "joins")),
                    *(_cell(row["wall_ms"][key]) for key in ("median", "min", "max")),
                    *(_cell(row["python_us"][key], 1) for key in ("median", "min")),
                )
                for group in ("first_calls", "calls")
                for kind, row in document[group].items()
                if row["calls"] > 0
            ],
        )
    if document["calls_dropped"]:
        tables.line(f"{document['calls_dropped']:,} more calls are in the phases alone")
    _print_layers(tables, document, layers)
    steady = [step for step in document["steps"] if not step["first"]]
    rows = []
    for name, value in document["system"].items():
        steps = [step["system"][name] for step in steady if step["system"].get(name) is not None]
        source = document["system_sources"].get(name) or "nothing counts it here"
        middle = _cell(statistics.median(steps) if steps else None, 0)
        rows.append((name.replace("_", " "), _cell(value, 0), middle, source))
    tables.table("operating system", ("", "whole run", "a steady step, median", "counted by"), rows)


def _print_idle(tables: Tables, document: doc.Document) -> None:
    """What threads without work waited for, while a time line was recorded."""
    rows = idle_between(document["trace"], document["threads"]) if document.get("trace") else []
    if not rows:
        return
    tables.table(
        "without work in the recorded time line, by the phases around it",
        ("after", "before", "thread ms", "times", "longest"),
        [
            (row["after"], row["before"], _cell(row["thread_ms"], 3), f"{row['times']:,}", _cell(row["longest_ms"], 3))
            for row in rows[:_MOST_IDLE]
        ],
    )


def _print_layers(tables: Tables, document: doc.Document, phases: bool) -> None:
    """A row for each layer and direction, and for each of its phases where those are wanted; nothing of a run with one
    layer, whose calls stand above."""
    if len({row["layer"] for row in document["layers"]}) < 2:
        return
    rows = []
    for row in document["layers"]:
        longest = max(row["phases"], key=lambda phase: phase["thread_ms"], default=None)
        rows.append(
            (
                str(row["layer"]),
                row["kind"],
                str(row["calls"]),
                _cell(row["first_ms"]),
                *(_cell(row["wall_ms"][key]) for key in ("median", "max")),
                "-" if row["busy_fraction"] is None else f"{100 * row['busy_fraction']:.0f}%",
                "-" if longest is None else f"{longest['name']}, {longest['thread_ms']:,.2f}",
            )
        )
    title = ("layer", "", "calls", "first ms", "median ms", "max", "busy", "longest phase, thread ms")
    tables.table("layers, without their first calls", title, rows)
    if not phases:
        return
    tables.table(
        "phases of layers, without their first calls",
        ("layer", "phase", "calls", "thread ms", "first call", "GFLOP/s", "GB/s", "% ceiling"),
        [
            (
                str(row["layer"]),
                phase["name"],
                f"{phase['calls']:,}",
                _cell(phase["thread_ms"]),
                _cell(phase["first_ms"]),
                *_rates(phase),
            )
            for row in document["layers"]
            for phase in row["phases"]
        ],
    )
