"""The fine-tuned model of examples/finetune answers questions with each way of sampling.

``python examples/generate --help``; trains the demo's model first where ``make demo`` has not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FINETUNE = Path(__file__).resolve().parent.parent / "finetune"
sys.path.insert(0, str(FINETUNE))

import torch  # noqa: E402
import transformers  # noqa: E402
from data import ANSWER, QUESTION  # noqa: E402
from peft import PeftModel  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402
from training import Run, load  # noqa: E402

import moesaic.hf  # noqa: E402
from moesaic.sampling import generate  # noqa: E402

#: generate()'s arguments by strategy.
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top-k 20": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "top-p 0.9": {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.9},
    "min-p 0.1": {"do_sample": True, "top_k": 0, "min_p": 0.1},
    "typical-p 0.8": {"do_sample": True, "top_k": 0, "typical_p": 0.8},
    "repetition penalty": {"do_sample": True, "temperature": 0.7, "top_k": 0, "repetition_penalty": 1.2},
}
QUESTIONS = ("What does str.join do?", "What is the module json for?")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="examples/generate", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--run", type=Path, default=Path("build/demo"), help="where examples/finetune wrote its runs (build/demo)")
    add("--tokens", type=int, default=80, help="of each answer (80)")
    add("--question", action="append", help="may be given several times (default: two about Python)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    return options


def trained_model(folder: Path) -> tuple[Any, Any]:
    """The demo's model with the adapter that the engine trained, its experts packed, and its tokenizer."""
    run = Run.load(folder / "moesaic" / "run.json")
    model, tokenizer = load(run)
    model.set_experts_implementation("moesaic")
    model = PeftModel.from_pretrained(model, str(folder / "moesaic" / "adapter")).merge_and_unload().eval()
    moesaic.hf.prepare(model, release=False)
    return model, tokenizer


def answer(
    model: Any, tokenizer: Any, question: str, options: argparse.Namespace, **arguments: Any
) -> tuple[str, float]:
    """An answer, and the tokens a second."""
    prompt = tokenizer(f"{QUESTION}{question}{ANSWER}", return_tensors="pt", add_special_tokens=False).input_ids
    begin = time.perf_counter()
    written = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.tokens,
        min_new_tokens=options.tokens,
        pad_token_id=tokenizer.pad_token_id,
        **arguments,
    )
    seconds = time.perf_counter() - begin
    text: str = tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True)
    return text, (written.shape[1] - prompt.shape[1]) / seconds


def readable(text: str) -> Text:
    """An answer as it is; of one that would not be seen, what it consists of."""
    if text.strip():
        return Text(text)
    return Text(f"nothing but {len(text)} blanks: {text[:20]!r}...", style="dim")


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where the model could not be trained."""
    options = parse(arguments)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console = Console(highlight=False)
    if not (options.run / "moesaic" / "adapter").is_dir():
        console.print(f"no trained model in {options.run}: training it first", style="dim")
        command = [sys.executable, str(FINETUNE), "--only", "moesaic", "--out", str(options.run)]
        if subprocess.run(command, check=False).returncode != 0:
            return 1
    model, tokenizer = trained_model(options.run)
    questions = options.question or list(QUESTIONS)
    answer(model, tokenizer, questions[0], options, **STRATEGIES["greedy"], custom_generate=generate)  # warm-up

    speeds = Table("strategy", "tokens/s", "with transformers' sampling", title="speed", title_justify="left")
    stages = Table("strategy", "stage", "thread ms", "of the sampler", title="the sampler", title_justify="left")
    for name, strategy in STRATEGIES.items():
        rates, stock = [], []
        with moesaic.profile() as profile:
            for question in questions:
                text, rate = answer(
                    model,
                    tokenizer,
                    question,
                    options,
                    custom_generate=generate,
                    sampling_seed=options.seed,
                    **strategy,
                )
                rates.append(rate)
                console.print(Panel(readable(text), title=f"{name}: {question}", title_align="left"))
        for question in questions:
            torch.manual_seed(options.seed)
            stock.append(answer(model, tokenizer, question, options, **strategy)[1])
        speeds.add_row(name, *(f"{len(r) / sum(1 / x for x in r):.1f}" for r in (rates, stock)))
        found = {row["name"]: row["thread_ms"] for row in profile.phases() if row["category"] == "sample"}
        total = sum(found.values())
        for n, (stage, milliseconds) in enumerate(found.items()):
            stages.add_row(name if n == 0 else "", stage, f"{milliseconds:.2f}", f"{milliseconds / total:.0%}")
    console.print(speeds)
    console.print(stages)
    return 0


if __name__ == "__main__":
    sys.exit(main())
