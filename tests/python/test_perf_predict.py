"""`moesaic predict`: its output, its page in a browser, its errors, and a small --check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moesaic
import moesaic.perf as perf
from moesaic.cli import main
from moesaic.commands import training_step
from moesaic.perf import calibration, check
from moesaic.perf.calibration import LayerCase
from moesaic.perf.layer_model import ExpertsShape, LayerModel
from moesaic.perf.products import Products

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 32000, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return path


def predict(config: Path, *more: str) -> int:
    return main(["predict", "--model", str(config), "--machine", "emr-16c", *more])


def test_table_and_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--phase", "train", "--tokens", "200", "--devices", "2", "--routing", "zipf:1", "--recompute"]
    assert predict(config, *options) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("forward", "recompute", "backward", "optimizer", "experts", "why", "memory"))
    assert predict(config, *options, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert f"{document['milliseconds']:,.2f} ms" in shown
    result = perf.run_simulation(
        perf.Topology(devices=2),
        QWEN,
        perf.Inference("train", 200, lora_rank=16, recompute=True),
        perf.Parallelism(routing="zipf:1"),
        "emr-16c",
    )
    assert document["milliseconds"] == pytest.approx(result.milliseconds)
    assert document["inputs"]["topology"]["devices"] == 2


def test_the_page_in_a_browser(
    config: Path, tmp_path: Path, browse: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    options = ["--tokens", "64", "--decode-tokens", "3", "--devices", "2", "--granularity", "coarse"]
    assert predict(config, *options, "--html", str(tmp_path / "plan.html")) == 0
    page = (tmp_path / "plan.html").read_text()
    assert not re.search(r"(src|href)\s*=", page) and "http" not in page.replace("http://www.w3.org/2000/svg", "")

    def shown(tokens: int, devices: int, bandwidth: int) -> dict[str, str]:
        result = browse(f"file://{tmp_path / 'plan.html'}#tokens={tokens}&devices={devices}&bandwidth={bandwidth}")
        body = re.search(r"<body ([^>]*)>", result.stdout)
        assert body is not None, result.stderr[-500:]
        found = dict(re.findall(r'data-(\w+)="([^"]*)"', body.group(1)))
        assert found["state"] == "ready" and found["errors"] == "0", found
        assert "CONSOLE" not in result.stderr, result.stderr
        assert result.stdout.count("data-bar=") >= 2 * 4 and "data-step=" in result.stdout
        found["blocks"] = re.findall(r'data-block="(\w+)" data-strategy="(\w+)" data-pieces="(\d+)"', result.stdout)  # type: ignore[assignment]
        return found

    # The sliders at the run that was asked for, and elsewhere: what Python says of those runs.
    for tokens, devices, bandwidth, factor in ((2, 1, 0, 1.0), (4, 2, -15, 0.125)):
        found = shown(tokens, devices, bandwidth)
        count, each = (16, 32, 64, 128, 256)[tokens], (1, 2, 4, 8, 16)[devices]
        assert (int(found["tokens"]), int(found["devices"]), float(found["bandwidth"])) == (count, each, factor)
        expected = perf.run_simulation(
            perf.Topology(devices=each, intra=perf.Link(48.0 * factor, 2.0)),
            QWEN,
            perf.Inference(tokens=count, decode_tokens=3),
            None,
            "emr-16c",
            perf.SimulationConfig(granularity="coarse"),
        )
        assert float(found["ms"]) == pytest.approx(
            expected.milliseconds, rel=1e-6
        )  # the cache keeps six digits of parts
        assert list(found["blocks"]) == [
            (block.name, block.strategy, str(block.pieces)) for step in expected.steps for block in step.blocks
        ]


def test_one_product(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", "--linear", "4096x768", "--tokens", "32", "--machine", "emr-16c", "--devices", "4"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["milliseconds"] == min(found["milliseconds"] for found in document["candidates"])
    assert main(command) == 0
    assert "hybrid 2 x 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--routing", "even"], "routing is 'even'"),
        (["--machine", "pdp-11"], "machine is 'pdp-11'"),
        (["--threads", "99"], "threads is 99"),
        (["--intra", "fast"], "argument --intra: 'fast'"),
        (["--intra", "-2"], "link.bandwidth_gbps is -2"),
        (["--inter", "10,1,2.5"], "argument --inter"),
        (["--inter", "10,1,inf"], "argument --inter"),
        (["--model", ""], "model is ''"),
        (["--phase", "decode", "--decode-tokens", "0"], "decode_tokens is 0"),
        (["--linear", "4096"], "argument --model"),
        (["--check"], "argument --model: not with --check"),
        (["--calibrate"], "argument --model: not with --check or --calibrate"),
        (["--seconds", "0"], "argument --seconds: '0' is not a number of seconds"),
        (["--seconds", "nan"], "argument --seconds: 'nan'"),
    ],
)
def test_bad_arguments_are_named(
    config: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(config, *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_check_is_of_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--check", "--machine", "emr-16c"]) == 2
    assert "argument --machine: 'emr-16c'" in capsys.readouterr().err


def test_links_without_a_latency_take_that_of_the_help(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for link in ("48", "48,2", "48,5"):
        assert predict(config, "--devices", "4", "--intra", link, "--json") == 0
        times.append(json.loads(capsys.readouterr().out)["milliseconds"])
    assert times[0] == times[1] < times[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": -8}, "hidden_size is -8"), ({"num_experts": None}, "num_experts is missing")],
)
def test_bad_models_are_named(
    config: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(json.dumps({k: v for k, v in {**QWEN, **change}.items() if v is not None}))
    assert predict(config) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "CONFIG", "--reps", "3"], "argument --reps: only with --check or --calibrate"),
        (["--model", "CONFIG", "--recompute"], "argument --recompute: only with --phase train"),
        (["--linear", "64x64", "--phase", "train"], "argument --phase: only with --model"),
        (["--linear", "64x64", "--max-simulated-tokens", "3"], "argument --max-simulated-tokens: only with --model"),
        (["--check", "--tokens", "64"], "argument --tokens: not with --check or --calibrate"),
        (["--calibrate", "--nodes", "2"], "argument --nodes: not with --check or --calibrate"),
    ],
)
def test_options_that_change_nothing_are_refused(
    config: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *(str(config) if option == "CONFIG" else option for option in options)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("what", [["--linear", "64x64"], ["--check"]])
def test_a_page_is_of_a_model(what: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *what, "--html", str(tmp_path / "plan.html")]) == 2
    assert capsys.readouterr().err == "moesaic: argument --html: expected --model with it, whose run the page shows\n"
    assert not (tmp_path / "plan.html").exists()


def test_files_that_cannot_be_had(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict(tmp_path / "nothing.json") == 1
    assert predict(config, "--html", str(tmp_path / "no" / "folder.html")) == 1
    perf.Machine.named("emr-16c").save(tmp_path / "m.json")
    machine = json.loads((tmp_path / "m.json").read_text())
    del machine["dram_gbps"]
    (tmp_path / "m.json").write_text(json.dumps(machine))
    assert main(["predict", "--model", str(config), "--machine", str(tmp_path / "m.json")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "dram_gbps is missing" in errors[2]


@pytest.fixture
def described(config: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[perf.Machine, list[int]]:
    """What two threads of this host are taken to be, in the place of what Measurement says; its rounds."""
    moesaic.set_num_threads(2)
    machine = replace(perf.Machine.named("zen5-2c"), isa=moesaic.isa(), l3_bytes=1 << 16)
    if machine.isa not in machine.kernels:
        machine = replace(machine, kernels={machine.isa: next(iter(machine.kernels.values()))})
    rounds: list[int] = []

    class Described:
        def __init__(self, progress: object) -> None: ...

        def forget(self) -> None:
            rounds.clear()

        def rounds(self, count: int) -> None:
            rounds.append(count)

        def machine(self) -> perf.Machine:
            return machine

    monkeypatch.setattr(check, "Measurement", Described)
    return machine, rounds


def test_check_compares_what_it_runs(
    described: tuple[perf.Machine, list[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a description that is not this host's, with small layers: the machinery, not the bars."""
    machine, rounds = described
    small = (LayerCase(ExpertsShape(4, 64, 96, 2, 8), 24), LayerCase(ExpertsShape(4, 96, 64, 2, 0), 40, "zipf"))
    monkeypatch.setattr(check, "calibration_cases", lambda l3_bytes: small)
    shapes = [perf.GemmShape(m=3, k=256, n=128, output="fp32"), perf.GemmShape(groups=2, m=20, k=128, n=96)]
    monkeypatch.setattr(check, "gemm_shapes", lambda: shapes)
    monkeypatch.setattr(check, "layer_cases", lambda *, full: small)
    disturbed = False
    monkeypatch.setattr(perf.machine.Kernels, "undisturbed", lambda self, isa: not disturbed)
    code = main(["predict", "--check", "--json", "--reps", "2", "--only", "gemm", "--only", "layer"])
    document = json.loads(capsys.readouterr().out)
    groups = [row["group"] for row in document["summary"]]
    assert groups == ["gemm", "layer forward", "layer backward", "skewed routing"]
    assert rounds == [1] * 12  # anew, in turn with the products
    assert perf.Machine.from_json(document["description"]) == machine
    assert code == (0 if all(row["holds"] for row in document["summary"]) else 1)
    for pair in document["pairs"]:
        assert pair["measured_ms"] > 0 and pair["predicted_ms"] > 0 and pair["spread"] >= 1
        assert pair["error"] == pytest.approx(pair["predicted_ms"] / pair["measured_ms"] - 1)
    # What others disturb says nothing, and a check that could run nothing does not hold.
    disturbed = True
    assert main(["predict", "--check", "--json", "--reps", "2", "--only", "gemm", "--seconds", "0.5"]) == 1
    nothing = json.loads(capsys.readouterr().out)
    assert nothing["pairs"] == [] and nothing["left_out"]["gemm"].startswith("2 of 2 shapes")
    # Where nobody is ever left alone, all of it counts.
    main(["predict", "--check", "--json", "--reps", "2", "--only", "gemm", "--seconds", "1", "--disturbed"])
    everything = json.loads(capsys.readouterr().out)
    assert len(everything["pairs"]) == 2 and everything["left_out"] == {} and everything["disturbed"]
    # But of layers the least of many disturbed runs is taken where the least is asked for.
    layers = [replace(one, undisturbed=False) for one in calibration.measure_layers(small, 1)]
    monkeypatch.setattr(check, "measure_layers", lambda *arguments, **named: layers)
    some = ["predict", "--check", "--json", "--only", "layer"]
    main(some)
    assert len(json.loads(capsys.readouterr().out)["left_out"]) == len(small)
    main([*some, "--statistic", "least"])
    least = json.loads(capsys.readouterr().out)
    assert least["left_out"] == {} and len(least["pairs"]) == 2 * len(small)
    # The rates are kept, and used by the next prediction for this machine.
    assert document["rates"] is not None
    kept = perf.LayerRates.of(machine, 2)
    assert {name: getattr(kept, name) for name in perf.LayerRates.names()} == document["rates"]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and models that take a moment, and fit any cache."""
    tiny = training_step.MODELS["tiny"]
    monkeypatch.setitem(training_step.MODELS, "demo", tiny)
    monkeypatch.setattr(check, "CALIBRATION_MODEL", tiny)
    monkeypatch.setattr(check, "CALIBRATION_STEP", LayerCase(ExpertsShape(32, 64, 32, 8, 16), 12))
    monkeypatch.setattr(check, "calibration_cases", lambda l3_bytes: (LayerCase(ExpertsShape(4, 64, 96, 2, 8), 24),))
    monkeypatch.setattr(check, "layer_cases", lambda *, full: ())
    monkeypatch.setattr(Products, "fits", lambda self, weight_bytes: True)


def test_steps_take_turns_with_layers(
    described: tuple[perf.Machine, list[int]], _small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    fitted: list[Any] = []

    def fit_in_model(model: LayerModel, shape: ExpertsShape, repetitions: Any, statistic: Any) -> perf.LayerRates:
        fitted.append((shape, repetitions))
        return replace(calibration.fit_in_model(model, shape, repetitions, statistic), in_model=1.5)

    monkeypatch.setattr(check, "fit_in_model", fit_in_model)
    told_alone: list[list[float]] = []

    def run_alone(step: training_step.TrainingStep) -> list[float]:
        original(step)
        told_alone.append([float(len(told_alone))] * 2 * len(step.calls))
        return told_alone[-1]

    original = training_step.TrainingStep.run_alone
    monkeypatch.setattr(training_step.TrainingStep, "run_alone", run_alone)
    told: list[str] = []
    plan = check.CheckPlan(repetitions=5, recalibrate=True, parts=("layer", "step"), seconds=1.0, disturbed=True)
    document = check.run_check(plan, told.append)
    assert [row["group"] for row in document["summary"]] == ["step"] and document["left_out"] == {}
    for pair, tokens in zip(document["pairs"], (512, 192), strict=True):
        assert pair["name"] == f"demo model, {tokens} tokens, 2 layers"
        assert pair["measured_ms"] > 0 and pair["predicted_ms"] > 0 and pair["spread"] >= 1
    turns = [text.split(":")[0] for text in told if text.startswith("turn")]
    assert turns == [f"turn {turn} of 12" for turn in range(1, 13) for _ in range(2)]  # a layer, then the steps
    assert sum(text.startswith("turn") and "steps" in text for text in told) == 12
    ((shape, repetitions),) = fitted
    assert shape == ExpertsShape(32, 64, 32, 8, 16)
    assert [[len(calls) for calls in one] for one in repetitions] == [[4, 4]] * 5  # inside, and alone
    # Every other run of the calls alone is there for the next one.
    assert [alone for _, alone in repetitions] == told_alone[1::2] and len(told_alone) == 10
    # What is kept is what the steps' turns said.
    kept = perf.LayerRates.of(described[0], 2)
    assert {name: getattr(kept, name) for name in perf.LayerRates.names()} == document["rates"]
    assert kept.in_model == 1.5


@pytest.mark.parametrize(
    ("parts", "left_out"), [(("layer",), {"in_model"}), (("step",), {"step", "in_model"}), (("gemm",), set())]
)
def test_a_check_without_transformers(
    described: tuple[perf.Machine, list[int]],
    _small: None,
    monkeypatch: pytest.MonkeyPatch,
    parts: tuple[str, ...],
    left_out: set[str],
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(check, "gemm_shapes", lambda: ())
    plan = check.CheckPlan(repetitions=1, recalibrate=True, parts=parts, seconds=1.0, disturbed=True)
    document = check.run_check(plan, lambda text: None)
    assert set(document["left_out"]) == left_out
    assert all("transformers or PEFT is missing" in why for why in document["left_out"].values())
    assert document["rates"] is None or document["rates"]["in_model"] == 1.0


def test_the_clock_of_one_thread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Inside of the check the engine's clock is the thread's own, and on one thread."""
    import time

    import moesaic
    from moesaic import _core

    seen: list[tuple[int, bool]] = []

    def run_check(*args: object) -> dict[str, object]:
        own, engine = time.thread_time_ns(), _core.clock_ns()
        seen.append((moesaic.get_num_threads(), abs(engine - own) < 1e9))
        raise ValueError("enough")

    monkeypatch.setattr(check, "run_check", run_check)
    for command in ("predict", "tune"):
        assert main([command, "--check", "--clock", "cpu"]) == 2
        assert "--threads 1" in capsys.readouterr().err
    moesaic.set_num_threads(2)
    with pytest.raises(ValueError, match="enough"):
        main(["predict", "--check", "--clock", "cpu", "--threads", "1"])
    assert seen == [(1, True)]
    assert abs(_core.clock_ns() - time.perf_counter_ns()) < 1e9  # afterwards it is everybody's again
    moesaic.set_num_threads(2)


def test_the_distribution_of_errors() -> None:
    pairs = [check.Pair("gemm", "", 1.0 + e, 1.0, 1.0) for e in (*[0.01] * 10, *[-0.05] * 8, 0.15, -0.3)]
    (row,) = check.summarise(pairs)
    assert (row["count"], row["holds"]) == (20, True)
    assert [row[name] for name in ("median", "p95", "worst")] == pytest.approx([0.03, 0.15, 0.3])
    (row,) = check.summarise([*pairs, *pairs[-1:] * 2])
    assert row["p95"] == pytest.approx(0.3) and not row["holds"]
    # Every skewed case counts.
    (row,) = check.summarise([check.Pair("skewed routing", "", e, 1.0, 1.0) for e in (1.01, 0.99, 1.2)])
    assert not row["holds"] and row["median"] == pytest.approx(0.01)


def test_no_case_is_both_fitted_and_held_out() -> None:
    fitted = {case.shape for l3 in (1 << 20, 32 << 20, 300 << 20) for case in calibration.calibration_cases(l3)}
    fitted.add(calibration.CALIBRATION_STEP.shape)
    held = {case.shape for case in check.layer_cases(full=True)}  # those of the demo's model are among them
    demo = training_step.MODELS["demo"]
    assert (demo["hidden_size"], demo["moe_intermediate_size"]) in {(s.hidden, s.intermediate) for s in held}
    sizes = {(shape.hidden, shape.intermediate) for shape in fitted}
    assert not sizes & {(shape.hidden, shape.intermediate) for shape in held}
