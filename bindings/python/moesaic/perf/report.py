"""A prediction as one HTML file that needs nothing else, with a time line and what would be with other numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.perf.communication import Topology
from moesaic.perf.gemm_evaluator import GemmEvaluator
from moesaic.perf.inference import Inference
from moesaic.perf.model import Block
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.rates import LayerRates
from moesaic.perf.simulation import Parallelism, Simulation, SimulationConfig, SimulationResult
from moesaic.perf.strategy import BLOCKS

__all__ = ["render", "what_if"]

_TOKENS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the run's
_DEVICES = (1, 2, 4, 8, 16)  # in a node


def what_if(
    topology: Topology,
    model: TransformerConfig,
    inference: Inference,
    parallelism: Parallelism,
    evaluator: GemmEvaluator,
    rates: LayerRates | None = None,
    *,
    precise: bool = True,
) -> dict[str, Any]:
    """Times of all blocks for some numbers of tokens and of devices, communication apart as latency and bytes.

    The page adds them up as the simulation does, so that it can tell what any bandwidth would make of them.

    Args:
        topology: nodes, devices and connections of the run.
        model: what is run.
        inference: how; its tokens are in the middle.
        parallelism: strategies to choose from.
        evaluator: of each device.
        rates: of the engine's layers.
        precise: as in SimulationConfig.
    """
    config = SimulationConfig(granularity="coarse", use_precise_evaluator=precise)
    tokens = sorted({max(1, round(inference.tokens * factor)) for factor in _TOKENS})
    devices = sorted({*_DEVICES, topology.devices})
    cells = []
    for count in tokens:
        row = []
        for each in devices:
            simulation = Simulation(
                replace(topology, devices=each),
                model,
                replace(inference, tokens=count),
                parallelism,
                evaluator,
                config,
                rates,
            )
            simulation.prewarm()
            row.append(_cell(simulation, replace(topology, devices=each)))
        cells.append(row)
    return {
        "tokens": tokens,
        "devices": devices,
        "nodes": topology.nodes,
        "at": [tokens.index(inference.tokens), devices.index(topology.devices)],
        "pieces": list(BLOCKS) if parallelism.overlap else [1],
        "cells": cells,
    }


def _cell(simulation: Simulation, topology: Topology) -> list[dict[str, Any]]:
    """Passes; the last one of training is the optimizer, which is only a time."""
    passes: list[dict[str, Any]] = [
        {
            "name": name,
            "count": count,
            "tokens": work.tokens,
            "blocks": [_block(simulation, topology, block) for block in simulation.blocks(work)],
        }
        for name, work, count in simulation.passes()
    ]
    fixed = simulation.optimizer_ms() / topology.size
    if fixed > 0:
        passes.append({"name": "optimizer", "count": 1, "tokens": 0, "blocks": [], "fixed_ms": fixed})
    return passes


def _block(simulation: Simulation, topology: Topology, block: Block) -> dict[str, Any]:
    ways = []
    for name in simulation.allowed(block):
        communication = block.strategies[name][1]
        latency = communication.milliseconds(topology, 0.0)
        ways.append(
            {
                "strategy": name,
                "compute_ms": block.compute_ms(name),
                "piece_ms": simulation.piece_ms(block, name),
                "latency_ms": latency,
                "bytes_ms": communication.milliseconds(topology) - latency,
            }
        )
    return {"name": block.name, "count": block.count, "ways": ways}


def render(result: SimulationResult, possible: Mapping[str, Any]) -> str:
    """The page of a prediction and of what_if() around it; it computes everything it shows from these numbers."""
    shown = {**_summary(result), "whatIf": possible}
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = (Path(__file__).parent / "plan.html").read_text(encoding="utf-8")
    return page.replace("/*DOCUMENT*/null", data, 1)


def _summary(result: SimulationResult) -> dict[str, Any]:
    document = result.to_json()
    for step in document["steps"]:
        step["blocks"] = [_merged(block) for block in step["blocks"]]
    return document


def _merged(block: Mapping[str, Any]) -> dict[str, Any]:
    operators: Sequence[Mapping[str, Any]] = block["operators"]
    return {**block, "operators": [{k: o[k] for k in ("name", "kind", "milliseconds", "bound")} for o in operators]}
