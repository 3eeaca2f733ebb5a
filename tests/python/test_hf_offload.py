"""Models that accelerate dispatched: experts on "cpu" or "disk", whose weights it keeps and moves in each forward.

Without a GPU everything is executed on the CPU; accelerate's hooks, maps and meta tensors are the same.
"""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moesaic.hf
from hf_models import assert_same_training, blocks, build, distance, freeze_experts, logits
from moesaic.hf.released import ReleasedParameter

accelerate = pytest.importorskip("accelerate")


def kept_in_memory(model: Any, _: Path) -> Any:
    """Every weight is in a map in host memory between forwards."""
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def kept_on_disk(model: Any, folder: Path) -> Any:
    """The experts are in files, the rest is where it was."""
    device_map = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
    device_map |= {name: "disk" for name, _ in moesaic.hf.find_blocks(model)}
    device_map = {n: d for n, d in device_map.items() if d == "disk" or ".experts." not in n}
    return accelerate.dispatch_model(model, device_map, offload_dir=str(folder))


WAYS = pytest.mark.parametrize("dispatch", [kept_in_memory, kept_on_disk])


def frozen() -> Any:
    model = build(num_hidden_layers=1)
    model.requires_grad_(False)
    return model


def on_meta(model: nn.Module) -> list[bool]:
    return [p.is_meta for block in blocks(model) for p in block._parameters.values()]


@WAYS
@pytest.mark.parametrize("release", [True, False])
def test_prepare_takes_the_weights_over(dispatch: Any, release: bool, tmp_path: Path) -> None:
    model = frozen()
    expected = logits(model)
    model = dispatch(model, tmp_path)
    assert all(on_meta(model))
    moesaic.hf.prepare(model, release=release, progress=False)
    layers = [block.__dict__["_moesaic_packed"].layer for block in blocks(model)]
    for _ in range(2):
        assert distance(logits(model), expected) < 1e-2
        assert not any(on_meta(model))
    assert [block.__dict__["_moesaic_packed"].layer for block in blocks(model)] == layers, "packed again"
    for block in blocks(model):
        for parameter in block._parameters.values():
            assert isinstance(parameter, ReleasedParameter) == release
            assert parameter.device.type == "cpu"


@WAYS
def test_the_first_forward_takes_the_weights_over(dispatch: Any, tmp_path: Path) -> None:
    model = frozen()
    expected = logits(model)
    model = dispatch(model, tmp_path)
    model.set_experts_implementation("moesaic")
    assert distance(logits(model), expected) < 1e-2
    layers = [block.__dict__["_moesaic_packed"].layer for block in blocks(model)]
    assert not any(on_meta(model))
    assert distance(logits(model), expected) < 1e-2
    assert [block.__dict__["_moesaic_packed"].layer for block in blocks(model)] == layers, "packed again"


def test_released_weights_are_freed(tmp_path: Path) -> None:
    model = kept_in_memory(frozen(), tmp_path)
    kept = [
        weakref.ref(block._hf_hook.weights_map[name].untyped_storage())
        for block in blocks(model)
        for name in block._parameters
    ]
    moesaic.hf.prepare(model, progress=False)
    gc.collect()
    assert [ref() for ref in kept] == [None] * 2


@WAYS
def test_dispatch_after_prepare(dispatch: Any, tmp_path: Path) -> None:
    model = frozen()
    moesaic.hf.prepare(model, progress=False)
    expected = logits(model)
    layers = [block.__dict__["_moesaic_packed"].layer for block in blocks(model)]
    model = dispatch(model, tmp_path)
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    if dispatch is kept_in_memory:  # moves one element; a file holds the values, which are packed once more
        assert [block.__dict__["_moesaic_packed"].layer for block in blocks(model)] == layers, "packed again"
        for block in blocks(model):
            assert all(isinstance(p, ReleasedParameter) for p in block._parameters.values())


def test_moving_a_released_weight(tmp_path: Path) -> None:
    model = build()
    expected = copy.deepcopy(blocks(model)[0].gate_up_proj.detach())
    freeze_experts(model)
    moesaic.hf.prepare(model, progress=False)
    parameter = blocks(model)[0].gate_up_proj
    meta = parameter.to("meta")
    assert meta.is_meta and meta.shape == expected.shape and isinstance(parameter.to("cpu"), ReleasedParameter)
    back = meta.to(device="cpu")
    assert back.untyped_storage().nbytes() == 4 and torch.equal(back + 0, expected)
    assert torch.equal(parameter.to(torch.float64), expected.double())
    again = type(parameter)(back, requires_grad=False)
    assert isinstance(again, ReleasedParameter) and torch.equal(again + 0, expected)
    assert type(type(parameter)(expected, requires_grad=False)) is nn.Parameter
    with pytest.raises(ValueError, match="released"):
        back.zero_()


def test_training_a_dispatched_model(tmp_path: Path) -> None:
    stock = build(num_hidden_layers=1)
    freeze_experts(stock)
    engine = kept_on_disk(copy.deepcopy(stock), tmp_path)
    moesaic.hf.prepare(engine, progress=False)
    assert_same_training(engine, stock)


def test_saving_a_dispatched_model(tmp_path: Path) -> None:
    model = frozen()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = kept_on_disk(model, tmp_path / "offload")
    moesaic.hf.prepare(model, progress=False)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = type(model).from_pretrained(str(tmp_path / "saved"), dtype=torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# With attention on a GPU and the experts' weights on the CPU.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this host")


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
    )


def losses(model: Any, device: str, steps: int = 8) -> list[float]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 128, (4, 24), generator=generator).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def from_device_map(model: Any, folder: Path) -> Any:
    """As users load one: everything on the GPU, the experts' weights on the CPU."""
    import transformers

    model.save_pretrained(str(folder))
    device_map: dict[str, int | str] = {name: "cpu" for name, _ in moesaic.hf.find_blocks(model)}
    for name, module in model.named_modules():
        if not list(module.children()) and not any(name.startswith(block) for block in device_map):
            device_map.setdefault(name, 0)
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, device_map=device_map)


def moved(model: Any, _: Path) -> Any:
    """As the Trainer moves one."""
    moesaic.hf.prepare(model, progress=False)
    return model.to("cuda")


@needs_gpu
@pytest.mark.parametrize("place", [from_device_map, moved])
@pytest.mark.parametrize("prepared", [True, False])
def test_gpu_training_equals_training_on_the_cpu(place: Any, prepared: bool, tmp_path: Path) -> None:
    reference = frozen()
    moesaic.hf.prepare(reference, progress=False)
    expected = losses(adapted(reference), "cpu")
    assert expected[-1] < expected[0] - 0.1
    model = place(frozen(), tmp_path)
    if prepared:
        moesaic.hf.prepare(model, progress=False)
    else:
        model.set_experts_implementation("moesaic")
    assert model.get_input_embeddings().weight.is_cuda
    model.requires_grad_(False)
    if place is from_device_map and not prepared:
        # PEFT puts the adapters where accelerate has left the experts' weights: nowhere.
        with pytest.raises(ValueError, match="a tensor of lora is on the meta device"):
            losses(adapted(model), "cuda")
        return
    found = losses(adapted(model), "cuda")
    assert found == [pytest.approx(loss, rel=0.01) for loss in expected]
    layers = [block.__dict__["_moesaic_packed"].layer for block in blocks(model)]
    assert logits(model, torch.ones(1, 4, dtype=torch.int64, device="cuda")).isfinite().all()
    assert [block.__dict__["_moesaic_packed"].layer for block in blocks(model)] == layers, "packed again"


@needs_gpu
def test_gpu_training_with_checkpointing_and_autocast(tmp_path: Path) -> None:
    reference = frozen()
    moesaic.hf.prepare(reference, progress=False)
    expected = losses(adapted(reference), "cpu")
    model = adapted(moved(frozen(), tmp_path))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = losses(model, "cuda")
    assert found == [pytest.approx(loss, rel=0.03) for loss in expected]


@needs_gpu
def test_gpu_memory_holds_no_experts(tmp_path: Path) -> None:
    size = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32}
    experts = 32 * 3 * 512 * 512 * 4
    for place in (from_device_map, moved):
        model = build("qwen3_moe", **size)
        model.requires_grad_(False)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = place(model, tmp_path / place.__name__)
        moesaic.hf.prepare(model, progress=False)
        logits(model, torch.ones(2, 8, dtype=torch.int64, device="cuda"))
        assert torch.cuda.max_memory_allocated() - before < experts // 2
        del model
