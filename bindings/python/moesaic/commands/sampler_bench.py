"""`moesaic bench sampler`: tokens from logits, beside what else draws them and the time to read the logits once."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.commands import options
from moesaic.commands.output import Tables, print_json, stdout_for_json

if TYPE_CHECKING:
    import torch

    from moesaic.commands.sampler_peers import Call

SCHEMA = 1
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 50, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}
DISTRIBUTIONS = ("model", "flat", "wide")
DTYPES = ("float32", "bfloat16", "float16")
PEERS = ("torch", "torch_compile", "numpy")

_DESCRIPTION = """\
Draws a token for each row of logits with moesaic.sampling.sample and with its peers in turn: torch, the processors of
transformers with softmax and multinomial; torch_compile, the same compiled; numpy, on one thread. Distributions:
"model", whose probabilities fall as those of a language model (a power of the rank); "flat", normal logits; "wide",
the same with a deviation of 3, of which some thousand tokens have 0.9. read: the time to read the logits once from
memory on the same threads, by the bandwidth probed around each repetition; the rows come from memory, not from a
cache, as far as 512 MiB of copies go. The probe leaves Python's and the engine's own code in no cache, and a call of
anything then takes 100 to 200 us: one of the engine on 64 logits goes before each timed one, and of few rows several
calls, each with another copy, are timed as one. First the kept sets and probabilities are compared with a reference
in double precision; exits 1 if they differ. Stages: thread time by stage of calls apart from the timed ones."""

_COPIES_BYTES = 512 << 20
_MOST_COPIES = 1000
_PROBE_SECONDS = 0.02
_GROUP_BYTES = 8 << 20


def add_parser(benches: Any) -> None:
    """Adds the command to those of `bench`."""
    parser = benches.add_parser("sampler", help="tokens from logits", description=_DESCRIPTION)
    add = parser.add_argument
    add("--vocabulary", type=options.positive, default=151_936, metavar="V", help="default 151936")
    add("--rows", type=options.several(options.positive), default=[1, 8, 16, 64], metavar="N[,N...]", help="1,8,16,64")
    add(
        "--settings",
        default="plain,top_k,top_p,both",
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(SETTINGS)}, or all",
    )
    add("--distributions", default="model,flat", metavar="NAME[,NAME]", help=f"of {', '.join(DISTRIBUTIONS)}, or all")
    add("--dtype", choices=DTYPES, default="float32", help="of the logits (default float32)")
    add(
        "--peers",
        default="torch",
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(PEERS)}, or all; empty: none (default torch)",
    )
    add("--threads", type=options.threads, metavar="N", help="default: as the engine chooses")
    options.add_clock(parser)
    add("--reps", type=options.positive, default=20, metavar="R", help="timed repetitions (default 20)")
    add("--warmup", type=options.non_negative, default=3, metavar="W", help="calls before them (default 3)")
    add("--diffusion", action="store_true", help="also block-diffusion decoding of a small model, by stage")
    options.add_archive(parser, "sampler")
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0, or 1 if a result is wrong.

    Raises:
        UsageError: an unknown name.
        OSError: the archive cannot be written.
    """
    options.clock(args)
    chosen = {
        "settings": options.names("settings", args.settings, tuple(SETTINGS)),
        "distributions": options.names("distributions", args.distributions, DISTRIBUTIONS),
        "peers": options.names("peers", args.peers, PEERS),
    }
    options.check_archive(args)
    with stdout_for_json(args.json):
        document, calls = measure(args, chosen, options.progress())
        if args.archive is not None:
            options.keep(args, document, calls, _show)
    if args.json:
        print_json(document)
    else:
        _show(document)
    wrong = [case for case in document["cases"] if not case["verified"]]
    for case in wrong:
        where = f"{case['rows']} rows, {case['setting']}, {case['distribution']}"
        print(f"moesaic: {where}: not what the reference keeps", file=sys.stderr)
    return 1 if wrong else 0


def measure(
    args: argparse.Namespace, chosen: dict[str, list[str]], progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[Callable[[], object]]]:
    """The document that --json prints, and the engine's call of each case."""
    import torch

    import moesaic
    from moesaic import _core

    if args.threads:
        moesaic.set_num_threads(args.threads)
        torch.set_num_threads(args.threads)
    threads = _core.get_num_threads()
    probe = _core.ReadProbe(threads)
    cases: list[dict[str, Any]] = []
    engine: list[Callable[[], object]] = []
    left_out: dict[str, str] = {}
    for distribution in chosen["distributions"]:
        for rows in args.rows:
            batches = _batches(distribution, rows, args.vocabulary, getattr(torch, args.dtype))
            for setting in chosen["settings"]:
                progress(f"{distribution}, {rows} rows, {setting}")
                calls, reasons = _calls(setting, chosen["peers"], batches[0])
                left_out |= reasons
                case = _measure_case(args, setting, batches, calls, probe)
                engine.append(functools.partial(calls["moesaic"], batches[0]))
                cases.append({"rows": rows, "setting": setting, "distribution": distribution, **case})
    document = {
        "schema": SCHEMA,
        "host": {
            "cpu": _core.cpu_name(),
            "isa": _core.isa(),
            "threads": threads,
            "torch": torch.__version__,
            "clock": args.clock,
        },
        "vocabulary": args.vocabulary,
        "dtype": args.dtype,
        "cases": cases,
        "left_out": left_out,
        "diffusion": _diffusion(args.vocabulary) if args.diffusion else None,
    }
    return document, engine


def _batches(distribution: str, rows: int, vocabulary: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of one batch, as many as no cache holds."""
    import torch

    from moesaic import _core

    generator = torch.Generator().manual_seed(0)
    if distribution in ("flat", "wide"):
        logits = (3.0 if distribution == "wide" else 1.0) * torch.randn(rows, vocabulary, generator=generator)
    else:
        ranks = torch.argsort(torch.rand(rows, vocabulary, generator=generator), dim=-1)
        logits = -1.5 * (ranks.float() + 1).log() + 0.3 * torch.randn(rows, vocabulary, generator=generator)
    logits = logits.to(dtype)
    enough = 2 * max(_core.last_level_cache_bytes(), 32 << 20)
    copies = max(1, min(-(-enough // logits.nbytes), _COPIES_BYTES // logits.nbytes, _MOST_COPIES))
    return [logits, *(logits.clone() for _ in range(copies - 1))]


def _calls(setting: str, peers: Sequence[str], example: torch.Tensor) -> tuple[dict[str, Call], dict[str, str]]:
    """moesaic's call and those of the peers that run here; why the others do not."""
    from moesaic.commands import sampler_peers
    from moesaic.commands.variants import UnavailableError
    from moesaic.sampling import sample

    values = SETTINGS[setting]
    calls: dict[str, Call] = {"moesaic": lambda logits: sample(logits, **values)}
    reasons = {}
    for peer in peers if setting != "greedy" else ():
        try:
            if peer == "torch":
                calls[peer] = sampler_peers.pipeline(values)
            elif peer == "torch_compile":
                calls[peer] = sampler_peers.compiled(values, example)
            else:
                calls[peer] = sampler_peers.numpy(values)
        except UnavailableError as error:
            reasons[peer] = str(error)
    return calls, reasons


def _measure_case(
    args: argparse.Namespace, setting: str, batches: Sequence[torch.Tensor], calls: dict[str, Call], probe: Any
) -> dict[str, Any]:
    import moesaic
    from moesaic.commands.measure import by_clock
    from moesaic.profiles.document import spread

    verified = _verify(batches[0], SETTINGS[setting])
    clock = options.clock(args)
    group = min(len(batches), max(1, _GROUP_BYTES // batches[0].nbytes))
    turn = 0

    few = batches[0][:1, :64].clone()

    def timed(call: Call) -> float:
        nonlocal turn
        turn = (turn + group) % len(batches)
        chosen = [batches[(turn + i) % len(batches)] for i in range(group)]
        calls["moesaic"](few)
        begin = clock()
        for logits in chosen:
            call(logits)
        return (clock() - begin) * 1e6 / group

    def bandwidth() -> float:
        return by_clock(lambda: probe.measure(_PROBE_SECONDS), clock)

    for call in calls.values():
        for _ in range(args.warmup):
            timed(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    fractions, bandwidths = [], []
    for _ in range(args.reps):
        before = bandwidth()
        for name, call in calls.items():
            times[name].append(timed(call))
            if name == "moesaic":
                after = bandwidth()
                bandwidths += [before, after]
                fractions.append(batches[0].nbytes / ((before + after) / 2) / 1e3 / times[name][-1])
    calls_by_stage = max(4, args.reps // 2)
    with moesaic.profile() as profile:
        for i in range(calls_by_stage):
            calls["moesaic"](batches[i % len(batches)])
    stages = {row["name"]: row["thread_ms"] for row in profile.phases() if row["category"] == "sample"}
    median = statistics.median(times["moesaic"])
    return {
        "verified": verified,
        "bytes": batches[0].nbytes,
        "copies": len(batches),
        "read_gbps": statistics.median(bandwidths),
        "moesaic": {"us": spread(times["moesaic"]), "fraction_of_read": statistics.median(fractions)},
        "stages_ms": {name: ms / calls_by_stage for name, ms in stages.items()},
        "peers": {
            name: {"us": spread(values), "ratio": statistics.median(values) / median}
            for name, values in times.items()
            if name != "moesaic"
        },
    }


def _verify(logits: torch.Tensor, setting: dict[str, Any]) -> bool:
    """Whether the first rows keep what the reference keeps, and the probability of their tokens is right."""
    from moesaic import sampling
    from moesaic.commands.sampler_peers import reference_kept

    rows = logits[:4]
    ids, probability = sampling.sample(rows, **setting, return_confidence=True)
    if setting.get("temperature") == 0:
        return bool((ids == rows.argmax(-1)).all())
    kept = reference_kept(rows, setting)
    if not bool((sampling.kept(rows, **setting) == kept).all()):
        return False
    expected = rows.double().masked_fill(~kept, float("-inf")).softmax(-1).gather(1, ids[:, None])[:, 0]
    return bool(((probability - expected).abs() <= 1e-5 * expected).all())


def _diffusion(vocabulary: int) -> list[dict[str, Any]]:
    """The decoding loop of a small model with random weights, with the engine's sampler and with PyTorch's, in turn."""
    import torch
    from torch import nn

    from moesaic.commands.sampler_peers import diffusion_draw
    from moesaic.sampling import BlockDiffusion

    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(vocabulary, 256), encoder, nn.Linear(256, vocabulary, bias=False)).eval()
    prompt = torch.randint(0, vocabulary - 1, (1, 16))
    rows = []
    for steps in (16, 8):
        sums: dict[str, dict[str, list[float]]] = {"moesaic": {}, "torch": {}}
        for _ in range(4):  # the first is a warm-up
            for name, draw in (("moesaic", None), ("torch", diffusion_draw)):
                decoding = BlockDiffusion(16, steps, mask_token_id=vocabulary - 1, draw=draw)
                for stage, seconds in decoding.generate(model, prompt, 32).seconds.items():
                    sums[name].setdefault(stage, []).append(seconds)
        found = {name: {s: 1e3 * statistics.median(v[1:]) for s, v in stages.items()} for name, stages in sums.items()}
        ratio = sum(found["torch"].values()) / sum(found["moesaic"].values())
        rows.append({"block_length": 16, "denoising_steps": steps, "new_tokens": 32, "ms": found, "ratio": ratio})
    return rows


def _show(document: dict[str, Any]) -> None:
    tables = Tables()
    host = document["host"]
    tables.heading(f"{host['cpu']}, {host['isa']}, {host['threads']} threads")
    tables.line(f"vocabulary {document['vocabulary']:,}, {document['dtype']} logits, {host['clock']} time")
    for peer, reason in document["left_out"].items():
        tables.line(f"{peer} left out: {reason}")
    peers = list(dict.fromkeys(name for case in document["cases"] for name in case["peers"]))
    rows = []
    for case in document["cases"]:
        own = case["moesaic"]
        rows.append(
            [
                case["distribution"],
                str(case["rows"]),
                case["setting"],
                f"{own['us']['median']:,.0f}",
                f"{own['us']['min']:,.0f}",
                f"{case['bytes'] / case['read_gbps'] / 1e3:,.0f}",
                f"{own['fraction_of_read']:.2f}",
                *(f"{case['peers'][peer]['ratio']:.1f}x" if peer in case["peers"] else "-" for peer in peers),
                "yes" if case["verified"] else "NO",
            ]
        )
    header = ["logits", "rows", "setting", "us", "min", "read us", "read / it", *(f"{p} / it" for p in peers), "right"]
    tables.table("a token for each row, medians", header, rows)
    names = list(dict.fromkeys(name for case in document["cases"] for name in case["stages_ms"]))
    stages = [
        [case["distribution"], str(case["rows"]), case["setting"]]
        + [f"{1e3 * case['stages_ms'][name]:,.1f}" if name in case["stages_ms"] else "-" for name in names]
        for case in document["cases"]
    ]
    tables.table("thread us a call by stage", ["logits", "rows", "setting", *names], stages)
    if document["diffusion"]:
        rows = [
            [
                str(row["denoising_steps"]),
                name,
                *(f"{row['ms'][name][s]:,.1f}" for s in ("model", "sample", "fill")),
                f"{row['ratio']:.2f}x" if name == "torch" else "-",
            ]
            for row in document["diffusion"]
            for name in row["ms"]
        ]
        title = "block diffusion, blocks of 16, 32 tokens, ms"
        tables.table(title, ["steps", "sampler", "model", "sample", "fill", "torch / it"], rows)
