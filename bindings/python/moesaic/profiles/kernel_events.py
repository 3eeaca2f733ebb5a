"""Counts that the kernel keeps of this process: its own events, and system calls where tracepoints may be read.

Events are perf's (``perf_event_open``), one for each thread there is when counting begins; threads that those start
later count with them. Unlike a library in front of libc, the kernel sees every call, whoever makes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["KernelEvents"]

_PERF_EVENT_OPEN = 298  # x86-64
_TYPE_SOFTWARE, _TYPE_TRACEPOINT = 1, 2
_ATTRIBUTE_BYTES, _CONFIG_AT, _FLAGS_AT = 112, 8, 40
_INHERIT, _INHERIT_THREAD = 1 << 1, 1 << 35
_CLOSE_ON_EXEC = 8
_SET_FILTER = 0x40082406
#: Descriptors that may be used for it: a part of what the process may open.
_MOST_DESCRIPTORS = 1024

#: Of the kernel's own; <linux/perf_event.h> has the numbers.
_SOFTWARE = {
    "context_switches": ("context-switches", 3),
    "page_faults": ("page-faults", 2),
    "migrations": ("cpu-migrations", 4),
}
# FUTEX_WAIT and FUTEX_WAIT_BITSET, of one process or of several, with either clock.
_FUTEX_WAITS = "||".join(f"op=={op | private | clock}" for op in (0, 9) for private in (0, 128) for clock in (0, 256))
#: Calls that count together. The first one has to be there; the others came or went with versions of the kernel.
_CALLS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "file_opens": (("openat", None), ("open", None), ("openat2", None), ("creat", None)),
    "sleeps": (("clock_nanosleep", None), ("nanosleep", None)),
    "futex_waits": (("futex", _FUTEX_WAITS), ("futex_wait", None)),
    "maps": (("mmap", None), ("mremap", None)),
    "unmaps": (("munmap", None),),
}
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


def _open_event(kind: int, config: int, thread: int) -> int:
    """A descriptor that counts; threads that `thread` starts count with it.

    Raises:
        OSError: it is not permitted, or there is no such event.
    """
    attributes = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into("=II", attributes, 0, kind, _ATTRIBUTE_BYTES)
    struct.pack_into("=Q", attributes, _CONFIG_AT, config)
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_INHERIT | _INHERIT_THREAD, _INHERIT):  # before Linux 5.13 forked children count as well
        struct.pack_into("=Q", attributes, _FLAGS_AT, flags)
        buffer = (ctypes.c_char * _ATTRIBUTE_BYTES).from_buffer(attributes)
        descriptor = libc.syscall(_PERF_EVENT_OPEN, buffer, thread, -1, -1, _CLOSE_ON_EXEC)
        if descriptor >= 0:
            return int(descriptor)
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _call_number(call: str) -> int | None:
    """The tracepoint at the beginning of a system call; None: there is none, or it may not be read."""
    for folder in _TRACING:
        try:
            return int((folder / "events" / "syscalls" / f"sys_enter_{call}" / "id").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


class KernelEvents:
    """Counts from its construction until `close`, as far as the system permits; `counts` has what it could open.

    Attributes:
        sources: for each count what it is made from.
        refused: why counts are missing; empty where none is.
    """

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.refused: list[str] = []
        self._descriptors: dict[str, list[int]] = {}
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._left = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(_MOST_DESCRIPTORS, soft // 4)
        for name, (title, config) in _SOFTWARE.items():
            self._add(name, f"perf: {title}", [(_TYPE_SOFTWARE, config, None)], threads)
        for name, calls in _CALLS.items():
            numbers = [
                (call, number, condition) for call, condition in calls if (number := _call_number(call)) is not None
            ]
            if not numbers or numbers[0][0] != calls[0][0]:
                self.refused.append(f"{name}: tracefs has no syscalls:sys_enter_{calls[0][0]} that may be read")
                continue
            title = "tracepoints: " + ", ".join(f"sys_enter_{call}" for call, _, _ in numbers)
            self._add(name, title, [(_TYPE_TRACEPOINT, number, rule) for _, number, rule in numbers], threads)

    def _add(
        self, name: str, source: str, events: Sequence[tuple[int, int, str | None]], threads: Iterable[int]
    ) -> None:
        opened: list[int] = []
        try:
            for thread in threads:
                for kind, config, condition in events:
                    if self._left == 0:
                        raise OSError(0, "more threads than descriptors to count them with")
                    try:
                        opened.append(_open_event(kind, config, thread))
                    except ProcessLookupError:  # the thread has ended
                        continue
                    self._left -= 1
                    if condition is not None:
                        fcntl.ioctl(opened[-1], _SET_FILTER, condition.encode() + b"\0")
        except OSError as error:
            _close(opened)
            self._left += len(opened)
            self.refused.append(f"{name}: {source}: {error.strerror}")
            return
        self._descriptors[name] = opened
        self.sources[name] = source

    def counts(self) -> dict[str, int]:
        """What was counted since the construction."""
        return {
            name: sum(int.from_bytes(os.read(descriptor, 8), "little") for descriptor in descriptors)
            for name, descriptors in self._descriptors.items()
        }

    def close(self) -> None:
        """Ends counting; twice is once."""
        for descriptors in self._descriptors.values():
            _close(descriptors)
        self._descriptors = {}


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
