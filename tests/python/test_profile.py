"""Profiles: what they add up to, their files, the command, the report in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic import _core
from moesaic.cli import main
from moesaic.perf import calibration
from moesaic.profiles import document as doc
from moesaic.profiles.compare import compare
from moesaic.profiles.idle import idle_between

RunPython = Callable[..., subprocess.CompletedProcess[str]]
Browse = Callable[[str], subprocess.CompletedProcess[str]]

PROGRAM = """
import torch, moesaic
E, H, I, T = 4, 256, 128, 256
torch.manual_seed(0)
layer = moesaic.ExpertsLayer(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
a, b = (torch.randn(s, requires_grad=True) for s in ((E, 8, H), (E, 2 * I, 8)))
lora = moesaic.Lora(gate_up=moesaic.LoraPair(a, b, 1.0))
ids, w, x = torch.randint(0, E, (T, 2)), torch.rand(T, 2), torch.randn(T, H, requires_grad=True)
optimizer = torch.optim.SGD([a, b], 1e-9)
for _ in range(6):
    moesaic.moe_experts(x, ids, w, layer, lora).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recorded() -> doc.Document:
    with moesaic.profile(trace=True) as profile:
        exec(PROGRAM, {})
    profile.measure_ceilings()
    return json.loads(json.dumps(profile.document()))  # type: ignore[no-any-return]


def test_times_add_up(recorded: doc.Document) -> None:
    account = recorded["account"]
    parts = sum(value for name, value in account.items() if name != "threads_x_wall_ms")
    assert parts == pytest.approx(account["threads_x_wall_ms"], rel=1e-9)
    assert all(value >= 0 for value in account.values())
    leaves = sum(row["thread_ms"] for row in recorded["phases"] if doc.is_leaf(row["name"]))
    assert leaves <= (account["busy_ms"] + account["serial_ms"]) * 1.02
    assert len(recorded["steps"]) == 6 and [step["first"] for step in recorded["steps"]] == [True] + [False] * 5
    for kind in ("forward", "backward"):
        assert recorded["first_calls"][kind]["calls"] == 1 and recorded["calls"][kind]["calls"] == 5
        assert recorded["calls"][kind]["joins"] == 5 and recorded["calls"][kind]["tokens"] == 5 * 256
        assert recorded["calls"][kind]["python_us"]["min"] > 0
    assert all(row["fraction_of_ceiling"] for row in recorded["phases"] if row["flops"] > 0)


def test_the_trace_gives_the_totals_of_the_timers(recorded: doc.Document, tmp_path: Path) -> None:
    schema = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs the perfetto package for the trace's schema"
    )
    path = tmp_path / "run.perfetto-trace"
    moesaic.profiler.write(recorded, path)
    trace = schema.Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = {p.track_descriptor.uuid for p in trace.packet if p.HasField("track_descriptor")}
    open_slices: dict[int, list[tuple[str, int]]] = {}
    totals: dict[str, int] = {}
    flows: dict[int, int] = {}
    categories: dict[str, set[str]] = {}
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert event.track_uuid in tracks
        for flow in event.flow_ids:
            flows[flow] = flows.get(flow, 0) + 1
        if event.type == event.TYPE_SLICE_BEGIN:
            open_slices.setdefault(event.track_uuid, []).append((event.name, packet.timestamp))
            categories.setdefault(event.name, set()).update(event.categories)
        elif event.type == event.TYPE_SLICE_END:
            name, begin = open_slices[event.track_uuid].pop()
            totals[name] = totals.get(name, 0) + packet.timestamp - begin
    assert not any(open_slices.values()), "every slice ends"
    assert all(ends == 2 for ends in flows.values()), "an arrow has two ends"
    # The traced step is the second one; its timers and its slices are two ways to the same numbers.
    step = recorded["steps"][1]["phases"]
    assert {"gate_up_gemm", "D3_gemm", "merge"} <= set(step)
    assert categories["D3_gemm"] == {"backward_down"} and categories["merge"] == {"forward"}
    for name, ms in step.items():
        if name in doc.SUMS:
            continue  # no timer watches them
        assert totals[name] / 1e6 == pytest.approx(ms, rel=1e-3, abs=2e-3), name


def test_idle_time_between_phases() -> None:
    ranges = ["forward", "gate_up_gemm", "gate_up_lora", "down_gemm", "merge", "backward"]

    def phase(name: str, begin: float, duration: float) -> list[float]:
        return [0, begin, duration, ranges.index(name), -1, 0, 0.0, 0.0]

    def thread(lane: int, *events: list[float], dropped: int = 0) -> dict[str, Any]:
        return {"lane": lane, "events": list(events), "dropped": dropped}

    caller = [phase("forward", 0, 100), phase("gate_up_gemm", 10, 20), phase("gate_up_lora", 30, 10)]
    caller += [phase("down_gemm", 45, 45), phase("merge", 91, 9)]
    worker = [phase("gate_up_gemm", 12, 23), [1, 35.5, 9.0, 1, -1, 0, 0.0, 0.0], phase("down_gemm", 45, 15)]
    worker += [[2, 60, 0.0, 0, -1, 0, 0.0, 0.0], phase("merge", 150, 10), phase("merge", 210, 20)]
    second = [phase("backward", 200, 50), phase("merge", 204, 46)]  # another thread that calls
    trace = {"kinds": list(doc.EVENT_KINDS), "idle_kinds": list(doc.IDLE_KINDS), "ranges": ranges}
    trace["threads"] = [thread(0, *caller), thread(0, *second), thread(1, *worker), thread(-1, phase("merge", 0, 9))]
    rows = [(row["after"], row["before"], 1e3 * row["thread_ms"], row["times"]) for row in idle_between(trace, 3)]
    assert rows == [
        ("begin of forward", "end of forward", pytest.approx(100), 1),  # the third thread
        ("begin of backward", "end of backward", pytest.approx(50), 1),
        ("down_gemm", "end of forward", pytest.approx(40), 1),
        ("begin of forward", "gate_up_gemm", pytest.approx(22), 2),
        ("merge", "end of backward", pytest.approx(20), 1),
        # The adapter's share of a product is the product's; a microsecond between two tasks is none.
        ("gate_up_gemm", "down_gemm", pytest.approx(15), 2),
        ("begin of backward", "merge", pytest.approx(14), 2),
    ]
    assert idle_between(trace, 3)[3]["longest_ms"] == pytest.approx(0.012)
    assert idle_between(trace, 2) == idle_between(trace, 3)[2:]
    assert idle_between(trace, 1) == idle_between(trace, 2)  # the number of threads may have changed since
    # What came behind the last event that fitted is not known.
    trace["threads"][2] = thread(1, *worker[:4], dropped=7)
    assert idle_between(trace, 3) == []
    trace["threads"][2] = thread(1, *worker[:5], dropped=7)
    assert all("backward" not in row["before"] for row in idle_between(trace, 3))


def test_phases_and_idle_times_of_a_trace_add_up(recorded: doc.Document) -> None:
    """Every moment of every thread in a call is a phase's or listed, but for less than 2 us behind each phase."""
    trace, threads = recorded["trace"], recorded["threads"]
    ranges = [
        (trace["ranges"][what], duration)
        for thread in trace["threads"]
        for kind, _, duration, what, *_ in thread["events"]
        if trace["kinds"][kind] == "range"
    ]
    calls = [duration for name, duration in ranges if name in ("forward", "backward")]
    phases = [duration for name, duration in ranges if doc.is_leaf(name)]
    idle = 1e3 * sum(row["thread_ms"] for row in idle_between(trace, threads))
    assert len(calls) == 2 and idle > 0
    assert 0 <= threads * sum(calls) - sum(phases) - idle <= 2 * (len(phases) + threads * len(calls))


def test_the_report_in_a_browser(recorded: doc.Document, tmp_path: Path, browse: Browse) -> None:
    moesaic.profiler.write(recorded, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert not re.search(r"(src|href)\s*=", page) and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    result = browse(f"file://{tmp_path / 'run.html'}")
    assert 'data-state="ready" data-errors="0"' in result.stdout, result.stdout[:500]
    assert "CONSOLE" not in result.stderr, result.stderr
    shown = dict(re.findall(r'<tr data-phase="([^"]+)" data-calls="\d+" data-ms="([^"]+)"', result.stdout))
    for row in recorded["phases"]:
        name = f"{row['category']}/{row['name']}" if row["category"].startswith("GU3_") else row["name"]
        assert float(shown[name]) == row["thread_ms"], name
    gaps = re.findall(r'data-gap="([^"]+)" data-ms="([^"]+)"', result.stdout)
    assert [(name, float(ms)) for name, ms in gaps] == [
        (f"{row['after']}, {row['before']}", row["thread_ms"])
        for row in idle_between(recorded["trace"], recorded["threads"])[:20]
    ]
    bars = dict(re.findall(r'data-part="(\w+)" data-ms="([^"]+)"', result.stdout))
    assert {f"{name}_ms": float(value) for name, value in bars.items()} == {
        name: value for name, value in recorded["account"].items() if name != "threads_x_wall_ms"
    }
    assert len(re.findall(r"data-step=", result.stdout)) == len(recorded["steps"])
    boxes = re.findall(r'data-layer="(\d+)" data-phase="([^"]+)" data-ms="([^"]+)"', result.stdout)
    assert [(int(layer), name, float(ms)) for layer, name, ms in boxes] == [
        (row["layer"], phase["name"], phase["thread_ms"]) for row in recorded["layers"] for phase in row["phases"]
    ]


def test_command(run_python: RunPython, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, target = tmp_path / "program.py", tmp_path / "run.json"
    script.write_text(PROGRAM)
    assert main(["profile", "-o", str(target), "--", sys.executable, str(script)]) == 0
    shown = capfd.readouterr().out
    assert "gate_up_gemm" in shown and "file opens" in shown
    document = json.loads(target.read_text())
    assert document["system"]["file_opens"] is not None, "the shim is loaded"
    assert main(["profile", "show", str(target), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == document
    assert main(["profile", "diff", str(target), str(target)]) == 0
    assert "slower" not in capfd.readouterr().out
    assert main(["profile", "--", sys.executable, "-c", PROGRAM + "\nraise SystemExit(7)"]) == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": 3, "phases": [', "not a complete JSON document"),
        ('{"schema": 99, "phases": []}', "schema 99"),
        ('{"a": 1}', "not a profile"),
        (None, "No such file"),
    ],
)
def test_bad_files(content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    assert main(["profile", "show", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_edited_files(recorded: doc.Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, edited = tmp_path / "good.json", tmp_path / "edited.json"
    good.write_text(json.dumps(recorded))
    without = {name: value for name, value in recorded.items() if name != "calls"}
    no_number = {**recorded, "phases": [{**recorded["phases"][0], "calls": "many"}]}
    no_step = {**recorded, "steps": [None]}
    cut_event = json.loads(json.dumps(recorded))
    cut_event["trace"]["threads"][0]["events"][0] = [0, 1]
    for content, command in (
        (without, ["show"]),
        (without, ["show", "-o", str(tmp_path / "run.html")]),
        (no_number, ["show"]),
        (cut_event, ["show"]),
        (cut_event, ["show", "-o", str(tmp_path / "run.html")]),
        (no_step, ["diff", str(good)]),
    ):
        edited.write_text(json.dumps(content))
        assert main(["profile", *command, str(edited)]) == 1
        error = capsys.readouterr().err
        assert "edited.json: not as schema 3 says" in error and error.count("\n") == 1
    edited.write_text(json.dumps({name: value for name, value in recorded.items() if name != "trace"}))
    assert main(["profile", "show", str(edited)]) == 0
    assert main(["profile", "show", str(edited), "-o", str(tmp_path / "run.perfetto-trace")]) == 1
    assert "there is no time line in this profile" in capsys.readouterr().err
    assert main(["profile", "show", str(edited), "-o", str(tmp_path / "run.txt")]) == 2
    assert "expected a name that ends in" in capsys.readouterr().err


def test_bad_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--", "no-such-program-of-ours"]) == 1
    assert "no such program" in capsys.readouterr().err
    assert main(["profile", "--", "true"]) == 1
    error = capsys.readouterr().err
    assert "nothing of the engine ran" in error and error.count("\n") == 1
    assert main(["profile", "--", sys.executable, "-c", "import moesaic, sys; sys.exit(7)"]) == 1
    assert "ended with 7, and nothing of the engine ran in it" in capsys.readouterr().err
    assert main(["profile", "--"]) == 2
    nowhere = tmp_path / "none" / "run.json"
    assert main(["profile", "-o", str(nowhere), "--", "touch", str(tmp_path / "ran")]) == 1
    assert "there is no such folder" in capsys.readouterr().err and not (tmp_path / "ran").exists()
    with moesaic.profile() as profile:
        pass
    profile.save(tmp_path / "empty.json")
    assert main(["profile", "show", str(tmp_path / "empty.json")]) == 1
    assert "an empty run" in capsys.readouterr().err


def test_diff_tells_a_slower_phase_from_noise(recorded: doc.Document) -> None:
    def with_steps(factor: float) -> dict[str, Any]:
        steps = [
            {
                "first": i == 0,
                "wall_ms": 10.0,
                "phases": {"D3_gemm": factor * (4 + 0.01 * (i % 3)), "merge": 1 + 0.2 * (i % 2)},
            }
            for i in range(9)
        ]
        return dict(recorded, steps=steps)

    rows = {row["phase"]: row for row in compare(with_steps(1.0), with_steps(1.5))}
    assert rows["D3_gemm"]["verdict"] == "slower" and rows["D3_gemm"]["change"] == pytest.approx(0.5, rel=0.01)
    assert rows["merge"]["verdict"] == "same"
    back = {row["phase"]: row for row in compare(with_steps(1.5), with_steps(1.0))}
    assert back["D3_gemm"]["verdict"] == "faster"


def test_diff_without_steps_keeps_gate_and_up_apart(recorded: doc.Document) -> None:
    before = dict(recorded, steps=[])
    slower = [dict(row) for row in recorded["phases"]]
    gate = next(row for row in slower if row["name"] == "dB" and row["category"] == "GU3_lora_pass_gate")
    gate["thread_ms"] += 100
    rows = {row["phase"]: row for row in compare(before, dict(before, phases=slower))}
    assert rows["GU3_lora_pass_gate/dB"]["change_ms"] == pytest.approx(100)
    assert rows["GU3_lora_pass_up/dB"]["change_ms"] == 0 and rows["GU3_lora_pass_up/dB"]["verdict"] == "?"


def test_python_names_all_phases() -> None:
    """What PARENTS and the model's groups of phases leave out would be counted twice, or not at all."""
    rows = [row for row in _core.timers_snapshot() if row["category"] not in ("sample", "fused")]
    holders = {row["category"] for row in rows} & {row["name"] for row in rows}
    assert {"backward", "GU3_lora_pass_up"} <= holders <= doc.PARENTS
    fitted = {name for names in calibration._TIMERS.values() for name in names}
    leaves = {row["name"] for row in rows if row["category"] in holders} - holders
    # What a call costs besides its stages, and what is timed with another phase.
    assert leaves - fitted == {"allocate", "D0_prepare", "GU0_prepare", "pack_dG", "pack_intermediate"}
    assert fitted <= leaves


_STEADY = """
import os, sys, torch
sys.stdout.flush()
source = open("program.py").read().split("for _ in range(6):")
exec(source[0])
def step():
    moesaic.moe_experts(x, ids, w, layer, lora).sum().backward()
for _ in range(8):
    step()
os.access("/marker-begin", 0)
for _ in range(5):
    step()
os.access("/marker-end", 0)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace on this host")
def test_a_steady_step_opens_sleeps_and_maps_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    traced = "access,faccessat,open,openat,creat,nanosleep,clock_nanosleep,mmap,munmap,mremap"
    command = ["strace", "-f", "-qq", "-o", "calls", "-e", f"trace={traced}", sys.executable, "-c", _STEADY]
    path = os.pathsep.join(part for part in sys.path if part)
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    if "ptrace" in result.stderr and result.returncode != 0:
        pytest.skip("ptrace is not permitted here")
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "calls").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "/marker-begin" in line)
    end = next(i for i, line in enumerate(lines) if "/marker-end" in line)
    assert begin > 100, "strace saw the program start"
    assert lines[begin + 1 : end] == []
