"""ProfileCallback in a training run: what it logs, that parts add up, what tools see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs PEFT")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import moesaic
import moesaic.hf
from hf_models import build
from moesaic.profiles.shares import ATTENTION, PARTS, step_parts


class Reported(TrainerCallback):  # type: ignore[misc]
    """Stands where an integration of `report_to` stands: before the callbacks of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def train(tmp_path: Path, steps: int, callback: Any, **settings: Any) -> tuple[Trainer, Reported]:
    model = build()
    moesaic.hf.prepare(model, progress=False)
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    model = get_peft_model(model, config)
    reported = Reported()
    rows = [{"input_ids": torch.arange(1, 17), "labels": torch.arange(1, 17)} for _ in range(2 * steps)]
    options = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "logging_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        **settings,
    }
    trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows, callbacks=[reported])
    trainer.add_callback(callback(trainer))
    trainer.train()
    return trainer, reported


@pytest.mark.parametrize("checkpointing", [False, True])
def test_metrics_reach_whoever_reports(tmp_path: Path, checkpointing: bool) -> None:
    callbacks: list[moesaic.hf.ProfileCallback] = []

    def make(trainer: Trainer) -> moesaic.hf.ProfileCallback:
        callbacks.append(moesaic.hf.ProfileCallback(trainer, sample_every=4))
        return callbacks[0]

    with moesaic.profile() as profile:
        trainer, reported = train(
            tmp_path, 6, make, gradient_checkpointing=checkpointing, gradient_accumulation_steps=2
        )
    metrics = [logs for logs in reported.logs if "moesaic/step_ms" in logs]
    assert len(metrics) == 3 and sum("loss" in logs for logs in reported.logs) == 3
    assert [row for row in trainer.state.log_history if "moesaic/step_ms" in row]
    for logs in metrics:
        assert 0 < logs["moesaic/experts_share"] < 1
        assert logs["moesaic/experts_ms"] == pytest.approx(logs["moesaic/experts_share"] * logs["moesaic/step_ms"])
        assert logs["moesaic/fraction_of_limit"] > 0
        assert logs["moesaic/phase_ms/gate_up_gemm"] > 0 and logs["moesaic/phase_limit/D3_gemm"] > 0
        assert not any(name.endswith(("/forward", "/backward_only")) for name in logs), "parents are no phases"
    # Steps 2 and 4 were recorded.
    sampled = [logs for logs in metrics if "moesaic/share/experts" in logs]
    assert [metrics.index(logs) for logs in sampled] == [0, 1]
    for logs in sampled:
        shares = {part: logs[f"moesaic/share/{part}"] for part in PARTS}
        assert sum(shares.values()) == pytest.approx(1)
        assert all(shares[part] > 0 for part in PARTS), shares
    assert callbacks[0].parts is not None
    calls = {row["name"]: row["calls"] for row in profile.phases()}
    assert calls["full_train_loop"] == 1
    assert calls["forward_only"] == 12 and calls["backward_only"] == 12


def test_without_a_trainer_and_without_samples(tmp_path: Path) -> None:
    trainer, reported = train(tmp_path, 2, lambda trainer: moesaic.hf.ProfileCallback(sample_every=0))
    (row,) = (row for row in trainer.state.log_history if "moesaic/step_ms" in row)
    assert "loss" in row and not any(name.startswith("moesaic/share/") for name in row)
    assert not any("moesaic/step_ms" in logs for logs in reported.logs)
    with pytest.raises(ValueError, match="sample_every is -1"):
        moesaic.hf.ProfileCallback(sample_every=-1)


def event(name: str, begin: float, end: float, parent: Any = None, sequence: int = -1, thread: int = 1) -> Any:
    made = SimpleNamespace(
        name=name, thread=thread, sequence_nr=sequence, cpu_parent=parent, is_async=False, cpu_time_total=end - begin
    )
    made.time_range = SimpleNamespace(start=begin, end=end)
    made.self_cpu_time_total = end - begin
    if parent is not None:
        parent.self_cpu_time_total -= end - begin
    return made


def test_parts_of_a_step() -> None:
    node = "autograd::engine::evaluate_function: "
    attention = event(ATTENTION, 0, 1000)
    linear = event("aten::linear", 100, 400, attention, sequence=5)
    experts = event("_MoeExperts", 1000, 3000, sequence=6)
    backward = event(node + "MmBackward0", 4000, 4500, sequence=5)
    repeated = event(node + "CheckpointFunctionBackward", 5000, 9000)
    events = [
        attention,
        linear,
        event("aten::t", 110, 120, linear, sequence=5),
        experts,
        event("aten::empty", 1100, 1200, experts),
        event("aten::mm", 3000, 3500, sequence=7),
        backward,
        event("MmBackward0", 4100, 4400, backward, sequence=5),
        event(node + "_MoeExpertsBackward", 4500, 5000, sequence=6),
        repeated,
        event(ATTENTION, 6000, 7000, repeated),
        event(node + "MmBackward0", 9000, 9100, sequence=7),
        event("Optimizer.step#AdamW.step", 9100, 9600),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 9600, 9700),
        event("aten::mm", 0, 5000, thread=2),
    ]
    parts = step_parts(events, wall_ms=10.0)
    assert parts == pytest.approx(
        {"experts": 2.5, "attention": 2.5, "optimizer": 0.5, "data_loading": 0.1, "other": 4.4}
    )
