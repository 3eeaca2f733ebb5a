"""`moesaic bench step`: the experts inside a real training step beside the same calls alone, and what the rest of the
step takes with the engine and without."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import CommandError, Tables, print_json, stdout_for_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moesaic import ExpertsLayer, Lora

SCHEMA = 1
# What each ratio should stay below.
INSIDE_BAR = 1.10
OTHERS_BAR = 1.02

_DESCRIPTION = """\
Trains a small Qwen3-MoE with random weights through transformers and PEFT (LoRA on attention and experts, bf16, no
checkpointing), and takes turns between a step (forward and backward), the same step with experts that compute
nothing, and the experts' calls of that step alone, on the same inputs. inside / alone: the engine's time. with /
without: what the step takes besides."""

_TOKENS, _REPS, _WARMUP, _RANK = 512, 10, 3, 16

_COMMON = {"vocab_size": 4096, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_experts": 32, "pad_token_id": 0}
# "demo" has the sizes of `make demo`; the other one 4 layers of Qwen3-30B-A3B with a quarter of their experts.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "demo": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


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
    parser.add_argument("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0.

    Raises:
        CommandError: transformers or PEFT is missing.
    """
    with stdout_for_json(args.json):
        document = measure(args, options.progress())
    if args.json:
        print_json(document)
    else:
        _show(document)
    return 0


@dataclass
class _RecordedCall:
    """One call of the experts in a step."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    layer: ExpertsLayer
    lora: Lora | Sequence[Lora] | None
    d_out: torch.Tensor | None = None


def measure(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures and returns the document that --json prints.

    Raises:
        CommandError: transformers or PEFT is missing.
    """
    import torch

    import moesaic

    if args.threads is not None:
        moesaic.set_num_threads(args.threads)
    torch.set_num_threads(moesaic.get_num_threads())
    progress("building the model")
    model = _model(MODELS[args.model], args.rank)
    ids = torch.randint(4096, (1, args.tokens), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        return (time.perf_counter() - start) * 1e3

    step()  # gradients are there from now on, and the next ones are added to them
    calls: list[_RecordedCall] = []
    with _replaced_experts(_recorder(calls)):
        step()

    inside: list[float] = []
    alone: list[float] = []
    total: list[float] = []
    others: list[float] = []
    others_without: list[float] = []
    for i in range(args.warmup + args.reps):
        progress(f"repetition {i + 1} of {args.warmup + args.reps}")
        with moesaic.profile() as profile:
            whole = step()
        experts = _engine_ms(profile)
        with _replaced_experts(_nothing_computed()):
            rest = step()
        with moesaic.profile() as profile:
            _run_alone(calls)
        if i >= args.warmup:
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
        "calls": len(calls),
        "step_ms": _summary(total),
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


def _model(sizes: dict[str, Any], rank: int) -> nn.Module:
    try:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        import moesaic.hf
    except ImportError as error:
        raise CommandError(
            f"bench step needs transformers and PEFT (pip install 'transformers>=5.7' 'peft>=0.19'): {error}"
        ) from None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**_COMMON, **sizes), dtype=torch.bfloat16)
    moesaic.hf.prepare(model, progress=False)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted.train()


@contextlib.contextmanager
def _replaced_experts(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """`function` in the place of moesaic.moe_experts, as transformers calls it."""
    from moesaic.hf import experts

    original = vars(experts)["moe_experts"]
    vars(experts)["moe_experts"] = function
    try:
        yield
    finally:
        vars(experts)["moe_experts"] = original


def _recorder(calls: list[_RecordedCall]) -> Callable[..., torch.Tensor]:
    """moe_experts, which also keeps what it is called with."""
    import moesaic

    def record(
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        layer: ExpertsLayer,
        lora: Lora | Sequence[Lora] | None,
    ) -> torch.Tensor:
        out = moesaic.moe_experts(hidden, ids, weights, layer, lora)
        call = _RecordedCall(hidden.detach(), ids, weights.detach(), layer, _detached(lora))
        calls.append(call)

        def keep(d_out: torch.Tensor) -> None:
            call.d_out = d_out

        out.register_hook(keep)  # type: ignore[no-untyped-call]
        return out

    return record


def _detached(lora: Lora | Sequence[Lora] | None) -> Sequence[Lora]:
    import moesaic

    if lora is None:
        return ()
    adapters = [lora] if isinstance(lora, moesaic.Lora) else lora

    def pair(of: moesaic.LoraPair | None) -> moesaic.LoraPair | None:
        return None if of is None else moesaic.LoraPair(of.a.detach(), of.b.detach(), of.scale, of.experts)

    return [moesaic.Lora(*(pair(p) for p in (a.gate_up, a.gate, a.up, a.down))) for a in adapters]


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


def _run_alone(calls: Sequence[_RecordedCall]) -> None:
    """All forwards, then all backwards, last layer first, as a step has them."""
    saved = [call.layer.forward(call.hidden, call.ids, call.weights, call.lora)[1] for call in calls]
    for call, state in zip(reversed(calls), reversed(saved), strict=True):
        assert state is not None and call.d_out is not None  # saved, and recorded by a whole step
        call.layer.backward(state, call.d_out)


def _engine_ms(profile: Any) -> float:
    """Time that callers spent in the engine."""
    return sum(float(phase["thread_ms"]) for phase in profile.phases() if phase["name"] in ("forward", "backward"))


def _show(document: dict[str, Any]) -> None:
    host, experts, others = document["host"], document["experts_ms"], document["others_ms"]
    rows = [
        [name, *(f"{values[key]:.2f}" for key in ("min", "median", "mean", "std", "max"))]
        for name, values in (
            ("step", document["step_ms"]),
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
    )
    tables.table(title, ["ms", "min", "median", "mean", "std", "max"], rows)
    tables.table(
        "",
        None,
        [
            [name, f"{values['ratio']:.3f}  (bar: {values['bar']:g})"]
            for name, values in (("experts: inside / alone", experts), ("the rest: with / without", others))
        ],
    )
