"""Packing all experts blocks of a model ahead of the first forward, and undoing it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moesaic.hf import data_parallel, packing
from moesaic.hf.blocks import IMPLEMENTATION, WEIGHTS, find_blocks, implementation, refusal, require_module, weight
from moesaic.hf.released import is_released, restore_block

__all__ = ["BlockReport", "PrepareReport", "prepare", "restore"]


@dataclass(frozen=True)
class BlockReport:
    """One experts block, packed."""

    name: str
    """Its name in the model."""
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bytes_packed: int
    bytes_released: int
    """What its parameters held and hold no longer; 0 where they are kept, or were released before."""
    rounded: bool
    """Whether packing rounded the weights, because they were not bf16."""


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did; ``print`` it."""

    blocks: tuple[BlockReport, ...]
    weight_format: str
    seconds: float

    @property
    def bytes_packed(self) -> int:
        """Bytes of all packed weights."""
        return sum(block.bytes_packed for block in self.blocks)

    @property
    def bytes_released(self) -> int:
        """Bytes that the model's parameters held and hold no longer."""
        return sum(block.bytes_released for block in self.blocks)

    def __str__(self) -> str:
        shapes: dict[tuple[int, int, int], int] = {}
        for block in self.blocks:
            shape = (block.num_experts, block.hidden_size, block.intermediate_size)
            shapes[shape] = shapes.get(shape, 0) + 1
        kinds = ", ".join(f"{n} with {e} experts each, hidden {h}, intermediate {i}" for (e, h, i), n in shapes.items())
        rounded = "; weights were rounded to bfloat16" if any(block.rounded for block in self.blocks) else ""
        return (
            f"moesaic: packed {len(self.blocks)} experts blocks ({kinds}) as {self.weight_format} "
            f"in {self.seconds:.1f} s: "
            f"{_size(self.bytes_packed)} packed, {_size(self.bytes_released)} of parameters released{rounded}"
        )


def prepare(
    model: nn.Module, weight_format: str = "bf16", release: bool = True, progress: bool | None = None
) -> PrepareReport:
    """Packs the base weights of every experts block of `model` for the engine, and sets its experts implementation to
    it.

    Before or after ``get_peft_model``. A second call packs only what changed. Nothing is touched if a block is refused.

    Args:
        model: a transformers model, a PEFT model around one, or any module that holds experts blocks.
        weight_format: how the packed weights are stored: ``"bf16"``.
        release: free the parameters, so that the packed weights are the only copy. They keep shape, dtype and device;
            reading one unpacks its values anew (so ``save_pretrained`` writes true weights, rounded to bf16 if they
            were not), writing to one is an error, and so is running the block on another implementation. `restore`
            brings them back.
        progress: show a bar; None: if standard error is a terminal and `rich` is there.

    Raises:
        TypeError: `model` is no module.
        ValueError: there is no experts block, or the engine cannot serve one of them, or PEFT is to train one in full
            (``modules_to_save``); every such block is named with the reason. Base weights that require a gradient
            without PEFT are accepted for inference; a forward with gradients enabled refuses them.
        MemoryError: memory cannot be had; blocks packed so far stay packed, and a further call goes on from there.
    """
    require_module(model)
    blocks = list(find_blocks(model))
    if not blocks:
        raise ValueError(f"model ({type(model).__name__}) has no experts block; expected a mixture-of-experts model")
    refused = ((name, block, _refusal(name, block)) for name, block in blocks)
    reasons = [f"{name} ({type(block).__name__}): {reason}" for name, block, reason in refused if reason]
    if reasons:
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ValueError("the moesaic engine cannot serve this model: " + "; ".join(reasons[:3]) + more)
    began = time.perf_counter()
    set_implementation(model, IMPLEMENTATION)
    reports = [
        _prepare_block(name, block, weight_format, release)
        for name, block in _with_progress(blocks, sys.stderr.isatty() if progress is None else progress)
    ]
    if release:
        data_parallel.leave_released_alone(_outermost(model))
    return PrepareReport(tuple(reports), weight_format, time.perf_counter() - began)


def restore(model: nn.Module, experts_implementation: str | None = "grouped_mm") -> None:
    """Undoes `prepare`: parameters that were released hold the weights again, and packed weights are dropped.

    The weights are what the engine computed with: rounded to bf16 where they were given in another dtype.

    Args:
        model: as given to `prepare`.
        experts_implementation: what to set the model to afterwards; None: leave it (the next forward packs again).

    Raises:
        TypeError: `model` is no module.
    """
    require_module(model)
    for _, block in find_blocks(model):
        if is_released(block):
            restore_block(block)
        packing.drop(block)
    data_parallel.undo(_outermost(model))
    if experts_implementation is not None:
        set_implementation(model, experts_implementation)


def set_implementation(model: nn.Module, name: str) -> None:
    """Sets the experts implementation of every experts block in `model`."""
    from transformers import PreTrainedModel

    outermost = _outermost(model)
    if isinstance(outermost, PreTrainedModel):
        outermost.set_experts_implementation(name)
    for _, block in find_blocks(model):
        # A block may have a config of its own: modules_to_save copies both.
        if implementation(block) != name:
            block.config._experts_implementation = name  # type: ignore[union-attr]


def _outermost(model: nn.Module) -> nn.Module:
    """The model of transformers in `model`, or else that itself."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _refusal(name: str, block: nn.Module) -> str | None:
    reason = refusal(block)
    trainable = any((parameter := weight(block, n)) is not None and parameter.requires_grad for n in WEIGHTS)
    if reason is None and trainable and "modules_to_save" in name.split("."):
        return "it is to be trained in full (modules_to_save), and the engine has no gradient for base weights"
    return reason


def _prepare_block(name: str, block: nn.Module, weight_format: str, release: bool) -> BlockReport:
    rounded = any(block._parameters[n].dtype != torch.bfloat16 for n in WEIGHTS)  # type: ignore[union-attr]
    layer = packing.packed_layer(block, weight_format)
    return BlockReport(
        name,
        layer.num_experts,
        layer.hidden_size,
        layer.intermediate_size,
        layer.weight_bytes,
        packing.release(block) if release else 0,
        rounded,
    )


def _with_progress(
    blocks: list[tuple[str, nn.Module]], progress: bool
) -> Iterable[tuple[str, nn.Module]] | Iterator[tuple[str, nn.Module]]:
    if progress:
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            return blocks
        return track(blocks, description="packing experts", console=Console(stderr=True))
    return blocks


def _size(count: int) -> str:
    value, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and unit != "GiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit in ("B", "KiB") else f"{value:.1f} {unit}"
