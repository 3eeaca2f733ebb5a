"""`moesaic bench step`: the experts inside a real training step beside the same calls alone, what the rest of the step
takes with the engine and without, and the step with its dense parts and attention fused."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import CommandError, Tables, print_json, stdout_for_json
from moesaic.commands.training_step import MODELS, TrainingStep, build_model, replaced_experts

if TYPE_CHECKING:
    import torch

    from moesaic import ExpertsLayer, Lora

SCHEMA = 1
# What each ratio should stay below.
INSIDE_BAR = 1.10
OTHERS_BAR = 1.02
# Of the losses of a plain step and a fused one, relative.
LOSS_TOLERANCE = 1e-2

_DESCRIPTION = """\
Trains a small Qwen3-MoE with random weights through transformers and PEFT (LoRA on attention and experts, no
checkpointing; bf16, or fp32 under autocast to bf16), and takes turns between a step (forward and backward), the same
step with experts that compute nothing, the experts' calls of that step alone, on the same inputs, and the step after
moesaic.hf.fuse. inside / alone: the engine's time. with / without: what the step takes besides. plain / fused: the
whole step, whose losses must agree within 1%, else it exits 1."""

_TOKENS, _REPS, _WARMUP, _RANK = 512, 10, 3, 16


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser("step", help="the experts inside a training step", description=_DESCRIPTION)
    parser.add_argument("--model", choices=tuple(MODELS), default="demo", help="default demo")
    for name, default, what in (
        ("tokens", _TOKENS, "in a step"),
        ("rank", _RANK, "of the adapter"),
        ("reps", _REPS, "timed repetitions"),
        ("warmup", _WARMUP, "repetitions before them"),
    ):
        parser.add_argument(
            f"--{name}", type=options.positive, default=default, metavar="N", help=f"{what} (default {default})"
        )
    parser.add_argument(
        "--autocast",
        action="store_true",
        help="weights in fp32, and autocast to bf16, as TRL's trainers have models that they load by name",
    )
    parser.add_argument("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 if the fused step computes something else.

    Raises:
        CommandError: transformers or PEFT is missing.
    """
    with stdout_for_json(args.json):
        document = measure(args, options.progress())
    if args.json:
        print_json(document)
    else:
        _show(document)
    return 0 if document["fused_step_ms"]["loss_difference"] <= LOSS_TOLERANCE else 1


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the document that --json prints.

    Raises:
        CommandError: transformers or PEFT is missing.
    """
    import torch

    import moesaic
    import moesaic.hf

    if args.threads is not None:
        moesaic.set_num_threads(args.threads)
    torch.set_num_threads(moesaic.get_num_threads())
    progress("building the model")
    try:
        model = build_model(MODELS[args.model], args.rank, torch.float32 if args.autocast else torch.bfloat16)
    except ImportError as error:
        raise CommandError(
            f"bench step needs transformers and PEFT (pip install 'transformers>=5.7' 'peft>=0.19'): {error}"
        ) from None

    step = TrainingStep(model, args.tokens, args.autocast)

    def timed() -> tuple[float, float]:
        """Milliseconds of a step, and its loss."""
        start = time.perf_counter()
        loss = step.run()
        return (time.perf_counter() - start) * 1e3, loss

    inside: list[float] = []
    alone: list[float] = []
    total: list[float] = []
    fused: list[float] = []
    differences: list[float] = []
    others: list[float] = []
    others_without: list[float] = []
    for i in range(args.warmup + args.reps):
        progress(f"repetition {i + 1} of {args.warmup + args.reps}")
        with moesaic.profile() as profile:
            whole, loss = timed()
        experts = _engine_ms(profile)
        with replaced_experts(_nothing_computed()):
            rest, _ = timed()
        with moesaic.profile() as profile:
            step.run_alone()
        moesaic.hf.fuse(model)
        step.run()  # packs what is frozen
        with moesaic.profile():  # as around the plain step
            whole_fused, fused_loss = timed()
        differences.append(abs(fused_loss / loss - 1.0))
        moesaic.hf.unfuse(model)
        step.run()  # PyTorch's own copies of weights, and their caches
        if i >= args.warmup:
            fused.append(whole_fused)
            total.append(whole)
            inside.append(experts)
            others.append(whole - experts)
            others_without.append(rest)
            alone.append(_engine_ms(profile))
    return {
        "schema": SCHEMA,
        "host": {
            "cpu": moesaic._core.cpu_name(),
            "isa": moesaic.isa(),
            "threads": moesaic.get_num_threads(),
            "torch": torch.__version__,
        },
        "model": args.model,
        "tokens": args.tokens,
        "rank": args.rank,
        "autocast": args.autocast,
        "calls": len(step.calls),
        "step_ms": _summary(total),
        "fused_step_ms": {
            **_summary(fused),
            "ratio": statistics.median(total) / statistics.median(fused),
            "loss_difference": float(torch.tensor(differences).max()),  # NaN, if one is
        },
        "experts_ms": {"inside": _summary(inside), "alone": _summary(alone), **_ratio(inside, alone, INSIDE_BAR)},
        "others_ms": {
            "with": _summary(others),
            "without": _summary(others_without),
            **_ratio(others, others_without, OTHERS_BAR),
        },
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    from moesaic.profiles.document import spread

    return spread(values)


def _ratio(a: Sequence[float], b: Sequence[float], bar: float) -> dict[str, float]:
    return {"ratio": statistics.median(a) / statistics.median(b), "bar": bar}


def _nothing_computed() -> Callable[..., torch.Tensor]:
    """Experts that cost PyTorch what the engine's cost it: as many tensors in and out of autograd, none computed."""
    import torch

    from moesaic.lora import flatten

    gradients: dict[tuple[int, ...], torch.Tensor] = {}

    def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
        key = (*tensor.shape, *tensor.stride())
        if key not in gradients:
            gradients[key] = torch.zeros_like(tensor)
        return gradients[key]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor, weights: torch.Tensor, *lora: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden, weights, *lora)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
            _, *others = ctx.saved_tensors
            return d_out, *(gradient_of(tensor) for tensor in others)

    def nothing(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        layer: ExpertsLayer,
        lora: Lora | Sequence[Lora] | None,
    ) -> torch.Tensor:
        tensors, _ = flatten(lora)
        out: torch.Tensor = Nothing.apply(hidden, weights, *tensors)  # type: ignore[no-untyped-call]
        return out

    return nothing


def _engine_ms(profile: Any) -> float:
    """Time that callers spent in the engine."""
    return sum(float(phase["thread_ms"]) for phase in profile.phases() if phase["name"] in ("forward", "backward"))


def _show(document: dict[str, Any]) -> None:
    host, experts, others = document["host"], document["experts_ms"], document["others_ms"]
    rows = [
        [name, *(f"{values[key]:.2f}" for key in ("min", "median", "mean", "std", "max"))]
        for name, values in (
            ("step", document["step_ms"]),
            ("step, fused", document["fused_step_ms"]),
            ("experts inside", experts["inside"]),
            ("experts alone", experts["alone"]),
            ("the rest, with the engine", others["with"]),
            ("the rest, experts compute nothing", others["without"]),
        )
    ]
    tables = Tables()
    tables.heading(f"{host['cpu']}, {host['isa']}, {host['threads']} threads")
    title = (
        f"{document['model']}, {document['tokens']} tokens, rank {document['rank']}, {document['calls']} experts blocks"
        f"{', fp32 under autocast to bf16' if document['autocast'] else ''}"
    )
    tables.table(title, ["ms", "min", "median", "mean", "std", "max"], rows)
    tables.table(
        "",
        None,
        [
            [name, f"{values['ratio']:.3f}  (bar: {values['bar']:g})"]
            for name, values in (("experts: inside / alone", experts), ("the rest: with / without", others))
        ]
        + [
            ["the step: plain / fused", f"{document['fused_step_ms']['ratio']:.3f}"],
            ["their losses differ by", f"{document['fused_step_ms']['loss_difference']:.1e}"],
        ],
    )
