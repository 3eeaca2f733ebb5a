"""`moesaic bench gemm` and `bench pool`: results are right, documents consistent. No times are asserted."""

import json
import time

import pytest
import torch

import moesaic
from moesaic import _core, cli
from moesaic.commands import gemm_bench, onednn, pool_bench
from moesaic.commands.output import UsageError
from moesaic.profiles import system as profiles_system

SHAPES = "name,form,rows,columns,contraction\nsmall,direct,5,33,70\nsmall,unpack,17,70,33\nsmall,gradient,17,70,33\n"


def run_json(capsys, *arguments, code=0):
    assert cli.main(["bench", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text(SHAPES)
    return path


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_gemm_document(capsys, shapes, stream, monkeypatch):
    monkeypatch.setattr(gemm_bench, "_copies", lambda weight_bytes: 3)
    threads = torch.get_num_threads()
    document = run_json(capsys, "gemm", "--shapes", str(shapes), "--reps", "2", *stream)
    assert torch.get_num_threads() == threads
    assert document["weights"] == ("memory" if stream else "cache")
    assert [(s["form"], s["rows"], s["columns"], s["contraction"]) for s in document["shapes"]] == [
        ("direct", 5, 33, 70),
        ("unpack", 17, 70, 33),
        ("gradient", 17, 70, 33),
    ]
    tiers = [name for _, name in gemm_bench.runnable_tiers()]
    assert len(set(tiers)) == len(tiers) == sum(runs for _, runs in _core.kernel_tiers()) and "portable" in tiers
    for shape in document["shapes"]:
        assert shape["copies"] == (3 if stream else 1)
        assert list(shape["kernels"]) == tiers
        flops = 2 * shape["rows"] * shape["columns"] * shape["contraction"]
        for row in [*shape["kernels"].values(), *shape["onednn"].values()]:
            assert 0 < row["us"]["min"] <= row["us"]["median"] <= row["us"]["max"]
            assert row["gflops"] == pytest.approx(flops / row["us"]["median"] / 1e3)
            assert 0 < row["error"] < 4e-3
        for row in shape["kernels"].values():
            assert row["error"] < 1e-5 and row["fraction_of_ceiling"] > 0
            assert set(row["ratio"]) == set(shape["onednn"])
            for name, ratio in row["ratio"].items():
                assert ratio == pytest.approx(shape["onednn"][name]["us"]["median"] / row["us"]["median"])
    if document["onednn"]["available"]:
        assert all(set(shape["onednn"]) == {"onednn_packed", "onednn_plain"} for shape in document["shapes"])
    else:
        assert document["onednn"]["reason"] and all(shape["onednn"] == {} for shape in document["shapes"])


def test_gemm_for_people(capsys, shapes):
    assert (
        cli.main(["bench", "gemm", "--shapes", str(shapes), "--only", "unpack", "--tier", "portable", "--reps", "1"])
        == 0
    )
    text = capsys.readouterr().out
    assert "portable_baseline" not in text
    assert "17 x 70 x 33" in text and "5 x 33 x 70" not in text and "portable" in text and "oneDNN" in text


def test_a_wrong_gemm_is_a_failure(capsys, shapes, monkeypatch):
    monkeypatch.setattr(gemm_bench, "KERNEL_TOLERANCE", 0.0)
    assert cli.main(["bench", "gemm", "--shapes", str(shapes), "--reps", "1", "--json"]) == 1
    assert "small, 5 rows: off by" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "name,form\nx,direct\n", SHAPES + "x,sideways,1,1,1\n", SHAPES + "x,direct,0,1,1\n"]
)
def test_shapes_that_are_none(capsys, tmp_path, text):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    assert cli.main(["bench", "gemm", "--shapes", str(path)]) == 2
    assert capsys.readouterr().err.startswith("moesaic: argument --")
    with pytest.raises(UsageError, match=r"missing\.csv"):
        gemm_bench.read_shapes(tmp_path / "missing.csv")


def test_the_list_of_shapes_in_the_package():
    shapes = gemm_bench.read_shapes(gemm_bench.SHAPES)
    assert {shape.form for shape in shapes} == set(gemm_bench.FORMS)


def test_gemm_probe_refuses():
    x, w = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    tier = gemm_bench.runnable_tiers()[0][0]
    for arguments, said in [
        ((99, "direct", x, w), "tier"),
        ((tier, "sideways", x, w), "form"),
        ((tier, "unpack", x, w), "contraction"),
        ((tier, "direct", x.long(), w), "activations"),
        ((tier, "direct", x, w.long()), "weights"),
        ((tier, "direct", x, w, 0), "copies"),
    ]:
        with pytest.raises(ValueError, match=said):
            _core.GemmProbe(*arguments)
    with pytest.raises(ValueError, match="out"):
        _core.GemmProbe(tier, "direct", x, w).result(torch.zeros(4, 31))


@pytest.mark.skipif(onednn.unavailable() is not None, reason=f"oneDNN: {onednn.unavailable()}")
def test_onednn_packed_weights():
    x, w = torch.randn(7, 50).to(onednn.dtype()), torch.randn(20, 50)
    expected = x.double() @ w.to(onednn.dtype()).double().t()
    for weight in (onednn.PackedWeight(w, 7), onednn.PlainWeight(w, 7), onednn.PlainWeight(w.t().contiguous().t(), 7)):
        result = weight.product(x)
        assert result.dtype == onednn.dtype()
        assert (result.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("threads", [1, 2])
def test_pool_document(capsys, monkeypatch, threads):
    for name, value in {"_JOBS": 10, "_WAKES": 2, "_TASKS": 50, "_CHAIN_LENGTH": 20, "_STEALS": 30}.items():
        monkeypatch.setattr(pool_bench, name, value)
    document = run_json(capsys, "pool", "--threads", str(threads), "--rounds", "1")
    assert document["host"]["threads"] == threads
    assert document["openmp_region"]["us"]["count"] == 10
    for source in ("own", "openmp"):
        measured = document["pool"][source]
        assert measured["empty_job_us"]["count"] == 10 and measured["wake_us"]["count"] == 2
        assert measured["tasks_1us_us"]["min"] * threads >= 50  # 50 tasks of 1 us each
        assert threads > 1 or "steal_us" not in measured
        for row in measured.values():
            assert 0 <= row["min"] <= row["p50"] <= row["p99"] <= row["max"]
    assert moesaic.get_num_threads() >= 1


@pytest.mark.parametrize("source", pool_bench.SOURCES)
def test_tasks_are_stolen(source):
    probe = _core.PoolProbe(2, source)
    end = time.monotonic() + 20  # a host with one free core lets the second thread in late
    while not (latencies := probe.steals(100)) and time.monotonic() < end:
        pass
    assert latencies and min(latencies) > 0


def test_pool_for_people(capsys, monkeypatch):
    monkeypatch.setattr(pool_bench, "_JOBS", 10)
    assert cli.main(["bench", "pool", "--threads", "1", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    for word in ("empty job", "wake", "edge", "steal", "idle", "OpenMP region"):
        assert word in text


def test_percentiles():
    row = pool_bench.percentiles([float(i) for i in range(101)][::-1])
    assert row == {"p50": 50.0, "p99": 99.0, "min": 0.0, "max": 100.0, "count": 101}
    assert pool_bench.percentiles([3.0])["p99"] == 3.0


def test_wrong_usage(capsys):
    for arguments in (
        ["pool", "--threads", "0"],
        ["pool", "--rounds", "x"],
        ["gemm", "--reps", "0"],
        ["gemm", "--only", "?"],
    ):
        assert cli.main(["bench", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1


def test_profiling_document(capsys):
    if profiles_system.library(profiles_system.COLLECTOR) is None:
        assert cli.main(["bench", "profiling"]) == 1
        pytest.skip("built without the NVTX headers")
    code = cli.main(["bench", "profiling", "--preset", "tiny", "--tokens", "32", "--reps", "3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if all(row["met"] for row in document["overhead"].values()) else 1)
    assert set(document["step_ms"]) == {"off", "timers", "collector"}
    assert all(0 < times["min"] <= times["median"] <= times["max"] for times in document["step_ms"].values())
    assert document["ranges_a_step"] > 20 and document["tasks_a_step"] > 5
    assert 0 < document["range_ns"]["off"] < document["range_ns"]["timers"] < document["range_ns"]["collector"]
    bars = {name: row["bar"] for name, row in document["overhead"].items()}
    assert bars == {"timers": 0.005, "timers_and_nvtx": 0.01, "collector": 0.03}
    for row in document["overhead"].values():
        assert row["estimate"] > 0
        assert all(way["value"] > -1 and way["noise"] >= 0 for way in row["measured"].values())
        beyond = all(way["value"] - way["noise"] > row["bar"] for way in row["measured"].values())
        assert row["met"] == (row["estimate"] <= row["bar"] and not beyond)
    assert _core.mute_nvtx(True) is False, "the tool was in a process of its own"
    assert cli.main(["bench", "profiling", "--preset", "nothing"]) == 2
