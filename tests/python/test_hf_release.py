"""Released base weights: no second copy, and never a zero where someone meets them."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moesaic.hf
from hf_models import LOGITS, blocks, build, distance, each_storage, freeze_experts, logits, tokens

transformers = pytest.importorskip("transformers")


@pytest.fixture
def stock() -> Any:
    return build()


@pytest.fixture
def prepared(stock: Any) -> Any:
    model = copy.deepcopy(stock)
    moesaic.hf.prepare(model, progress=False)
    return model


def experts(model: nn.Module) -> Any:
    return blocks(model)[0]


def test_report(stock: Any) -> None:
    model = build(num_hidden_layers=2)
    expected = sum(p.nbytes for block in blocks(model) for p in block.parameters())
    report = moesaic.hf.prepare(model, progress=False)
    assert [block.name for block in report.blocks] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert report.bytes_released == expected
    numbers = expected // 4  # fp32
    assert 2 * numbers <= report.bytes_packed <= 1.02 * 2 * numbers
    assert report.seconds > 0
    assert "packed 2 experts blocks (2 with 8 experts each, hidden 64, intermediate 48) as bf16" in str(report)
    assert "rounded" in str(report)
    again = moesaic.hf.prepare(model, progress=False)
    assert again.bytes_released == 0
    assert again.bytes_packed == report.bytes_packed
    assert "rounded" not in str(moesaic.hf.prepare(build().to(torch.bfloat16), progress=False))


def test_progress_bar(prepared: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    moesaic.hf.prepare(prepared, progress=True)
    assert "packing experts" in capfd.readouterr().err


def test_no_second_copy(stock: Any, prepared: Any) -> None:
    expected = logits(stock)
    for step in (lambda: None, lambda: logits(prepared), lambda: prepared.to("cpu"), lambda: prepared.float()):
        step()
        assert set(each_storage(prepared)) == {4}  # one element
    assert prepared.num_parameters() == stock.num_parameters()
    assert [tuple(p.shape) for p in prepared.parameters()] == [tuple(p.shape) for p in stock.parameters()]
    assert distance(logits(prepared), expected) < LOGITS


def test_memory_of_the_process(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """After prepare the process holds the packed weights and not the given ones."""
    result = run_python(
        """
import moesaic.hf, torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

config = Qwen3MoeConfig(hidden_size=1024, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=2)
config._experts_implementation = "moesaic"
model = torch.nn.ModuleList(Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16) for _ in range(4)).requires_grad_(False)
for parameter in model.parameters():
    parameter.fill_(0.01)
model[0](torch.zeros(1, 4, 1024, dtype=torch.bfloat16))   # threads, code
before = resident()
report = moesaic.hf.prepare(model)
print(report.bytes_packed, before, resident())
"""
    )
    assert result.returncode == 0, result.stderr
    packed, before, after = (int(word) for word in result.stdout.split())
    # The first block was packed before; three were packed, and four released.
    assert after - before < 3 * packed / 4 - packed + 0.15 * packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_gives_the_true_weights(stock: Any, dtype: torch.dtype) -> None:
    stock = stock.to(dtype)
    model = copy.deepcopy(stock)
    moesaic.hf.prepare(model, progress=False)
    for name in ("gate_up_proj", "down_proj"):
        released, true = getattr(experts(model), name), getattr(experts(stock), name).detach()
        assert released.dtype == dtype
        assert released.shape == true.shape
        assert released.numel() == true.numel()
        assert released.untyped_storage().nbytes() == dtype.itemsize
        for read in (lambda w: w[3], lambda w: w.float().sum(), lambda w: w.clone(), lambda w: w.data.clone()):
            assert torch.equal(read(released), read(true))
        for read in (lambda w: w.mT, lambda w: w.detach()[1:, 2], lambda w: w @ torch.ones(w.shape[-1]).to(dtype)):
            assert torch.equal(read(released), read(true))
        assert torch.equal(torch.stack([released, released])[1], true)
        assert type(released.clone()) is torch.Tensor
        assert "values in the moesaic engine" in repr(released)
        out = torch.zeros_like(true)
        with torch.no_grad():
            out.copy_(released)
        assert torch.equal(out, true)


def test_writing_is_refused(stock: Any, prepared: Any) -> None:
    weight = experts(prepared).down_proj
    other = torch.ones(weight.shape)

    def add_to_data() -> None:
        weight.data += other

    def assign_data() -> None:
        weight.data = other

    def assign_item() -> None:
        weight[0] = 1.0

    writes: tuple[Callable[[], Any], ...] = (
        add_to_data,
        assign_data,
        assign_item,
        lambda: weight.data.copy_(other),
        lambda: weight.mul_(2),
        lambda: torch.add(other, 1, out=weight),
        lambda: torch._foreach_add_([weight], 1.0),
        lambda: nn.init.zeros_(weight),
    )
    for write in writes:
        with torch.no_grad(), pytest.raises(ValueError, match=r"released.*restore"):
            write()
    assert distance(logits(prepared), logits(stock)) < LOGITS


def test_another_implementation_is_refused_until_restored(stock: Any, prepared: Any) -> None:
    out = logits(prepared)
    for name in ("grouped_mm", "batched_mm", "eager"):
        prepared.set_experts_implementation(name)
        with pytest.raises(ValueError, match=rf"{name}.*released.*restore"):
            logits(prepared)
    prepared.set_experts_implementation("moesaic")
    assert torch.equal(logits(prepared), out)
    moesaic.hf.restore(prepared)
    assert torch.equal(logits(prepared), logits(stock))
    assert type(experts(prepared)) is type(experts(stock))
    assert type(experts(prepared).down_proj) is nn.Parameter
    assert min(each_storage(prepared)) > 1000
    moesaic.hf.prepare(prepared, progress=False)
    assert torch.equal(logits(prepared), out)


def test_save_pretrained_writes_true_weights(stock: Any, prepared: Any, tmp_path: Path) -> None:
    prepared.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, stock.get_parameter(name)), name
    assert torch.equal(logits(loaded), logits(stock))
    assert set(each_storage(prepared)) == {4}


def test_save_pretrained_in_its_own_layout(stock: Any, prepared: Any, tmp_path: Path) -> None:
    """Without the conversion to one tensor an expert nothing computes on the weights before they are written."""
    prepared.save_pretrained(tmp_path, save_original_format=False)
    safetensors = pytest.importorskip("safetensors.torch")
    written = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["model.layers.0.mlp.experts.gate_up_proj"], experts(stock).gate_up_proj)
    assert torch.equal(written["model.layers.0.mlp.experts.down_proj"], experts(stock).down_proj)


def test_state_dict_and_pickle_hold_true_weights(stock: Any, prepared: Any, tmp_path: Path) -> None:
    torch.save(prepared.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(state[name], tensor) for name, tensor in stock.state_dict().items())
    block = pickle.loads(pickle.dumps(experts(prepared)))
    assert type(block) is type(experts(stock))
    assert torch.equal(block.gate_up_proj, experts(stock).gate_up_proj)
    with torch.no_grad():
        hidden, ids, weights = torch.randn(3, 64), torch.zeros(3, 1).long(), torch.ones(3, 1)
        assert torch.equal(block(hidden, ids, weights), experts(prepared)(hidden, ids, weights))


def test_state_dict_costs_nothing(prepared: Any) -> None:
    """PEFT takes the whole state to save an adapter."""
    gc.collect()
    state = prepared.state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    assert state[name].untyped_storage().nbytes() == 4
    assert state[name].shape == experts(prepared).down_proj.shape


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_load_state_dict_counts(assign: bool, release: bool) -> None:
    model, other = build(), build()
    with torch.no_grad():
        for parameter in experts(other).parameters():
            parameter.mul_(-0.5)
    moesaic.hf.prepare(model, release=release, progress=False)
    before = logits(model)
    model.load_state_dict(other.state_dict(), assign=assign)
    assert distance(logits(model), before) > 10 * LOGITS
    assert distance(logits(model), logits(other)) < LOGITS
    if release:
        assert set(each_storage(model)) == {4}
    model.load_state_dict({"lm_head.weight": model.lm_head.weight.detach()}, strict=False)
    assert distance(logits(model), logits(other)) < LOGITS


@pytest.mark.parametrize("how", ["data", "no_grad", "assign", "new parameter"])
def test_changed_weights_are_packed_anew(how: str) -> None:
    model = build()
    moesaic.hf.prepare(model, release=False, progress=False)
    before = logits(model)
    block = experts(model)
    with torch.no_grad():
        if how == "data":
            block.down_proj.data += 0.5
        elif how == "no_grad":
            block.down_proj[0] += 0.5
        elif how == "assign":
            block.down_proj.data = block.down_proj.data * 2
        else:
            block.down_proj = nn.Parameter(block.down_proj * 2)
    out = logits(model)
    assert distance(out, before) > LOGITS
    model.set_experts_implementation("grouped_mm")
    assert distance(out, logits(model)) < LOGITS


def test_a_new_parameter_in_a_released_block(stock: Any, prepared: Any) -> None:
    for model in (stock, prepared):
        experts(model).down_proj = nn.Parameter(experts(model).down_proj.detach() * 2)
    assert distance(logits(prepared), logits(stock)) < LOGITS
    assert set(each_storage(prepared)) == {4}


def test_deepcopy_shares_the_packed_weights(stock: Any, prepared: Any) -> None:
    twin = copy.deepcopy(prepared)
    assert set(each_storage(twin)) == {4}
    assert experts(twin).down_proj.source.layer is experts(prepared).down_proj.source.layer
    del prepared
    assert distance(logits(twin), logits(stock)) < LOGITS
    moesaic.hf.restore(twin)
    assert torch.equal(logits(twin), logits(stock))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moves_keep_the_release(stock: Any, prepared: Any, dtype: torch.dtype) -> None:
    prepared.to(dtype)
    assert experts(prepared).down_proj.dtype == dtype
    assert set(each_storage(prepared)) == {dtype.itemsize}
    prepared.to("meta")
    assert experts(prepared).down_proj.is_meta
    prepared.float()
    twin = copy.deepcopy(stock)
    moesaic.hf.prepare(twin, progress=False)
    twin.to(dtype).float()
    assert set(each_storage(twin)) == {4}
    assert distance(logits(twin), logits(copy.deepcopy(stock).to(dtype).float())) < LOGITS


def test_parametrized_weights_are_refused(stock: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    moesaic.hf.prepare(stock, release=False, progress=False)
    nn.utils.parametrize.register_parametrization(experts(stock), "down_proj", Twice())
    with pytest.raises(ValueError, match="down_proj is parametrized"):
        logits(stock)


def test_trains_after_release() -> None:
    """What is not an expert's base weight trains as before, embeddings and routers too."""
    model = build()
    freeze_experts(model)
    moesaic.hf.prepare(model, progress=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
