"""`moesaic doctor`."""

import importlib.metadata
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic
from moesaic import _core, cli
from moesaic.commands import doctor, host, output


def doctor_json(capsys, *options, code=0):
    assert cli.main(["doctor", "--json", *options]) == code
    return json.loads(capsys.readouterr().out)


def test_json_of_a_fresh_process():
    done = subprocess.run(
        [sys.executable, "-m", "moesaic.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == 1 and report["ok"] is True and report["problems"] == []
    assert report["cpu"]["name"]


def test_tiers(capsys):
    isa = doctor_json(capsys)["isa"]
    assert isa["chosen"] == moesaic.isa()
    assert [tier["name"] for tier in isa["tiers"] if tier["chosen"]] == [isa["chosen"]]
    names = [tier["name"] for tier in isa["tiers"]]
    assert sorted(names) == ["amx_bf16", "avx512", "avx512_bf16", "onednn", "portable"]
    for tier in isa["tiers"]:
        assert set(tier) == {"name", "supported", "permitted", "compiled", "chosen", "verified"}
        runs = tier["supported"] and tier["permitted"] and tier["compiled"]
        assert tier["verified"] is (True if runs else None), tier


def test_limits_and_topology_are_this_process_s(capsys):
    report = doctor_json(capsys)
    limits, topology = report["limits"], report["topology"]
    assert limits["affinity"] == sorted(os.sched_getaffinity(0))
    assert limits["threads"] == moesaic.get_num_threads()
    assert 1 <= limits["usable_cores"] <= len(limits["affinity"])
    assert topology["pus"] >= len(limits["affinity"]) and topology["pus"] >= topology["cores"] >= 1
    assert 0 < limits["available_memory_bytes"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    for name in ("address_space_bytes", "locked_memory_bytes", "data_bytes", "cgroup_memory_bytes"):
        assert limits[name] is None or limits[name] >= 0
    assert limits["cpu_quota"] is None or limits["cpu_quota"] > 0
    assert report["huge_pages"]["transparent"] in (None, "always", "madvise", "never")
    assert all(row["free"] <= row["total"] for row in report["huge_pages"]["reserved"])


def test_weights_on_numa_nodes(capsys):
    report = doctor_json(capsys)
    nodes = report["numa"]["nodes"]
    assert 1 <= len(nodes) <= len(report["topology"]["nodes"])
    assert 1 <= sum(node["cores"] for node in nodes) <= report["topology"]["cores"]
    for node in nodes:
        assert node["lies_on"] is None or node["bind_error"] is not None or node["lies_on"] == node["os_index"]


def _numa_notes(monkeypatch, capsys, nodes, *, bound):
    monkeypatch.setattr(_core, "numa", lambda: nodes)
    monkeypatch.setattr(_core, "openmp_threads_are_bound", lambda: bound)
    cli.main(["doctor"])
    text = " ".join(capsys.readouterr().out.split())
    return text, [note for note in doctor_json(capsys)["notes"] if "NUMA" in note]


def test_several_numa_nodes(monkeypatch, capsys):
    good = [{"os_index": n, "cores": 4, "bind_error": None, "lies_on": n} for n in (0, 2)]
    text, notes = _numa_notes(monkeypatch, capsys, good, bound=True)
    assert "divided among 2 nodes with 4, 4 cores, bound" in text and notes == []
    denied = [node | {"bind_error": "Operation not permitted", "lies_on": 0} for node in good]
    text, notes = _numa_notes(monkeypatch, capsys, denied, bound=True)
    assert "placed by first touch" in text
    assert len(notes) == 1 and "mbind: Operation not permitted" in notes[0]
    full = [good[0], good[1] | {"lies_on": 0}]
    _, notes = _numa_notes(monkeypatch, capsys, full, bound=False)
    assert len(notes) == 2 and "meant for NUMA node 2 came to lie on node 0" in notes[0] and "OMP_PROC_BIND" in notes[1]


def test_an_address_space_limit_lowers_the_available_memory(monkeypatch):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (200 << 20)
    real = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda what: (limit, limit) if what == resource.RLIMIT_AS else real(what)
    )
    limits = host.limits()
    assert limits["address_space_bytes"] == limit
    assert (100 << 20) < limits["available_memory_bytes"] < (300 << 20)


def test_a_control_group_lowers_the_available_memory(monkeypatch, tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (above / "memory.max").write_text("100000\n")
    (above / "memory.current").write_text("30000\n")
    (above / "memory.stat").write_text("anon 20000\ninactive_file 4000\n")
    monkeypatch.setattr(host, "_cgroup_folders", lambda: iter([tmp_path, above]))
    limits = host.limits()
    assert limits["cgroup_memory_bytes"] == 100000
    assert limits["available_memory_bytes"] == 100000 - 30000 + 4000


def test_versions_and_hook(capsys):
    report = doctor_json(capsys)
    versions, hook = report["versions"], report["hook"]
    assert versions["moesaic"] == moesaic.__version__
    assert versions["torch"] == importlib.metadata.version("torch")
    assert hook["registered"] == (versions["transformers"] is not None)
    assert (hook["reason"] is None) == hook["registered"]


def test_measure(capsys):
    report = doctor_json(capsys, "--measure")
    ceiling = report["ceiling"]
    threads = moesaic.get_num_threads()
    assert ceiling["threads"] == [1, threads]
    tiers = {tier["name"]: tier for tier in report["isa"]["tiers"]}
    # FLOP a cycle that no core exceeds, at a clock that none reaches: a wrong count of operations would show.
    most = {"amx_bf16": 1024, "avx512_bf16": 128, "avx512": 64, "portable": 32}
    for probe in ceiling["compute"]:
        tier = tiers.get(probe["isa"])
        if tier is not None:
            assert (probe["gflops"] is not None) == (tier["supported"] and tier["permitted"])
        if probe["gflops"] is not None:
            for rate, count in zip(probe["gflops"], ceiling["threads"], strict=True):
                assert 0 < rate < most[probe["isa"]] * 6.5 * count
    assert [probe["isa"] for probe in ceiling["compute"]] == list(most)
    assert len(ceiling["read"]) == 2
    for read in ceiling["read"]:
        assert 0 < read["gbps"] < 10000
        assert read["bytes"] >= _core.last_level_cache_bytes()
    handover = ceiling["handover_ns"]
    assert (handover is None) == (threads == 1)
    if handover is not None:
        assert 0 <= handover["least"] <= handover["median"] <= handover["most"] < 1e5


def test_processors_that_move_are_noted(capsys, monkeypatch):
    fetches = itertools.cycle([7.4, 89.8])  # some of both on a host with a single kind of ceiling, too

    class Probe:
        def __init__(self, threads, far_bytes):
            pass

        def fetch(self, isa):
            return next(fetches)

    monkeypatch.setattr(_core, "MachineProbe", Probe)
    monkeypatch.setattr(_core, "measure_compute", lambda isa, threads, seconds: 100.0)
    monkeypatch.setattr(doctor, "_MEASURE_SECONDS", 0.01)
    moesaic.set_num_threads(2)
    usable = _core.topology()["usable_cores"]

    def noted():
        return [note for note in doctor_json(capsys, "--measure")["notes"] if "by the moment" in note]

    if usable >= 2:
        assert cli.main(["doctor", "--measure"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "takes 7 to 90 ns more, by the moment" in text and "1 KB from another thread" in text
        fetches = itertools.cycle([33.0, 47.0])
        assert noted() == []
    fetches = itertools.chain([1000.0], itertools.cycle([33.0, 47.0]))  # disturbed once
    assert noted() == []
    # Threads that share cores move, and nothing is wrong with that.
    moesaic.set_num_threads(usable + 1)
    fetches = itertools.cycle([7.4, 89.8])
    assert noted() == []
    moesaic.set_num_threads(1)
    assert doctor_json(capsys, "--measure")["ceiling"]["handover_ns"] is None


def test_output_for_people(capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("portable", "verified", "NUMA", "torch", "RLIMIT_MEMLOCK", f"runs on {moesaic.isa()}"):
        assert word in text


def test_output_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    output.Tables().table("A title", ["name", "value"], [["x", "1"], ["longer", "22"]])
    assert capsys.readouterr().out == "\nA title\n  name    value\n  x       1\n  longer  22\n"


def test_wrong_numbers_are_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(_core, "verify_isa", lambda name: name != "portable")
    report = doctor_json(capsys, code=1)
    assert report["ok"] is False
    assert report["problems"] == ["portable: the kernel's numbers are wrong"]
    assert cli.main(["doctor"]) == 1
    assert "problem: portable" in capsys.readouterr().out


def test_a_build_without_onednn_says_so(capsys, monkeypatch):
    tiers = [tier | {"compiled": tier["name"] != "onednn"} for tier in _core.isa_tiers()]
    monkeypatch.setattr(_core, "isa_tiers", lambda: tiers)
    report = doctor_json(capsys)
    assert [note for note in report["notes"] if "oneDNN" in note] != []
    assert {tier["name"]: tier["verified"] for tier in report["isa"]["tiers"]}["onednn"] is None


def test_a_forced_tier_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "moesaic.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOESAIC_ISA": "no_such_tier"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no_such_tier" in done.stderr and len(done.stderr.splitlines()) == 1


def command(*arguments, **environment):
    """The program as it is installed, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from moesaic_command import main; sys.exit(main())", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MOESAIC_NUM_THREADS", "abc", "a whole number from 1 to 4096"),
        ("MOESAIC_CLOCK", "sundial", '"system"'),
        ("MOESAIC_HWLOC_XML", "/no/such/file", "an XML file"),
        ("MOESAIC_ISA", "no_such_tier", "portable"),
    ],
)
def test_a_wrong_variable_is_one_line(variable, value, expected):
    process = command("doctor", **{variable: value})
    out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert len(err.splitlines()) == 1 and variable in err and value in err and expected in err, err


def test_a_wrong_variable_on_import(run_python):
    result = run_python("import moesaic", MOESAIC_NUM_THREADS="abc")
    assert result.stderr.splitlines()[-1] == (
        "ValueError: MOESAIC_NUM_THREADS: 'abc', expected a whole number from 1 to 4096"
    )


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_reader_that_has_seen_enough(form):
    process = command(
        "bench", "sampler", "--vocabulary=100", "--rows=1", "--reps=1", "--peers=", "--settings=plain", *form
    )
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize("arguments", [[], ["doctr"], ["doctor", "--meassure"], ["doctor", "extra"]])
def test_wrong_usage(capsys, arguments):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1 and "--help" in captured.err


def test_help(capsys):
    assert cli.main(["doctor", "--help"]) == 0
    assert "--measure" in capsys.readouterr().out
