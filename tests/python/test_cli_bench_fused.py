"""`moesaic bench fused` and examples/encoder: results are right, documents consistent. No times are asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moesaic import cli
from moesaic.commands import fused_bench, fused_case, measure

SMALL = ["bench", "fused", "--batch", "2", "--tokens", "9", "--hidden", "64", "--warmup", "0", "--reps", "2"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "encoder"


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones read some GiB each; test_cli_bench has them."""

    class Probe:
        def __init__(self, isa: str, threads: int, clock: Callable[[], float]) -> None:
            assert clock() <= clock()

        def measure(self) -> measure.Ceiling:
            return measure.Ceiling(compute_gflops=100.0, read_gbps=10.0)

    monkeypatch.setattr(measure, "CeilingProbe", Probe)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_document(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--dtype", dtype, "--silu-batch", "1", "--peers", "torch,onednn", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["cases"]}
    assert list(rows) == [
        "attention output 64",
        "FFN 1 64",
        "FFN 2 64",
        # Of fp32 they are PyTorch's.
        *(
            [
                "adapter in training 64",
                "self-attention 64",
                "attention in training, 9 tokens",
                "attention in training, 4 x 9 in a row",
                "decoding, 36 keys",
            ]
            if dtype == "bf16"
            else []
        ),
        "rotary in training",
        "loss 64",
        "loss of logits",
        "attention output 770",
        "FFN 2 770",
        "layernorm 64",
        "rmsnorm 64",
        "silu_mul (1, 1024, 1024)",
    ]
    size = 2 if dtype == "bf16" else 4
    row = rows["FFN 2 64"]
    assert (row["rows"], row["n"], row["k"], row["flops"]) == (18, 64, 256, 2 * 18 * 64 * 256)
    assert row["bytes"] == size * (18 * 256 + 64 * 256 + 2 * 18 * 64)
    row = rows["loss 64"]
    assert (row["rows"], row["n"], row["k"], row["flops"]) == (36, 151936, 64, 6 * 36 * 151936 * 64)
    assert row["bytes"] == size * (3 * 36 * 64 + 2 * 151936 * 64)
    assert rows["rotary in training"]["bytes"] == size * 4 * 18 * 36 * 128
    assert rows["FFN 2 770"]["rows"] == 16
    assert rows["silu_mul (1, 1024, 1024)"]["bytes"] == size * 3 * 2**20
    # The arena rounds a block up by an eighth at most.
    assert [name for name, row in rows.items() if row["moesaic"].get("fraction_of_stream", 0) > 0] == [
        "silu_mul (1, 1024, 1024)"
    ]
    assert 3 * size * 2**20 <= rows["silu_mul (1, 1024, 1024)"]["peak_bytes"] < 3.3 * size * 2**20
    for row in rows.values():
        assert row["verified"] <= fused_bench.BOUND[dtype]
        limit = max(row["flops"] / 100e6, row["bytes"] / 10e6)
        times = row["moesaic"]["ms"]
        assert limit / times["max"] <= row["moesaic"]["fraction_of_limit"] <= limit / times["min"]
        ratio = row["peers"]["torch"]["ms"]["median"] / times["median"]
        assert row["peers"]["torch"]["ratio"] == pytest.approx(ratio)
        others = ("adapter", "self-attention", "attention in", "decoding", "loss")
        dense = row["flops"] > 0 and not row["name"].startswith(others)
        assert ("ratio" in row["peers"]["onednn"]) == (dense and fused_case.onednn.unavailable() is None)


def test_peers_compute_the_same() -> None:
    with torch.no_grad():
        for case in fused_case.cases(2, 5, [32], [], torch.float32):
            inputs = case.inputs()
            expected = inputs.engine()
            for name in ("torch", "onednn", "trl"):
                peer = inputs.peer(name)
                if not isinstance(peer, str):
                    torch.testing.assert_close(peer(), expected, rtol=1e-4, atol=1e-4)


def test_table_archive_and_diff(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fails)
    monkeypatch.chdir(tmp_path)
    only = ["--only", "attention", "--peers", "compile", "--archive"]
    assert cli.main([*SMALL, *only]) == 0
    out = capsys.readouterr().out
    assert "attention output 770" in out and "compile: torch.compile failed: no compiler" in out
    (folder,) = (tmp_path / "profile_runs").iterdir()
    assert folder.name.endswith("_fused")
    assert json.loads((folder / "result.json").read_text())["schema"] == 1
    assert "attention output 770" in (folder / "table.txt").read_text()
    assert cli.main(["profile", "diff", str(folder), str(folder), "--json"]) == 0
    rows = {row["phase"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["gemm"] == rows["(wall clock)"] == "same"


def test_wrong_usage_and_a_wrong_result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*SMALL, "--peers", "numpy"]) == 2
    assert "argument --peers: 'numpy' is none of torch, compile, onednn, trl, all" in capsys.readouterr().err
    assert cli.main([*SMALL, "--only", "convolution"]) == 2
    assert "argument --only: no case has 'convolution' in its name" in capsys.readouterr().err
    assert cli.main([*SMALL, "--clock", "cpu"]) == 2
    assert "--threads 1" in capsys.readouterr().err
    assert cli.main([*SMALL, "--archive", "a/b"]) == 2
    assert "argument --archive: name is 'a/b'; expected letters" in capsys.readouterr().err
    for bound in (0.0, math.nan):  # no error is below either, as one that is NaN is below no bound
        monkeypatch.setitem(fused_bench.BOUND, "bf16", bound)
        assert cli.main([*SMALL, "--only", "layernorm 64"]) == 1
        captured = capsys.readouterr()
        assert "WRONG" in captured.out and "moesaic: layernorm 64: off by" in captured.err


def test_the_encoder_example() -> None:
    pytest.importorskip("transformers")
    small = ["--batch", "2", "--tokens", "16", "--layers", "2", "--hidden", "128", "--reps", "1", "--dtype", "fp32"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *small, "--train"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemm_bias_add_layernorm" in done.stdout and "tokens/s" in done.stdout and "backward_gemm" in done.stdout
