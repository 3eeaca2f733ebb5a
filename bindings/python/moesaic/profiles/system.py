"""What the operating system did for this process: switches, faults, sleeps, opens, maps."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

from moesaic.profiles.kernel_events import KernelEvents

__all__ = ["COLLECTOR", "SHIM", "USAGE", "SystemCounter", "difference", "library", "preload"]

_SHIM_COUNTERS = ("file_opens", "sleeps", "futex_waits", "maps", "unmaps")


def _library(name: str) -> Path:
    from moesaic import _core  # the libraries lie beside the compiled module, wherever the Python files are

    return Path(_core.__file__).parent / name


#: What getrusage counts.
USAGE = ("context_switches", "voluntary_switches", "involuntary_switches", "page_faults", "major_faults")
#: Counts calls that pass through libc, when LD_PRELOAD names it.
SHIM = "libmoesaic_os_shim.so"
#: Records NVTX ranges, when NVTX_INJECTION64_PATH names it.
COLLECTOR = "libmoesaic_nvtx_collector.so"


def library(name: str) -> Path | None:
    """Where `SHIM` or `COLLECTOR` lies; None if this build has none."""
    path = _library(name)
    return path if path.exists() else None


def preload(environment: dict[str, str]) -> None:
    """Lets a program that starts in `environment` load the shim."""
    shim = library(SHIM)
    if shim is None:
        return
    before = environment.get("LD_PRELOAD")
    environment["LD_PRELOAD"] = f"{shim}:{before}" if before else str(shim)


def _shim_counts() -> dict[str, int] | None:
    try:
        function = ctypes.CDLL(None).moesaic_os_counts
    except AttributeError:  # not preloaded
        return None
    values = (ctypes.c_int64 * 16)()
    count = function(values)
    return dict(zip(_SHIM_COUNTERS, values[:count], strict=True))


class SystemCounter:
    """Counts of the whole process; differences between two readings mean something, single ones do not.

    Switches and faults are getrusage's; sleeps, futex waits, opens and maps are those that pass through libc's
    functions, if the shim was preloaded.

    Args:
        kernel: count the kernel's events instead, as far as it permits: they see every call of every thread, and nobody
            else counts migrations. Where tracepoints are permitted, `close` takes some 0.4 s.

    Attributes:
        sources: for each count where it comes from; None: nothing counts it.
    """

    def __init__(self, kernel: bool = False) -> None:
        self._kernel = KernelEvents() if kernel else None
        shim = _shim_counts() or {}
        self.sources: dict[str, str | None] = dict.fromkeys(self.read())
        self.sources.update(dict.fromkeys(shim, "calls of libc's functions"))
        self.sources.update(dict.fromkeys(USAGE, "getrusage"))
        if self._kernel is not None:
            self.sources.update(self._kernel.sources)

    @property
    def refused(self) -> list[str]:
        """Why the kernel's events do not count everything."""
        return self._kernel.refused if self._kernel is not None else []

    def read(self) -> dict[str, int | None]:
        """What was counted so far; None for what nothing counts."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "context_switches": usage.ru_nvcsw + usage.ru_nivcsw,
            "voluntary_switches": usage.ru_nvcsw,
            "involuntary_switches": usage.ru_nivcsw,
            "migrations": None,
            "page_faults": usage.ru_minflt + usage.ru_majflt,
            "major_faults": usage.ru_majflt,
            **(_shim_counts() or dict.fromkeys(_SHIM_COUNTERS)),
            **(self._kernel.counts() if self._kernel is not None else {}),
        }

    def close(self) -> None:
        """Ends the kernel's counting."""
        if self._kernel is not None:
            self._kernel.close()


def difference(after: dict[str, int | None], before: dict[str, int | None]) -> dict[str, int | None]:
    """What was counted between two calls of `SystemCounter.read`."""
    result: dict[str, int | None] = {}
    for name, value in after.items():
        earlier = before.get(name)
        result[name] = None if value is None or earlier is None else value - earlier
    return result
