"""`moesaic bench layer`: the document is consistent and its numbers follow from each other. No times are asserted."""

import csv
import json
import subprocess
import sys

import pytest
import torch

import moesaic
from moesaic import _core, cli
from moesaic.commands import layer_bench, onednn

FAST = ["--warmup", "0", "--reps", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads, torch_threads = moesaic.get_num_threads(), torch.get_num_threads()
    yield
    moesaic.set_num_threads(threads)
    torch.set_num_threads(torch_threads)


@pytest.fixture(autouse=True)
def _small_read_probe(monkeypatch):
    """A buffer that is made quickly; its rate is too good, and no test minds."""
    make = _core.ReadProbe
    monkeypatch.setattr(_core, "ReadProbe", lambda threads: make(threads, 1 << 24))


def bench_json(capsys, *options, code=0):
    assert cli.main(["bench", "layer", "--json", *FAST, *options]) == code
    return json.loads(capsys.readouterr().out)


def check_statistics(times):
    assert set(times) == {"min", "median", "mean", "std", "max"}
    assert 0 < times["min"] <= times["median"] <= times["max"]
    assert times["min"] <= times["mean"] <= times["max"] and times["std"] >= 0


def check_case(document, case):
    """Recomputes everything that follows from the sizes, the ceilings and the times."""
    e, h, i, k = case["experts"], case["hidden"], case["intermediate"], case["top_k"]
    t, r = case["tokens"], case["rank"]
    slots = t * k
    base = 6 * slots * h * i
    lora = 2 * slots * r * (h + 3 * i + h)
    assert case["flops"] == {"forward": base + lora, "backward": base + 2 * lora}

    own = case["moesaic"]
    assert 1 <= case["experts_hit"] <= min(e, slots)
    assert case["weight_bytes"] >= 2 * 3 * e * h * i
    adapter = r * (h + 2 * i) + r * (i + h)  # one expert: A, B of gate_up; A, B of down
    hit = case["weight_bytes"] * case["experts_hit"] // e + 4 * adapter * case["experts_hit"]
    rows = 2 * 2 * t * h
    assert case["bytes"]["forward"] == hit + own["saved_bytes"] + rows
    assert case["bytes"]["backward"] == hit + own["saved_bytes"] + rows + 4 * adapter * e
    if case["save"]:  # G and U in bf16, the narrow products, the routing; each part may be rounded up to 64 bytes
        least = 2 * slots * (2 * i + 2 * r) + 4 * slots
        assert least <= own["saved_bytes"] <= least + 2 * slots * 2 * r + 4 * (e + 1) + 5 * 64

    ceiling = document["ceiling"]
    for way in ("forward", "backward"):
        limit = max(
            case["flops"][way] / (ceiling["compute_gflops"] * 1e6), case["bytes"][way] / (ceiling["read_gbps"] * 1e6)
        )
        assert case["limit_ms"][way] == pytest.approx(limit)
    check_statistics(own["forward_ms"])
    assert own["first_call_ms"] > 0
    run, left_out = case["repetitions"]["run"], case["repetitions"]["left_out"]
    assert run == 2 and 0 <= left_out <= run
    assert (own["fraction_of_limit"]["forward"] is None) == (left_out == run)
    assert case["threads"] == document["host"]["threads"] and case["ceiling"] == ceiling
    assert own["scratch_bytes"] > 0
    for way in ("forward", "backward"):
        faults = own["page_faults"][way]
        assert (faults is None) == (own[f"{way}_ms"] is None)
        assert faults is None or 0 <= faults["min"] <= faults["median"] <= faults["max"]
    assert (own["forward_without_saving_ms"] is not None) is case["save"]


def test_the_whole_document(capsys):
    document = bench_json(capsys, "--preset", "tiny", "--peers", "torch", "--verify")
    assert document["schema"] == 1
    assert document["host"]["isa"] == moesaic.isa() and document["host"]["threads"] == 1 and document["host"]["cpu"]
    assert document["ceiling"]["compute_gflops"] > 0 and document["ceiling"]["read_gbps"] > 0
    (case,) = document["cases"]
    sizes = {"experts": 8, "hidden": 128, "intermediate": 96, "top_k": 2, "rank": 8, "tokens": 64}
    assert {name: case[name] for name in sizes} == sizes
    assert case["routing"] == "uniform" and case["weight_format"] == "bf16" and case["save"] is True
    check_case(document, case)

    own = case["moesaic"]
    check_statistics(own["backward_ms"])
    slowest = own["forward_ms"]["max"] + own["backward_ms"]["max"]
    fastest = own["forward_ms"]["min"] + own["backward_ms"]["min"]
    assert 64e3 / slowest <= own["tokens_per_s"] * (1 + 1e-9) and own["tokens_per_s"] <= 64e3 / fastest * (1 + 1e-9)

    assert list(case["peers"]) == ["torch_loop", "torch_grouped_mm"]
    for peer in case["peers"].values():
        for way in ("forward", "backward"):
            check_statistics(peer[f"{way}_ms"])
            ratio = peer[f"{way}_ms"]["median"] / own[f"{way}_ms"]["median"]
            assert peer["ratio"][way] == pytest.approx(ratio)
        assert peer["ratio"]["total"] > 0
        assert all(0 < error < 3e-2 for error in peer["verified"].values())
    assert set(case["verified"]) == {"output", "d_hidden", "d_lora", "d_router"}
    assert all(0 < error <= 5e-3 for error in case["verified"].values())
    assert case["verified_tokens"] == 64


def test_options_override_a_preset_and_several_cases(capsys):
    document = bench_json(
        capsys, "--preset", "tiny", "--experts", "5", "--rank", "3", "--tokens", "1,30", "--routing", "concentrated:3"
    )
    assert [case["tokens"] for case in document["cases"]] == [1, 30]
    for case in document["cases"]:
        assert (case["experts"], case["rank"], case["routing"]) == (5, 3, "concentrated:3")
        assert case["peers"] == {} and case["verified"] is None
        check_case(document, case)
    assert document["cases"][1]["experts_hit"] == 3


def test_peers_that_cannot_run_are_left_out(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kt_kernel", None)  # as if it were not installed
    document = bench_json(capsys, "--preset", "tiny", "--peers", "kt-kernel,onednn", "--verify")
    (case,) = document["cases"]
    assert {"kt_kernel", "kt_kernel_repack"} <= set(case["peers_left_out"]) and all(case["peers_left_out"].values())
    assert set(case["peers"]) | set(case["peers_left_out"]) == {"kt_kernel", "kt_kernel_repack", "onednn"}
    assert (onednn.unavailable() is None) is ("onednn" in case["peers"])


def test_bars(capsys):
    document = bench_json(capsys, "--preset", "tiny", "--tokens", "16,32", "--bars")
    first, second = document["cases"]
    own = {"backward_over_forward", "prepare_share", "forward_overhead_us", "backward_overhead_us"}
    names = {"lora_overhead", "two_adapters", *own}
    assert set(first["bars"]) == {*names, "first_call"} and set(second["bars"]) == names
    for case in (first, second):
        assert case["peers"] == {}
        assert all(row["bar"] > 0 for row in case["bars"].values())
        assert all(row["value"] > 0 for name, row in case["bars"].items() if name != "lora_overhead")
        assert case["moesaic"]["autograd_us"] > 0 and all(us > 0 for us in case["moesaic"]["nothing_us"].values())
        assert case["bars"]["lora_overhead"]["value"] > -1 and case["bars"]["prepare_share"]["value"] < 1
    times = first["moesaic"]
    slowest = times["forward_ms"]["max"] + times["backward_ms"]["max"]
    assert first["bars"]["first_call"]["value"] >= times["first_call_ms"] / slowest
    (case,) = bench_json(capsys, "--preset", "tiny", "--rank", "0", "--bars")["cases"]
    assert set(case["bars"]) == {*own, "first_call"}
    (case,) = bench_json(capsys, "--preset", "tiny", "--rank", "200", "--bars")["cases"]
    assert "two_adapters" not in case["bars"]  # no adapter has rank 400


def test_sweep(capsys, tmp_path):
    prefix = tmp_path / "run.1"
    document = bench_json(
        capsys, "--preset", "tiny", "--tokens", "8,4", "--threads", "1,2", "--rank", "2,0", "--sweep", str(prefix)
    )
    assert document["host"]["threads"] == 1
    points = [(case["tokens"], case["threads"], case["rank"]) for case in document["cases"]]
    assert points == [(8, 1, 2), (4, 1, 2), (8, 1, 0), (8, 2, 2)]
    with (tmp_path / "run.1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["axis"], row["tokens"], row["threads"], row["rank"]) for row in rows] == [
        ("tokens", "4", "1", "2"),
        ("tokens", "8", "1", "2"),
        ("threads", "8", "1", "2"),
        ("threads", "8", "2", "2"),
        ("rank", "8", "1", "0"),
        ("rank", "8", "1", "2"),
    ]
    by_point = dict(zip(points, document["cases"], strict=True))
    for row in rows:
        case = by_point[int(row["tokens"]), int(row["threads"]), int(row["rank"])]
        assert float(row["forward_ms"]) == case["moesaic"]["forward_ms"]["median"]
        assert float(row["backward_limit_ms"]) == case["limit_ms"]["backward"]
    assert (tmp_path / "run.1.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--tokens", "4,2", "--rank", "2,0", "--save", "no", "--sweep", str(tmp_path / "x")]
    assert cli.main(["bench", "layer", "--preset", "tiny", *FAST, *arguments]) == 0
    assert "matplotlib" in capsys.readouterr().err
    assert (tmp_path / "x.csv").exists() and not (tmp_path / "x.png").exists()


def test_without_a_preset_forward_alone(capsys):
    sizes = ["--experts", "4", "--hidden", "64", "--intermediate", "32", "--top-k", "2", "--tokens", "16"]
    document = bench_json(capsys, *sizes, "--save", "no", "--routing", "zipf", "--peers", "torch_loop")
    (case,) = document["cases"]
    check_case(document, case)
    own, peer = case["moesaic"], case["peers"]["torch_loop"]
    assert case["rank"] == 16 and case["bars"] is None
    assert own["backward_ms"] is None and own["saved_bytes"] == 0 and own["fraction_of_limit"]["backward"] is None
    assert peer["backward_ms"] is None and peer["ratio"]["backward"] is None
    assert peer["ratio"]["total"] == pytest.approx(peer["ratio"]["forward"])


def test_without_an_adapter(capsys):
    document = bench_json(capsys, "--preset", "tiny", "--rank", "0", "--verify", "--peers", "torch_grouped_mm")
    (case,) = document["cases"]
    check_case(document, case)
    assert case["verified"]["d_lora"] is None and case["verified"]["output"] <= 5e-3


def test_sizes_off_the_grid(capsys):
    sizes = [
        "--experts",
        "3",
        "--hidden",
        "77",
        "--intermediate",
        "45",
        "--top-k",
        "1",
        "--rank",
        "1",
        "--tokens",
        "40",
    ]
    document = bench_json(capsys, *sizes, "--verify", "--peers", "torch_loop")
    (case,) = document["cases"]
    check_case(document, case)


def test_output_for_people_and_stdout_of_a_process(capsys):
    assert cli.main(["bench", "layer", "--preset", "tiny", *FAST, "--verify", "--peers", "torch_loop"]) == 0
    text = capsys.readouterr().out
    for word in (
        "moesaic",
        "torch_loop",
        "forward",
        "backward",
        "total",
        "GFLOP/s",
        "tokens/s",
        "d_router",
        "left out",
    ):
        assert word in text
    command = [sys.executable, "-m", "moesaic.cli", "bench", "layer", "--preset", "tiny", "--json", *FAST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["schema"] == 1
    assert done.stderr == ""  # no terminal, no progress


def test_a_wrong_number_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(layer_bench, "ENGINE_TOLERANCE", 1e-6)
    assert cli.main(["bench", "layer", "--json", *FAST, "--preset", "tiny", "--verify"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cases"][0]["verified"]["output"] > 1e-6
    assert "moesaic, 64 tokens: output is off by" in captured.err


def test_a_nan_is_a_failure():
    case = {"tokens": 1, "verified": {"output": float("nan"), "d_lora": None}, "peers": {}}
    assert len(layer_bench.failures({"cases": [case]})) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--preset", "no-such"], "--preset"),
        ([], "--experts"),
        (["--experts", "4", "--hidden", "64", "--intermediate", "32"], "--top-k"),
        (["--preset", "tiny", "--experts", "0"], "--experts"),
        (["--preset", "tiny", "--experts", "-3"], "--experts"),
        (["--preset", "tiny", "--hidden", "64.5"], "--hidden"),
        (["--preset", "tiny", "--experts", "1"], "--top-k"),
        (["--preset", "tiny", "--tokens", "0"], "--tokens"),
        (["--preset", "tiny", "--tokens", "4,,8"], "--tokens"),
        (["--preset", "tiny", "--rank", "257"], "--rank"),
        (["--preset", "tiny", "--routing", "hot"], "--routing"),
        (["--preset", "tiny", "--routing", "concentrated:9"], "--routing"),
        (["--preset", "tiny", "--routing", "concentrated:1"], "--routing"),
        (["--preset", "tiny", "--save", "maybe"], "--save"),
        (["--preset", "tiny", "--save", "no", "--verify"], "--verify"),
        (["--preset", "tiny", "--weight-format", "fp2"], "--weight-format"),
        (["--preset", "tiny", "--peers", "jax"], "--peers"),
        (["--preset", "tiny", "--peers", "torch", "--hidden", "100"], "--peers"),
        (["--preset", "tiny", "--reps", "0"], "--reps"),
        (["--preset", "tiny", "--threads", "0"], "--threads"),
        (["--preset", "tiny", "--threads", "5000"], "--threads"),
        (["--preset", "tiny", "--threads", "1,2"], "--threads"),
        (["--preset", "tiny", "--rank", "4,8"], "--rank"),
        (["--preset", "tiny", "--save", "no", "--bars"], "--bars"),
        (["--preset", "tiny", "--sweep", "/no/such/folder/x"], "--sweep"),
    ],
)
def test_wrong_usage(capsys, options, said):
    assert cli.main(["bench", "layer", "--json", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and said in captured.err


@pytest.mark.parametrize("peers", [[], ["--peers", "torch"]])
def test_a_layer_that_does_not_fit(capsys, peers):
    assert cli.main(["bench", "layer", "--json", "--preset", "deepseek-v3", "--experts", "1000000", *peers]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    needed = next(int(word[1:]) for word in line.split() if word.startswith("(") and word[1:].isdecimal())
    assert needed >= 2 * 3 * 1000000 * 7168 * 2048 * (2 if peers else 1)
