"""What this process finds on its host: limits, memory, huge pages, packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("moesaic", "torch", "transformers", "peft", "trl", "accelerate")


def limits() -> dict[str, int | None]:
    """Soft limits of this process and the memory it may use, in bytes; None: no limit."""
    return {
        "address_space_bytes": _soft_limit(resource.RLIMIT_AS),
        "locked_memory_bytes": _soft_limit(resource.RLIMIT_MEMLOCK),
        "data_bytes": _soft_limit(resource.RLIMIT_DATA),
        "cgroup_memory_bytes": cgroup_memory_limit(),
        "available_memory_bytes": available_memory(),
    }


def _soft_limit(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def available_memory() -> int:
    """Bytes that this process can still take without swapping: MemAvailable, less where a control group or RLIMIT_AS
    allows less."""
    fields = _meminfo()
    free = fields.get("MemAvailable", fields.get("MemFree", 0))
    for folder in _cgroup_folders():
        limit, used = _read_int(folder / "memory.max"), _read_int(folder / "memory.current")
        if limit is not None and used is not None:
            # The page cache counts as used and can be dropped.
            free = min(free, limit - used + _inactive_file(folder / "memory.stat"))
    address_space = _soft_limit(resource.RLIMIT_AS)
    if address_space is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        free = min(free, address_space - pages * resource.getpagesize())
    return max(free, 0)


def cgroup_memory_limit() -> int | None:
    """The least memory limit of this process's control group and of those above it (version 2); None: no limit."""
    found = [limit for folder in _cgroup_folders() if (limit := _read_int(folder / "memory.max")) is not None]
    return min(found, default=None)


def _cgroup_folders() -> Iterator[Path]:
    """This process's control group and all above it, as far as they are mounted here."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            folder = root / line[3:].lstrip("/")
            yield folder
            yield from (parent for parent in folder.parents if parent.is_relative_to(root))


def _inactive_file(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("inactive_file", 0))


def _read_int(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says 'max'."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes (counts where it has no unit)."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        number, *unit = value.split()
        fields[key] = int(number) * (1024 if unit else 1)
    return fields


def huge_pages() -> dict[str, Any]:
    """Transparent huge pages (mode and defragmentation, as the kernel names them; None: not there) and reserved ones by
    size."""
    reserved = []
    for folder in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = _read_int(folder / "nr_hugepages"), _read_int(folder / "free_hugepages")
        reserved.append({"bytes": size, "total": total or 0, "free": free or 0})
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    return {"transparent": _selected(folder / "enabled"), "defrag": _selected(folder / "defrag"), "reserved": reserved}


def _selected(path: Path) -> str | None:
    """'always [madvise] never' -> 'madvise'."""
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def versions() -> dict[str, str | None]:
    """Versions of Python and of PACKAGES; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["moesaic"] is None:  # run from a build folder
        import moesaic

        found["moesaic"] = moesaic.__version__
    return found


def hook() -> dict[str, Any]:
    """Whether transformers knows the experts implementation "moesaic", and if not why.

    Returns:
        registered; reason (None where registered); expected: whether an installed transformers should have it.
    """
    if versions()["transformers"] is None:
        return {"registered": False, "reason": "transformers is not installed", "expected": False}
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        import moesaic.hf  # noqa: F401  registers it
    except ImportError as error:
        return {"registered": False, "reason": f"{error}", "expected": True}
    registered = "moesaic" in ALL_EXPERTS_FUNCTIONS
    reason = None if registered else "moesaic.hf did not register it"
    return {"registered": registered, "reason": reason, "expected": True}


def environment() -> dict[str, str]:
    """The variables that change what moesaic does, as far as they are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("MOESAIC_", "OMP_", "KMP_"))}
