"""Fine-tunes a mixture-of-experts model with LoRA twice, with stock transformers and through moesaic, and compares.

``make demo``, or ``python examples/finetune --help``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from dataclasses import asdict  # noqa: E402

try:
    import report
    from checks import adapter_in_stock_model, loss_falls, losses_agree
    from report import Check, Result
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    sys.exit(
        f"examples/finetune needs {error.name}, which {sys.executable} does not have; 'make setup' gives it to .venv"
    )


class RunFailedError(Exception):
    """A training run ended with an error, which it has written to a file."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what was not given is chosen for this host."""
    parser = argparse.ArgumentParser(prog="examples/finetune", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", metavar="PATH", help="a model of yours (default: a small one, random weights)")
    add("--data", metavar="FILE", type=Path, help="rows of yours, .jsonl or text (default: Python's documentation)")
    add("--steps", type=int, help="optimizer steps of each run")
    add("--batch-size", type=int, help="rows in a step")
    add("--length", type=int, help="tokens in a row")
    add("--rank", type=int, default=16, help="of the LoRA adapters (16)")
    add("--learning-rate", type=float, default=2e-3, help="at its highest (2e-3)")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("bfloat16", "float32"), help="bfloat16 where this CPU computes in it")
    add("--only", choices=("stock", "moesaic"), help="one of the two runs, without the comparison")
    add("--out", type=Path, default=Path("build/demo"), help="where everything is written (build/demo)")
    options = parser.parse_args(arguments)
    fast = computes_in_bfloat16()
    options.dtype = options.dtype or ("bfloat16" if fast else "float32")
    # A host without bf16 arithmetic gets a shorter run, so that it ends within minutes as well.
    options.steps = options.steps or (60 if fast else 20)
    options.batch_size = options.batch_size or (4 if fast else 2)
    options.length = options.length or (256 if fast else 128)
    for name in ("steps", "batch_size", "length", "rank"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("data", "model"):
        path = getattr(options, name)
        if path is not None and not Path(path).exists():
            parser.error(f"--{name} {path} is not there")
    return options


def computes_in_bfloat16() -> bool:
    """Whether PyTorch has matrix arithmetic in bf16 on this CPU. Without, its bf16 products are a hundred times slower
    than those in fp32, and nobody would train in it."""
    flags = cpu_info("flags").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def cpu_info(key: str) -> str:
    """An entry of /proc/cpuinfo; empty where it is missing."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def train(name: str, options: argparse.Namespace, console: Console) -> Result:
    """One training run in a process of its own, with a progress bar.

    Raises:
        RunFailedError: it ended with an error.
    """
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    run_file, log_file = folder / "run.json", folder / "log.txt"
    run_file.write_text(json.dumps(describe(name, options), indent=1) + "\n", encoding="utf-8")
    result = Result()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, str(HERE / "training.py"), str(run_file)]
    with (
        open(log_file, "w", encoding="utf-8") as log,
        report.progress(console) as bar,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        label = f"[{report.STYLES[name]}]{report.LABELS[name]:<18}"
        task = bar.add_task(label, total=options.steps, note="starting")
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                kind = event.pop("kind")
                if kind == "step":
                    result.losses.append(event["loss"])
                    result.seconds.append(event["seconds"])
                    bar.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}")
                    continue
                if kind == "state":
                    bar.update(task, note=event.pop("text"))
                elif kind in ("prepared", "note"):
                    console.print(event["text"], style="dim", highlight=False)
                result.facts |= event
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0 or not result.losses:
        tail = log_file.read_text(encoding="utf-8").strip().splitlines()[-15:]
        raise RunFailedError(
            f"the {name} run failed (exit code {process.returncode}); from {log_file}:\n" + "\n".join(tail)
        )
    return result


def describe(name: str, options: argparse.Namespace) -> dict[str, object]:
    """The fields of `training.Run`, which this process does without importing PyTorch."""
    return {
        "name": name,
        "out": str(options.out),
        "model": options.model,
        "data": None if options.data is None else str(options.data),
        "steps": options.steps,
        "batch_size": options.batch_size,
        "length": options.length,
        "rank": options.rank,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "dtype": options.dtype,
    }


def introduce(options: argparse.Namespace, console: Console) -> None:
    """What is going to happen."""
    table = Table.grid(padding=(0, 2))
    table.add_row("host", f"{cpu_info('model name')}, {len(os.sched_getaffinity(0))} CPUs")
    table.add_row("model", options.model or "Qwen3-MoE: 8 layers of 32 experts, top-8, 107 M random parameters")
    table.add_row("data", str(options.data or "questions and answers from the documentation of Python itself"))
    table.add_row("LoRA", f"rank {options.rank}, on attention and on all experts")
    table.add_row("steps", f"{options.steps} of {options.batch_size} x {options.length} tokens, {options.dtype}")
    if not computes_in_bfloat16():
        table.add_row("", "[dim]this CPU has no bf16 arithmetic: a shorter run, by default in fp32")
    console.print(Panel(table, title="LoRA fine-tuning of a mixture of experts", title_align="left"))


def show(results: dict[str, Result], options: argparse.Namespace, console: Console) -> list[Check]:
    """Curves, tables, checks."""
    tokens = options.batch_size * options.length
    console.print(report.curves(results))
    picture = options.out / "loss.png"
    drawn = report.save_curves(results, picture)
    console.print(report.comparison(results, tokens))
    found = [loss_falls(results[name]) for name in results if name == "moesaic"]
    if "moesaic" in results:
        facts = results["moesaic"].facts
        console.print(report.phases(facts["phases"], facts["threads"]))
    if len(results) == 2:
        found.append(losses_agree(results))
    if "moesaic" in results:
        console.print("loading the adapter into the stock model ...", style="dim")
        check, text = adapter_in_stock_model(options.out / "moesaic" / "run.json")
        found.append(check)
        console.print(Panel(Text(text), title="the stock model with this adapter writes", title_align="left"))
    console.print(report.checks(found))
    if drawn:
        console.print(f"curves   {picture}", highlight=False)
    if "moesaic" in results:
        console.print(f"adapter  {options.out / 'moesaic' / 'adapter'} (a PEFT folder)", highlight=False)
    return found


def save(results: dict[str, Result], found: list[Check], options: argparse.Namespace) -> None:
    """Everything that was shown, as ``summary.json``."""
    tokens = options.batch_size * options.length
    runs = {
        name: {
            "tokens_per_s": result.tokens_per_second(tokens),
            "losses": result.losses,
            "step_seconds": result.seconds,
            **result.facts,
        }
        for name, result in results.items()
    }
    document = {
        "schema": 1,
        "options": describe("", options),
        "runs": runs,
        "checks": [asdict(check) for check in found],
    }
    (options.out / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed, or a run did; 2: wrong usage."""
    options = parse(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    introduce(options, console)
    results: dict[str, Result] = {}
    try:
        for name in (options.only,) if options.only else ("stock", "moesaic"):
            results[name] = train(name, options, console)
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    found = show(results, options, console)
    save(results, found, options)
    return 0 if all(check.holds for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
