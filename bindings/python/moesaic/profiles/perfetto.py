"""The time line of a profile for https://ui.perfetto.dev and its trace processor, as Perfetto's own protocol buffers.

A track for each worker with its phases and idle times, a flow arrow from the worker that lost a task to the thief, a
counter of the tasks that wait in each worker's queue. Messages and field numbers are those of
``protos/perfetto/trace`` (trace_packet, track_event, track_descriptor).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

from moesaic.profiles.document import Document

__all__ = ["encode"]

_PROCESS = 1
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_SEQUENCE = 1


def encode(document: Document) -> bytes:
    """The trace of a document.

    Raises:
        ValueError: it has none.
    """
    trace = document.get("trace")
    if not trace:
        raise ValueError("the profile has no trace; record one with moesaic.profile(trace=True)")
    return b"".join(_field(1, packet) for packet in _packets(trace))


def _packets(trace: dict[str, Any]) -> Iterator[bytes]:
    yield _field(60, _number(1, _PROCESS) + _field(3, _number(1, os.getpid()) + _field(6, b"moesaic")))
    tracks = {thread["os_id"]: 16 + 2 * i for i, thread in enumerate(trace["threads"])}
    lanes = {thread["lane"]: thread for thread in trace["threads"] if thread["lane"] >= 0}
    for thread in trace["threads"]:
        name = f"worker {thread['lane']}" if thread["lane"] >= 0 else thread["name"] or "thread"
        track = tracks[thread["os_id"]]
        descriptor = _number(1, os.getpid()) + _number(2, thread["os_id"]) + _field(5, name.encode())
        yield _field(60, _number(1, track) + _number(5, _PROCESS) + _field(4, descriptor))
        if thread["lane"] >= 0:
            counter = _number(1, track + 1) + _field(2, f"queue of {name}".encode()) + _number(5, _PROCESS)
            yield _field(60, counter + _field(8, b""))
    flow = 0
    for thread in trace["threads"]:
        track = tracks[thread["os_id"]]
        open_ends: list[int] = []
        for kind, begin_us, duration_us, what, expert, rows, flops, size in thread["events"]:
            begin = round(begin_us * 1000)
            end = begin + round(duration_us * 1000)
            while open_ends and open_ends[-1] <= begin:
                yield _event(open_ends.pop(), _number(9, _END) + _number(11, track))
            if trace["kinds"][kind] == "range":
                notes = b""
                if expert >= 0:
                    notes = _note("expert", expert) + _note("rows", rows)
                notes += _note("flops", flops) + _note("bytes", size)
                name, category = trace["ranges"][what], trace["categories"][what]
                yield _event(
                    begin, _number(9, _BEGIN) + _number(11, track) + _text(22, category) + _text(23, name) + notes
                )
                open_ends.append(_nested_end(end, open_ends))
            elif trace["kinds"][kind] == "idle":
                name = trace["idle_kinds"][what]
                yield _event(begin, _number(9, _BEGIN) + _number(11, track) + _text(22, "idle") + _text(23, name))
                open_ends.append(_nested_end(end, open_ends))
            elif trace["kinds"][kind] == "steal":
                flow += 1
                thief = _number(9, _INSTANT) + _number(11, track) + _text(22, "pool") + _text(23, "steal")
                thief += _note("from worker", what)
                if what in lanes:
                    victim = _number(11, tracks[lanes[what]["os_id"]])
                    yield _event(
                        begin, _number(9, _INSTANT) + victim + _text(22, "pool") + _text(23, "lost") + _flow(flow)
                    )
                    thief += _flow(flow)
                # A moment later: an arrow needs a direction.
                yield _event(begin + 1, thief)
            else:
                yield _event(begin, _number(9, _COUNTER) + _number(11, track + 1) + _number(30, what))
        while open_ends:
            yield _event(open_ends.pop(), _number(9, _END) + _number(11, track))


def _nested_end(end: int, open_ends: list[int]) -> int:
    """Slices of a track nest; a nanosecond of rounding must not let one outlast the slice around it."""
    return min(end, open_ends[-1]) if open_ends else end


def _event(at_ns: int, event: bytes) -> bytes:
    return _number(8, at_ns) + _number(10, _SEQUENCE) + _field(11, event)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, payload: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def _text(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _flow(flow: int) -> bytes:
    return _varint(47 << 3 | 1) + struct.pack("<Q", flow)


def _note(name: str, value: float) -> bytes:
    """DebugAnnotation: name, and int_value or double_value."""
    payload = _number(4, value) if isinstance(value, int) else _varint(5 << 3 | 1) + struct.pack("<d", value)
    return _field(4, _text(10, name) + payload)
