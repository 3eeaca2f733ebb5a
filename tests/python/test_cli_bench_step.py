"""`moesaic bench step`: the document is consistent, and the variants of a step do what they say. No times asserted."""

import json
import sys

import pytest
import torch

import moesaic
from moesaic import cli
from moesaic.commands import step_bench, training_step

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads, torch_threads = moesaic.get_num_threads(), torch.get_num_threads()
    yield
    moesaic.set_num_threads(threads)
    torch.set_num_threads(torch_threads)


@pytest.mark.parametrize("autocast", [False, True])
def test_document(autocast, capsys):
    arguments = "step --model tiny --tokens 16 --rank 2 --reps 2 --warmup 1 --threads 1 --json"
    assert cli.main(["bench", *arguments.split(), *(["--autocast"] if autocast else [])]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["autocast"] is autocast
    assert (document["model"], document["tokens"], document["rank"], document["calls"]) == ("tiny", 16, 2, 2)
    assert document["host"]["threads"] == 1
    experts, others, step = document["experts_ms"], document["others_ms"], document["step_ms"]
    assert experts["ratio"] == pytest.approx(experts["inside"]["median"] / experts["alone"]["median"])
    assert others["ratio"] == pytest.approx(others["with"]["median"] / others["without"]["median"])
    fused = document["fused_step_ms"]
    assert 0 < fused["loss_difference"] < 1e-2  # rounded elsewhere, so not 0
    assert fused["min"] > 0 and fused["ratio"] == pytest.approx(step["median"] / fused["median"])
    assert 0 < experts["inside"]["max"] < step["max"] and experts["alone"]["min"] > 0
    assert 0 < others["with"]["min"] < step["min"] and others["without"]["min"] > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_the_dtypes_of_a_step(autocast):
    model = training_step.build_model(training_step.MODELS["tiny"], 2, torch.float32 if autocast else None)
    seen = set()
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda _, __, out: seen.add(out[0].dtype))
        if name.endswith("input_layernorm"):
            module.register_forward_hook(lambda _, __, out: seen.add(("norm", out.dtype)))
    training_step.TrainingStep(model, 16, autocast).run()
    assert seen == {torch.bfloat16, ("norm", torch.float32 if autocast else torch.bfloat16)}


def test_for_people(capsys):
    arguments = "step --model tiny --tokens 8 --reps 1 --warmup 1 --threads 1"
    assert cli.main(["bench", *arguments.split()]) == 0
    text = capsys.readouterr().out
    for word in ("experts inside", "experts alone", "with / without", "plain / fused", "2 experts blocks"):
        assert word in text


def test_calls_alone_are_those_of_the_step():
    model = training_step.build_model(training_step.MODELS["tiny"], 2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    calls: list[training_step.RecordedCall] = []
    model.zero_grad()
    with training_step.replaced_experts(training_step._recorder(calls)):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if name in whole:
            assert torch.equal(parameter.grad, whole[name]), name
    assert len(calls) == 2
    # The first block's gradients, computed alone, are those that its parameters got.
    first = calls[0]
    _, saved = first.layer.forward(first.hidden, first.ids, first.weights, first.lora)
    grads = first.layer.backward(saved, first.d_out)
    a = next(p for n, p in model.named_parameters() if "layers.0" in n and "experts" in n and "lora_A" in n)
    # PEFT 0.19.0 has A and B the other way around, and the engine gets views of them.
    parts = [pair.a if pair.a.ndim == 2 else pair.b.mT for x in grads.lora for pair in (x.gate_up, x.down) if pair]
    found = [part.reshape(a.shape) for part in parts if part.numel() == a.numel()]
    assert any(torch.equal(gradient.to(a.dtype), a.grad) for gradient in found)

    # Experts that compute nothing: every parameter still gets a gradient, those of the experts' adapters zeros.
    model.zero_grad()
    with training_step.replaced_experts(step_bench._nothing_computed()):
        model(input_ids=ids, labels=ids).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(whole)
    assert all((p.grad == 0).all() for n, p in model.named_parameters() if "experts" in n and "lora" in n)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()  # the engine is back
    assert torch.equal(a.grad, whole[next(n for n in whole if "layers.0" in n and "experts" in n and "lora_A" in n)])


def test_a_step_and_its_calls_alone():
    model = training_step.build_model(training_step.MODELS["tiny"], 2)
    step = training_step.TrainingStep(model, 12)
    assert [call.hidden.shape[0] for call in step.calls] == [12, 12] and step.calls[0].layer is not step.calls[1].layer
    gradient = next(p.grad for n, p in model.named_parameters() if "experts" in n and "lora_B" in n)
    assert gradient is not None and gradient.abs().sum() > 0
    twice = gradient.clone()  # of the first step and the recorded one
    inside = training_step.engine_calls_ms(step.run)
    assert len(inside) == 4 and min(inside) > 0
    assert torch.allclose(gradient, 1.5 * twice, rtol=1e-2)
    alone = training_step.engine_calls_ms(step.run_alone)
    assert len(alone) == 4 and min(alone) > 0
    start = moesaic._core.clock_ns()
    whole = step.run_alone()  # of each call, with Python, and nothing else
    assert len(whole) == 4 and min(whole) > 0 and sum(whole) <= (moesaic._core.clock_ns() - start) * 1e-6


def test_without_transformers(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.main(["bench", "step", "--model", "tiny"]) == 1
    assert "pip install 'transformers>=5.7' 'peft>=0.19'" in capsys.readouterr().err
