"""One training run, in a process of its own so that its memory is its own: ``python training.py RUN.json``.

What happens is written to standard output as one JSON object a line; whatever else says something does so on standard
error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import byte_tokenizer, python_questions, read_rows
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """What one training run needs to know."""

    name: str
    """"stock" or "moesaic"."""
    out: str
    model: str | None
    data: str | None
    steps: int
    batch_size: int
    length: int
    rank: int
    learning_rate: float
    seed: int
    dtype: str
    """"bfloat16" or "float32": of the base model and of what both runs compute in."""

    @staticmethod
    def load(path: Path) -> Run:
        """As the parent process wrote it."""
        return Run(**json.loads(path.read_text(encoding="utf-8")))


def small_model(vocabulary: int) -> Qwen3MoeConfig:
    """Qwen3-MoE with about 100 million parameters, nearly all of them in 8 blocks of 32 experts. Random weights of the
    usual size, 0.02, would leave the experts so faint in a model this narrow that no check could see them."""
    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        router_aux_loss_coef=0.001,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def load(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base model, its weights bf16 numbers whatever their dtype, and its tokenizer: the user's, or the small one
    with random weights, the same for each seed.

    Raises:
        ValueError: the tokenizer makes no tokens of a text, as transformers' do whose files are missing.
    """
    if run.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        if not tokenizer("text").input_ids:
            raise ValueError(f"{run.model} has no tokenizer beside the model: save one there with save_pretrained")
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.bfloat16)
    else:
        tokenizer = byte_tokenizer()
        torch.manual_seed(run.seed)
        model = AutoModelForCausalLM.from_config(small_model(len(tokenizer)), dtype=torch.bfloat16)
    return model.to(getattr(torch, run.dtype)), tokenizer


def with_lora(model: PreTrainedModel, run: Run) -> Any:
    """LoRA on attention and on all experts. The seed makes the adapters of both runs start equal. The embeddings and
    the head of a model with random weights know nothing yet: they are trained whole, and saved with the adapter."""
    config = LoraConfig(
        r=run.rank,
        lora_alpha=2 * run.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        modules_to_save=["embed_tokens", "lm_head"] if run.model is None else None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(run.seed)
    return get_peft_model(model, config)


def probe_ids(run: Run, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """A text on which the trained model and the reloaded one are compared."""
    text = "Question: What does textwrap.dedent do?\nAnswer: Remove any common leading whitespace from every line."
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[:, : run.length]
    return ids


def emit(kind: str, **values: Any) -> None:
    """One line for the parent process."""
    print(json.dumps({"kind": kind, **values}), file=_events, flush=True)


def resident_bytes() -> int:
    """What of the process is in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Events(TrainerCallback):  # type: ignore[misc]
    """Reports each step with its loss and its time."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stops it: forward, backward and the optimizer's step are done."""
        self._seconds = time.perf_counter() - self._began

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """The Trainer knows the loss a little later than it ends the step."""
        if logs and "loss" in logs:
            emit("step", step=state.global_step, loss=logs["loss"], seconds=self._seconds)


def make_trainer(
    run: Run, model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], out: Path
) -> Trainer:
    """TRL's SFTTrainer, with its defaults (gradient checkpointing, the router's auxiliary loss); where TRL is missing,
    transformers' own with the same settings, for rows of text."""
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": run.dtype == "bfloat16",
        "max_steps": run.steps,
        "per_device_train_batch_size": run.batch_size,
        "gradient_checkpointing": True,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, run.steps // 20),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "include_num_input_tokens_seen": "all",
        "seed": run.seed,
        "data_seed": run.seed,
    }
    try:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer
    except ImportError:
        emit("note", text="TRL is not installed: transformers' Trainer takes its place")
        blocks = text_blocks(tokenizer, rows, run.length)
        arguments = TrainingArguments(**settings)
        return Trainer(
            model, arguments, train_dataset=blocks, data_collator=default_data_collator, callbacks=[Events()]
        )
    return SFTTrainer(
        model=model,
        # Packed: as many tokens in each step.
        args=SFTConfig(**settings, max_length=run.length, packing=True, packing_strategy="wrapped"),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Events()],
    )


def text_blocks(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], length: int
) -> list[dict[str, list[int]]]:
    """All texts one after the other, cut into blocks of `length` tokens.

    Raises:
        ValueError: a row has no text, or there are fewer tokens than one block takes.
    """
    ids: list[int] = []
    for row in rows:
        if "text" not in row:
            raise ValueError(f"a row has {sorted(row)}; without TRL every row needs a text")
        ids += [*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]
    blocks = [ids[n : n + length] for n in range(0, len(ids) - length + 1, length)]
    if not blocks:
        raise ValueError(f"the data has {len(ids)} tokens; one row takes {length}")
    return [{"input_ids": block, "labels": block} for block in blocks]


def train(run: Run) -> None:
    """Trains, saves the adapter as PEFT does, and leaves the logits of `probe_ids` beside it, in fp32: so that what
    differs from the stock model later is what the experts compute, and not how bf16 rounds everything around them."""
    out = Path(run.out) / run.name
    out.mkdir(parents=True, exist_ok=True)
    emit("state", text="building the model" if run.model is None else "loading the model")
    model, tokenizer = load(run)
    experts = [m for n, m in model.named_modules() if n.endswith(".experts")]
    emit(
        "model",
        parameters=model.num_parameters(),
        expert_parameters=sum(p.numel() for block in experts for p in block.parameters()),
        blocks=len(experts),
        experts=int(next(experts[0].parameters()).shape[0]) if experts else 0,
    )
    if run.name == "moesaic":
        import moesaic
        import moesaic.hf

        emit("state", text="packing the experts")
        emit("prepared", text=str(moesaic.hf.prepare(model, progress=False)))
    emit("state", text="reading the data")
    rows = python_questions(run.seed) if run.data is None else read_rows(Path(run.data))
    model = with_lora(model, run)
    if run.name == "moesaic":
        emit("prepared", text=str(moesaic.hf.fuse(model)))
    trainer = make_trainer(run, model, tokenizer, rows, out / "trainer")
    trainer.remove_callback(PrinterCallback)
    emit("state", text="training", loaded_bytes=resident_bytes(), rows=len(rows))
    if run.name == "moesaic":
        with moesaic.profile() as profile:
            trainer.train()
        profile.save(out / "profile.json")
        emit("profile", phases=profile.phases(), isa=moesaic.isa(), threads=moesaic.get_num_threads())
    else:
        trainer.train()
    emit(
        "trained",
        tokens=trainer.state.num_input_tokens_seen,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    model.save_pretrained(str(out / "adapter"))
    model.float().eval()
    with torch.no_grad():
        logits = model(input_ids=probe_ids(run, tokenizer)).logits
    torch.save(logits, out / "logits.pt")


_events = sys.stdout

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr  # for whatever libraries print
    train(Run.load(Path(sys.argv[1])))
