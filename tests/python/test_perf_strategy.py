"""Sharing a product among devices: `auto` against everything there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.perf import GemmEvaluator, GemmShape, Machine
from moesaic.perf.communication import Link, Topology, collective_ms
from moesaic.perf.strategy import BLOCKS, linear_candidates, pipelined_ms, plan_linear


def roofline(m: int, k: int, n: int) -> float:
    """Milliseconds at 3 TFLOP/s and 170 GB/s, and 5 us a call."""
    return max(2.0 * m * k * n / 3e9, 2.0 * k * n / 170e6) + 5e-3


def exhaustive(product_ms, topology: Topology, m: int, k: int, n: int) -> dict[tuple[int, int, int], float]:  # type: ignore[no-untyped-def]
    """Times of all (row cuts, column cuts, blocks), written down anew; one node."""
    times = {}
    size = topology.size
    for rows, columns, blocks in itertools.product(range(1, size + 1), range(1, size + 1), BLOCKS):
        if rows * columns != size or k < rows or n < columns * blocks:
            continue
        part_n = -(-n // (columns * blocks))
        compute = product_ms(m, -(-k // rows), part_n)

        def among(devices: int) -> Topology:
            return Topology(devices=devices, kind=topology.kind, intra=topology.intra)

        communication = collective_ms("all_reduce", among(rows), 4 * m * part_n)
        communication += collective_ms("all_gather", among(columns), 2 * m * part_n * columns)
        # A two-stage pipeline, step by step.
        computed = sent = 0.0
        for _ in range(blocks):
            computed += compute
            sent = max(sent, computed) + communication
        times[rows, columns, blocks] = sent
    return times


@pytest.mark.parametrize(("m", "k", "n"), [(32, 4096, 768), (16, 4096, 16384), (32, 4096, 4096)])
@pytest.mark.parametrize("kind", ["ring", "mesh"])
@pytest.mark.parametrize("devices", [2, 4, 6, 8])
@pytest.mark.parametrize(("bandwidth", "latency"), [(50.0, 2.0), (400.0, 0.5), (3.0, 0.0)])
def test_auto_is_the_best_of_all(m: int, k: int, n: int, kind, devices: int, bandwidth: float, latency: float) -> None:  # type: ignore[no-untyped-def]
    topology = Topology(devices=devices, kind=kind, intra=Link(bandwidth, latency))
    times = exhaustive(roofline, topology, m, k, n)
    plan = plan_linear(roofline, topology, m, k, n)
    assert plan.milliseconds == pytest.approx(min(times.values()), rel=1e-12)
    assert plan.milliseconds == pytest.approx(times[plan.row_cuts, plan.column_cuts, plan.blocks], rel=1e-12)
    # It says what it chose and what the others would have taken.
    assert plan.reason.startswith(str(plan)) and f"{plan.milliseconds:.4f} ms" in plan.reason
    for other in {"column", "row"} - {plan.strategy}:
        assert other in plan.reason


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 512),
    st.integers(1, 8192),
    st.integers(1, 8192),
    st.sampled_from([1, 2, 3, 4, 8, 12]),
    st.floats(1, 500),
    st.floats(0, 50),
)
def test_auto_is_never_beaten(m: int, k: int, n: int, devices: int, bandwidth: float, latency: float) -> None:
    topology = Topology(devices=devices, intra=Link(bandwidth, latency))
    candidates = list(linear_candidates(roofline, topology, m, k, n))
    if not candidates:
        with pytest.raises(ValueError, match="cannot share"):
            plan_linear(roofline, topology, m, k, n)
        return
    best = min(candidate.milliseconds for candidate in candidates)
    assert plan_linear(roofline, topology, m, k, n).milliseconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("m", "k", "n", "chosen"), [(32, 4096, 768, "row"), (16, 4096, 16384, "column"), (32, 4096, 4096, "hybrid")]
)
def test_auto_on_a_machine(m: int, k: int, n: int, chosen: str) -> None:
    """Three shapes, three strategies: a short y is cheap to reduce, a long one not, a square one is cut both ways."""
    evaluator = GemmEvaluator(Machine.named("emr-16c"), cache=False)

    def product_ms(m: int, k: int, n: int) -> float:
        return evaluator.evaluate(GemmShape(m=m, k=k, n=n)).milliseconds

    topology = Topology(devices=4)
    times = exhaustive(product_ms, topology, m, k, n)
    plan = plan_linear(product_ms, topology, m, k, n)
    assert plan.strategy == chosen
    assert plan.milliseconds == pytest.approx(min(times.values()), rel=1e-12)


def test_one_device_keeps_the_product() -> None:
    plan = plan_linear(roofline, Topology(), 32, 4096, 768)
    assert plan.milliseconds == roofline(32, 4096, 768) and plan.communication_ms == 0.0
    assert plan.reason == "one device: nothing to share"


@pytest.mark.parametrize("strategy", ["column", "row", "hybrid"])
def test_a_strategy_that_is_asked_for_is_kept(strategy) -> None:  # type: ignore[no-untyped-def]
    topology = Topology(devices=8)
    plan = plan_linear(roofline, topology, 32, 4096, 4096, strategy)
    assert plan.strategy == strategy and plan.reason.endswith("asked for")
    kept = [c.milliseconds for c in linear_candidates(roofline, topology, 32, 4096, 4096, strategy)]
    assert plan.milliseconds == min(kept) >= plan_linear(roofline, topology, 32, 4096, 4096).milliseconds


@given(st.just(0.0) | st.floats(1e-9, 10), st.just(0.0) | st.floats(1e-9, 10), st.integers(1, 64))
def test_pieces_hide_what_is_shorter(compute: float, communication: float, pieces: int) -> None:
    time = pipelined_ms(compute / pieces, communication / pieces, pieces)
    assert max(compute, communication) * (1 - 1e-12) <= time <= (compute + communication) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sizes", "strategy", "message"),
    [
        ((0, 1, 1), "auto", "m is 0"),
        ((1, -4, 1), "auto", "k is -4"),
        ((1, 8, 8), "diagonal", "strategy is 'diagonal'"),
        ((1, 8, 8), "expert", "strategy is 'expert'"),
        ((1, 1, 64), "row", "strategy is 'row'; it cannot share k = 1, n = 64 among 4 devices"),
    ],
)
def test_bad_input_is_named(sizes, strategy, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        plan_linear(roofline, Topology(devices=4), *sizes, strategy)
