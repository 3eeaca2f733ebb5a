"""What the operating system did for this process: switches, faults, and with the shim also sleeps, opens and maps."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

__all__ = ["COLLECTOR", "SHIM", "difference", "library", "preload", "system_counts"]

_SHIM_COUNTERS = ("file_opens", "sleeps", "futex_waits", "maps", "unmaps")


def _library(name: str) -> Path:
    from moesaic import _core  # the libraries lie beside the compiled module, wherever the Python files are

    return Path(_core.__file__).parent / name


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


def system_counts() -> dict[str, int | None]:
    """Counts of the whole process since it began; None for what is not counted without the shim.

    Sleeps, futex waits, opens and maps are those that pass through libc's functions. What the C library and OpenMP do
    by themselves shows in the kernel's own counts: a thread that sleeps, whoever sent it, is a voluntary switch.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    shim = _shim_counts()
    return {
        "voluntary_switches": usage.ru_nvcsw,
        "involuntary_switches": usage.ru_nivcsw,
        "minor_faults": usage.ru_minflt,
        "major_faults": usage.ru_majflt,
        **(shim if shim is not None else dict.fromkeys(_SHIM_COUNTERS)),
    }


def difference(after: dict[str, int | None], before: dict[str, int | None]) -> dict[str, int | None]:
    """What was counted between two calls of `system_counts`."""
    result: dict[str, int | None] = {}
    for name, value in after.items():
        earlier = before.get(name)
        result[name] = None if value is None or earlier is None else value - earlier
    return result
