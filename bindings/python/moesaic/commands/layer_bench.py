"""Runs `bench layer`: builds the layer, verifies it, and times engine and peers in turn."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import moesaic
from moesaic import _core
from moesaic.commands import host, layer_case, layer_ratios, layer_reference
from moesaic.commands.layer_case import LayerShape, Routing
from moesaic.commands.layer_data import Adapter, Batch, Weights, make_adapter, make_batch, make_weights
from moesaic.commands.measure import Ceiling, CeilingProbe, Repetition, fraction_of_limit, median_ceiling
from moesaic.commands.output import format_bytes
from moesaic.commands.peers import PEERS, needs_full_copy, resident_bytes
from moesaic.commands.variants import Call, Engine, UnavailableError, Variant, timed
from moesaic.profiles.document import spread

SCHEMA = 1

# Relative L2 against fp32 on operands rounded to bf16: the engine keeps fp32 sums and rounds G, U and Z once, which
# stays below 5e-3. PyTorch also rounds every product and the adapter's narrow ones to bf16.
ENGINE_TOLERANCE = 5e-3
PEER_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Point:
    """What differs between the cases of a run."""

    tokens: int
    threads: int
    rank: int


@dataclass(frozen=True)
class Plan:
    """What to run; one case a point. The rank of `shape` is that of the first."""

    shape: LayerShape
    points: Sequence[Point]
    routing: Routing
    weight_format: str
    save: bool
    warmup: int
    reps: int
    peers: Sequence[str]
    verify: bool
    bars: bool
    seed: int


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Runs every case and returns the document that --json prints.

    Args:
        plan: what to run; sizes are valid.
        progress: is told in a few words what happens now.

    Raises:
        MemoryError: the layer does not fit; the message says how many bytes it needs.
    """
    _check_memory(plan)
    _use_threads(plan.points[0].threads)
    generator = torch.Generator().manual_seed(plan.seed)
    progress("generating and packing the weights")
    weights = make_weights(plan.shape, generator, full_copy=any(map(needs_full_copy, plan.peers)))
    layer = moesaic.ExpertsLayer(weights.gate_up, weights.down, weight_format=plan.weight_format)
    _start_autograd()
    probe: CeilingProbe | None = None
    cases: list[dict[str, Any]] = []
    repetitions: dict[int, list[Repetition]] = {}
    for number, point in enumerate(plan.points):
        if probe is None or probe.threads != point.threads:
            _use_threads(point.threads)
            probe = None  # before the next one takes its memory
            probe = CeilingProbe(moesaic.isa(), point.threads)
        shape = layer_case.with_rank(plan.shape, point.rank)
        # The same numbers for the same point, whatever else runs.
        generator.manual_seed(plan.seed + 1)
        adapter = make_adapter(shape, generator)
        batch = make_batch(shape, point.tokens, plan.routing, generator)
        case = _Case(plan, shape, point, weights, layer, adapter, batch)
        result, measured = case.run(probe, progress, first=number == 0)
        cases.append(result)
        repetitions.setdefault(point.threads, []).extend(measured)
    ceilings = {threads: median_ceiling(measured) for threads, measured in repetitions.items()}
    for result in cases:
        _add_limits(result, ceilings[result["threads"]])
    ceiling = ceilings[plan.points[0].threads]
    return {
        "schema": SCHEMA,
        "host": {
            "cpu": _core.cpu_name(),
            "isa": moesaic.isa(),
            "threads": plan.points[0].threads,
            "torch": torch.__version__,
        },
        "ceiling": _ceiling_row(ceiling),
        "cases": cases,
    }


def _use_threads(threads: int) -> None:
    moesaic.set_num_threads(threads)
    torch.set_num_threads(threads)


def _start_autograd() -> None:
    """PyTorch loads half a second of modules in its first backward, which is no part of the layer's first call."""
    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(x * 2, [x], torch.ones(1))


def failures(document: dict[str, Any]) -> list[str]:
    """The verified errors of a document that are too large, a line each."""
    found = []
    for case in document["cases"]:
        checks = [("moesaic", case["verified"], ENGINE_TOLERANCE)]
        checks += [(name, peer["verified"], PEER_TOLERANCE) for name, peer in case["peers"].items()]
        for name, verified, tolerance in checks:
            for what, error in (verified or {}).items():
                if error is not None and not error <= tolerance:
                    found.append(
                        f"{name}, {case['tokens']} tokens: {what} is off by {error:.2e}, allowed {tolerance:.0e}"
                    )
    return found


class _Case:
    """One point."""

    def __init__(
        self,
        plan: Plan,
        shape: LayerShape,
        point: Point,
        weights: Weights,
        layer: moesaic.ExpertsLayer,
        adapter: Adapter | None,
        batch: Batch,
    ) -> None:
        self._plan = plan
        self._shape = shape
        self._point = point
        self._weights = weights
        self._layer = layer
        self._adapter = adapter
        self._batch = batch
        self._engine = Engine(batch, layer, [] if adapter is None else [adapter])

    def run(
        self, probe: CeilingProbe, progress: Callable[[str], None], *, first: bool
    ) -> tuple[dict[str, Any], list[Repetition]]:
        """Verifies, warms up and measures; `limit_ms` is still missing in what comes back.

        Args:
            probe: of the ceilings, on this point's threads.
            progress: is told what happens now.
            first: the layer has not been called before.
        """
        plan = self._plan
        label = f"{self._point.tokens} tokens, {self._point.threads} threads, rank {self._point.rank}"
        progress(f"{label}: first call")
        first_call = timed(self._engine, plan.save)
        saved_bytes = self._saved_bytes() if plan.save else 0
        peers, left_out = self._make_peers(progress)
        verified: dict[str, dict[str, float | None]] = {}
        if plan.verify:
            progress(f"{label}: verifying")
            verified = self._verify({"moesaic": self._engine, **peers})

        bars = layer_ratios.Bars(self._shape, self._batch, self._layer, self._adapter) if plan.bars else None
        others: dict[str, Variant] = {**peers, **(bars.variants if bars is not None else {})}
        progress(f"{label}: warming up")
        for _ in range(plan.warmup):
            for variant in (self._engine, *others.values()):
                timed(variant, plan.save)
        repetitions: list[Repetition] = []
        without_saving: list[Call] = []
        calls: dict[str, list[Call]] = {name: [] for name in others}
        gc.collect()
        gc.disable()
        loop = _core.OuterRange("full_train_loop")
        try:
            for i in range(plan.reps):
                progress(f"{label}: repetition {i + 1} of {plan.reps}")
                before = probe.measure()
                call = timed(self._engine, plan.save)
                repetitions.append(Repetition(call, before, probe.measure()))
                if plan.save:
                    without_saving.append(timed(self._engine, save=False))
                for name, variant in others.items():
                    calls[name].append(timed(variant, plan.save))
        finally:
            loop.close()
            gc.enable()
        result = self._report(first_call, saved_bytes, repetitions, without_saving, verified)
        own = [repetition.call for repetition in repetitions]
        result["peers"] = {
            name: {**_times(calls[name]), "ratio": _ratio(calls[name], own), "verified": verified.get(name)}
            for name in peers
        }
        result["peers_left_out"] = left_out
        result["bars"] = None
        if bars is not None:
            result["bars"] = bars.report(
                own, calls, result["flops"], result["bytes"], median_ceiling(repetitions), first_call if first else None
            )
            result["moesaic"]["autograd_us"] = bars.autograd_us
            result["moesaic"]["nothing_us"] = bars.nothing_us
        return result, repetitions

    def _make_peers(self, progress: Callable[[str], None]) -> tuple[dict[str, Variant], dict[str, str]]:
        """The peers that can be had, and why the others cannot."""
        peers: dict[str, Variant] = {}
        left_out: dict[str, str] = {}
        for name in self._plan.peers:
            progress(f"preparing {name}")
            try:
                peers[name] = PEERS[name](self._batch, self._weights, self._adapter)
            except UnavailableError as error:
                left_out[name] = str(error)
        return peers, left_out

    def _saved_bytes(self) -> int:
        """Bytes that the engine's forward keeps for backward, its own inputs not counted."""
        own = {leaf.untyped_storage().data_ptr() for leaf in self._engine.leaves}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self._engine.forward()  # bound to a name: its graph keeps the storages, so no address is used twice
        del out
        return sum(kept.values())

    def _verify(self, variants: dict[str, Variant]) -> dict[str, dict[str, float | None]]:
        checked = layer_reference.checked_tokens(self._shape, self._batch.tokens)
        expected = layer_reference.reference(self._batch, self._weights, self._adapter, checked)
        d_out = layer_reference.masked_gradient(self._batch, checked)
        verified = {}
        for name, variant in variants.items():
            out = variant.forward()
            d_hidden, d_router, *d_lora = variant.gradients(variant.backward(out, d_out))
            result = layer_reference.LayerResult(out.detach()[checked], d_hidden, d_router, d_lora)
            verified[name] = {**layer_reference.errors(result, expected)}
        return verified

    def _report(
        self,
        first_call: Call,
        saved_bytes: int,
        repetitions: Sequence[Repetition],
        without_saving: Sequence[Call],
        verified: dict[str, dict[str, float | None]],
    ) -> dict[str, Any]:
        plan, shape, batch = self._plan, self._shape, self._batch
        flops = layer_case.flops(shape, batch.tokens)
        bytes_moved = layer_case.bytes_moved(
            shape,
            batch.tokens,
            experts_hit=batch.experts_hit,
            weight_bytes=self._layer.weight_bytes,
            lora_itemsize=4,
            saved_bytes=saved_bytes,
            itemsize=batch.hidden.element_size(),
        )
        own = [repetition.call for repetition in repetitions]
        return {
            "experts": shape.experts,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "top_k": shape.top_k,
            "rank": shape.rank,
            "tokens": batch.tokens,
            "threads": self._point.threads,
            "routing": str(plan.routing),
            "experts_hit": batch.experts_hit,
            "weight_format": plan.weight_format,
            "weight_bytes": self._layer.weight_bytes,
            "save": plan.save,
            "warmup": plan.warmup,
            "repetitions": {"run": len(repetitions), "left_out": sum(not r.steady() for r in repetitions)},
            "flops": {"forward": flops.forward, "backward": flops.backward},
            "bytes": {"forward": bytes_moved.forward, "backward": bytes_moved.backward},
            "moesaic": {
                **_times(own),
                "forward_without_saving_ms": _summary_of([call.forward_ms for call in without_saving]),
                "tokens_per_s": batch.tokens / (_median_total(own) * 1e-3),
                "fraction_of_limit": fraction_of_limit(repetitions, flops, bytes_moved),
                "first_call_ms": first_call.total_ms,
                "saved_bytes": saved_bytes,
                "scratch_bytes": _core.scratch_bytes(),
                "page_faults": {
                    "forward": _summary_of([call.forward_faults for call in own]),
                    "backward": _summary_of([call.backward_faults for call in own]),
                },
            },
            "verified": verified.get("moesaic"),
            "verified_tokens": len(layer_reference.checked_tokens(shape, batch.tokens)) if plan.verify else None,
        }


def _summary_of(values: Sequence[float | None]) -> dict[str, float] | None:
    """Their summary; None where nothing was measured."""
    there = [value for value in values if value is not None]
    return spread(there) if there else None


def _times(calls: Sequence[Call]) -> dict[str, dict[str, float] | None]:
    return {
        "forward_ms": _summary_of([call.forward_ms for call in calls]),
        "backward_ms": _summary_of([call.backward_ms for call in calls]),
    }


def _median_total(calls: Sequence[Call]) -> float:
    return statistics.median(call.total_ms for call in calls)


def _ratio(peer: Sequence[Call], own: Sequence[Call]) -> dict[str, float | None]:
    """The peer's medians over the engine's, each way and for forward and backward together."""
    peer_times, own_times = _times(peer), _times(own)
    ratio: dict[str, float | None] = {}
    for way in ("forward", "backward"):
        theirs, ours = peer_times[f"{way}_ms"], own_times[f"{way}_ms"]
        ratio[way] = theirs["median"] / ours["median"] if theirs is not None and ours is not None else None
    ratio["total"] = _median_total(peer) / _median_total(own)
    return ratio


def _ceiling_row(ceiling: Ceiling) -> dict[str, float]:
    return {"compute_gflops": ceiling.compute_gflops, "read_gbps": ceiling.read_gbps}


def _add_limits(case: dict[str, Any], ceiling: Ceiling) -> None:
    case["ceiling"] = _ceiling_row(ceiling)
    case["limit_ms"] = {
        way: ceiling.limit_ms(case["flops"][way], case["bytes"][way]) for way in ("forward", "backward")
    }


def needed_bytes(plan: Plan) -> tuple[int, int]:
    """An estimate of the memory that a plan takes.

    Returns:
        bytes of the weights, packed and, for peers, original and in their own forms; bytes of everything else at its
        largest.
    """
    shape = layer_case.with_rank(plan.shape, max(point.rank for point in plan.points))
    tokens = max(point.tokens for point in plan.points)
    packed = 2 * shape.experts * shape.weights_per_expert
    resident = packed * (2 if any(map(needs_full_copy, plan.peers)) else 1)
    resident += sum(resident_bytes(name, shape) for name in plan.peers)
    lora = 4 * shape.lora_values_per_expert * shape.experts
    rows = tokens * shape.top_k
    if plan.peers:  # several bf16 copies of the rows' gate, up and hidden values, alive until backward has used them
        working = 2 * rows * (8 * shape.intermediate + 6 * shape.hidden) + lora
    else:
        working = 2 * rows * (3 * shape.intermediate + shape.hidden)
    if plan.bars:  # adapters of one and of two ranks more, and all their gradients
        working += 10 * lora
    read_probe = max(1 << 30, 4 * _core.last_level_cache_bytes())
    return resident, 2 * lora + working + 2 * 2 * tokens * shape.hidden + read_probe


def _check_memory(plan: Plan) -> None:
    """Linux grants more memory than there is and ends the process that uses it: better to say no before."""
    weights, rest = needed_bytes(plan)
    total = weights + rest
    available = host.available_memory()
    if total > available:
        raise MemoryError(
            f"needs about {format_bytes(total)} ({total} bytes; {format_bytes(weights)} of them for the weights"
            f"{', packed and as the peers have them' if plan.peers else ''}), {format_bytes(available)} are available;"
            " fewer --experts need less"
        )
