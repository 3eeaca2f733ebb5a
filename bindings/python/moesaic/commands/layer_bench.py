"""Runs `bench layer`: builds the layer, verifies it, and times engine and peers in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import moesaic
from moesaic import _core
from moesaic.commands import host, layer_case, layer_reference
from moesaic.commands.layer_case import LayerShape, Routing
from moesaic.commands.layer_data import Adapter, Batch, Weights, make_adapter, make_batch, make_weights
from moesaic.commands.measure import Ceiling, CeilingProbe, Repetition, fraction_of_limit, median_ceiling, summary
from moesaic.commands.output import format_bytes
from moesaic.commands.torch_peers import PEERS, Peer

SCHEMA = 1

# Relative L2 against fp32 on operands rounded to bf16: the engine keeps fp32 sums and rounds G, U and Z once, which
# stays below 5e-3. PyTorch also rounds every product and the adapter's narrow ones to bf16.
ENGINE_TOLERANCE = 5e-3
PEER_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Plan:
    """What to run. `tokens`: one case each."""

    shape: LayerShape
    tokens: Sequence[int]
    routing: Routing
    weight_format: str
    save: bool
    threads: int
    warmup: int
    reps: int
    peers: Sequence[str]
    verify: bool
    seed: int


# Computes the output [T, H] of the batch it belongs to, differentiably where gradients are on.
Forward = Callable[[], torch.Tensor]


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Runs every case and returns the document that --json prints.

    Args:
        plan: what to run; sizes are valid.
        progress: is told in a few words what happens now.

    Raises:
        MemoryError: the layer does not fit; the message says how many bytes it needs.
    """
    _check_memory(plan)
    moesaic.set_num_threads(plan.threads)
    torch.set_num_threads(plan.threads)
    probe = CeilingProbe(moesaic.isa(), plan.threads)
    generator = torch.Generator().manual_seed(plan.seed)
    progress("generating and packing the weights")
    weights = make_weights(plan.shape, generator, full_copy=bool(plan.peers))
    layer = moesaic.ExpertsLayer(weights.gate_up, weights.down, weight_format=plan.weight_format)
    adapter = make_adapter(plan.shape, generator)
    _start_autograd()
    cases, repetitions = [], []
    for tokens in plan.tokens:
        case = _Case(plan, weights, layer, adapter, make_batch(plan.shape, tokens, plan.routing, generator))
        result, measured = case.run(probe, progress)
        cases.append(result)
        repetitions.extend(measured)
    ceiling = median_ceiling(repetitions)
    for case_result in cases:
        _add_limits(case_result, ceiling)
    return {
        "schema": SCHEMA,
        "host": {"cpu": _core.cpu_name(), "isa": moesaic.isa(), "threads": plan.threads, "torch": torch.__version__},
        "ceiling": {"compute_gflops": ceiling.compute_gflops, "read_gbps": ceiling.read_gbps},
        "cases": cases,
    }


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
    """One number of tokens."""

    def __init__(
        self, plan: Plan, weights: Weights, layer: moesaic.ExpertsLayer, adapter: Adapter | None, batch: Batch
    ) -> None:
        self._plan = plan
        self._weights = weights
        self._layer = layer
        self._adapter = adapter
        self._batch = batch
        self._leaves = [batch.hidden, batch.router, *(adapter.parameters() if adapter is not None else [])]

    def run(self, probe: CeilingProbe, progress: Callable[[str], None]) -> tuple[dict[str, Any], list[Repetition]]:
        """Verifies, warms up and measures; `limit_ms` is still missing in what comes back."""
        plan, batch = self._plan, self._batch
        label = f"{batch.tokens} tokens"
        peers = {name: self._peer_forward(PEERS[name]) for name in plan.peers}

        progress(f"{label}: first call")
        first_call_ms = sum(part or 0.0 for part in self._timed(self._engine_forward))
        saved_bytes = self._saved_bytes() if plan.save else 0
        verified: dict[str, dict[str, float | None]] = {}
        if plan.verify:
            progress(f"{label}: verifying")
            verified = self._verify({"moesaic": self._engine_forward, **peers})

        progress(f"{label}: warming up")
        for _ in range(plan.warmup):
            for forward in (self._engine_forward, *peers.values()):
                self._timed(forward)
        repetitions: list[Repetition] = []
        peer_times: dict[str, list[tuple[float, float | None]]] = {name: [] for name in peers}
        gc.collect()
        gc.disable()
        try:
            for i in range(plan.reps):
                progress(f"{label}: repetition {i + 1} of {plan.reps}")
                before = probe.measure()
                times = self._timed(self._engine_forward)
                repetitions.append(Repetition(*times, before, probe.measure()))
                for name, forward in peers.items():
                    peer_times[name].append(self._timed(forward))
        finally:
            gc.enable()
        return self._report(first_call_ms, saved_bytes, repetitions, peer_times, verified), repetitions

    def _engine_forward(self) -> torch.Tensor:
        batch = self._batch
        lora = None
        if self._adapter is not None:
            gate_up, down = (
                moesaic.LoraPair(*pair.views(), pair.scale) for pair in (self._adapter.gate_up, self._adapter.down)
            )
            lora = moesaic.Lora(gate_up=gate_up, down=down)
        return moesaic.moe_experts(batch.hidden, batch.ids, batch.router, self._layer, lora)

    def _peer_forward(self, peer: Peer) -> Forward:
        return lambda: peer(self._batch, self._weights, self._adapter)

    def _timed(self, forward: Forward) -> tuple[float, float | None]:
        """Milliseconds of a forward, and of the backward to all leaves (None without --save)."""
        with torch.set_grad_enabled(self._plan.save):
            start = time.perf_counter()
            out = forward()
            middle = time.perf_counter()
        if not self._plan.save:
            return (middle - start) * 1e3, None
        torch.autograd.grad(out, self._leaves, self._batch.d_out)
        end = time.perf_counter()
        return (middle - start) * 1e3, (end - middle) * 1e3

    def _saved_bytes(self) -> int:
        """Bytes that the engine's forward keeps for backward, its own inputs not counted."""
        own = {leaf.untyped_storage().data_ptr() for leaf in self._leaves}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self._engine_forward()  # bound to a name: its graph keeps the storages, so no address is used twice
        del out
        return sum(kept.values())

    def _verify(self, forwards: dict[str, Forward]) -> dict[str, dict[str, float | None]]:
        checked = layer_reference.checked_tokens(self._plan.shape, self._batch.tokens)
        expected = layer_reference.reference(self._batch, self._weights, self._adapter, checked)
        d_out = layer_reference.masked_gradient(self._batch, checked)
        verified = {}
        for name, forward in forwards.items():
            out = forward()
            d_hidden, d_router, *d_lora = torch.autograd.grad(out, self._leaves, d_out)
            result = layer_reference.LayerResult(out.detach()[checked], d_hidden, d_router, d_lora)
            verified[name] = {**layer_reference.errors(result, expected)}
        return verified

    def _report(
        self,
        first_call_ms: float,
        saved_bytes: int,
        repetitions: Sequence[Repetition],
        peer_times: dict[str, list[tuple[float, float | None]]],
        verified: dict[str, dict[str, float | None]],
    ) -> dict[str, Any]:
        plan, shape, batch = self._plan, self._plan.shape, self._batch
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
        own = [(repetition.forward_ms, repetition.backward_ms) for repetition in repetitions]
        return {
            "experts": shape.experts,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "top_k": shape.top_k,
            "rank": shape.rank,
            "tokens": batch.tokens,
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
                "tokens_per_s": batch.tokens / (_median_total(own) * 1e-3),
                "fraction_of_limit": fraction_of_limit(repetitions, flops, bytes_moved),
                "first_call_ms": first_call_ms,
                "saved_bytes": saved_bytes,
            },
            "peers": {
                name: {**_times(times), "ratio": _ratio(times, own), "verified": verified.get(name)}
                for name, times in peer_times.items()
            },
            "verified": verified.get("moesaic"),
            "verified_tokens": len(layer_reference.checked_tokens(shape, batch.tokens)) if plan.verify else None,
        }


def _times(times: Sequence[tuple[float, float | None]]) -> dict[str, dict[str, float] | None]:
    backward = [value for _, value in times if value is not None]
    return {
        "forward_ms": summary([value for value, _ in times]),
        "backward_ms": summary(backward) if backward else None,
    }


def _median_total(times: Sequence[tuple[float, float | None]]) -> float:
    return statistics.median(forward + (backward or 0.0) for forward, backward in times)


def _ratio(
    peer: Sequence[tuple[float, float | None]], own: Sequence[tuple[float, float | None]]
) -> dict[str, float | None]:
    """The peer's medians over the engine's, each way and for forward and backward together."""
    peer_times, own_times = _times(peer), _times(own)
    ratio: dict[str, float | None] = {}
    for way in ("forward", "backward"):
        theirs, ours = peer_times[f"{way}_ms"], own_times[f"{way}_ms"]
        ratio[way] = theirs["median"] / ours["median"] if theirs is not None and ours is not None else None
    ratio["total"] = _median_total(peer) / _median_total(own)
    return ratio


def _add_limits(case: dict[str, Any], ceiling: Ceiling) -> None:
    case["limit_ms"] = {
        way: ceiling.limit_ms(case["flops"][way], case["bytes"][way]) for way in ("forward", "backward")
    }


def needed_bytes(plan: Plan) -> tuple[int, int]:
    """An estimate of the memory that a plan takes.

    Returns:
        bytes of the weights, packed and, for peers, original; bytes of everything else at its largest.
    """
    shape = plan.shape
    packed = 2 * shape.experts * shape.weights_per_expert
    resident = packed * (2 if plan.peers else 1)
    lora = 4 * shape.lora_values_per_expert * shape.experts
    rows = max(plan.tokens) * shape.top_k
    if plan.peers:  # several bf16 copies of the rows' gate, up and hidden values, alive until backward has used them
        working = 2 * rows * (8 * shape.intermediate + 6 * shape.hidden) + lora
    else:
        working = 2 * rows * (3 * shape.intermediate + shape.hidden)
    read_probe = max(1 << 30, 4 * _core.last_level_cache_bytes())
    return resident, 2 * lora + working + 2 * 2 * max(plan.tokens) * shape.hidden + read_probe


def _check_memory(plan: Plan) -> None:
    """Linux grants more memory than there is and ends the process that uses it: better to say no before."""
    weights, rest = needed_bytes(plan)
    total = weights + rest
    available = host.available_memory()
    if total > available:
        raise MemoryError(
            f"needs about {format_bytes(total)} ({total} bytes; {format_bytes(weights)} of them for the weights"
            f"{', packed and as PyTorch has them' if plan.peers else ''}), {format_bytes(available)} are available;"
            " fewer --experts need less"
        )
