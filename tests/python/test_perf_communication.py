"""Collectives against the textbook's formulas, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.perf.communication import Collective, Link, Topology, collective_ms, split_mesh

OPERATIONS = get_args(Collective)
LINK = Link(bandwidth_gbps=10.0, latency_us=3.0)
ALPHA, BETA = 3e-3, 10e6  # ms, bytes a ms


def ring(devices: int, link: Link = LINK) -> Topology:
    return Topology(devices=devices, intra=link)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 60])
@pytest.mark.parametrize("n", [0.0, 1.0, 1e6, 3e9])
def test_rings_follow_the_textbook(p: int, n: float) -> None:
    share = (p - 1) * ALPHA + (p - 1) / p * n / BETA
    assert collective_ms("all_gather", ring(p), n) == pytest.approx(share, rel=1e-12)
    assert collective_ms("reduce_scatter", ring(p), n) == pytest.approx(share, rel=1e-12)
    assert collective_ms("all_reduce", ring(p), n) == pytest.approx(2 * share, rel=1e-12)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 9])
def test_all_to_all_on_a_ring_is_what_its_busiest_link_carries(p: int) -> None:
    # Every message by the shorter way; at equal distance half of it each way.
    load = dict.fromkeys(range(p), 0.0)  # clockwise link i -> i + 1
    for source in range(p):
        for target in range(p):
            distance = (target - source) % p
            if distance == 0 or distance > p - distance:
                continue
            part = 0.5 if 2 * distance == p else 1.0
            for step in range(distance):
                load[(source + step) % p] += part / p
    n = 8e6
    expected = p // 2 * ALPHA + max(load.values()) * n / BETA
    assert collective_ms("all_to_all", ring(p), n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("devices", [2, 4, 6, 7, 9, 12, 16])
def test_all_to_all_on_a_mesh_is_what_its_busiest_links_carry(devices: int) -> None:
    rows, columns = split_mesh(devices)
    horizontal: dict[tuple[int, int], float] = {}
    vertical: dict[tuple[int, int], float] = {}
    for r1, c1, r2, c2 in (
        (a, b, c, d) for a in range(rows) for b in range(columns) for c in range(rows) for d in range(columns)
    ):
        for c in range(min(c1, c2), max(c1, c2)):
            if c1 < c2:  # one direction; the other is its mirror image
                horizontal[r1, c] = horizontal.get((r1, c), 0.0) + 1 / devices
        for r in range(min(r1, r2), max(r1, r2)):
            if r1 < r2:
                vertical[r, c2] = vertical.get((r, c2), 0.0) + 1 / devices
    n = 5e6
    busiest = max(horizontal.values(), default=0.0) + max(vertical.values(), default=0.0)
    expected = (rows + columns - 2) * ALPHA + busiest * n / BETA
    mesh = Topology(devices=devices, kind="mesh", intra=LINK)
    assert collective_ms("all_to_all", mesh, n) == pytest.approx(expected, rel=1e-12)


def test_a_mesh_reduces_along_its_rows_and_then_along_its_columns() -> None:
    n, mesh = 6e6, Topology(devices=12, kind="mesh", intra=LINK)  # 3 x 4
    rows = 3 * ALPHA + 3 / 4 * n / BETA
    columns = 2 * ALPHA + 2 / 3 * (n / 4) / BETA
    assert collective_ms("all_reduce", mesh, n) == pytest.approx(2 * (rows + columns), rel=1e-12)
    # No more bytes than a ring of as many devices, and fewer steps.
    assert collective_ms("all_reduce", mesh, n) < collective_ms("all_reduce", ring(12), n)


def test_nodes_of_devices() -> None:
    n, inter = 6e6, Link(bandwidth_gbps=2.0, latency_us=20.0)
    both = Topology(nodes=4, devices=2, intra=LINK, inter=inter)
    inside = ALPHA + 1 / 2 * n / BETA
    between = 3 * 20e-3 + 3 / 4 * n / 2e6
    assert collective_ms("all_reduce", both, n) == pytest.approx(2 * inside + 2 * between, rel=1e-12)
    assert collective_ms("all_gather", both, n) == pytest.approx(inside + between, rel=1e-12)
    # What two devices send to other nodes shares their node's connection.
    assert collective_ms("all_to_all", both, n) == pytest.approx(
        2 * 20e-3 + 16 / 4 / 2 * (2 * n / 4) / 2e6 + ALPHA + 4 / 4 / 2 * (n / 2) / BETA, rel=1e-12
    )


links = st.builds(
    Link,
    bandwidth_gbps=st.floats(0.1, 1000),
    latency_us=st.floats(0, 100),
    links=st.integers(1, 8),
    contention=st.floats(1, 8),
)
topologies = st.builds(
    Topology,
    nodes=st.integers(1, 9),
    devices=st.integers(1, 16),
    kind=st.sampled_from(["ring", "mesh"]),
    intra=links,
    inter=links,
)


@settings(max_examples=200, deadline=None)
@given(topologies, st.sampled_from(OPERATIONS), st.floats(0, 1e12), st.floats(0, 1e12), st.floats(1, 100))
def test_more_bytes_never_take_less_and_more_bandwidth_never_costs(
    topology: Topology, operation: Collective, few: float, more: float, faster: float
) -> None:
    few, more = sorted((few, more))
    time = collective_ms(operation, topology, more)
    assert 0.0 <= collective_ms(operation, topology, few) <= time
    rounding = 1e-12 * time
    wider = {
        level: replace(link, bandwidth_gbps=link.bandwidth_gbps * faster)
        for level, link in (("intra", topology.intra), ("inter", topology.inter))
    }
    assert collective_ms(operation, replace(topology, **wider), more) <= time + rounding
    for level in ("intra", "inter"):
        link = getattr(topology, level)
        doubled = replace(topology, **{level: replace(link, links=2 * link.links)})
        contended = replace(topology, **{level: replace(link, contention=2 * link.contention)})
        assert collective_ms(operation, doubled, more) <= time + rounding
        assert collective_ms(operation, contended, more) >= time - rounding


@given(links, st.sampled_from(OPERATIONS), st.floats(0, 1e12), st.sampled_from(["ring", "mesh"]))
def test_one_device_never_communicates(link: Link, operation: Collective, count: float, kind: str) -> None:
    assert collective_ms(operation, Topology(kind=kind, intra=link, inter=link), count) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(bandwidth_gbps=0), "link.bandwidth_gbps is 0; expected a finite number above 0"),
        (lambda: Link(bandwidth_gbps=float("nan")), "link.bandwidth_gbps is nan"),
        (lambda: Link(10, latency_us=-1), "link.latency_us is -1"),
        (lambda: Link(10, links=0), "link.links is 0; expected a whole number from 1 on"),
        (lambda: Link(10, contention=0.5), "link.contention is 0.5"),
        (lambda: Topology(nodes=0), "topology.nodes is 0"),
        (lambda: Topology(devices=-3), "topology.devices is -3"),
        (lambda: Topology(kind="torus"), "topology.kind is 'torus'; expected ring or mesh"),  # type: ignore[arg-type]
        (lambda: collective_ms("all_reduce", ring(2), -1), "bytes is -1"),
        (lambda: collective_ms("gossip", ring(2), 1), "operation is 'gossip'"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
