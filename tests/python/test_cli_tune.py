"""`moesaic tune`."""

import dataclasses
import json
import platform

import pytest

import moesaic
from moesaic import _core, cli, perf
from moesaic.commands import tune_check
from moesaic.perf import Machine, measure, timing
from test_perf_evaluator import DEEPSEEK_V3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    return str(path)


@pytest.fixture
def here(monkeypatch):
    """This host, with figures that cost nothing to measure."""
    like = Machine.named("zen5-2c")
    machine = dataclasses.replace(
        like,
        name=platform.node() or "here",
        cpu=_core.cpu_name(),
        source="measured",
        isa=moesaic.isa(),
        kernels={moesaic.isa(): like.kernels["avx512_bf16"]},
        threads=2,
        l3_bytes=1 << 20,
    )
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, progress=None: machine))
    moesaic.set_num_threads(2)
    return machine


def tune(capsys, *options, code=0):
    assert cli.main(["tune", "--json", *options]) == code
    return json.loads(capsys.readouterr().out)


def test_a_model_is_evaluated_once(capsys, config):
    options = ("--model", config, "--machine", "emr-16c", "--tokens", "128", "--published")
    document = tune(capsys, *options)
    assert document["shapes"] == document["misses"] == len(document["list"]) == 13
    assert document["candidates"] == 1800 * 13 and document["hits"] == 0
    assert document["evaluate_ms"] > 0 and 0 < document["cache_bytes"] < 10 << 20
    assert document["machine"]["name"] == "emr-16c" and document["machine"]["threads"] == 16
    row = next(row for row in document["list"] if row["name"] == "experts.down_proj")
    assert (row["groups"], row["m"], row["k"], row["n"]) == (256, 4, 2048, 7168)
    assert sum(row["parts"].values()) == pytest.approx(row["milliseconds"])
    again = tune(capsys, *options)
    assert (again["hits"], again["misses"], again["candidates"]) == (13, 0, 0)
    assert [r["milliseconds"] for r in again["list"]] == [r["milliseconds"] for r in document["list"]]


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        (("--deployment", "decode", "--tokens", "4,8"), 26),
        (("--deployment", "decode", "--tokens", "4", "--tensor-parallel", "1,8"), 22),
        (("--deployment", "train", "--tokens", "64", "--lora-rank", "8"), 32),
        (("--tokens", "64", "--batch", "1,2"), 26),
    ],
)
def test_deployments(capsys, config, options, shapes):
    document = tune(capsys, "--model", config, "--machine", "zen5-2c", *options)
    assert document["shapes"] == shapes
    assert all(row["m"] > 0 and row["milliseconds"] > 0 for row in document["list"])


def test_history_export_import_and_clear(capsys, config, tmp_path):
    evaluator = perf.GemmEvaluator(Machine.named("zen5-2c"))
    shape = perf.GemmShape(groups=2, m=7, rows=(7, 3), k=96, n=160, output="fp32")
    evaluator.evaluate(shape)
    evaluator.cache.flush()
    document = tune(capsys, "--from-history", "--machine", "emr-16c")
    assert document["shapes"] == 1 and document["list"][0]["rows"] == [7, 3]
    stats = tune(capsys, "--stats")
    assert stats["entries"] == 2 and stats["uses"] == 1 and stats["writable"]
    assert tune(capsys, "--missed")["missed"] == []
    file = str(tmp_path / "all.json")
    assert tune(capsys, "--export", file) == {"schema": 1, "exported": 2}
    assert tune(capsys, "--export", "-") == json.loads((tmp_path / "all.json").read_text())
    assert tune(capsys, "--clear") == {"schema": 1, "dropped": 2}
    assert tune(capsys, "--stats")["entries"] == 0
    assert tune(capsys, "--import", file) == {"schema": 1, "imported": 2}
    assert tune(capsys, "--from-history", "--machine", "emr-16c")["hits"] == 1


def test_a_table_for_people(capsys, config):
    assert cli.main(["tune", "--model", config, "--machine", "emr-16c", "--tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "router" in out and "13 shapes" in out and "13 misses" in out
    assert cli.main(["tune", "--stats"]) == 0 and "entries: 13" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_said(capsys, config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path / "file"))
    document = tune(capsys, "--model", config, "--machine", "emr-16c", "--tokens", "8")
    assert document["cache"]["kept"] is False and document["shapes"] == 13


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ((), 2, "--model"),
        (("--model", "/nowhere.json", "--machine", "emr-16c"), 1, "/nowhere.json"),
        (("--from-history", "--machine", "mine"), 2, "emr-16c"),
        (("--from-history", "--machine", "emr-16c", "--threads", "17"), 2, "threads is 17"),
        (("--from-history", "--machine", "emr-16c", "--measured"), 2, "this host"),
        (("--check", "--machine", "emr-16c"), 2, "this host"),
        (("--import", "/nowhere.json"), 1, "/nowhere.json"),
        (("--model", "CONFIG", "--machine", "emr-16c", "--routing", "even"), 2, "routing"),
        (("--tokens", "0"), 2, "--tokens"),
        (("--stats", "--clear"), 2, "not allowed"),
        (("--stats", "--model", "CONFIG"), 2, "argument --model: not with --stats, --missed"),
        (("--export", "-", "--threads", "2"), 2, "argument --threads: not with --stats"),
        (("--check", "--lora-rank", "8"), 2, "argument --lora-rank: not with --check"),
        (("--from-history", "--tokens", "8"), 2, "argument --tokens: only with --model"),
        (("--model", "CONFIG", "--clock", "cpu"), 2, "argument --clock: only with --check"),
    ],
)
def test_wrong_usage_is_one_line(capsys, config, options, code, text):
    assert cli.main(["tune", *(config if o == "CONFIG" else o for o in options)]) == code
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_an_unknown_architecture_names_the_field(capsys, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(DEEPSEEK_V3 | {"model_type": "resnet"}))
    assert cli.main(["tune", "--model", str(path), "--machine", "emr-16c"]) == 2
    assert "model_type is 'resnet'" in capsys.readouterr().err


def test_the_check_runs_all_candidates(capsys, here, monkeypatch):
    monkeypatch.setattr(tune_check, "held_out_shapes", lambda: [perf.GemmShape(m=3, k=64, n=128, output="fp32")])
    monkeypatch.setattr(tune_check, "_DUEL_SECONDS", 0.05)
    monkeypatch.setattr(timing, "_SECONDS", 0.01)
    monkeypatch.setattr(tune_check, "described_in_turn", lambda: lambda: here)
    cli.main(["tune", "--check", "--json"])  # its bars say nothing about one tiny shape
    document = json.loads(capsys.readouterr().out)
    (row,) = document["shapes"]
    assert row["analytic"] > 0 and row["measured"] > 0 and row["candidates"] > 1 and row["rounds"] >= 15
    assert row["analytic_uncertainty"] >= 0 and row["spread"] >= 1
    assert {bar["bar"] for bar in document["bars"]} == {
        "analytic within 5%", "analytic within 15%", "measured within 3%"
    }  # fmt: skip
    assert document["ok"] == all(bar["share"] >= bar["expected"] for bar in document["bars"])


def test_the_check_describes_the_host_in_turn_with_its_shapes(capsys, here, monkeypatch):
    shapes = [perf.GemmShape(m=m, k=64, n=128, output="fp32") for m in range(1, 6)]
    rounds, machines, seen = [], [], []

    class Described:
        def __init__(self, progress):
            pass

        def rounds(self, count):
            rounds.append(count)

        def machine(self):
            slower = {n: us * (1 + len(machines)) for n, us in here.job_us.items()}
            machines.append(dataclasses.replace(here, job_us=slower))
            return machines[-1]

    def compare(timer, shape, ranked):
        seen.append((shape.m, len(machines)))
        assert ranked == perf.GemmEvaluator(machines[-1], cache=False).rank(shape, 10_000)
        return {"analytic": 1.0, "measured": 1.0}

    monkeypatch.setattr(measure, "Measurement", Described)
    monkeypatch.setattr(tune_check, "held_out_shapes", lambda: shapes)
    monkeypatch.setattr(tune_check, "_compare", compare)
    monkeypatch.setattr(tune_check, "show", lambda document: None)
    assert cli.main(["tune", "--check"]) == 0
    assert rounds == [measure.ROUNDS - 1, 1, 1, 1]
    assert seen == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    first, last = (perf.GemmEvaluator(m, cache=False).rank(shapes[0], 1)[0] for m in (machines[0], machines[-1]))
    assert first.milliseconds < last.milliseconds  # so `compare` tells descriptions apart


def test_a_ratio_is_that_of_its_rounds():
    slower = [1.0 + 0.1 * (i % 7) for i in range(40)]  # others use the host, now and then
    ratio, uncertainty = tune_check._ratio([1.25 * x for x in slower], slower)
    assert ratio == pytest.approx(1.25) and uncertainty == pytest.approx(0.0, abs=1e-12)
    ratio, uncertainty = tune_check._ratio(slower, [1.0] * 40)
    assert ratio == pytest.approx(1.3) and 0.05 < uncertainty < 0.2


def test_held_out_shapes():
    shapes = tune_check.held_out_shapes()
    assert len(set(shapes)) == 40
    assert min(s.m for s in shapes) == 1 and max(s.m for s in shapes) == 4096
