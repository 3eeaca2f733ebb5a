"""What a profile of layers of a real size adds up to: times, flops, layers."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic import _core
from moesaic.profiles import document as doc

E, H, INNER, K, R, T, LAYERS, STEPS = 8, 2048, 768, 4, 16, 256, 2, 3


@pytest.fixture(scope="module")
def documents() -> list[doc.Document]:
    """The first steps, and three times as many more."""
    torch.manual_seed(0)
    gate_up, down = torch.randn(E, 2 * INNER, H) / H**0.5, torch.randn(E, H, INNER) / INNER**0.5
    layers = [moesaic.ExpertsLayer(gate_up, down) for _ in range(LAYERS)]
    pairs = [
        moesaic.LoraPair(
            torch.randn(E, R, inner, requires_grad=True), torch.randn(E, outer, R, requires_grad=True), 1.0
        )
        for inner, outer in ((H, 2 * INNER), (INNER, H))
    ]
    lora = moesaic.Lora(gate_up=pairs[0], down=pairs[1])
    ids = torch.rand(T, E).topk(K).indices

    def train(profile: moesaic.Profile) -> None:
        for _ in range(STEPS):
            y = torch.randn(T, H, requires_grad=True)
            for layer in layers:
                y = moesaic.moe_experts(y, ids, torch.rand(T, K), layer, lora)
            y.sum().backward()
            profile.step()

    documents = []
    for _ in range(4):
        with moesaic.profile() as profile:
            train(profile)
        documents.append(profile.document())
    assert [row["layer"] for row in documents[0]["layers"]] == [n for layer in layers for n in [layer.number] * 2]
    return documents


@pytest.fixture(scope="module")
def recorded(documents: list[doc.Document]) -> doc.Document:
    return documents[0]


def test_thread_times_and_idle_times_are_all_the_time_there_was(documents: list[doc.Document]) -> None:
    """Phases are timed by their ranges, idle workers by the pool and calls by the bindings: three clocks, one sum.

    Of the steady state: in first calls, tasks take memory between their phases. The closest of three, because a host
    that takes a core away between two phases takes it from the phases alone.
    """
    gaps = []
    for document in documents[1:]:
        account = document["account"]
        leaves = sum(row["thread_ms"] for row in document["phases"] if doc.is_leaf(row["name"]))
        idle = sum(account[f"{name}_ms"] for name in ("stealing", "waiting", "parked", "serial_idle", "python"))
        gaps.append(abs(leaves + idle - account["threads_x_wall_ms"]) / account["threads_x_wall_ms"])
        calls = [document["calls"][kind] for kind in ("forward", "backward")]
        assert all(row["calls"] == LAYERS * STEPS for row in calls), "no first calls"
        wall = sum(row["wall_ms"]["mean"] * row["calls"] for row in calls)
        assert account["threads_x_wall_ms"] == pytest.approx(_core.get_num_threads() * wall)
        assert min(row["wall_ms"]["min"] for row in calls) > 1.0, "a layer of a real size"
    assert min(gaps) < 0.02, gaps


def test_sums_hold_what_their_phases_take(recorded: doc.Document) -> None:
    times = {doc.key_of(row): row["thread_ms"] for row in recorded["phases"]}
    for name in doc.SUMS:
        inside = [row["thread_ms"] for row in recorded["phases"] if row["category"] == name]
        assert times[name] == pytest.approx(sum(inside), rel=1e-9), name
    roots = sum(times[name] for name in ("backward_down", "backward_activation", "backward_gate_up"))
    assert roots == pytest.approx(
        sum(
            row["thread_ms"]
            for row in recorded["phases"]
            if doc.is_leaf(row["name"]) and row["category"].startswith(("backward", "GU3_"))
        ),
        rel=1e-9,
    )


def test_flops_are_those_of_the_formulas(recorded: doc.Document) -> None:
    calls = LAYERS * STEPS
    base, lora = 6 * T * K * H * INNER, 2 * T * K * R * (2 * H + 3 * INNER)
    for kind, expected in (("forward", base + lora), ("backward", base + 2 * lora)):
        phases = [phase for row in recorded["layers"] if row["kind"] == kind for phase in row["phases"]]
        steady = sum(phase["flops"] for phase in phases)
        assert steady == pytest.approx(expected * (calls - LAYERS), rel=1e-9), kind
    leaves = sum(row["flops"] for row in recorded["phases"] if doc.is_leaf(row["name"]))
    assert leaves == pytest.approx((2 * base + 3 * lora) * calls, rel=1e-9)


def test_layers_add_up_to_the_run(recorded: doc.Document) -> None:
    assert len(recorded["layers"]) == 2 * LAYERS
    total: dict[str, list[float]] = {}
    for row in recorded["layers"]:
        assert row["calls"] == STEPS - 1 and row["first_ms"] > 0
        for phase in row["phases"]:
            sums = total.setdefault(phase["name"], [0.0, 0.0])
            sums[0] += phase["thread_ms"] + phase["first_ms"]
            sums[1] += phase["first_ms"]
            assert phase["calls"] > 0 and phase["first_ms"] > 0
    leaves = {doc.key_of(row): row for row in recorded["phases"] if doc.is_leaf(row["name"])}
    assert set(total) == set(leaves)
    for name, row in leaves.items():
        assert total[name] == [pytest.approx(row["thread_ms"], rel=1e-9), pytest.approx(row["first_ms"], rel=1e-9)], (
            name
        )
    backward = {doc.key_of(row): row for row in recorded["phases"]}["backward_gate_up"]
    assert 0 < backward["first_ms"] < backward["thread_ms"]


def test_a_profile_inside_another_one_has_its_own_layers() -> None:
    layer = moesaic.ExpertsLayer(torch.randn(4, 64, 32), torch.randn(4, 32, 32))

    def call(times: int) -> None:
        for _ in range(times):
            layer.forward(torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))

    with moesaic.profile() as outer:
        call(3)
        with moesaic.profile() as inner:
            call(2)
    counts = []
    for profile in (inner, outer):
        (row,) = profile.document()["layers"]
        routing = next(phase for phase in row["phases"] if phase["name"] == "routing")
        counts.append((row["calls"], row["first_ms"] is None, routing["calls"]))
    assert counts == [(2, True, 2), (4, False, 4)]
