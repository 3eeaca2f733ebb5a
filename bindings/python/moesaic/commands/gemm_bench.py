"""`moesaic bench gemm`: both forms of GEMM of every tier, beside oneDNN on packed and on plain weights."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import Tables, UsageError, print_json, stdout_for_json

if TYPE_CHECKING:
    import torch

SCHEMA = 1
FORMS = ("direct", "unpack", "gradient")
SHAPES = Path(__file__).with_name("gemm_shapes.csv")
# fp32 sums of bf16 products against fp64: eps sqrt(K) at most, 2^-24 x sqrt(7168) = 5e-6. oneDNN rounds to bf16: 2^-9.
KERNEL_TOLERANCE = 1e-5
ONEDNN_TOLERANCE = 4e-3

_DESCRIPTION = """\
Times one call of each GEMM kernel (direct: contraction along the columns of the stored weights; unpack: along their
rows; gradient: along the rows of activations) on one thread, for every tier that runs here, and oneDNN's product of
the same size on weights packed before and on plain ones, in turn. Each result is compared with an fp64 one first.
ratio: oneDNN's median over the kernel's; of ceiling: FLOP/s over those of multiply-adds on registers, probed around
each shape, of the kernel's own tier. oneDNN is the one inside PyTorch; on hosts where it has no bf16 products it
computes in fp32, on twice the bytes. Exits 1 if a result is wrong."""

_REPS = 20
_ROUNDS = 5
_PROBE_SECONDS = 0.02


@dataclass(frozen=True)
class Shape:
    """C [rows, columns] = X [rows, contraction] times weights. `form`: one of FORMS."""

    name: str
    form: str
    rows: int
    columns: int
    contraction: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition are two."""
        return 2 * self.rows * self.columns * self.contraction


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser("gemm", help="the GEMM kernels, beside oneDNN", description=_DESCRIPTION)
    parser.add_argument(
        "--shapes",
        type=Path,
        default=SHAPES,
        metavar="CSV",
        help="name,form,rows,columns,contraction (default: a list)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only shapes whose name or form has this text")
    parser.add_argument("--tier", metavar="NAME", help="only this tier of kernels (default: all that run here)")
    parser.add_argument("--reps", type=options.positive, default=_REPS, metavar="R", help=f"calls (default {_REPS})")
    parser.add_argument(
        "--stream", action="store_true", help="read the weights from memory in each call, not from a cache"
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 if a result is wrong.

    Raises:
        UsageError: the file of shapes cannot be read or holds something else.
    """
    shapes = [shape for shape in read_shapes(args.shapes) if args.only in shape.name or args.only in shape.form]
    if not shapes:
        raise UsageError(f"argument --only: no shape in {args.shapes} has '{args.only}' in its name or form")
    tiers = [(number, name) for number, name in runnable_tiers() if args.tier in (None, name)]
    if not tiers:
        runnable = ", ".join(name for _, name in runnable_tiers())
        raise UsageError(f"argument --tier: '{args.tier}' is none of those that run here: {runnable}")
    with stdout_for_json(args.json):
        document = measure(shapes, tiers, args.reps, args.stream, options.progress())
    if args.json:
        print_json(document)
    else:
        _show(document)
    wrong = failures(document)
    for line in wrong:
        print(f"moesaic: {line}", file=sys.stderr)
    return 1 if wrong else 0


def read_shapes(path: Path) -> list[Shape]:
    """The shapes of a CSV file.

    Raises:
        UsageError: no such file, or a line that is no shape.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"argument --shapes: {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"argument --shapes: {path}: {error}") from None
    shapes = []
    for number, row in enumerate(rows, 2):
        try:
            sizes = [int(row[name]) for name in ("rows", "columns", "contraction")]
            shape = Shape(row["name"], row["form"], *sizes)
        except (KeyError, TypeError, ValueError):
            shape = Shape("", "", 0, 0, 0)
        if shape.form not in FORMS or min(shape.rows, shape.columns, shape.contraction) < 1:
            raise UsageError(
                f"argument --shapes: {path}, line {number}: expected name,form,rows,columns,contraction with the form "
                f"one of {', '.join(FORMS)} and sizes from 1 on"
            )
        shapes.append(shape)
    return shapes


def measure(
    shapes: Sequence[Shape],
    tiers: Sequence[tuple[int, str]],
    reps: int,
    stream: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures every shape on one thread and returns the document that --json prints. `tiers`: of runnable_tiers()."""
    import torch

    from moesaic import _core
    from moesaic.commands import onednn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        for i, shape in enumerate(shapes):
            progress(f"{i + 1} of {len(shapes)}: {shape.name}, {shape.form}, {shape.rows} rows")
            results.append(_measure_shape(shape, tiers, reps, stream))
    finally:
        torch.set_num_threads(threads)
    reason = onednn.unavailable()
    return {
        "schema": SCHEMA,
        "host": {"cpu": _core.cpu_name(), "threads": 1, "torch": torch.__version__},
        "weights": "memory" if stream else "cache",
        "onednn": {
            "available": reason is None,
            "reason": reason,
            "version": onednn.version(),
            "dtype": None if reason is not None else str(onednn.dtype()).removeprefix("torch."),
        },
        "shapes": results,
    }


def runnable_tiers() -> list[tuple[int, str]]:
    """(number, name) of every tier that runs here; a name that stands twice is told apart by what it is compiled
    for."""
    from moesaic import _core

    tiers = [(number, name) for number, (name, runs) in enumerate(_core.kernel_tiers()) if runs]
    names = [name for _, name in tiers]
    return [
        (number, f"{name}_baseline" if name in names[:place] else name) for place, (number, name) in enumerate(tiers)
    ]


def _measure_shape(shape: Shape, tiers: Sequence[tuple[int, str]], reps: int, stream: bool) -> dict[str, Any]:
    import torch

    from moesaic import _core
    from moesaic.commands import onednn

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.rows, shape.contraction, generator=generator).bfloat16()
    stored = (shape.columns, shape.contraction) if shape.form == "direct" else (shape.contraction, shape.columns)
    weights = torch.randn(*stored, generator=generator).bfloat16()
    weight = weights if shape.form == "direct" else weights.t()  # [columns, contraction]
    expected = x.double() @ weight.double().t()
    copies = _copies(weights.numel() * 2) if stream else 1

    def error(result: torch.Tensor) -> float:
        return float((result.double() - expected).norm() / expected.norm())

    calls: dict[str, Callable[[int], list[float]]] = {}
    errors: dict[str, float] = {}
    for number, name in tiers:
        probe = _core.GemmProbe(number, shape.form, x, weights, copies)
        calls[name] = probe.measure
        probe.measure(1)
        result = torch.empty(shape.rows, shape.columns)
        probe.result(result)
        errors[name] = error(result)
    if onednn.unavailable() is None:
        operand = x.to(onednn.dtype())
        for name, kind in (("onednn_packed", onednn.PackedWeight), ("onednn_plain", onednn.PlainWeight)):
            products = [kind(weight, shape.rows).product for _ in range(copies)]
            errors[name] = error(products[0](operand))
            calls[name] = _onednn_call(products, operand)

    times: dict[str, list[float]] = {name: [] for name in calls}
    # A tier without a probe of its own is held against the host's best.
    probed = [probe["isa"] for probe in _core.compute_probes() if probe["available"]]
    own = {name: name.removesuffix("_baseline") for _, name in tiers}
    isas = {name: isa if isa in probed else probed[0] for name, isa in own.items()}
    ceilings: dict[str, list[float]] = {isa: [] for isa in isas.values()}
    for _ in range(min(_ROUNDS, reps)):
        for isa in ceilings:
            ceilings[isa].append(_core.measure_compute(isa, 1, _PROBE_SECONDS))
        for name, call in calls.items():
            call(1)  # another variant has been in the caches
            times[name].extend(call(-(-reps // _ROUNDS)))

    def row(name: str) -> dict[str, Any]:
        median = statistics.median(times[name])
        gflops = shape.flops / median * 1e-3
        result = {
            "us": {"min": min(times[name]), "median": median, "max": max(times[name])},
            "gflops": gflops,
            "error": errors[name],
        }
        if name in isas:
            result["fraction_of_ceiling"] = gflops / statistics.median(ceilings[isas[name]])
            result["ratio"] = {other: statistics.median(times[other]) / median for other in times if other not in isas}
        return result

    return {
        "name": shape.name,
        "form": shape.form,
        "rows": shape.rows,
        "columns": shape.columns,
        "contraction": shape.contraction,
        "copies": copies,
        "kernels": {name: row(name) for name in isas},
        "onednn": {name: row(name) for name in calls if name not in isas},
    }


def _copies(weight_bytes: int) -> int:
    """As many as no last-level cache holds, within 1 GiB."""
    from moesaic import _core

    enough = 2 * max(_core.last_level_cache_bytes(), 32 << 20)
    return max(1, min(-(-enough // weight_bytes), (1 << 30) // weight_bytes))


def _onednn_call(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> Callable[[int], list[float]]:
    """As GemmProbe.measure: microseconds of each of some calls, the weights in turn. A call through Python costs a few
    microseconds, which count: that is how it can be called from here."""
    from time import perf_counter

    turn = 0

    def call(count: int) -> list[float]:
        nonlocal turn
        times = []
        for _ in range(count):
            product = products[turn]
            turn = (turn + 1) % len(products)
            start = perf_counter()
            product(x)
            times.append((perf_counter() - start) * 1e6)
        return times

    return call


def failures(document: dict[str, Any]) -> list[str]:
    """Results that are wrong, a line each."""
    found = []
    for shape in document["shapes"]:
        for group, tolerance in (("kernels", KERNEL_TOLERANCE), ("onednn", ONEDNN_TOLERANCE)):
            for name, row in shape[group].items():
                if not row["error"] <= tolerance:
                    where = f"{name}, {shape['name']}, {shape['rows']} rows"
                    found.append(f"{where}: off by {row['error']:.2e}, allowed {tolerance:.0e}")
    return found


def _show(document: dict[str, Any]) -> None:
    tables = Tables()
    host, library = document["host"], document["onednn"]
    tables.heading(f"{host['cpu']}, 1 thread, weights from {document['weights']}")
    if library["available"]:
        tables.line(f"oneDNN {library['version']} of PyTorch {host['torch']}, {library['dtype']}")
    else:
        tables.line(f"oneDNN left out: {library['reason']}")
    for shape in document["shapes"]:
        rows = []
        for name, row in [*shape["kernels"].items(), *shape["onednn"].items()]:
            ratio = row.get("ratio", {})
            rows.append(
                [
                    name,
                    f"{row['us']['median']:,.1f}",
                    f"{row['gflops']:,.1f}",
                    f"{100 * row['fraction_of_ceiling']:.0f}%" if "fraction_of_ceiling" in row else "-",
                    *(f"{ratio[other]:.2f}x" if other in ratio else "-" for other in ("onednn_packed", "onednn_plain")),
                    f"{row['error']:.1e}",
                ]
            )
        title = f"{shape['name']}: {shape['form']}, {shape['rows']} x {shape['columns']} x {shape['contraction']}"
        tables.table(title, ["", "us", "GFLOP/s", "of ceiling", "packed / it", "plain / it", "error"], rows)
