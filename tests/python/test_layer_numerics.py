"""The layer against PyTorch's autograd, over random cases and every instruction set that runs here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch

import moesaic
from layer_cases import AdapterCase, LayerCase, RelativeError, make_problem, random_case, reference
from moesaic import _core

# bf16 has 8 significant bits: rounding to nearest errs by 2^-9 at most, 2^-9 / sqrt(3) = 1.1e-3 rms. A gradient passes
# about nine such roundings of independent sign (X, A's product, G, U, Z, dO, Q, dG, the result): 3.4e-3 rms. The bound
# leaves room for sums in which a few large terms count.
TOLERANCE = 5e-3
CASES = 210
# A router gradient, and the low-rank product of an adapter of rank 1, are sums of terms of random sign that may cancel,
# so that one alone has no bounded relative error. A case with fewer independent slots than this is drawn again until it
# has them, and the error is that of all draws together.
SLOTS = 64

BIG_LORA = (AdapterCase({"gate_up": 16, "down": 16}, {"gate_up": 2.0, "down": 2.0}, peft=True, dtype=torch.float32),)
EDGE_CASES = [
    LayerCase(1001, tokens=0, experts=4, top_k=2, hidden=64, intermediate=96, adapters=BIG_LORA),
    LayerCase(1002, tokens=1, experts=4, top_k=2, hidden=1024, intermediate=512, adapters=BIG_LORA),
    LayerCase(1003, tokens=600, experts=2, top_k=2, hidden=257, intermediate=131, adapters=BIG_LORA),
    LayerCase(1004, tokens=600, experts=64, top_k=8, hidden=96, intermediate=64, adapters=BIG_LORA, routing="one"),
    LayerCase(1005, tokens=64, experts=64, top_k=1, hidden=33, intermediate=1023),
    LayerCase(
        1007, tokens=70, experts=8, top_k=3, hidden=96, intermediate=80, adapters=BIG_LORA, activation="gelu_tanh"
    ),
    LayerCase(
        1006,
        tokens=40,
        experts=3,
        top_k=2,
        hidden=128,
        intermediate=64,
        adapters=(
            AdapterCase({"gate_up": 256, "down": 255}, {"gate_up": 0.5, "down": 0.5}, peft=True, dtype=torch.bfloat16),
        ),
    ),
]


def _check(case: LayerCase) -> None:
    slots = case.tokens * (1 if case.routing == "one" else case.top_k)  # an expert chosen twice computes the same twice
    layer = make_problem(case).layer()
    errors: dict[str, RelativeError] = defaultdict(RelativeError)
    for draw in range(1 if slots == 0 else math.ceil(SLOTS / slots)):
        problem = make_problem(case, draw)
        out = moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, layer, problem.loras())
        assert out.dtype == problem.hidden.dtype and out.shape == problem.hidden.shape
        grads = torch.autograd.grad(out, problem.leaves, problem.d_out)
        expected_out, expected_grads = reference(problem)
        errors["out"].add(out, expected_out)
        for name, leaf, grad, expected in zip(problem.names, problem.leaves, grads, expected_grads, strict=True):
            assert grad.dtype == leaf.dtype and grad.shape == leaf.shape, name
            errors[name].add(grad, expected)
        skipped = (problem.ids < 0) | (problem.ids == case.experts)
        assert not grads[1][skipped].any(), "a skipped slot has a router gradient of exactly 0"
    wrong = {name: float(error) for name, error in errors.items() if not float(error) <= TOLERANCE}
    assert not wrong, f"{case}: {wrong}"


@pytest.mark.parametrize("case", [random_case(seed) for seed in range(CASES)], ids=str)
def test_random_case(case: LayerCase) -> None:
    _check(case)


@pytest.mark.parametrize("case", EDGE_CASES, ids=str)
def test_edge_case(case: LayerCase) -> None:
    _check(case)


@pytest.mark.parametrize("tier", [tier["name"] for tier in _core.isa_tiers()])
def test_every_tier(tier: str) -> None:
    """The cases above again, in a process that is held to another instruction set."""
    if tier == moesaic.isa():
        pytest.skip(f"{tier} is what this process runs: the tests above were its")
    row = next(row for row in _core.isa_tiers() if row["name"] == tier)
    if not (row["supported"] and row["permitted"] and row["compiled"]):
        pytest.skip(f"{tier} cannot run here: {row}")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            __file__,
            "-k",
            "random_case or edge_case",
        ],
        env={**os.environ, "MOESAIC_ISA": tier},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert f"{CASES + len(EDGE_CASES)} passed" in result.stdout, result.stdout[-1000:]
