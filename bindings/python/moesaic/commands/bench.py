"""`moesaic bench`: measures, and holds what it measured against the limits of the host and against what else there
is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.commands import fused_bench, gemm_bench, options, pool_bench, profiling_bench, sampler_bench, step_bench
from moesaic.commands.output import Tables, UsageError, format_bytes, print_json, stdout_for_json

if TYPE_CHECKING:
    from moesaic.commands.layer_bench import Plan, Point

WEIGHT_FORMATS = ("bf16",)

_DEFAULT_RANK = 16
_DEFAULT_TOKENS = 128
_DEFAULT_WARMUP = 3
_DEFAULT_REPS = 10

_LAYER_DESCRIPTION = """\
Times forward and backward of one experts layer with a LoRA adapter (fp32, PEFT's layout: one A for gate and up), bf16
hidden states, through moesaic.moe_experts and autograd. limit: the larger of flops / compute ceiling and bytes / read
bandwidth; both ceilings are probed before and after each repetition on the same threads, and a repetition whose
probes differ by more than 10% does not count for the fraction of the limit. Engine and peers take turns; ratio: the
peer's median over moesaic's. first call: forward and backward, before any warm-up. A peer that cannot run here is
left out, with the reason. Exits 1 if --verify finds a wrong number."""

_PEERS_HELP = """\
torch_loop, torch_grouped_mm (torch: both); onednn: the loop on weights that oneDNN packed before; kt_kernel, with a
second copy of the weights, and kt_kernel_repack, without (kt-kernel: both); all (default: none)"""

_BARS_HELP = """\
also, in turn with the rest: without LoRA; two adapters and one of twice the rank, into .grad; and what of backward is
preparation"""

_SWEEP_HELP = """\
one axis at a time: --tokens, --threads and --rank (lists; where only one value is given, usual ones beside it), the
others at their first value; writes PREFIX.csv and, with matplotlib, PREFIX.png"""

_VERIFY_HELP = """\
before timing, compare output and the gradients of hidden states, router weights and adapter with an fp32 reference on
operands rounded to bf16, as relative L2 errors; large layers on evenly spread tokens (the gradient of the others is set
to zero, so that the adapter's gradient is compared whole). Bounds: 5e-3, peers 3e-2"""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("bench", help="measure the engine", description="Measures the engine.")
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    layer = benches.add_parser("layer", help="one experts layer, forward and backward", description=_LAYER_DESCRIPTION)
    _add_layer_options(layer)
    layer.set_defaults(run=run_layer)
    gemm_bench.add_parser(benches)
    fused_bench.add_parser(benches)
    pool_bench.add_parser(benches)
    step_bench.add_parser(benches)
    profiling_bench.add_parser(benches)
    sampler_bench.add_parser(benches)


def _add_layer_options(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("layer")
    shape.add_argument(
        "--preset", metavar="NAME", help="a known layer; options beside it override its values (a wrong name lists all)"
    )
    shape.add_argument("--experts", type=options.positive, metavar="E")
    shape.add_argument("--hidden", type=options.positive, metavar="H")
    shape.add_argument("--intermediate", type=options.positive, metavar="I")
    shape.add_argument("--top-k", type=options.positive, metavar="K")
    shape.add_argument(
        "--rank",
        type=options.several(options.rank),
        metavar="R",
        help=f"0: without LoRA (default {_DEFAULT_RANK}); several only with --sweep",
    )
    shape.add_argument("--weight-format", choices=WEIGHT_FORMATS, default="bf16", metavar="F", help="bf16 (default)")
    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--tokens",
        type=options.several(options.positive),
        metavar="T[,T...]",
        help=f"one case for each number (default {_DEFAULT_TOKENS})",
    )
    batch.add_argument(
        "--routing", default="uniform", metavar="uniform|zipf|concentrated:N", help="how tokens choose experts"
    )
    batch.add_argument("--save", choices=("yes", "no"), default="yes", help="no: forward alone, under no_grad")
    batch.add_argument(
        "--seed", type=options.non_negative, default=0, metavar="S", help="of weights, inputs and routing (default 0)"
    )
    how = parser.add_argument_group("measurement")
    how.add_argument(
        "--threads",
        type=options.several(options.threads),
        metavar="N",
        help="default: as the engine chooses; several only with --sweep",
    )
    how.add_argument(
        "--warmup", type=options.non_negative, metavar="W", help=f"calls before timing (default {_DEFAULT_WARMUP})"
    )
    how.add_argument("--reps", type=options.positive, metavar="R", help=f"timed repetitions (default {_DEFAULT_REPS})")
    how.add_argument("--peers", metavar="NAME[,NAME...]", default="", help=_PEERS_HELP)
    how.add_argument("--bars", action="store_true", help=_BARS_HELP)
    how.add_argument("--sweep", type=Path, metavar="PREFIX", help=_SWEEP_HELP)
    how.add_argument("--verify", action="store_true", help=_VERIFY_HELP)
    options.add_json(parser)


def run_layer(args: argparse.Namespace) -> int:
    """Runs `bench layer`; 0, or 1 if a verified number is wrong.

    Raises:
        UsageError: options that do not fit together.
        MemoryError: the layer does not fit; the message says what it needs.
    """
    from moesaic.commands import layer_bench

    plan = layer_plan(args)
    if args.sweep is not None and not args.sweep.absolute().parent.is_dir():
        raise UsageError(f"argument --sweep: there is no folder {args.sweep.parent}")
    with stdout_for_json(args.json):
        document = layer_bench.run(plan, options.progress())
        failures = layer_bench.failures(document)
        if args.sweep is not None:
            _write_sweep(document, args.sweep)
    if args.json:
        print_json(document)
    else:
        _show_layer(document)
    for failure in failures:
        print(f"moesaic: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _write_sweep(document: dict[str, Any], prefix: Path) -> None:
    from moesaic.commands import sweep

    table, plot = (prefix.with_name(prefix.name + suffix) for suffix in (".csv", ".png"))
    sweep.write_csv(document, table)
    if not sweep.write_png(document, plot):
        print(f"moesaic: {plot} is left out: matplotlib is not installed", file=sys.stderr)


def layer_plan(args: argparse.Namespace) -> Plan:
    """What the options of `bench layer` ask for. UsageError where they do not fit together."""
    import moesaic
    from moesaic.commands.layer_bench import Plan
    from moesaic.commands.layer_case import PRESETS, LayerShape, Preset, parse_routing

    preset: Preset | None = None
    if args.preset is not None:
        preset = PRESETS.get(args.preset)
        if preset is None:
            raise UsageError(f"argument --preset: '{args.preset}' is none of {', '.join(PRESETS)}")

    def size(name: str, default: int | None = None) -> int:
        for value in (getattr(args, name), getattr(preset, name, None), default):
            if value is not None:
                return int(value)
        raise UsageError(f"--{name.replace('_', '-')} is missing; give it, or a --preset")

    values: dict[str, list[int]] = {
        "tokens": args.tokens if args.tokens is not None else [size("tokens", _DEFAULT_TOKENS)],
        "threads": args.threads if args.threads is not None else [moesaic.get_num_threads()],
        "rank": args.rank if args.rank is not None else [size("rank", _DEFAULT_RANK)],
    }
    shape = LayerShape(
        experts=size("experts"),
        hidden=size("hidden"),
        intermediate=size("intermediate"),
        top_k=size("top_k"),
        rank=values["rank"][0],
    )
    if shape.top_k > shape.experts:
        raise UsageError(f"argument --top-k: {shape.top_k} is more than the {shape.experts} experts")
    try:
        routing = parse_routing(args.routing)
    except ValueError as error:
        raise UsageError(f"argument --routing: {error}") from None
    if routing.kind == "concentrated" and not shape.top_k <= routing.among <= shape.experts:
        raise UsageError(
            f"argument --routing: {routing} needs at least {shape.top_k} (top-k) and at most {shape.experts} experts"
        )
    peers = _peers(args.peers)
    if "torch_grouped_mm" in peers and (shape.hidden % 8 or shape.intermediate % 8):
        raise UsageError(
            "argument --peers: torch_grouped_mm takes rows of whole 16 bytes: --hidden and --intermediate by 8"
        )
    for option in ("verify", "bars"):
        if args.save == "no" and getattr(args, option):
            raise UsageError(f"argument --{option}: is about gradients too, and --save no has none")
    return Plan(
        shape=shape,
        points=_points(values, args.sweep is not None),
        routing=routing,
        weight_format=args.weight_format,
        save=args.save == "yes",
        warmup=size("warmup", _DEFAULT_WARMUP),
        reps=size("reps", _DEFAULT_REPS),
        peers=peers,
        verify=args.verify,
        bars=args.bars,
        seed=args.seed,
    )


def _points(values: dict[str, list[int]], sweeps: bool) -> list[Point]:
    """The cases that the options ask for. UsageError for several threads or ranks without --sweep."""
    from moesaic.commands import sweep
    from moesaic.commands.layer_bench import Point

    if not sweeps:
        for axis in ("threads", "rank"):
            if len(values[axis]) > 1:
                raise UsageError(f"argument --{axis}: several values only with --sweep")
        return [Point(tokens, values["threads"][0], values["rank"][0]) for tokens in values["tokens"]]
    defaults = {
        "tokens": sweep.TOKENS,
        "threads": sweep.powers_of_two(values["threads"][0]),
        "rank": sweep.RANKS,
    }
    axes = {axis: given if len(given) > 1 else [*given, *defaults[axis]] for axis, given in values.items()}
    return sweep.points(axes)


def _peers(text: str) -> list[str]:
    """'torch' -> both of its peers. UsageError for an unknown name and for one that this PyTorch cannot run."""
    import torch

    from moesaic.commands.peers import PEER_GROUPS, PEERS
    from moesaic.commands.torch_peers import grouped_mm_available

    names: list[str] = []
    for word in filter(None, text.split(",")):
        group = PEER_GROUPS.get(word, [word])
        unknown = [name for name in group if name not in PEERS]
        if unknown:
            raise UsageError(f"argument --peers: '{word}' is none of {', '.join([*PEER_GROUPS, *PEERS])}")
        names.extend(name for name in group if name not in names)
    if "torch_grouped_mm" in names and not grouped_mm_available():
        raise UsageError(f"argument --peers: PyTorch {torch.__version__} has no grouped_mm for CPUs; torch_loop runs")
    return names


def _show_layer(document: dict[str, Any]) -> None:
    """Prints the document for people."""
    tables = Tables()
    host, ceiling = document["host"], document["ceiling"]
    threads = f"{host['threads']} thread" + ("s" if host["threads"] != 1 else "")
    tables.heading(f"{host['cpu']}, {host['isa']}, {threads}")
    tables.line(
        f"ceilings while measuring: {ceiling['compute_gflops']:,.1f} GFLOP/s, {ceiling['read_gbps']:.1f} GB/s read"
    )
    for case in document["cases"]:
        _show_case(tables, case)


def _show_case(tables: Tables, case: dict[str, Any]) -> None:
    own = case["moesaic"]
    title = (
        f"E {case['experts']}  H {case['hidden']}  I {case['intermediate']}  k {case['top_k']}  r {case['rank']}  "
        f"{case['tokens']} tokens, {case['threads']} threads, {case['routing']} ({case['experts_hit']} experts hit), "
        f"{case['weight_format']}"
    )
    rows = []
    ways = ("forward", "backward") if case["save"] else ("forward",)
    for name, times, ratio in [("moesaic", own, None)] + [(n, p, p["ratio"]) for n, p in case["peers"].items()]:
        for way in ways:
            stats = times[f"{way}_ms"]
            fraction = own["fraction_of_limit"][way] if ratio is None else None
            rows.append(
                [
                    name,
                    way,
                    *(f"{stats[key]:.2f}" for key in ("min", "median", "mean", "std", "max")),
                    "-" if fraction is None else f"{100 * fraction:.0f}%",
                    "-" if ratio is None else f"{ratio[way]:.2f}x",
                ]
            )
        if ratio is not None and case["save"]:
            rows.append([name, "total", "", "", "", "", "", "-", f"{ratio['total']:.2f}x"])
    tables.table(title, ["", "ms", "min", "median", "mean", "std", "max", "of limit", "ratio"], rows)
    details = [
        ["tokens/s", f"{own['tokens_per_s']:,.0f}"],
        ["limit, ms", "  ".join(f"{way} {case['limit_ms'][way]:.2f}" for way in ways)],
        [
            "work",
            "  ".join(
                f"{way} {case['flops'][way] / 1e9:,.2f} GFLOP, {format_bytes(case['bytes'][way])}" for way in ways
            ),
        ],
        ["first call, ms", f"{own['first_call_ms']:.2f}"],
        ["packed weights", format_bytes(case["weight_bytes"])],
        ["saved for backward", format_bytes(own["saved_bytes"])],
        ["scratch", format_bytes(own["scratch_bytes"])],
        ["page faults a call", "  ".join(f"{way} {own['page_faults'][way]['median']:.0f}" for way in ways)],
        ["left out (ceilings moved)", f"{case['repetitions']['left_out']} of {case['repetitions']['run']} repetitions"],
    ]
    if own["forward_without_saving_ms"] is not None:
        details.insert(0, ["forward without saving, ms", f"{own['forward_without_saving_ms']['median']:.2f}"])
    details.extend([f"{name} left out", reason] for name, reason in case["peers_left_out"].items())
    for name, row in (case["bars"] or {}).items():
        details.append([name.replace("_", " "), f"{row['value']:.3f}  (bar: {row['bar']:g})"])
    if own.get("autograd_us") is not None:
        details.append(["autograd around backward, us", f"{own['autograd_us']:.1f}"])
        nothing = "  ".join(f"{way} {us:.1f}" for way, us in own["nothing_us"].items())
        details.append(["an autograd function of nothing, us", nothing])
    checks = [("moesaic", case["verified"])] + [(name, peer["verified"]) for name, peer in case["peers"].items()]
    for name, verified in checks:
        if verified is not None:
            text = "  ".join(f"{what} {error:.1e}" for what, error in verified.items() if error is not None)
            details.append([f"error of {name}", f"{text}  ({case['verified_tokens']} tokens)"])
    tables.table("", None, details)
