"""`moesaic bench fused`: fused dense layers beside PyTorch eager, torch.compile and oneDNN with post-ops, losses
beside TRL's."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import Tables, UsageError, print_json, stdout_for_json

if TYPE_CHECKING:
    from moesaic.commands.fused_case import Case

SCHEMA = 1
PEERS = ("torch", "compile", "onednn", "trl")
BOUND = {"bf16": 5e-3, "fp32": 1e-6}

_DESCRIPTION = """\
Times the fused operators on the layers of an encoder (attention output and both FFN layers of each hidden size, on 16 x
512 rows), on a square layer with an adapter of rank 16 and its gradients, on the loss of 4 x 512 tokens of a vocabulary
of 151,936 and its gradient, from hidden states and from logits, on attention, on that of a decoder with its gradients,
of four sequences that share a row and of one query to a cache of four times as many tokens (32 heads, 4 of keys, of 128
numbers), on that decoder's rotary embeddings with theirs, on odd shapes (hidden 770, 16 x 511 rows), norms, and
silu_mul, under no_grad but for those gradients. Engine and peers take turns on one set of inputs; ratio: the peer's
median over moesaic's. torch: eager, an adapter as PEFT has it, a loss as transformers; compile: torch.compile with
frozen weights; onednn: the oneDNN inside PyTorch on weights that it packed before, GELU and residual as post-ops, a
norm behind them; trl: the log-probabilities of TRL's trainers. of limit: the larger of flops / compute ceiling and
bytes read and written / read bandwidth, over the time; ceilings are probed before and after each repetition, and one
whose probes differ by more than 10% does not count. of stream, of silu_mul: the time of PyTorch's exclusive or of both
halves, as much read and written and hardly any arithmetic, from the caches or memory as the engine's call finds its
input, over the time. Before each timed call of the engine and of that one the same call on 16 rows (decoding: keys)
brings its code back, which the probe has driven out of the caches. odd over aligned: flops a second of hidden 770 over
those of 768.
Results are compared with PyTorch in double precision on 256 rows (attention: on one sequence or row) first; exits 1 if
one is wrong."""


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser(
        "fused", help="fused dense layers, losses, attention, norms and gates", description=_DESCRIPTION
    )
    parser.add_argument("--batch", type=options.positive, default=16, metavar="B", help="sequences (default 16)")
    parser.add_argument("--tokens", type=options.positive, default=512, metavar="S", help="of one (default 512)")
    parser.add_argument(
        "--hidden",
        type=options.several(options.positive),
        default=[768, 1024],
        metavar="H[,H...]",
        help="default 768,1024",
    )
    parser.add_argument("--dtype", choices=tuple(BOUND), default="bf16", help="default bf16")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds it")
    parser.add_argument(
        "--silu-batch",
        type=options.several(options.positive),
        default=[1, 8],
        metavar="B[,B...]",
        help="silu_mul at (1, 1024, 1024), (8, 2048, 4096), (16, 2048, 8192), (32, 4096, 8192), by the first "
        "(default 1,8: the others take 1.6 and 6.4 GB in bf16)",
    )
    parser.add_argument("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    options.add_clock(parser)
    parser.add_argument("--warmup", type=options.non_negative, default=2, metavar="W", help="default 2")
    parser.add_argument("--reps", type=options.positive, default=10, metavar="R", help="default 10")
    parser.add_argument(
        "--peers", default="", metavar="NAME[,NAME...]", help="torch, compile, onednn, trl; all (default: none)"
    )
    options.add_archive(parser, "fused")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 if a result is wrong.

    Raises:
        UsageError: an unknown peer, or no case.
        OSError: the archive cannot be written.
    """
    import torch

    import moesaic
    from moesaic.commands import fused_case

    names = options.names("peers", args.peers, PEERS)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    cases = [
        case
        for case in fused_case.cases(args.batch, args.tokens, args.hidden, args.silu_batch, dtype)
        if args.only in case.name
    ]
    if not cases:
        raise UsageError(f"argument --only: no case has '{args.only}' in its name")
    clock = options.clock(args)
    options.check_archive(args)
    if args.threads:
        moesaic.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    with stdout_for_json(args.json), torch.no_grad():
        document = measure(cases, names, args.warmup, args.reps, args.dtype, clock, options.progress())
        document["host"]["clock"] = args.clock
        if args.archive is not None:
            options.keep(args, document, [case.inputs().engine for case in cases], _show)
    if args.json:
        print_json(document)
    else:
        _show(document)
    wrong = [case for case in document["cases"] if not case["verified"] <= BOUND[args.dtype]]
    for case in wrong:
        print(
            f"moesaic: {case['name']}: off by {case['verified']:.1e}, allowed {BOUND[args.dtype]:.0e}", file=sys.stderr
        )
    return 1 if wrong else 0


def measure(
    cases: Sequence[Case],
    peers: Sequence[str],
    warmup: int,
    reps: int,
    dtype: str,
    clock: Callable[[], float],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures and returns the document that --json prints."""
    import moesaic
    from moesaic import _core
    from moesaic.commands.measure import CeilingProbe

    isa, threads = moesaic.isa(), moesaic.get_num_threads()
    if dtype == "fp32":  # products of fp32 are multiply-adds, whatever the tier multiplies bf16 with
        probed = [probe["isa"] for probe in _core.compute_probes() if probe["available"]]
        ceiling = next((name for name in ("avx512", "portable") if name in probed), isa)
    else:
        ceiling = isa
    probe = CeilingProbe(ceiling, threads, clock)
    rows = []
    for case in cases:
        progress(case.name)
        rows.append(_measure_case(case, peers, warmup, reps, clock, probe))
    _relate_odd(rows)
    return {
        "schema": SCHEMA,
        "host": {"cpu": _core.cpu_name(), "isa": isa, "threads": threads},
        "ceiling_isa": ceiling,
        "dtype": dtype,
        "cases": rows,
    }


def _measure_case(
    case: Case, peers: Sequence[str], warmup: int, reps: int, clock: Callable[[], float], probe: Any
) -> dict[str, Any]:
    from moesaic.commands.measure import PROBE_TOLERANCE
    from moesaic.profiles.document import spread

    inputs = case.inputs()
    engine = inputs.engine
    row: dict[str, Any] = {"name": case.name, "rows": case.rows, "n": case.n, "k": case.k, "peers": {}}
    row |= {"flops": case.flops, "bytes": case.bytes, "verified": inputs.error()}
    # The fewest whose attention the engine has its form for many for; of decoding 16 keys.
    few = (replace(case, tokens=16) if case.kind == "decoding" else replace(case, rows=16)).inputs()
    calls: dict[str, Callable[[], object]] = {"moesaic": engine}
    first: dict[str, Callable[[], object]] = {"moesaic": few.engine}
    stream, few_stream = inputs.stream(), few.stream()
    if stream is not None and few_stream is not None:
        calls["stream"] = stream  # first behind the engine: as there, the probe has just gone through the caches
        first["stream"] = few_stream
    for name in peers:
        peer = inputs.peer(name)
        if isinstance(peer, str):
            row["peers"][name] = {"unavailable": peer}
        else:
            calls[name] = peer
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    fractions, dropped = [], 0
    for _ in range(reps):
        for name, call in calls.items():
            before = probe.measure() if name == "moesaic" else None
            if name in first:
                first[name]()
            start = clock()
            call()
            times[name].append((clock() - start) * 1e3)
            if before is None:
                continue
            after = probe.measure()
            limits = [ceiling.limit_ms(case.flops, case.bytes) for ceiling in (before, after)]
            if abs(limits[0] - limits[1]) <= PROBE_TOLERANCE * max(limits):
                fractions.append(statistics.fmean(limits) / times[name][-1])
            else:
                dropped += 1
    row["moesaic"] = {"ms": spread(times["moesaic"]), "dropped": dropped}
    row["moesaic"]["fraction_of_limit"] = statistics.median(fractions) if fractions else None
    middle = row["moesaic"]["ms"]["median"]
    if "stream" in times:
        row["moesaic"]["fraction_of_stream"] = statistics.median(times["stream"]) / middle
    for name in calls:
        if name not in ("moesaic", "stream"):
            values = spread(times[name])
            row["peers"][name] = {"ms": values, "ratio": values["median"] / middle}
    if case.name.startswith("silu_mul"):
        row["peak_bytes"] = inputs.peak_bytes()
    return row


def _relate_odd(rows: list[dict[str, Any]]) -> None:
    speed = {row["name"]: row["flops"] / row["moesaic"]["ms"]["median"] for row in rows}
    for row in rows:
        aligned = row["name"].replace("770", "768")
        if aligned != row["name"] and aligned in speed:
            row["odd_over_aligned"] = speed[row["name"]] / speed[aligned]


def _show(document: dict[str, Any]) -> None:
    host, bound = document["host"], BOUND[document["dtype"]]
    tables = Tables()
    tables.heading(f"{host['cpu']}, {host['isa']}, {host['threads']} threads, {document['dtype']}")
    names = sorted({name for row in document["cases"] for name in row["peers"]}, key=PEERS.index)
    rows, notes = [], []
    for row in document["cases"]:
        fraction = row["moesaic"]["fraction_of_limit"]
        stream = row["moesaic"].get("fraction_of_stream")
        cells = [row["name"], f"{row['moesaic']['ms']['median']:,.3f}"]
        cells += ["-" if share is None else f"{share:.2f}" for share in (fraction, stream)]
        for name in names:
            ratio = row["peers"][name].get("ratio")
            cells.append("-" if ratio is None else f"{ratio:.2f}x")
        odd = row.get("odd_over_aligned")
        cells += ["-" if odd is None else f"{odd:.2f}", f"{row['verified']:.1e}"]
        rows.append(cells)
        notes += [f"{name}: {peer['unavailable']}" for name, peer in row["peers"].items() if "unavailable" in peer]
        if "peak_bytes" in row:
            notes.append(f"{row['name']}: {row['peak_bytes'] / 2**20:,.0f} MiB at the peak, input and result")
        if not row["verified"] <= bound:
            notes.append(f"{row['name']}: WRONG, relative L2 {row['verified']:.1e}; the bound is {bound:.0e}")
    header = ["", "ms", "of limit", "of stream", *(f"vs {name}" for name in names), "odd over aligned", "error"]
    tables.table("Fused operators", header, rows)
    for note in dict.fromkeys(notes):
        tables.line(note)
