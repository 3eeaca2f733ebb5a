"""The NVTX collector: what it records of other programs, and its tables against ones computed here."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.profiles import document as doc
from moesaic.profiles.system import COLLECTOR, library

HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Range"
_COLLECTOR = library(COLLECTOR)
_PROGRAM = _COLLECTOR.parents[2] / "tests" / "profiling" / "collector_program" if _COLLECTOR else Path("none")

pytestmark = pytest.mark.skipif(_COLLECTOR is None, reason="built without the NVTX headers")
needs_program = pytest.mark.skipif(not _PROGRAM.exists(), reason="the C++ tests are not built")


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={
            **os.environ,
            "NVTX_INJECTION64_PATH": str(_COLLECTOR),
            "MOESAIC_NVTX_OUTPUT": str(folder / "run"),
            "MOESAIC_NVTX_TRACE": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def summary_of(ranges: list[dict[str, str]]) -> list[list[str]]:
    """nvtx_pushpop_sum, computed from the listing."""
    durations: dict[str, list[int]] = {}
    for row in ranges:
        durations.setdefault(row["Name"], []).append(int(row["End (ns)"]) - int(row["Start (ns)"]))
    total = sum(sum(times) for times in durations.values())
    lines = []
    for name, times in sorted(durations.items(), key=lambda item: (-sum(item[1]), item[0].encode())):
        deviation = statistics.stdev(times) if len(times) > 1 else 0.0
        lines.append(
            [
                f"{100 * sum(times) / total:.1f}",
                str(sum(times)),
                str(len(times)),
                f"{sum(times) / len(times):.1f}",
                f"{statistics.median(times):.1f}",
                str(min(times)),
                str(max(times)),
                f"{deviation:.1f}",
                name,
            ]
        )
    return lines


def check_summary(folder: Path, name: str = "run") -> list[dict[str, str]]:
    ranges = rows(folder / f"{name}.trace.csv")
    summary = rows(folder / f"{name}.csv")
    assert (folder / f"{name}.csv").read_text().splitlines()[0] == HEADER
    assert [list(row.values()) for row in summary] == summary_of(ranges)
    return ranges


@needs_program
def test_a_million_ranges_of_eight_threads(tmp_path: Path) -> None:
    result = run([str(_PROGRAM), "many", "8", "125000"], tmp_path)
    assert result.returncode == 0, result.stderr
    ranges = check_summary(tmp_path)
    assert len(ranges) == 1_000_000
    assert len({row["TID"] for row in ranges}) == 8
    counts = {row["Range"]: int(row["Instances"]) for row in rows(tmp_path / "run.csv")}
    assert set(counts) == {":inner", "many:a", 'many:b, quoted "c"', "many:d"}
    assert counts[":inner"] == 500_000
    assert "lost" not in (tmp_path / "run.txt").read_text()


@needs_program
def test_memory_is_bounded_and_losses_are_told(tmp_path: Path) -> None:
    result = run([str(_PROGRAM), "many", "2", "20000"], tmp_path, MOESAIC_NVTX_CAPACITY="8192")
    assert result.returncode == 0, result.stderr
    assert len(check_summary(tmp_path)) == 8192
    assert "31808 ranges were lost" in (tmp_path / "run.txt").read_text()
    result = run([str(_PROGRAM), "many", "1", "500"], tmp_path, MOESAIC_NVTX_CAPACITY="4095")  # not one block
    assert result.returncode == 0, result.stderr
    assert not check_summary(tmp_path)
    assert "500 ranges were lost" in (tmp_path / "run.txt").read_text()


@needs_program
def test_malformed_use(tmp_path: Path) -> None:
    result = run([str(_PROGRAM), "malformed"], tmp_path)
    assert result.returncode == 0, result.stderr
    names = [row["Name"] for row in check_summary(tmp_path)]
    assert {"odd:", "(other)", ":", ":wïde", ":outer", "odd:crossing"} <= set(names)
    assert ":left open" not in names
    text = (tmp_path / "run.txt").read_text()
    assert "2 pops without an open range" in text
    assert "1 ranges were still open" in text
    assert names.count(":deep") + 1977 == 3000 and "1977 ranges were lost: more than 1024" in text


@needs_program
def test_payloads(tmp_path: Path) -> None:
    result = run([str(_PROGRAM), "payloads"], tmp_path)
    assert result.returncode == 0, result.stderr
    payloads = {row["Name"].removeprefix("payloads:"): row["Payload"] for row in check_summary(tmp_path)}
    assert payloads == {
        "fields": "a=-7 b=1.5 c=0.25",
        "cut off": "a=-7 b=0 c=0",
        "no data": "",
        "no payloads": "",
        "unknown size": "",
        "unknown schema": "",
        "a number": "2.5",
        "at its end": "a=-7 b=1.5 c=0.25",
        "": "a=-7 b=1.5 c=0.25",
    }
    assert "1 pops without an open range" in (tmp_path / "run.txt").read_text()


@needs_program
def test_nesting(tmp_path: Path) -> None:
    assert run([str(_PROGRAM), "fork"], tmp_path).returncode == 0
    parent = {row["Name"]: row for row in check_summary(tmp_path)}
    assert set(parent) == {":around", ":parent"}
    assert parent[":parent"]["ParentId"] == parent[":around"]["RangeId"]
    assert (parent[":parent"]["Lvl"], parent[":around"]["NumChild"]) == ("1", "1")
    assert int(parent[":around"]["DurChild (ns)"]) == int(parent[":parent"]["Duration (ns)"])
    around, inner = parent[":around"]["RangeId"], parent[":parent"]["RangeId"]
    assert (parent[":around"]["RangeStack"], parent[":parent"]["RangeStack"]) == (f":{around}", f":{around}:{inner}")
    assert parent[":parent"]["NameTree"] == "--:parent"
    (child,) = [path for path in tmp_path.glob("run.*.trace.csv") if path.name != "run.trace.csv"]
    assert {row["Name"] for row in rows(child)} == {":around", ":child"}


@needs_program
def test_exit_inside_a_range(tmp_path: Path) -> None:
    assert run([str(_PROGRAM), "exit"], tmp_path).returncode == 3
    names = {row["Name"] for row in check_summary(tmp_path)}
    assert ":done" in names and ":open at exit" not in names


def test_stages_of_the_sampler(tmp_path: Path) -> None:
    program = """
import torch, moesaic
from moesaic.sampling import kept, sample
logits, context = torch.randn(3, 20000), torch.zeros(3, 1, dtype=torch.int64)
sample(logits, top_k=5, repetition_penalty=1.5, context=context, return_confidence=True)
sample(logits)
kept(logits, top_p=0.9)
"""
    path = os.pathsep.join(part for part in sys.path if part)
    result = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=path, MOESAIC_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    counts = {row["Range"]: int(row["Instances"]) for row in rows(tmp_path / "run.csv")}
    assert counts["moesaic:sample"] == 3
    per_row = {"pack": 3, "scale": 3, "confidence": 3, "unpack": 3, "draw": 6}
    assert {name: counts[f"moesaic:{name}"] for name in per_row} == per_row
    assert counts["moesaic:select"] > 0 and counts["moesaic:softmax"] > 0


def test_beside_pythons_nvtx(tmp_path: Path) -> None:
    pytest.importorskip("nvtx", reason="needs the nvtx package: a second user of NVTX in the process")
    program = """
import nvtx, torch, moesaic
layer = moesaic.ExpertsLayer(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
with nvtx.annotate("mine", domain="script"):
    for _ in range(3):
        layer.forward(torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
"""
    path = os.pathsep.join(part for part in sys.path if part)
    result = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    check_summary(tmp_path)
    counts = {row["Range"]: int(row["Instances"]) for row in rows(tmp_path / "run.csv")}
    assert counts["script:mine"] == 1 and counts["moesaic:forward"] == 3 and counts["moesaic:gate_up_gemm"] > 0


_STEP = """
import json, time, torch, moesaic
E, H, I, T = 4, 128, 96, 64
torch.manual_seed(0)
layer = moesaic.ExpertsLayer(torch.randn(E, 2 * I, H), torch.randn(E, H, I))
a, b = (torch.randn(s, requires_grad=True) for s in ((E, 8, H), (E, 2 * I, 8)))
c, d = (torch.randn(s, requires_grad=True) for s in ((E, 8, I), (E, H, 8)))
lora = moesaic.Lora(gate_up=moesaic.LoraPair(a, b, 1.0), down=moesaic.LoraPair(c, d, 1.0))
ids, w = torch.randint(0, E, (T, 2)), torch.rand(T, 2)
with moesaic.profile() as profile:
    out = moesaic.moe_experts(torch.randn(T, H, requires_grad=True), ids, w.requires_grad_(), layer, lora)
    out.sum().backward()
end_ns = time.perf_counter_ns()
profile.measure_ceilings()
print(json.dumps({"end_ns": end_ns, "rows": ids.flatten().bincount(minlength=E).tolist(), "phases": profile.phases()}))
"""


def test_the_engines_ranges(tmp_path: Path) -> None:
    """Nesting, and work: the tool's view and the timers' are two ways to the same numbers."""
    path = os.pathsep.join(part for part in sys.path if part)
    result = run([sys.executable, "-c", _STEP], tmp_path, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    ranges = [row for row in check_summary(tmp_path) if row["Name"].startswith("moesaic:")]
    # On Python's clock, to a millisecond; the ceilings are measured behind the tool's back.
    assert all(int(row["Start (ns)"]) < said["end_ns"] + 1_000_000 for row in ranges)
    names = {row["RangeId"]: row["Name"].removeprefix("moesaic:") for row in ranges}
    category: dict[str, set[str]] = {}
    for row in said["phases"]:
        category.setdefault(row["name"], set()).add(row["category"])
    flops, experts, nested = 0.0, {}, set()
    for row in ranges:
        name = row["Name"].removeprefix("moesaic:")
        fields = dict(field.split("=") for field in row["Payload"].split())
        flops += float(fields.get("flops", 0))
        if "expert" in fields and fields["expert"] != "-1":
            experts[int(fields["expert"])] = int(fields["rows"])
        if category.get(name, set()) & doc.SUMS:
            assert names[row["ParentId"]] in category[name], row
            nested.add(name)
    assert experts == {expert: count for expert, count in enumerate(said["rows"]) if count > 0}
    assert nested >= {
        "D3_gemm",
        "D4_lora_grad",
        "A1_silu_backward",
        "GU1_base_pass_gate",
        "P",
        "dA",
        "GU3_lora_pass_gate",
    }
    timed = sum(row["flops"] for row in said["phases"] if doc.is_leaf(row["name"]))
    assert flops == pytest.approx(timed) and timed > 0
    assert "GFLOP/s a thread" in (tmp_path / "run.txt").read_text()
