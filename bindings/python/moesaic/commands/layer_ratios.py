"""What `bench layer --bars` adds: times of the engine held against its own under other circumstances, in the same
run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import moesaic
from moesaic.commands.layer_case import LayerShape, with_rank
from moesaic.commands.layer_data import Adapter, Batch, make_adapter
from moesaic.commands.measure import Ceiling
from moesaic.commands.variants import AccumulatingEngine, Call, Engine, Variant, timed

# What each number should stay below.
LORA_OVERHEAD = 0.12
TWO_ADAPTERS = 1.08
BACKWARD_OVER_FORWARD = 1.25
PREPARE_SHARE = 0.01
FIRST_CALL = 1.3
OVERHEAD_US = 50.0

_PROFILED = 9


class _Nothing(torch.autograd.Function):
    """Computes nothing: keeps what it is given, and makes a tensor for each gradient."""

    backward_us = 0.0

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].view_as(tensors[0])

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = time.perf_counter()
        gradients = tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
        _Nothing.backward_us = 1e6 * (time.perf_counter() - start)
        return gradients


_WITHOUT_LORA, _TWO, _SUMMED = "without_lora", "two_adapters", "summed_rank"


class Bars:
    """Variants of the engine that take turns with the rest, and the ratios that follow."""

    def __init__(self, shape: LayerShape, batch: Batch, layer: moesaic.ExpertsLayer, adapter: Adapter | None) -> None:
        self._engine = Engine(batch, layer, [] if adapter is None else [adapter])
        self.variants: dict[str, Variant] = {}
        self.autograd_us: float | None = None
        """What PyTorch takes for a backward besides the function that it calls, once `report` has measured it."""
        self.nothing_us: dict[str, float] | None = None
        """What PyTorch takes, right after a call, for an autograd function of the same tensors that computes nothing:
        its forward, and in its backward what it saved and a new tensor for each gradient. Likewise."""
        if adapter is None:
            return
        generator = torch.Generator().manual_seed(1)
        second = make_adapter(shape, generator)
        summed = make_adapter(with_rank(shape, 2 * shape.rank), generator)
        assert second is not None and summed is not None  # the rank is not 0
        self.variants[_WITHOUT_LORA] = Engine(batch, layer, [])
        if 2 * shape.rank <= 256:  # the largest rank of an adapter
            self.variants[_TWO] = AccumulatingEngine(batch, layer, [adapter, second])
            self.variants[_SUMMED] = AccumulatingEngine(batch, layer, [summed])

    def report(
        self,
        own: Sequence[Call],
        calls: Mapping[str, Sequence[Call]],
        flops: Mapping[str, int],
        bytes_moved: Mapping[str, int],
        ceiling: Ceiling,
        first_call: Call | None,
    ) -> dict[str, dict[str, float]]:
        """name: {value, bar}; only what could be measured.

        lora_overhead: time with the adapter over time without, less one. two_adapters: time with two adapters over one
        of twice the rank, into `.grad` that is there. backward_over_forward: the ratio of times over that of limits.
        prepare_share: D0 and GU0 of all of backward. forward_overhead_us, backward_overhead_us: what a call takes
        outside of the engine, of forward from the adapter's objects to the output, of backward the function that
        autograd calls; all three from profiled calls. first_call: over the median.

        Args:
            own: the engine's calls.
            calls: those of `variants`.
            flops: of forward and backward.
            bytes_moved: likewise.
            ceiling: of the host meanwhile.
            first_call: of the layer; None: it was called before.
        """
        rows: dict[str, tuple[float, float]] = {}
        total = statistics.median(call.total_ms for call in own)

        def median_of(name: str) -> float:
            return statistics.median(call.total_ms for call in calls[name])

        if _WITHOUT_LORA in self.variants:
            rows["lora_overhead"] = (total / median_of(_WITHOUT_LORA) - 1.0, LORA_OVERHEAD)
        if _TWO in self.variants:
            rows["two_adapters"] = (median_of(_TWO) / median_of(_SUMMED), TWO_ADAPTERS)
        backward = [call.backward_ms for call in own if call.backward_ms is not None]
        if backward:
            ratio = statistics.median(backward) / statistics.median(call.forward_ms for call in own)
            limits = [ceiling.limit_ms(flops[way], bytes_moved[way]) for way in ("forward", "backward")]
            rows["backward_over_forward"] = (ratio / (limits[1] / limits[0]), BACKWARD_OVER_FORWARD)
            rows.update(self._profiled())
        if first_call is not None:
            rows["first_call"] = (first_call.total_ms / total, FIRST_CALL)
        for variant in self.variants.values():
            if isinstance(variant, AccumulatingEngine):
                variant.forget()
        return {name: {"value": value, "bar": bar} for name, (value, bar) in rows.items()}

    def _profiled(self) -> dict[str, tuple[float, float]]:
        shares, outside, around = [], [], []
        nothing: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(_PROFILED):
            with moesaic.profile() as profile:
                call = timed(self._engine, save=True)
            start = time.perf_counter()
            out = _Nothing.apply(*self._engine.leaves)  # type: ignore[no-untyped-call]
            nothing["forward"].append(1e6 * (time.perf_counter() - start))
            timed(self._engine, save=False)
            self._engine.backward(out, self._engine.batch.d_out)
            nothing["backward"].append(_Nothing.backward_us)
            phases = {phase["name"]: phase["thread_ms"] for phase in profile.phases()}
            shares.append((phases.get("D0_prepare", 0.0) + phases.get("GU0_prepare", 0.0)) / phases["backward"])
            document = profile.document()
            calls = {way: _only_call(document, way) for way in ("forward", "backward")}
            # The adapter's objects are made before the call begins, and count as well.
            made = 1e3 * (call.forward_ms - calls["forward"]["wall_ms"]["max"])
            outside.append((calls["forward"]["python_us"]["max"] + made, calls["backward"]["python_us"]["max"]))
            around.append(1e3 * ((call.backward_ms or 0.0) - calls["backward"]["wall_ms"]["max"]))
        forward, backward = zip(*outside, strict=True)
        self.autograd_us = statistics.median(around)
        self.nothing_us = {way: statistics.median(times) for way, times in nothing.items()}
        return {
            "prepare_share": (statistics.median(shares), PREPARE_SHARE),
            "forward_overhead_us": (statistics.median(forward), OVERHEAD_US),
            "backward_overhead_us": (statistics.median(backward), OVERHEAD_US),
        }


def _only_call(document: Mapping[str, Any], way: str) -> Any:
    """The one call of a profile: it is the first of its layer, or not."""
    return document["calls"][way] if document["calls"][way]["calls"] else document["first_calls"][way]
