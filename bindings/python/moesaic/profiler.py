"""Where the engine's time goes, phase by phase."""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TypedDict

from moesaic import _core

__all__ = ["Phase", "Profile", "profile"]


class Phase(TypedDict):
    """One row of the phase table. Phases of different experts overlap: thread times may be added up, spans not."""

    name: str
    category: str
    calls: int
    thread_ms: float
    """Time inside, summed over threads."""
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


class Profile:
    """A context manager that measures what the engine does inside it, on all threads of the process."""

    def __init__(self) -> None:
        self._nested = False
        self._base: dict[tuple[str, str], _core.RangeStats] = {}
        self._rows: list[Phase] | None = None
        self._began = 0.0
        self._wall_ms = 0.0

    def __enter__(self) -> Profile:
        self._nested = _core.timers_enabled()
        self._rows = None
        if self._nested:
            # The outer profile goes on counting, so what is there already is taken off at the end.
            self._base = {(row["name"], row["category"]): row for row in _core.timers_snapshot()}
        else:
            self._base = {}
            _core.reset_timers()
            _core.set_timers_enabled(True)
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._wall_ms = (time.perf_counter() - self._began) * 1e3
        if not self._nested:
            _core.set_timers_enabled(False)
        self._rows = self._read()

    def phases(self) -> list[Phase]:
        """The phases that ran, in the order of the phase table; inside the context those that have ended so far."""
        return self._read() if self._rows is None else self._rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile to a file.

        Args:
            path: ends in ``.json``.

        Raises:
            ValueError: another suffix.
            OSError: the file cannot be written.
        """
        target = _checked(path)
        wall_ms = self._wall_ms if self._rows is not None else (time.perf_counter() - self._began) * 1e3
        document = {
            "schema": 1,
            "cpu": _core.cpu_name(),
            "isa": _core.isa(),
            "threads": _core.get_num_threads(),
            "wall_ms": wall_ms,
            "phases": self.phases(),
        }
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def _read(self) -> list[Phase]:
        return [phase for row in _core.timers_snapshot() if (phase := self._phase(row))["calls"] > 0]

    def _phase(self, row: _core.RangeStats) -> Phase:
        base = self._base.get((row["name"], row["category"]))
        return Phase(
            name=row["name"],
            category=row["category"],
            calls=row["calls"] - (base["calls"] if base else 0),
            thread_ms=(row["thread_ns"] - (base["thread_ns"] if base else 0)) / 1e6,
            min_thread_ms=None if self._nested else row["min_thread_ns"] / 1e6,
            max_thread_ms=None if self._nested else row["max_thread_ns"] / 1e6,
            span_ms=None if self._nested else row["span_ns"] / 1e6,
            threads=None if self._nested else row["threads"],
            flops=row["flops"] - (base["flops"] if base else 0.0),
            bytes=row["bytes"] - (base["bytes"] if base else 0.0),
            apportioned=row["apportioned"],
        )


def profile() -> Profile:
    """``with moesaic.profile() as p: ...``, then ``p.phases()`` or ``p.save("run.json")``. Contexts may nest."""
    return Profile()


def _checked(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise ValueError(f"path is {str(target)!r}; expected a name that ends in .json")
    return target


def profile_process(path: str) -> None:
    """Profiles from now until the process ends, and writes `path` then; a forked child writes nothing."""
    target = _checked(path).absolute()
    pid = os.getpid()
    whole = Profile().__enter__()

    def finish() -> None:
        if os.getpid() == pid:
            whole.__exit__(None, None, None)
            whole.save(target)

    atexit.register(finish)
