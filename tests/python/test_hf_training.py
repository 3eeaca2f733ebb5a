"""Whole training runs through the hook: optimizer steps, TRL's trainer, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic.hf
from hf_models import VOCABULARY, build, distance, each_storage, logits, needs_peft_20

peft = pytest.importorskip("peft")


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            **options,
        ),
    )


def batches(count: int) -> list[torch.Tensor]:
    """Sentences of a language that can be learned: each token follows from the one before, nearly always."""
    generator = torch.Generator().manual_seed(4)
    follows = torch.randperm(VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (count, 4, 1), generator=generator)
    for _ in range(23):
        following = follows[ids[..., -1:]]
        noise = torch.randint(VOCABULARY, following.shape, generator=generator)
        surprise = torch.rand(following.shape, generator=generator) < 0.1
        ids = torch.cat([ids, torch.where(surprise, noise, following)], dim=-1)
    return list(ids)


def train(model: Any, data: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=4e-3, fused=True)
    losses = []
    model.train()
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fifty_steps_of_fused_adamw_equal_stock_training() -> None:
    data = batches(50)
    expected = train(adapted(build(num_hidden_layers=2)), data)
    engine = build(num_hidden_layers=2)
    moesaic.hf.prepare(engine, progress=False)
    losses = train(adapted(engine), data)
    assert expected[-1] < 0.9 * expected[0]  # there is something to agree on
    assert losses == [pytest.approx(loss, rel=0.01) for loss in expected]


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{n}": n for n in range(3, VOCABULARY)}
    model = tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="</s>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sft_trainer(model: Any, folder: Path, **options: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [
        {"text": " ".join(f"w{max(3, token)}" for token in sentence)} for ids in batches(6) for sentence in ids.tolist()
    ]
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 4e-3,
        "logging_steps": 1,
        "max_length": 32,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": True,
        "gradient_checkpointing": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **options,
    }
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@needs_peft_20
def test_sft_trainer_with_checkpointing_and_resume(tmp_path: Path) -> None:
    expected = sft_trainer(adapted(build(num_hidden_layers=2)), tmp_path / "stock")
    expected.train()

    def engine() -> Any:
        model = build(num_hidden_layers=2)
        moesaic.hf.prepare(model, progress=False)
        return adapted(model)

    whole = sft_trainer(engine(), tmp_path / "engine", save_strategy="steps", save_steps=2)
    whole.train()
    assert len(losses_of(whole)) == 4
    assert losses_of(whole) == [pytest.approx(loss, rel=0.01) for loss in losses_of(expected)]
    assert set(each_storage(whole.model)) == {4}
    saved = tmp_path / "engine" / "checkpoint-2"
    assert (saved / "adapter_model.safetensors").stat().st_size < 1_000_000  # no base weight in it

    resumed = sft_trainer(engine(), tmp_path / "resumed", save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(saved))
    assert losses_of(resumed)[-2:] == [pytest.approx(loss, rel=1e-3) for loss in losses_of(whole)[-2:]]
    assert set(each_storage(resumed.model)) == {4}


def test_sft_trainer_wraps_the_model_itself(tmp_path: Path) -> None:
    """Given a plain model and a peft_config, TRL freezes and wraps it: the order in which most people have it."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = build()
    moesaic.hf.prepare(model, progress=False)
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True, save_strategy="no"
        ),
        train_dataset=datasets.Dataset.from_list([{"text": "w3 w4 w5 w6"}] * 16),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=4),
    )
    trainer.train()
    changed = {n: float(p.norm()) for n, p in trainer.model.named_parameters() if "lora_B" in n}
    assert changed
    assert all(norm > 0 for norm in changed.values())


@needs_peft_20
def test_sft_trainer_that_loads_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, in fp32, to be trained under autocast to bf16 and evaluated."""
    from moesaic import _core

    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    seen: list[torch.dtype] = []
    compute = _core.attention
    monkeypatch.setattr(_core, "attention", lambda q, *a, **k: seen.append(q.dtype) or compute(q, *a, **k))
    build(num_hidden_layers=2).save_pretrained(str(tmp_path / "model"))
    rows = [{"text": " ".join(f"w{3 + (n + i) % 7}" for i in range(20))} for n in range(16)]
    losses: dict[str, list[float]] = {}
    for way in ("stock", "engine"):
        trainer = trl.SFTTrainer(
            model=str(tmp_path / "model"),
            args=trl.SFTConfig(
                output_dir=str(tmp_path / way),
                use_cpu=True,
                max_steps=3,
                learning_rate=4e-3,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=1,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            eval_dataset=datasets.Dataset.from_list(rows[:8]),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(
                target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=4
            ),
        )
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        if way == "engine":
            moesaic.hf.prepare(trainer.model, progress=False)
            moesaic.hf.fuse(trainer.model)
        trainer.train()
        losses[way] = [
            entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry
        ]
    assert len(losses["engine"]) == 6 and len(seen) > 0 and set(seen) == {torch.bfloat16}
    assert losses["engine"] == [pytest.approx(loss, rel=0.01) for loss in losses["stock"]]


@needs_peft_20
def test_training_changes_what_is_computed_and_saved(tmp_path: Path) -> None:
    engine = build()
    moesaic.hf.prepare(engine, progress=False)
    engine = adapted(engine)
    before = logits(engine.eval())
    train(engine, batches(5))
    assert distance(logits(engine.eval()), before) > 0.05
    engine.save_pretrained(str(tmp_path))
    stock = peft.PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    assert distance(logits(engine), logits(stock)) < 2e-2


@needs_peft_20
def test_sft_trainer_with_several_sequences_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic import _core

    shared: list[bool] = []
    compute = _core.attention
    monkeypatch.setattr(
        _core, "attention", lambda *a, **k: shared.append(k.get("first_keys") is not None) or compute(*a, **k)
    )
    options = {"packing": True, "max_length": 64, "gradient_checkpointing": False}
    expected = sft_trainer(adapted(build(num_hidden_layers=2).bfloat16()), tmp_path / "stock", **options)
    expected.train()
    model = build(num_hidden_layers=2).bfloat16()
    moesaic.hf.prepare(model, progress=False)
    trainer = sft_trainer(adapted(model), tmp_path / "engine", **options)
    moesaic.hf.fuse(trainer.model)
    trainer.train()
    assert losses_of(trainer) == [pytest.approx(loss, rel=0.01) for loss in losses_of(expected)]
    assert shared == [True] * 2 * 4  # layers, steps


#: Of TRL, beside SFTTrainer: what a row of their data has besides a prompt, and options.
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DPO": ({"chosen": " w7 w8 w9", "rejected": " w3 w3"}, {"max_length": 32}),
    "KTO": ({"completion": " w7 w8 w9", "label": True}, {"max_length": 32}),
    "GRPO": ({}, {"num_generations": 2, "max_completion_length": 8}),
    "RLOO": ({}, {"num_generations": 2, "max_completion_length": 8}),
}


@needs_peft_20
@pytest.mark.parametrize("kind", TRAINERS)
def test_other_trainers(kind: str, tmp_path: Path) -> None:
    """With a reference model (the same without its adapter), and with text that the model itself makes."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    columns, options = TRAINERS[kind]
    rows = [{"prompt": f"w{3 + n} w{4 + n} w{5 + n}", **columns} for n in range(16)]
    if kind == "KTO":
        rows = [{**row, "label": n % 2 == 0} for n, row in enumerate(rows)]
    if not columns:
        options = {**options, "temperature": 0.7}
    losses: dict[str, list[float]] = {}
    for way in ("stock", "engine"):
        model = build(num_hidden_layers=2).bfloat16()
        if way == "engine":
            moesaic.hf.prepare(model, progress=False)
        arguments = {
            "output_dir": str(tmp_path / way),
            "use_cpu": True,
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 4e-3,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "bf16": True,
            "save_strategy": "no",
            "dataloader_pin_memory": False,
            **options,
        }
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model,
            args=getattr(trl, f"{kind}Config")(**arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(
                target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"], r=4
            ),
            **({} if columns else {"reward_funcs": lambda completions, **_: [float(len(set(c))) for c in completions]}),
        )
        if way == "engine":
            moesaic.hf.fuse(trainer.model)
        trainer.train()
        losses[way] = losses_of(trainer)
        changed = [float(p.detach().norm()) for n, p in trainer.model.named_parameters() if "lora_B" in n]
        assert changed and all(0 < norm < 10 for norm in changed)
    assert len(losses["engine"]) == 3
    if columns:  # a token that is drawn otherwise changes all that follows
        assert losses["engine"] == [pytest.approx(loss, rel=0.01) for loss in losses["stock"]]
