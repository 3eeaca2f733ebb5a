"""How many rows each expert gets: of a described routing, without drawing every token."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from moesaic.perf.fields import at_least, one_of, whole

__all__ = ["RoutingLaw", "inclusion_probabilities"]


@dataclass(frozen=True)
class RoutingLaw:
    """How tokens choose experts.

    Attributes:
        kind: 'uniform'; 'zipf': the n-th most popular expert is chosen in proportion to n^-exponent; 'concentrated': on
            `among` experts, uniformly.
        exponent: of zipf.
        among: of concentrated.

    Raises:
        ValueError, TypeError: an attribute makes no sense.
    """

    kind: str = "uniform"
    exponent: float = 1.0
    among: int = 0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("uniform", "zipf", "concentrated"))
        at_least("exponent", self.exponent, 0.0)
        whole("among", self.among, 0)

    @staticmethod
    def parse(text: str) -> RoutingLaw:
        """'uniform', 'zipf', 'zipf:S' or 'concentrated:N'. ValueError for anything else."""
        kind, _, number = text.partition(":")
        if text == "uniform":
            return RoutingLaw()
        if kind == "zipf":
            try:
                exponent = float(number) if number else 1.0
            except ValueError:
                exponent = -1.0
            if 0.0 <= exponent <= 10.0:
                return RoutingLaw("zipf", exponent=exponent)
        if kind == "concentrated" and number.isdecimal() and int(number) > 0:
            return RoutingLaw("concentrated", among=int(number))
        raise ValueError(f"routing is {text!r}; expected uniform, zipf:S (S from 0 to 10) or concentrated:N")

    def __str__(self) -> str:
        if self.kind == "zipf":
            return f"zipf:{self.exponent:g}"
        return f"concentrated:{self.among}" if self.kind == "concentrated" else self.kind

    def popularity(self, experts: int, top_k: int) -> NDArray[np.float64]:
        """Weights [E] in proportion to which experts are drawn; ValueError where k or `among` does not fit E."""
        whole("top_k", top_k, 1)
        if top_k > experts:
            raise ValueError(f"top_k is {top_k}; expected at most {experts} (experts)")
        weights: NDArray[np.float64] = np.ones(experts)
        if self.kind == "zipf":
            weights = np.arange(1, experts + 1, dtype=float) ** -self.exponent
        elif self.kind == "concentrated":
            if not top_k <= self.among <= experts:
                raise ValueError(f"routing is {self}; expected from {top_k} (top-k) to {experts} (experts) experts")
            weights[self.among :] = 0.0
        return weights

    def rows(self, experts: int, top_k: int, tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Rows of each expert, T k in all: a draw with a fixed seed, so that the same question has one answer.

        Each expert's rows are binomial with its probability to be among a token's k; what the draws miss of T k, or
        have too much, is spread over the experts that may still take or give.
        """
        whole("tokens", tokens, 1)
        return _drawn(self, experts, top_k, tokens, seed)

    def _draw(self, experts: int, top_k: int, tokens: int, seed: int) -> tuple[int, ...]:
        probability = inclusion_probabilities(self.popularity(experts, top_k), top_k)
        rng = default_rng(seed)
        rows = rng.binomial(tokens, probability)
        for _ in range(64):
            missing = tokens * top_k - int(rows.sum())
            if missing == 0:
                break
            room = (tokens - rows) * (probability > 0) if missing > 0 else rows
            share = rng.multinomial(abs(missing), room / room.sum())
            rows = rows + np.minimum(share, room) if missing > 0 else rows - np.minimum(share, room)
        return tuple(int(r) for r in rows)


@functools.lru_cache(maxsize=256)
def _drawn(law: RoutingLaw, experts: int, top_k: int, tokens: int, seed: int) -> tuple[int, ...]:
    return law._draw(experts, top_k, tokens, seed)


def inclusion_probabilities(weights: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Probability of each expert to be among k draws without replacement in proportion to `weights`.

    Draws without replacement are the k first of exponential clocks with these rates; with the time of the k-th taken as
    its typical value t: p = 1 - exp(-t w), where the p add up to k. Exact for equal weights, and within a percent of
    the draws that `bench layer` makes otherwise.
    """
    there = weights > 0
    if int(there.sum()) == top_k:
        return there.astype(np.float64)
    if (weights[there] == weights.max()).all():
        return there.astype(np.float64) * (top_k / int(there.sum()))
    low, high = 0.0, 1.0
    scaled = weights / weights.max()
    while (1.0 - np.exp(-high * scaled)).sum() < top_k:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (1.0 - np.exp(-middle * scaled)).sum() < top_k else (low, middle)
    probability: NDArray[np.float64] = 1.0 - np.exp(-high * scaled)
    return probability * float(top_k / probability.sum())
