"""How a product is shared by several devices: which side of the weights is cut, in how many blocks, and why.

y [m, n] = x [m, k] W^T with x on every device before and y on every device after it:

    column       W is cut along n, an all-gather of y follows
    row          W is cut along k, an all-reduce of y follows
    hybrid r x c W is cut along k in r and along n in c: all-reduce among r, then all-gather among c

Each device computes its part in `blocks` pieces of its columns, and a piece is communicated while the next one is
computed, so that of `blocks` pieces with compute time a and communication time b  a + (blocks - 1) max(a, b) + b
remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.perf.communication import Topology, collective_ms
from moesaic.perf.fields import one_of, whole

__all__ = ["BLOCKS", "STRATEGIES", "LinearPlan", "Strategy", "linear_candidates", "pipelined_ms", "plan_linear"]

Strategy = Literal["auto", "column", "row", "hybrid", "expert"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "column", "row", "hybrid", "expert")
BLOCKS = (1, 2, 4, 8, 16)

_OUTPUT_BYTES = 2  # results travel as bf16
_PARTIAL_BYTES = 4  # partial sums as fp32

ProductMs = Callable[[int, int, int], float]
"""Milliseconds of a product (m, k, n) on one device."""


@dataclass(frozen=True)
class LinearPlan:
    """One way to share a product.

    Attributes:
        strategy: column, row or hybrid; column where there is one device.
        row_cuts, column_cuts: parts along k and n; their product is the number of devices.
        blocks: pieces in which a device computes.
        milliseconds: all of it.
        compute_ms: of one device.
        communication_ms: of all pieces; `milliseconds` holds what of it nothing hides.
        reason: why this and no other, in a sentence; empty in candidates.
    """

    strategy: str
    row_cuts: int
    column_cuts: int
    blocks: int
    milliseconds: float
    compute_ms: float
    communication_ms: float
    reason: str = ""

    def __str__(self) -> str:
        cuts = f" {self.row_cuts} x {self.column_cuts}" if self.strategy == "hybrid" else ""
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return f"{self.strategy}{cuts} in {blocks}"


def pipelined_ms(compute_ms: float, communication_ms: float, blocks: int) -> float:
    """Time of `blocks` equal pieces, each communicated while the next one is computed.

    Args:
        compute_ms: of one piece.
        communication_ms: of one piece.
        blocks: at least 1.
    """
    return compute_ms + (blocks - 1) * max(compute_ms, communication_ms) + communication_ms


def _communication_ms(topology: Topology, row_cuts: int, column_cuts: int, m: int, n: int) -> float:
    """All-reduce among the row cuts of m x n partial sums, then all-gather among the column cuts of m x (n
    column_cuts)."""
    reduced = collective_ms("all_reduce", _part(topology, row_cuts), _PARTIAL_BYTES * m * n)
    gathered = collective_ms("all_gather", _part(topology, column_cuts), _OUTPUT_BYTES * m * n * column_cuts)
    return reduced + gathered


def _part(topology: Topology, devices: int) -> Topology:
    """So many of the devices, inside one node where they fit there."""
    if devices == topology.size:
        return topology
    if devices <= topology.devices:
        return replace(topology, nodes=1, devices=devices)
    if devices % topology.devices == 0:
        return replace(topology, nodes=devices // topology.devices)
    return replace(topology, nodes=devices, devices=1)


def _candidate(
    product_ms: ProductMs, topology: Topology, shape: tuple[int, int, int], row_cuts: int, blocks: int
) -> LinearPlan | None:
    m, k, n = shape
    column_cuts = topology.size // row_cuts
    part_k, part_n = -(-k // row_cuts), -(-n // (column_cuts * blocks))
    if k < row_cuts or n < column_cuts * blocks:
        return None
    compute = product_ms(m, part_k, part_n)
    communication = _communication_ms(topology, row_cuts, column_cuts, m, part_n)
    strategy = "column" if row_cuts == 1 else "row" if column_cuts == 1 else "hybrid"
    total = pipelined_ms(compute, communication, blocks)
    return LinearPlan(strategy, row_cuts, column_cuts, blocks, total, compute * blocks, communication * blocks)


def linear_candidates(
    product_ms: ProductMs, topology: Topology, m: int, k: int, n: int, strategy: Strategy = "auto"
) -> Iterator[LinearPlan]:
    """Every way to share the product that a strategy allows; for `auto` those of all strategies."""
    for row_cuts in range(1, topology.size + 1):
        if topology.size % row_cuts:
            continue
        for blocks in BLOCKS if topology.size > 1 else (1,):
            found = _candidate(product_ms, topology, (m, k, n), row_cuts, blocks)
            if found is not None and strategy in ("auto", found.strategy):
                yield found


def plan_linear(
    product_ms: ProductMs, topology: Topology, m: int, k: int, n: int, strategy: Strategy = "auto"
) -> LinearPlan:
    """The best way to share y [m, n] = x [m, k] W^T among the devices of a topology.

    Candidates are visited by how much they communicate, and one whose least possible time is no better than the best so
    far is not evaluated.

    Args:
        product_ms: milliseconds of a product (m, k, n) on one device.
        topology: the devices.
        m: rows of x.
        k: columns of x.
        n: columns of y.
        strategy: 'auto', or the one to keep to; 'expert' is none for a single product.

    Raises:
        ValueError: a size below 1, an unknown strategy, or one that cannot share this product.
    """
    for name, value in (("m", m), ("k", k), ("n", n)):
        whole(name, value, 1)
    one_of("strategy", strategy, ("auto", "column", "row", "hybrid"))
    if topology.size == 1:
        return replace(next(linear_candidates(product_ms, topology, m, k, n)), reason="one device: nothing to share")
    best: LinearPlan | None = None
    by_kind: dict[str, LinearPlan] = {}
    whole_ms = product_ms(m, k, n)
    for bound, row_cuts, blocks in sorted(_bounds(topology, m, n)):
        if best is not None and bound >= best.milliseconds:
            break
        found = _candidate(product_ms, topology, (m, k, n), row_cuts, blocks)
        if found is None or strategy not in ("auto", found.strategy):
            continue
        if found.strategy not in by_kind or found.milliseconds < by_kind[found.strategy].milliseconds:
            by_kind[found.strategy] = found
        if best is None or found.milliseconds < best.milliseconds:
            best = found
    if best is None:
        raise ValueError(f"strategy is {strategy!r}; it cannot share k = {k}, n = {n} among {topology.size} devices")
    return replace(best, reason=_reason(best, by_kind, strategy, topology, whole_ms))


def _bounds(topology: Topology, m: int, n: int) -> Iterator[tuple[float, int, int]]:
    """(least possible milliseconds, row cuts, blocks) of every candidate: its communication alone, without latencies
    hidden twice: the first piece of compute and all pieces of communication cannot overlap."""
    for row_cuts in range(1, topology.size + 1):
        if topology.size % row_cuts == 0:
            column_cuts = topology.size // row_cuts
            for blocks in BLOCKS:
                part_n = -(-n // (column_cuts * blocks))
                yield blocks * _communication_ms(topology, row_cuts, column_cuts, m, part_n), row_cuts, blocks


def _reason(
    best: LinearPlan, by_kind: dict[str, LinearPlan], strategy: Strategy, topology: Topology, whole_ms: float
) -> str:
    exposed = max(best.milliseconds - best.compute_ms, 0.0)
    text = (
        f"{best}: {best.milliseconds:.4f} ms = {best.compute_ms:.4f} compute + {exposed:.4f} communication that "
        f"nothing hides ({best.communication_ms:.4f} in all); one device takes {whole_ms:.4f} ms"
    )
    if whole_ms < best.milliseconds:
        text += ", so that sharing gains nothing"
    others = [plan for kind, plan in by_kind.items() if kind != best.strategy]
    if strategy != "auto":
        return f"{text}; asked for"
    for plan in sorted(others, key=lambda plan: plan.milliseconds):
        communicates = plan.communication_ms - best.communication_ms
        slower = "communicates" if communicates > plan.compute_ms - best.compute_ms else "computes"
        text += f"; {plan} takes {plan.milliseconds:.4f} ms, it {slower} longer"
    left = sorted({"column", "row", "hybrid"} - set(by_kind) - ({"hybrid"} if _is_prime(topology.size) else set()))
    if left:
        text += f"; {' and '.join(left)} left out: their communication alone takes longer"
    return text


def _is_prime(value: int) -> bool:
    return all(value % d for d in range(2, int(value**0.5) + 1))


def best_blocks(compute_ms: float, communication: Callable[[float], float], overhead_ms: float) -> tuple[int, float]:
    """Pieces in which a block of operators hides its communication best, and the time of all of it.

    Args:
        compute_ms: of all pieces.
        communication: milliseconds of a share of the bytes.
        overhead_ms: what each further piece costs.
    """

    def total(blocks: int) -> float:
        return pipelined_ms(
            compute_ms / blocks + (overhead_ms if blocks > 1 else 0.0), communication(1 / blocks), blocks
        )

    choice: Sequence[int] = BLOCKS if communication(1.0) > 0 else (1,)
    best = min(choice, key=total)
    return best, total(best)
