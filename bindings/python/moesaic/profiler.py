"""Where the engine's time goes, phase by phase."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

from torch.optim.optimizer import register_optimizer_step_post_hook

from moesaic import _core, staging
from moesaic.profiles import document as doc
from moesaic.profiles.system import SystemCounter, difference

__all__ = ["Phase", "Profile", "profile"]


class Phase(TypedDict):
    """One row of the phase table. Phases of different experts overlap: thread times may be added up, spans not."""

    name: str
    category: str
    calls: int
    thread_ms: float
    """Time inside, summed over threads."""
    first_ms: float
    """Its part in the first calls of layers, which take memory."""
    min_thread_ms: float | None
    """The least over the threads that entered it; None in a profile inside another one, where it is not known."""
    max_thread_ms: float | None
    """The most, likewise."""
    span_ms: float | None
    """From the first beginning to the last end, likewise."""
    threads: int | None
    """Threads that entered it, likewise."""
    flops: float
    bytes: float
    apportioned: bool
    """Part of the time was measured together with a phase that is fused with this one, and divided by flops."""
    gflops: float | None
    """Rate on all threads together, as if they did nothing else; None where no work is counted."""
    gbps: float | None
    fraction_of_ceiling: float | None
    """The larger of both, over what the host can do; None while that has not been measured."""


class Profile:
    """A context manager that measures what the engine does inside it, on all threads of the process.

    Args:
        trace: also record single events: a time line of the second step (of the first, where there is one alone).
        system: let the kernel count sleeps, futex waits, opens, maps and migrations, as far as it permits. Leaving the
            context then takes up to half a second.

    A step ends with each `step()` of a torch optimizer, and with `Profile.step`.
    """

    def __init__(self, trace: bool = False, system: bool = False) -> None:
        self._asks_kernel = system
        self._trace = trace
        self._nested = False
        self._base: dict[tuple[str, str], _core.RangeStats] = {}
        self._base_layers: dict[tuple[int, bool, int], tuple[int, int, float, float]] = {}
        self._document: doc.Document | None = None
        self._ceiling: dict[str, float] | None = None
        self._steps: list[dict[str, Any]] = []
        self._mark: dict[str, Any] = {}
        self._first_mark: dict[str, Any] = {}
        self._kept_trace: list[_core.ThreadTrace] = []
        self._traced_ms: tuple[float, float] | None = None
        self._hook: Callable[[], None] | None = None
        self._system: SystemCounter | None = None
        self._began_ns = 0

    def __enter__(self) -> Profile:
        self._nested = _core.timers_enabled()
        self._document, self._steps, self._base, self._base_layers = None, [], {}, {}
        if self._nested:
            # The outer profile goes on counting, so what is there already is taken off at the end.
            self._base = {(row["name"], row["category"]): row for row in _core.timers_snapshot()}
            self._base_layers = {row[:3]: row[3:] for row in _core.layers_snapshot()}
        else:
            _core.reset_timers()
            _core.set_timers_enabled(True)
            if self._trace:
                _core.start_trace()
        self._hook = register_optimizer_step_post_hook(lambda *_: self.step()).remove
        self._system = SystemCounter(self._asks_kernel)
        self._began_ns = _core.clock_ns()
        self._mark = self._counts()
        self._first_mark = self._mark
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end = self._counts()
        if self._hook is not None:
            self._hook()
            self._hook = None
        if self._system is not None:
            self._system.close()
        if not self._nested:
            _core.set_timers_enabled(False)
            if self._trace:
                _core.stop_trace()
        self._document = self._make(end)

    def step(self) -> None:
        """Ends a step: what follows belongs to the next one. The first step is kept apart in all reports."""
        now = self._counts()
        before = self._mark
        phases = {name: ms - before["phases"].get(name, 0.0) for name, ms in now["phases"].items()}
        self._steps.append(
            {
                "first": not self._steps,
                "begin_ms": (before["ns"] - self._began_ns) / 1e6,
                "wall_ms": (now["ns"] - before["ns"]) / 1e6,
                "phases": {name: ms for name, ms in phases.items() if ms > 0},
                "pool": {name: value - before["pool"][name] for name, value in now["pool"].items()},
                "system": difference(now["system"], before["system"]),
            }
        )
        if self._trace and not self._nested and len(self._steps) <= 2:
            self._traced_ms = (self._steps[-1]["begin_ms"], self._steps[-1]["begin_ms"] + self._steps[-1]["wall_ms"])
            if len(self._steps) == 1:
                self._kept_trace = _core.read_trace()
                _core.start_trace()
            else:
                _core.stop_trace()
                self._kept_trace = _core.read_trace()
        self._mark = self._counts()

    def phases(self) -> list[Phase]:
        """The phases that ran, in the order of the phase table; inside the context those that have ended so far."""
        rows: list[Phase] = (self._document or self._make(self._counts()))["phases"]
        return rows

    def document(self) -> doc.Document:
        """Everything that was recorded, as docs/PROFILING.md describes it."""
        return self._document or self._make(self._counts())

    @property
    def ceiling(self) -> dict[str, float] | None:
        """``compute_gflops`` and ``read_gbps`` of the host; None while they have not been measured."""
        return self._ceiling

    def measure_ceilings(self) -> None:
        """Measures what the host can do (some 0.1 s on all threads), for fractions of it in the reports."""
        from moesaic.commands.measure import CeilingProbe

        threads = _core.get_num_threads()
        _core.mute_nvtx(True)  # a tool's summary is of the program
        try:
            found = CeilingProbe(_core.isa(), threads).measure()
        finally:
            _core.mute_nvtx(False)
        self._ceiling = {"compute_gflops": found.compute_gflops, "read_gbps": found.read_gbps}
        if self._document is not None:
            self._document["ceiling"] = self._ceiling
            of_layers = [row for layer in self._document["layers"] for row in layer["phases"]]
            for row in self._document["phases"] + of_layers:
                row.update(doc.rates(row, threads, self._ceiling))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file.

        Args:
            path: ends in ``.json`` (the document), ``.html`` (a report that needs nothing else) or ``.perfetto-trace``
                (a time line for https://ui.perfetto.dev; needs ``trace=True``).

        Raises:
            ValueError: another suffix; a trace is asked for, and none was recorded.
            OSError: the file cannot be written.
        """
        write(self.document(), path)

    def _counts(self) -> dict[str, Any]:
        staging.collect_times()
        return {
            "ns": _core.clock_ns(),
            "phases": {doc.key_of(row): row["thread_ns"] / 1e6 for row in _core.timers_snapshot() if row["calls"] > 0},
            "pool": doc.pool_ms(_core.pool_snapshot()),
            "system": self._system.read() if self._system is not None else {},
        }

    def _make(self, end: dict[str, Any]) -> doc.Document:
        threads = _core.get_num_threads()
        rows = _core.timers_snapshot()
        sums = self._layer_sums()
        first = doc.first_ns(sums, rows)
        phases = [
            phase
            for row, first_ns in zip(rows, first, strict=True)
            if (phase := self._phase(row, first_ns, threads))["calls"] > 0
        ]
        calls, dropped = _core.calls()
        calls = [call for call in calls if call["begin_ns"] >= self._began_ns]
        document: doc.Document = {
            "schema": doc.SCHEMA,
            "cpu": _core.cpu_name(),
            "isa": _core.isa(),
            "threads": threads,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "wall_ms": (end["ns"] - self._began_ns) / 1e6,
            "ceiling": self._ceiling,
            "phases": phases,
            "pool": {name: value - self._first_mark["pool"][name] for name, value in end["pool"].items()},
            "account": doc.account(calls),
            "calls": {
                kind: doc.call_summary([c for c in calls if c["kind"] == kind and not c["first"]])
                for kind in ("forward", "backward")
            },
            "first_calls": {
                kind: doc.call_summary([c for c in calls if c["kind"] == kind and c["first"]])
                for kind in ("forward", "backward")
            },
            "calls_dropped": dropped,
            "layers": doc.by_layer(calls, sums, rows),
            "steps": list(self._steps),
            "system": difference(end["system"], self._first_mark["system"]),
            "system_sources": self._system.sources if self._system is not None else {},
            "system_refused": self._system.refused if self._system is not None else [],
            "trace": None,
        }
        for layer in document["layers"]:
            for row in layer["phases"]:
                row.update(doc.rates(row, threads, self._ceiling))
        if self._trace and not self._nested:
            recorded = self._kept_trace if self._traced_ms is not None else _core.read_trace()
            document["trace"] = doc.trace_of(recorded, rows, self._began_ns)
            begin_ms, end_ms = self._traced_ms or (0.0, document["wall_ms"])
            document["trace"].update(begin_ms=begin_ms, end_ms=end_ms)
        return document

    def _layer_sums(self) -> doc.LayerSums:
        sums = {row[:3]: row[3:] for row in _core.layers_snapshot()}
        for key, (calls, thread_ns, flops, size) in self._base_layers.items():
            if key in sums:  # not so after a reset
                now = sums[key]
                sums[key] = (now[0] - calls, now[1] - thread_ns, now[2] - flops, now[3] - size)
        return {key: row for key, row in sums.items() if row[0] > 0}

    def _phase(self, row: _core.RangeStats, first_ns: int, threads: int) -> Phase:
        base = self._base.get((row["name"], row["category"]))
        nested = self._nested
        thread_ms = (row["thread_ns"] - (base["thread_ns"] if base else 0)) / 1e6
        flops = row["flops"] - (base["flops"] if base else 0.0)
        size = row["bytes"] - (base["bytes"] if base else 0.0)
        work = {"name": row["name"], "thread_ms": thread_ms, "flops": flops, "bytes": size}
        rates = doc.rates(work, threads, self._ceiling)
        return Phase(
            name=row["name"],
            category=row["category"],
            calls=row["calls"] - (base["calls"] if base else 0),
            thread_ms=thread_ms,
            first_ms=first_ns / 1e6,
            min_thread_ms=None if nested else row["min_thread_ns"] / 1e6,
            max_thread_ms=None if nested else row["max_thread_ns"] / 1e6,
            span_ms=None if nested else row["span_ns"] / 1e6,
            threads=None if nested else row["threads"],
            flops=flops,
            bytes=size,
            apportioned=row["apportioned"],
            gflops=rates["gflops"],
            gbps=rates["gbps"],
            fraction_of_ceiling=rates["fraction_of_ceiling"],
        )


def write(document: doc.Document, path: str | os.PathLike[str]) -> None:
    """Writes a document in the form that the suffix of `path` names; see `Profile.save`."""
    target = _checked(path)
    if target.suffix == ".html":
        from moesaic.profiles.html import render

        target.write_text(render(document), encoding="utf-8")
    elif target.suffix == ".perfetto-trace":
        from moesaic.profiles.perfetto import encode

        target.write_bytes(encode(document))
    else:
        target.write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")


def profile(trace: bool = False, system: bool = False) -> Profile:
    """``with moesaic.profile() as p: ...``, then ``p.phases()`` or ``p.save("run.json")``. Contexts may nest.

    Args:
        trace: also record the time line of a step (48 bytes an event, at most 3 MB a thread).
        system: let the kernel count what the process asks of it, as far as it permits.
    """
    return Profile(trace, system)


SUFFIXES = (".json", ".html", ".perfetto-trace")


def _checked(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(f"path is {str(target)!r}; expected a name that ends in .json, .html or .perfetto-trace")
    return target


def profile_process(path: str) -> None:
    """Profiles from now until the process ends, and writes `path` then; a forked child writes nothing.

    Raises:
        ValueError: a suffix that `Profile.save` does not know, or a folder that is not there.
    """
    target = _checked(path).absolute()
    if not target.parent.is_dir():  # now, and not when the process has done its work
        raise ValueError(f"path is {path!r}; expected a file in a folder that exists")
    pid = os.getpid()
    whole = Profile(trace=True, system=True).__enter__()

    def finish() -> None:
        if os.getpid() == pid:
            whole.__exit__(None, None, None)
            if whole.phases():
                whole.measure_ceilings()
            whole.save(target)

    atexit.register(finish)
