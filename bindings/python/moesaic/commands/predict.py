"""`moesaic predict`: how long a model would take on a machine, and whether such predictions hold here."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import CommandError, Tables, UsageError, format_bytes, print_json, stdout_for_json

if TYPE_CHECKING:
    from moesaic.perf.communication import Topology
    from moesaic.perf.gemm_evaluator import GemmEvaluator
    from moesaic.perf.simulation import BlockTime, SimulationResult

_OF_A_MODEL = (
    "--phase", "--decode-tokens", "--rank", "--recompute", "--routing",
    "--no-overlap", "--granularity", "--precise", "--no-prewarm", "--max-simulated-tokens",
)  # fmt: skip
_OF_DEVICES = ("--nodes", "--devices", "--topology", "--intra", "--inter", "--strategy")
_OF_A_RUN = ("--tokens", "--batch", *_OF_A_MODEL, *_OF_DEVICES)
_OF_A_CHECK = ("--full", "--only", "--reps", "--seconds", "--statistic", "--disturbed", "--clock")

_DESCRIPTION = """\
Adds the tile evaluator's answers up to the time of a prefill, of decoded tokens or of a training step, on one machine
or on several that share the model. The experts are computed as the engine computes them; see docs/MODEL.md. With
--linear one product is shared among the devices and every strategy compared. With --check predictions are held
against this host: products, layers and training steps that no rate was fitted to; exits 1 where a bar does not hold."""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("predict", help="predict times of a model on a machine", description=_DESCRIPTION)
    what = parser.add_argument_group("what is run")
    what.add_argument("--model", metavar="CONFIG", help="config.json of a model, or its folder")
    what.add_argument("--linear", metavar="KxN", help="instead of a model one product with --tokens rows")
    what.add_argument("--phase", choices=("prefill", "decode", "train"), default="prefill", help="default prefill")
    what.add_argument("--tokens", type=options.positive, default=128, metavar="T", help="of a sequence (default 128)")
    what.add_argument("--batch", type=options.positive, default=1, metavar="B", help="sequences (default 1)")
    what.add_argument(
        "--decode-tokens", type=options.non_negative, metavar="N", help="decoded behind them (default 0; decode: 1)"
    )
    what.add_argument("--rank", type=options.rank, metavar="R", help="of the adapters (default 0; train: 16)")
    what.add_argument("--recompute", action="store_true", help="train with activation checkpointing")
    what.add_argument(
        "--routing", default="uniform", metavar="LAW", help="uniform, zipf:S or concentrated:N (default uniform)"
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--machine",
        default="here",
        metavar="M",
        help="here, a file, or the name of a description that comes with the package, as emr-16c (default here)",
    )
    where.add_argument("--threads", type=options.threads, metavar="N", help="of a device (default: all it has)")
    where.add_argument("--nodes", type=options.positive, default=1, metavar="N", help="default 1")
    where.add_argument("--devices", type=options.positive, default=1, metavar="D", help="in a node (default 1)")
    where.add_argument("--topology", choices=("ring", "mesh"), default="ring", help="default ring")
    for level, default, latency in (("intra", 48.0, 2.0), ("inter", 25.0, 5.0)):
        inside = "inside a node" if level == "intra" else "between nodes"
        where.add_argument(
            f"--{level}", default=f"{default:g},{latency:g}", metavar="GBPS[,US[,LINKS[,CONTENTION]]]",
            help=f"links {inside}: GB/s each way, latency, how many, others' share (default {default:g},{latency:g})",
        )  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument(
        "--strategy",
        choices=("auto", "column", "row", "hybrid", "expert"),
        default="auto",
        help="how devices share a block; auto: the fastest for each (default auto)",
    )
    how.add_argument("--no-overlap", action="store_true", help="communication waits for computing")
    how.add_argument("--granularity", choices=("coarse", "fine"), default="fine", help="default fine")
    how.add_argument("--precise", choices=("yes", "no"), default="yes", help="no: closed formulas only")
    how.add_argument("--no-prewarm", action="store_true", help="evaluate products when they are asked for")
    how.add_argument(
        "--max-simulated-tokens",
        type=options.positive,
        default=64,
        metavar="N",
        help="decoded tokens computed one by one; later ones count as the last of them (default 64)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="with --model: also a page with a time line and sliders"
    )
    check = parser.add_argument_group("predictions against this host")
    check.add_argument("--check", action="store_true", help="run what is predicted, and compare")
    check.add_argument("--calibrate", action="store_true", help="fit the rates of the layers on this host anew")
    check.add_argument("--full", action="store_true", help="also layers of a gigabyte and more")
    check.add_argument("--only", choices=("gemm", "layer", "step"), action="append", help="only these parts")
    check.add_argument("--reps", type=options.positive, default=25, metavar="R", help="repetitions (default 25)")
    check.add_argument(
        "--seconds", type=options.seconds, default=12, metavar="S", help="for a case to be undisturbed in (default 12)"
    )
    check.add_argument(
        "--statistic",
        choices=("median", "least"),
        default="median",
        help="which of the repetitions counts; least where others use the host (default median)",
    )
    check.add_argument(
        "--disturbed",
        action="store_true",
        help="count what ran while others used the host, too: for hosts that are never left alone",
    )
    options.add_clock(check)
    options.add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 where a bar of --check does not hold.

    Raises:
        UsageError: an argument or a field of a file makes no sense; one line that names it.
        CommandError: a file cannot be read or written.
    """
    if args.html is not None and args.model is None:
        raise UsageError("argument --html: expected --model with it, whose run the page shows")
    if args.check or args.calibrate:
        if args.model is not None or args.linear is not None:
            option = "--model" if args.model is not None else "--linear"
            raise UsageError(f"argument {option}: not with --check or --calibrate, which run layers of their own")
        options.refuse(args, _OF_A_RUN, "not with --check or --calibrate, which run layers of their own")
        return _check(args)
    options.refuse(args, _OF_A_CHECK, "only with --check or --calibrate")
    if (args.model is None) == (args.linear is None):
        raise UsageError("argument --model: expected a config.json (or --linear, or --check)")
    if args.linear is not None:
        options.refuse(args, _OF_A_MODEL, "only with --model")
    if args.phase != "train":
        options.refuse(args, ["--recompute"], "only with --phase train")
    try:
        return _linear(args) if args.linear is not None else _predict(args)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None


def _topology(args: argparse.Namespace) -> Topology:
    from moesaic.perf.communication import Link, Topology

    def link(name: str) -> Link:
        parts = getattr(args, name).split(",")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 4 or (len(numbers) > 2 and not numbers[2].is_integer()):
            raise UsageError(f"argument --{name}: '{getattr(args, name)}' is not GBPS[,US[,LINKS[,CONTENTION]]]")
        default = (0.0, 2.0 if name == "intra" else 5.0, 1.0, 1.0)
        bandwidth, latency, links, contention = (*numbers, *default[len(numbers) :])
        return Link(bandwidth, latency, int(links), contention)

    return Topology(args.nodes, args.devices, args.topology, link("intra"), link("inter"))


def _evaluator(args: argparse.Namespace) -> GemmEvaluator:
    from moesaic.perf import GemmEvaluator, Machine

    return GemmEvaluator(Machine.find(args.machine), args.threads)


def _predict(args: argparse.Namespace) -> int:
    from moesaic.perf import TransformerConfig
    from moesaic.perf.inference import Inference
    from moesaic.perf.report import render, what_if
    from moesaic.perf.simulation import Parallelism, SimulationConfig, run_simulation

    train = args.phase == "train"
    decode = args.decode_tokens if args.decode_tokens is not None else (1 if args.phase == "decode" else 0)
    rank = args.rank if args.rank is not None else (16 if train else 0)
    inference = Inference(args.phase, args.tokens, args.batch, decode, rank, args.recompute)
    parallelism = Parallelism(args.strategy, args.routing, not args.no_overlap)
    config = SimulationConfig(not args.no_prewarm, args.precise == "yes", args.granularity, args.max_simulated_tokens)
    topology, model = _topology(args), TransformerConfig.load(args.model)
    with stdout_for_json(args.json):
        evaluator = _evaluator(args)
        result = run_simulation(topology, model, inference, parallelism, evaluator, config)
        if args.html is not None:
            possible = what_if(topology, model, inference, parallelism, evaluator, precise=args.precise == "yes")
            args.html.write_text(render(result, possible), encoding="utf-8")
    if args.json:
        print_json(result.to_json())
    else:
        _show(result)
    return 0


def _show(result: SimulationResult) -> None:
    tables = Tables()
    inputs, run = result.inputs, result.inputs["inference"]
    tables.heading(
        f"{inputs['model']['model_type']}, {run['phase']}, {run['batch']} x {run['tokens']} tokens on "
        f"{inputs['machine']['name']} ({inputs['machine']['source']}), {inputs['threads']} threads, "
        f"{inputs['topology']['nodes']} x {inputs['topology']['devices']} devices"
    )
    tables.line(
        f"{result.milliseconds:,.2f} ms, {result.tokens_per_second:,.1f} tokens/s, parallel efficiency "
        f"{result.parallel_efficiency:.3f}"
    )
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(step.name for step in result.steps):
        steps = [step for step in result.steps if step.name == name]
        count = sum(step.count for step in steps)
        times = [
            sum(getattr(step, field) * step.count for step in steps) / count
            for field in ("milliseconds", "compute_ms", "communication_ms")
        ]
        rows.append((f"{count} x {name}", *(f"{ms:,.3f}" for ms in times), "", ""))
        rows += _block_rows([block for step in steps[:1] for block in step.blocks])
    header = ("pass, and each of its blocks", "ms", "computing", "communicating", "strategy", "pieces")
    tables.table("time", header, rows)
    reasons = {block.name: block.reason for step in result.steps for block in step.blocks}
    if inputs["topology"]["nodes"] * inputs["topology"]["devices"] > 1:
        tables.table("why", None, list(reasons.items()))
    tables.table("memory of a device", None, [(name, format_bytes(count)) for name, count in result.memory.items()])
    warm = result.prewarming
    tables.line(
        f"{warm.shapes} products evaluated beforehand in {warm.milliseconds:.1f} ms, then {warm.hits} look-ups found "
        f"and {warm.misses} missed; simulated in {result.simulated_ms:.1f} ms"
    )


def _block_rows(blocks: Sequence[BlockTime]) -> list[tuple[str, ...]]:
    """Blocks of a pass by name; those with other draws of the routing together."""
    rows = []
    for name in dict.fromkeys(block.name for block in blocks):
        same = [block for block in blocks if block.name == name]
        count = sum(block.count for block in same)
        times = [
            sum(getattr(block, field) * block.count for block in same) / count
            for field in ("milliseconds", "compute_ms", "communication_ms")
        ]
        ways = dict.fromkeys((block.strategy, str(block.pieces)) for block in same)
        strategies, pieces = (" ".join(dict.fromkeys(part)) for part in zip(*ways, strict=True))
        rows.append((f"    {count} x {name}", *(f"{ms:,.3f}" for ms in times), strategies, pieces))
    return rows


def _linear(args: argparse.Namespace) -> int:
    from moesaic.perf import GemmShape
    from moesaic.perf.strategy import linear_candidates, plan_linear

    sizes = args.linear.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"argument --linear: '{args.linear}' is not KxN")
    k, n = map(int, sizes)
    topology, m = _topology(args), args.tokens * args.batch
    with stdout_for_json(args.json):
        evaluator = _evaluator(args)

        def product_ms(m: int, k: int, n: int) -> float:
            return float(evaluator.evaluate(GemmShape(m=m, k=k, n=n)).milliseconds)

        plan = plan_linear(product_ms, topology, m, k, n, args.strategy)
        candidates = sorted(linear_candidates(product_ms, topology, m, k, n), key=lambda found: found.milliseconds)
    if args.json:
        print_json({"schema": 1, "plan": asdict(plan), "candidates": [asdict(found) for found in candidates]})
        return 0
    tables = Tables()
    tables.heading(f"{m} x {k} -> {n} on {topology.size} devices of {evaluator.machine.name}")
    tables.line(plan.reason)
    rows = [
        (str(found), f"{found.milliseconds:.4f}", f"{found.compute_ms:.4f}", f"{found.communication_ms:.4f}")
        for found in candidates
    ]
    tables.table("all ways", ("way", "ms", "computing", "communicating"), rows)
    return 0


def _check(args: argparse.Namespace) -> int:
    from moesaic.perf.check import CheckPlan, run_check

    if args.machine != "here":
        raise UsageError(f"argument --machine: '{args.machine}' cannot be run here; --check is about this host")
    plan = CheckPlan(
        repetitions=args.reps,
        statistic=min if args.statistic == "least" else statistics.median,
        full=args.full,
        recalibrate=args.calibrate,
        seconds=args.seconds,
        disturbed=args.disturbed,
    )
    if args.only:
        plan = replace(plan, parts=tuple(args.only))
    elif not args.check:
        plan = replace(plan, parts=("layer",))
    with stdout_for_json(args.json), options.engine_clock(args):
        document = run_check(plan, options.progress())
    if args.json:
        print_json(document)
    else:
        _show_check(document)
    return 0 if document["summary"] and all(row["holds"] for row in document["summary"]) else 1


def _show_check(document: dict[str, Any]) -> None:
    tables = Tables()
    machine = document["machine"]
    tables.heading(
        f"{machine['cpu']}, {machine['isa']}, {document['threads']} threads; {document['statistic']} of the repetitions"
        + (", disturbed or not" if document["disturbed"] else "")
    )
    rows = [
        (
            pair["name"],
            f"{pair['predicted_ms']:.3f}",
            f"{pair['measured_ms']:.3f}",
            f"{100 * pair['error']:+.1f}%",
            f"{pair['spread']:.2f}",
        )
        for pair in document["pairs"]
    ]
    tables.table("predicted against measured", ("what", "predicted ms", "measured ms", "error", "spread"), rows)
    tables.table(
        "errors",
        ("group", "count", "median", "95th percentile", "worst", "bias", "bar", "holds"),
        [
            (
                row["group"],
                str(row["count"]),
                *(f"{100 * row[name]:.1f}%" for name in ("median", "p95", "worst", "bias")),
                f"{100 * row['bar']:.0f}%" + ("" if row["p95_bar"] is None else f" / {100 * row['p95_bar']:.0f}%"),
                "yes" if row["holds"] else "NO",
            )
            for row in document["summary"]
        ],
    )
    for what, why in document["left_out"].items():
        print(f"moesaic: left out: {what}: {why}", file=sys.stderr)
