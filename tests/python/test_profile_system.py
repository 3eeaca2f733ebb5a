"""What the operating system counts: the kernel's events where they are permitted, and what stands in for them."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.profiles import kernel_events
from moesaic.profiles.kernel_events import KernelEvents
from moesaic.profiles.system import USAGE, SystemCounter, difference

_SOFTWARE = {"context_switches", "page_faults", "migrations"}
_CALLS = {"file_opens", "sleeps", "futex_waits", "maps", "unmaps"}


def provoke() -> None:
    """4 opens, 2 sleeps, at least 1 page fault and 1 map; half of it in a thread that was not there before."""

    def some() -> None:
        for _ in range(2):
            os.close(os.open(os.devnull, os.O_RDONLY))
        ctypes.CDLL(None).usleep(1000)  # time.sleep is no sleep to the kernel before Python 3.11

    thread = threading.Thread(target=some)
    thread.start()
    thread.join()
    some()
    with mmap.mmap(-1, 1 << 22) as memory:
        memory[0] = 1


def test_the_kernels_own_counts() -> None:
    events = KernelEvents()
    try:
        if set(events.sources) & _SOFTWARE != _SOFTWARE:
            pytest.skip(f"perf events are not permitted here: {events.refused}")
        before = events.counts()
        provoke()
        counted = difference(events.counts(), before)  # type: ignore[arg-type]
    finally:
        events.close()
    assert counted["context_switches"] >= 2, "each sleep gives up the core"
    assert counted["page_faults"] >= 1
    assert set(events.sources) | {line.partition(":")[0] for line in events.refused} == _SOFTWARE | _CALLS


def test_tracepoints() -> None:
    """In a process that may read tracefs: where this one may not, but may mount, in a mount namespace of its own."""
    program = """
import json
from test_profile_system import provoke
from moesaic.profiles.system import SystemCounter, difference
counter = SystemCounter(kernel=True)
before = counter.read()
provoke()
print(json.dumps([counter.sources, difference(counter.read(), before)]))
"""
    command = [sys.executable, "-c", program]
    if kernel_events._call_number("openat") is None:
        if shutil.which("unshare") is None:
            pytest.skip("tracefs may not be read, and there is no unshare")
        mount = 'mount -t tracefs tracefs /sys/kernel/tracing && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
    path = os.pathsep.join([str(Path(__file__).parent), *(part for part in sys.path if part)])
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    if result.returncode != 0 and "Traceback" not in result.stderr:
        pytest.skip(f"tracefs may not be read: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    sources, counted = json.loads(result.stdout)
    if not all((sources[name] or "").startswith("tracepoints") for name in _CALLS):
        pytest.skip(f"tracepoints of system calls are not permitted here: {sources}")
    assert counted["file_opens"] == 4 and counted["sleeps"] == 2
    assert counted["maps"] >= 1 and counted["unmaps"] >= 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, config: int, thread: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kernel_events, "_open_event", refuse)
    monkeypatch.setattr(kernel_events, "_call_number", lambda call: 1)
    counter = SystemCounter(kernel=True)
    before = counter.read()
    provoke()
    counted = difference(counter.read(), before)
    counter.close()
    assert len(counter.refused) == 8 and all(os.strerror(number) in line for line in counter.refused)
    assert {name for name, source in counter.sources.items() if source == "getrusage"} == set(USAGE)
    assert counted["context_switches"] == counted["voluntary_switches"] + counted["involuntary_switches"] >= 2  # type: ignore[operator]
    assert counter.sources["migrations"] is None and counted["migrations"] is None


def test_descriptors_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    events = KernelEvents()
    events.close()
    events.close()
    assert opened() == before
    monkeypatch.setattr(kernel_events, "_MOST_DESCRIPTORS", 0)
    none = KernelEvents()
    assert none.counts() == {} and opened() == before
    assert all("more threads" in line or "tracefs" in line for line in none.refused) and len(none.refused) == 8


def test_a_profile_says_who_counted() -> None:
    layer = moesaic.ExpertsLayer(torch.randn(4, 64, 32), torch.randn(4, 32, 32))
    with moesaic.profile(system=True) as profile:
        layer.forward(torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
        profile.step()
    document = profile.document()
    assert set(document["system_sources"]) == set(document["system"]) == set(document["steps"][0]["system"])
    for name, value in document["system"].items():
        assert (value is None) == (document["system_sources"][name] is None), name
