"""`moesaic bench sampler`, and its archives."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from moesaic.cli import main
from moesaic.commands import options
from moesaic.commands.compiled import compile_for
from moesaic.commands.sampler_peers import numpy, pipeline, reference_kept
from moesaic.profiles.archive import write_archive

SMALL = ["--vocabulary", "3000", "--rows", "2", "--reps", "4", "--warmup", "1"]


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_document_archive_and_diff(in_folder, capsys):
    names = ["--settings", "plain,both,greedy", "--peers", "torch,numpy", "--diffusion", "--archive", "first", "--json"]
    assert main(["bench", "sampler", *SMALL, *names]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert len(document["cases"]) == 6 and all(case["verified"] for case in document["cases"])
    for case in document["cases"]:
        assert case["moesaic"]["fraction_of_read"] > 0 and case["stages_ms"]["draw"] > 0
        assert set(case["peers"]) == (set() if case["setting"] == "greedy" else {"torch", "numpy"})
    assert [row["denoising_steps"] for row in document["diffusion"]] == [16, 8]
    (folder,) = (in_folder / "profile_runs").iterdir()
    assert folder.name.endswith("_first") and f"moesaic: written to profile_runs/{folder.name}\n" in captured.err
    assert json.loads((folder / "result.json").read_text()) == document
    assert "a token for each row" in (folder / "table.txt").read_text()
    assert main(["profile", "diff", str(folder), str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["phase"] for row in rows} == {"(wall clock)", "select", "draw"}
    assert {row["verdict"] for row in rows} == {"same"}


def test_table(in_folder, capsys):
    assert main(["bench", "sampler", *SMALL, "--settings", "top_p", "--distributions", "flat", "--peers", ""]) == 0
    text = capsys.readouterr().out
    assert "top_p" in text and "thread us a call by stage" in text
    assert not (in_folder / "profile_runs").exists()


@pytest.mark.parametrize("option", ["settings", "distributions", "peers"])
def test_unknown_names(option, capsys):
    assert main(["bench", "sampler", f"--{option}", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_archives_of_one_second_do_not_collide(in_folder):
    folders = {write_archive("x", {"a": 1}, {"b": 2}, "t") for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        assert json.loads((folder / "result.json").read_text()) == {"a": 1}
        assert json.loads((folder / "profile.json").read_text()) == {"b": 2}
        assert (folder / "table.txt").read_text() == "t"
    with pytest.raises(ValueError, match="name is 'a/b'"):
        write_archive("a/b", {}, {}, "")


def test_archives_are_json(in_folder):
    args = argparse.Namespace(archive="x", reps=1)
    options.keep(args, {"verified": math.nan}, [], lambda document: print(f"off by {document['verified']}"))
    (folder,) = (in_folder / "profile_runs").iterdir()
    assert json.loads((folder / "result.json").read_text()) == {"verified": None}
    assert (folder / "table.txt").read_text() == "off by nan\n"


def test_what_cannot_be_kept_is_refused_before_the_run(in_folder, capsys):
    assert main(["bench", "sampler", *SMALL, "--archive", "a/b"]) == 2
    wrong = "moesaic: argument --archive: name is 'a/b'; expected letters, digits, '.', '-' and '_'\n"
    assert capsys.readouterr().err == wrong
    (in_folder / "profile_runs").write_text("a file")
    assert main(["bench", "sampler", *SMALL, "--archive"]) == 1
    assert capsys.readouterr().err == "moesaic: profile_runs: File exists\n"


def test_each_shape_of_a_compiled_peer_is_compiled():
    """PyTorch keeps eight compilations of a piece of code, and runs it as it is for other shapes."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(tuple(inputs[0].shape))
        return graph.forward

    for n in range(2, 14):
        peer = compile_for(lambda x: x * 2 + 1, torch.ones(n), backend=backend, dynamic=False)
        assert peer(torch.ones(n)).tolist() == [3.0] * n
    assert compiled == [(n,) for n in range(2, 14)]


@pytest.mark.parametrize("setting", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.6}])
def test_peers_draw_from_what_the_reference_keeps(setting):
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    kept = reference_kept(logits, setting)
    for call in (pipeline(setting), numpy(setting)):
        drawn = torch.as_tensor(call(logits))
        assert kept.gather(1, drawn[:, None]).all()
