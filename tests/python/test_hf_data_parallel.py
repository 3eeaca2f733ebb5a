"""Released weights inside DistributedDataParallel: two processes, gloo."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic.hf
from hf_models import VOCABULARY, build

peft = pytest.importorskip("peft")


def model_of_a_process() -> Any:
    model = build(num_hidden_layers=2)
    moesaic.hf.prepare(model, progress=False)
    torch.manual_seed(3)
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():  # what is trained has gradients in both factors
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    moesaic.hf.fuse(model)
    return model


def gradients(model: Any, rank: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compute(rank: int, folder: str) -> None:
    """What one of the processes does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = model_of_a_process()
    if rank == 1:  # rank 0's are sent
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(1)
    torch.save(gradients(torch.nn.parallel.DistributedDataParallel(model), rank), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    command = "import sys, test_hf_data_parallel as t; t.compute(int(sys.argv[1]), sys.argv[2])"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(rank), str(tmp_path)], cwd=Path(__file__).parent, env=environment
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    model = model_of_a_process()
    alone = [gradients(model, rank) for rank in range(2)]
    together = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert alone[0].keys() == together[0].keys() == together[1].keys()
    for name, gradient in together[0].items():
        assert torch.equal(gradient, together[1][name])
        torch.testing.assert_close(gradient, (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-8)


def test_names() -> None:
    """Those of the moment, of the model and of PEFT's wrapper; copies have their own, pickles and `restore` none."""

    def passed_over(module: Any) -> set[str]:
        return set(module._ddp_params_and_buffers_to_ignore)

    def released(module: Any) -> set[str]:
        return {name for name, _ in module.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))}

    model = build()
    model._ddp_params_and_buffers_to_ignore = ["somebody's"]
    moesaic.hf.prepare(model, progress=False)
    moesaic.hf.prepare(model, progress=False)
    assert released(model) | {"somebody's"} <= passed_over(model)
    twin = copy.deepcopy(model)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=4)
    )
    names = {name for name, _ in wrapped.named_parameters() if "lora_" not in name and "experts" in name}
    assert len(names) == 2 and names <= passed_over(wrapped)
    assert passed_over(twin) == {"somebody's"} | {p + n for n in released(twin) for p in ("", "base_model.model.")}
    with io.BytesIO() as file:
        torch.save(twin, file)
        file.seek(0)
        assert torch.load(file, weights_only=False)._ddp_params_and_buffers_to_ignore == ["somebody's"]
    moesaic.hf.restore(twin)
    assert twin._ddp_params_and_buffers_to_ignore == ["somebody's"]
    plain = build()
    moesaic.hf.prepare(plain, progress=False)
    moesaic.hf.restore(plain)
    assert not hasattr(plain, "_ddp_params_and_buffers_to_ignore")
