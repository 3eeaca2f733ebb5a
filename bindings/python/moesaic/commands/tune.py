"""`moesaic tune`: fills the cache of GEMM answers for a model, and looks after it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.commands.options import add_clock, add_json, engine_clock, positive, rank, refuse, several, threads
from moesaic.commands.output import CommandError, Tables, UsageError, format_bytes, print_json, stdout_for_json

if TYPE_CHECKING:
    from moesaic.perf import Cache, GemmEvaluator, GemmShape, Machine

SCHEMA = 1
_TOKENS = {"prefill": [128, 1024, 4096], "decode": [1, 8, 32], "train": [1024, 4096]}

_OF_A_MODEL = ("--deployment", "--tokens", "--batch", "--tensor-parallel", "--lora-rank", "--routing")
_OF_SHAPES = ("--model", "--from-history", *_OF_A_MODEL, "--measured", "--published")
_OF_A_MACHINE = ("--machine", "--threads")

_DESCRIPTION = """\
Evaluates every GEMM shape of a model on a machine and keeps the answers, blocking and time, in MOESAIC_CACHE_DIR, where
planning and the engine's own measurements find them. --stats, --missed, --clear, --export and --import look after the
cache; --check holds the evaluator against this host."""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("tune", help="evaluate a model's GEMM shapes ahead of use", description=_DESCRIPTION)
    what = parser.add_argument_group("what is evaluated")
    what.add_argument("--model", metavar="CONFIG.json", help="a model's configuration, or the folder that holds it")
    what.add_argument("--from-history", action="store_true", help="also every shape that was ever asked for")
    what.add_argument("--deployment", choices=sorted(_TOKENS), default="prefill", help="default: %(default)s")
    what.add_argument(
        "--tokens",
        type=several(positive),
        help="prefill and train: tokens of a sequence; decode: sequences at a time; commas between several"
        " (default: 128,1024,4096; decode: 1,8,32; train: 1024,4096)",
    )
    what.add_argument("--batch", type=several(positive), default=[1], help="sequences at a time (default: 1)")
    what.add_argument("--tensor-parallel", type=several(positive), default=[1], metavar="N,N", help="ways to split")
    what.add_argument("--lora-rank", type=rank, default=0, help="of an adapter on the experts (default: none)")
    what.add_argument("--routing", default="uniform", help="uniform, zipf:S or concentrated:N (default: uniform)")
    where = parser.add_argument_group("on which machine")
    where.add_argument(
        "--machine",
        default="here",
        help="here, a file, or the name of a description that comes with the package, as emr-16c (default: here)",
    )
    where.add_argument("--threads", type=threads, help="of the engine there (default: all)")
    where.add_argument("--measured", action="store_true", help="run the best few of each shape and keep the fastest")
    where.add_argument("--published", action="store_true", help="1,800 candidates a shape instead of the pruned ones")
    keep = parser.add_argument_group("the cache")
    only = keep.add_mutually_exclusive_group()
    only.add_argument("--stats", action="store_true", help="what it holds and how it was used")
    only.add_argument("--missed", action="store_true", help="shapes that were asked for and are not there")
    only.add_argument("--clear", action="store_true", help="drop everything")
    only.add_argument("--export", metavar="FILE", help="write all of it to a file; -: to stdout")
    only.add_argument("--import", metavar="FILE", dest="import_", help="add what --export wrote; -: from stdin")
    only.add_argument(
        "--check",
        type=positive,
        nargs="?",
        const=40,
        metavar="SHAPES",
        help="run all candidates of held-out shapes (default: all 40) and compare the choices with the fastest",
    )
    add_clock(parser)
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where --check finds a bar missed."""
    if args.stats or args.missed or args.clear or args.export or args.import_:
        refuse(
            args, (*_OF_SHAPES, *_OF_A_MACHINE, "--clock"), "not with --stats, --missed, --clear, --export or --import"
        )
    elif args.check:
        refuse(args, _OF_SHAPES, "not with --check, which has shapes of its own")
    else:
        refuse(args, ("--clock",), "only with --check")
        if args.model is None:
            refuse(args, _OF_A_MODEL, "only with --model")
    if args.export == "-":  # what is exported is the document
        from moesaic import perf

        sys.stdout.write(_text(perf.Cache().export()))
        return 0
    with stdout_for_json(args.json):
        if args.stats or args.missed or args.clear or args.export or args.import_:
            document, show = _look_after(args), _show_cache
        elif args.check:
            from moesaic.commands import tune_check

            with engine_clock(args):
                document, show = tune_check.check(_describer(args), args.check), tune_check.show
        else:
            document, show = _tune(args), _show
    if args.json:
        print_json(document)
    else:
        show(document)
    return 0 if document.get("ok", True) else 1


def _tune(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluates the shapes that were asked for."""
    from moesaic import perf

    if args.model is None and not args.from_history:
        raise UsageError("tune: expected --model, --from-history or one of the cache's options (see tune --help)")
    machine, cache = _machine(args), perf.Cache()
    try:
        evaluator = perf.GemmEvaluator(
            machine,
            args.threads,
            cache,
            space="published" if args.published else "pruned",
            mode="measured" if args.measured else "analytic",
        )
        shapes = _shapes(args, evaluator)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from None
    report = perf.prewarm(evaluator, shapes, progress=not args.json)
    with evaluator.uncounted():
        rows = [_row(evaluator, shape) for shape in shapes]
    return {
        "schema": SCHEMA,
        "machine": {
            "name": machine.name,
            "identity": machine.identity,
            "isa": evaluator.isa,
            "threads": evaluator.threads,
        },
        **vars(report),
        "cache": {"path": str(cache.path), "kept": cache.writable},
        "list": rows,
    }


def _describer(args: argparse.Namespace) -> Callable[[], Machine]:
    """What says which machine it is, each time that --check asks."""
    from moesaic.commands import tune_check

    if args.machine == "here":
        return tune_check.described_in_turn()
    machine = _machine(args)
    return lambda: machine


def _machine(args: argparse.Namespace) -> Machine:
    from moesaic import perf

    try:
        return perf.Machine.find(args.machine)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{args.machine}: {error.strerror}") from None


def _shapes(args: argparse.Namespace, evaluator: GemmEvaluator) -> list[GemmShape]:
    from moesaic import perf

    found: list[GemmShape] = []
    if args.model is not None:
        tokens = args.tokens or _TOKENS[args.deployment]
        decode = args.deployment == "decode"
        found += perf.generate_transformer_gemm_shapes(
            args.model,
            [batch * n for batch in args.batch for n in tokens] if decode else args.batch,
            [1] if decode else tokens,
            tensor_parallel=args.tensor_parallel,
            training=args.deployment == "train",
            lora_rank=args.lora_rank,
            routing=args.routing,
        )
    if args.from_history:
        found += evaluator.history()
    return list(dict.fromkeys(found))


def _row(evaluator: GemmEvaluator, shape: GemmShape) -> dict[str, Any]:
    answer = evaluator.evaluate(shape)
    sizes = {name: getattr(shape, name) for name in ("groups", "m", "k", "n", "input", "output", "weights")}
    configuration = dict(vars(answer.configuration))
    return {
        "name": shape.name,
        **sizes,
        "rows": None if shape.rows is None else list(shape.rows),
        "milliseconds": answer.milliseconds,
        "bound": answer.bound,
        "parts": answer.parts,
        "source": answer.source,
        "configuration": configuration,
    }


def _show(document: dict[str, Any]) -> None:
    tables = Tables()
    rows = []
    for row in document["list"]:
        c = row["configuration"]
        rows.append(
            [
                row["name"] or "-",
                f"{row['groups']} x {row['m']} x {row['k']} x {row['n']}",
                c["form"],
                f"{c['task_rows']} x {c['task_columns']}",
                f"{c['call_rows']} x {c['call_columns']} x {c['call_depth']}",
                c["order"],
                f"{row['milliseconds']:.3f}",
                row["bound"],
            ]
        )
    header = ["GEMM", "groups x M x K x N", "form", "task", "call", "order", "ms", "bound by"]
    machine = document["machine"]
    tables.table(f"{machine['name']}, {machine['isa']}, {machine['threads']} threads", header, rows)
    tables.line(
        f"{document['shapes']} shapes, {document['candidates']} candidates, {document['hits']} hits, "
        f"{document['misses']} misses, {document['evaluate_ms']:.1f} ms, cache {format_bytes(document['cache_bytes'])}"
    )
    if not document["cache"]["kept"]:
        tables.line(f"not kept: {document['cache']['path']} cannot be written")


def _look_after(args: argparse.Namespace) -> dict[str, Any]:
    """--stats, --missed, --clear, --export to a file and --import."""
    from moesaic import perf

    cache = perf.Cache()
    document: dict[str, Any] = {"schema": SCHEMA}
    if args.missed:
        return document | {"missed": [{"key": key, "uses": uses} for key, uses in _by_use(cache.missed())]}
    if args.stats:
        of_a_process = ("hits", "misses")
        return document | {name: value for name, value in vars(cache.stats()).items() if name not in of_a_process}
    if args.export:
        return document | {"exported": _export(cache, args.export)}
    document["dropped" if args.clear else "imported"] = cache.clear() if args.clear else _import(cache, args.import_)
    if not cache.writable:
        raise CommandError(f"{cache.path} cannot be written")
    return document


def _show_cache(document: dict[str, Any]) -> None:
    tables = Tables()
    if "missed" in document:
        rows = [[str(row["uses"]), row["key"]] for row in document["missed"]]
        tables.table("asked for, and not there", ["uses", "key"], rows)
        return
    for name, value in document.items():
        if name != "schema":
            tables.line(f"{name}: {format_bytes(value) if name == 'bytes' else value}")


def _by_use(uses: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(uses.items(), key=lambda item: (-item[1], item[0]))


def _export(cache: Cache, path: str) -> int:
    document = cache.export()
    try:
        Path(path).write_text(_text(document))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    return len(document["entries"])


def _text(exported: dict[str, Any]) -> str:
    return json.dumps(exported, indent=1) + "\n"


def _import(cache: Cache, path: str) -> int:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
        return cache.import_(json.loads(text))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
