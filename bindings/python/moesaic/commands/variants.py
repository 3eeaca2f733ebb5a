"""What `bench layer` times: one way of computing a batch's output and its gradients, behind one interface."""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import moesaic
from moesaic import _core
from moesaic.commands.layer_data import Adapter, Batch


class UnavailableError(Exception):
    """This host, this installation or this shape has no such way; the message says why."""


class Variant(ABC):
    """Forward and backward of one batch. The gradients' leaves: hidden, router weights, the adapters' parameters."""

    def __init__(self, batch: Batch, adapters: Sequence[Adapter]) -> None:
        self.batch = batch
        self.leaves = [batch.hidden, batch.router, *(p for adapter in adapters for p in adapter.parameters())]

    @abstractmethod
    def forward(self) -> torch.Tensor:
        """The output [T, H]; what backward needs is kept where gradients are on."""

    def backward(self, out: torch.Tensor, d_out: torch.Tensor) -> Sequence[torch.Tensor]:
        """What the user of this way calls for the gradients, in the form that it gives them."""
        return torch.autograd.grad(out, self.leaves, d_out)

    def gradients(self, raw: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What backward returned as gradients of the leaves, in their shapes. Not timed."""
        return raw


class Engine(Variant):
    """moesaic.moe_experts with any number of adapters."""

    def __init__(self, batch: Batch, layer: moesaic.ExpertsLayer, adapters: Sequence[Adapter]) -> None:
        super().__init__(batch, adapters)
        self._layer = layer
        self._adapters = adapters

    def forward(self) -> torch.Tensor:
        """As the hook into PEFT calls it."""
        batch = self.batch
        lora = [
            moesaic.Lora(
                gate_up=moesaic.LoraPair(gate_up.a, gate_up.b, gate_up.scale, gate_up.experts),
                down=moesaic.LoraPair(down.a, down.b, down.scale, down.experts),
            )
            for gate_up, down in ((adapter.gate_up, adapter.down) for adapter in self._adapters)
        ]
        return moesaic.moe_experts(batch.hidden, batch.ids, batch.router, self._layer, lora or None)


class AccumulatingEngine(Engine):
    """The same into `.grad` of the leaves, which is there already: a training step after the first."""

    def backward(self, out: torch.Tensor, d_out: torch.Tensor) -> Sequence[torch.Tensor]:
        """Adds to the gradients of the leaves; returns none."""
        torch.autograd.backward(out, d_out)
        return ()

    def forget(self) -> None:
        """Frees the gradients of the leaves."""
        for leaf in self.leaves:
            leaf.grad = None


@dataclass(frozen=True)
class Call:
    """One forward and one backward: milliseconds and page faults (minor ones, of the whole process). Those of
    backward are None where it was not run."""

    forward_ms: float
    backward_ms: float | None
    forward_faults: int
    backward_faults: int | None

    @property
    def total_ms(self) -> float:
        """Forward and backward together."""
        return self.forward_ms + (self.backward_ms or 0.0)


def timed(variant: Variant, save: bool) -> Call:
    """Times a forward, and with `save` the backward to all leaves; for tools, in ranges `forward_only` and
    `backward_only`."""
    with torch.set_grad_enabled(save):
        outer = _core.OuterRange("forward_only")
        faults_before, start = _faults(), time.perf_counter()
        out = variant.forward()
        middle, faults_between = time.perf_counter(), _faults()
        outer.close()
    if not save:
        return Call((middle - start) * 1e3, None, faults_between - faults_before, None)
    d_out = variant.batch.d_out
    outer = _core.OuterRange("backward_only")
    faults_again, again = _faults(), time.perf_counter()
    variant.backward(out, d_out)
    end, faults_after = time.perf_counter(), _faults()
    outer.close()
    return Call(
        (middle - start) * 1e3, (end - again) * 1e3, faults_between - faults_before, faults_after - faults_again
    )


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
