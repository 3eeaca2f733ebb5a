"""Random problems for the experts layer, and what PyTorch says of them.

The reference is the naive program: one expert after the other, LoRA added to the weights, autograd, all in fp32 on
inputs that were rounded to bf16 first, as the engine rounds them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

import moesaic

PAIRS = ("gate_up", "gate", "up", "down")


@dataclass(frozen=True)
class AdapterCase:
    """Which pairs an adapter has, the rank and the scale of each, and how they lie in memory."""

    ranks: dict[str, int]
    scales: dict[str, float]
    peft: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return ",".join(f"{name}:{rank}" for name, rank in self.ranks.items()) + ("p" if self.peft else "c")


@dataclass(frozen=True)
class LayerCase:
    """One problem: sizes, types, routing. `routing`: uniform, skewed (Zipf) or one (all rows on one expert)."""

    seed: int
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    adapters: tuple[AdapterCase, ...] = ()
    routing: str = "uniform"
    skip: bool = False
    hidden_dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32
    ids_dtype: torch.dtype = torch.int64
    activation: str = "silu"

    def __str__(self) -> str:
        lora = "+".join(str(adapter) for adapter in self.adapters) or "none"
        return (
            f"{self.seed}-T{self.tokens}-E{self.experts}-k{self.top_k}-H{self.hidden}-I{self.intermediate}"
            f"-{self.routing}{'-skip' if self.skip else ''}-{self.activation}-{str(self.hidden_dtype)[6:]}"
            f"-lora_{lora}"
        )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def _size(rng: random.Random, low: int, high: int) -> int:
    """A size on the grid of 32 or, as often, off it."""
    size = _log_uniform(rng, low, high)
    return max(low, size // 32 * 32) if rng.random() < 0.5 else size


def _random_adapter(rng: random.Random) -> AdapterCase:
    kinds: tuple[tuple[str, ...], ...] = (
        ("gate_up", "down"),
        ("gate", "up", "down"),
        ("gate_up",),
        ("down",),
        ("up",),
        PAIRS,
    )
    names = rng.choices(kinds, weights=(6, 4, 1, 1, 1, 1))[0]
    ranks = {name: _log_uniform(rng, 1, 64) for name in names}
    return AdapterCase(
        ranks,
        {name: rng.choice((0.5, 1.0, 2.0)) for name in names},
        peft=rng.random() < 0.6,
        dtype=rng.choice((torch.float32, torch.bfloat16)),
    )


def random_case(seed: int) -> LayerCase:
    """The same seed gives the same case. Weights and work are bounded, so that a case takes a fraction of a second."""
    rng = random.Random(seed)
    experts = _log_uniform(rng, 1, 64)
    top_k = rng.randint(1, min(8, experts))
    hidden = _size(rng, 32, 1024)
    intermediate = _size(rng, 32, max(32, min(1024, 2**21 // (experts * hidden))))
    most_tokens = max(1, min(600, 300_000_000 // (6 * top_k * hidden * intermediate)))
    tokens = rng.choices((0, 1, _log_uniform(rng, 1, most_tokens)), weights=(1, 4, 95))[0]
    return LayerCase(
        seed,
        tokens,
        experts,
        top_k,
        hidden,
        intermediate,
        adapters=tuple(_random_adapter(rng) for _ in range(rng.choices((0, 1, 2), weights=(1, 6, 3))[0])),
        routing=rng.choices(("uniform", "skewed", "one"), weights=(5, 4, 1))[0],
        skip=rng.random() < 0.3,
        hidden_dtype=rng.choice((torch.float32, torch.bfloat16)),
        weights_dtype=rng.choice((torch.float32, torch.bfloat16)),
        ids_dtype=rng.choice((torch.int64, torch.int32)),
        activation=rng.choice(("silu", "silu", "gelu_tanh")),
    )


@dataclass
class Adapter:
    """Leaf tensors ``(a, b, a, b, ...)`` as a trainer holds them."""

    case: AdapterCase
    experts: int
    leaves: list[torch.Tensor]

    def pairs(self, leaves: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor, float]]:
        """(name, a [E, r, in], b [E, out, r], scale) of every pair, as views of leaves like this adapter's."""
        pairs = []
        for n, (name, rank) in enumerate(self.case.ranks.items()):
            a, b = leaves[2 * n], leaves[2 * n + 1]
            if self.case.peft:
                a, b = a.view(self.experts, rank, -1), b.view(-1, rank, self.experts).permute(2, 0, 1)
            pairs.append((name, a, b, self.case.scales[name]))
        return pairs

    def lora(self) -> moesaic.Lora:
        return moesaic.Lora(**{name: moesaic.LoraPair(a, b, scale) for name, a, b, scale in self.pairs(self.leaves)})


@dataclass
class Problem:
    """Inputs, all of them leaves that require a gradient where one exists."""

    case: LayerCase
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    d_out: torch.Tensor
    adapters: list[Adapter]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """hidden, router weights, then every LoRA tensor."""
        return [self.hidden, self.weights, *(leaf for adapter in self.adapters for leaf in adapter.leaves)]

    @property
    def names(self) -> list[str]:
        """What the leaves are."""
        pairs = [f"lora[{n}].{name}" for n, adapter in enumerate(self.adapters) for name in adapter.case.ranks]
        return ["hidden", "router", *(f"{pair}.{side}" for pair in pairs for side in "ab")]

    def loras(self) -> list[moesaic.Lora]:
        return [adapter.lora() for adapter in self.adapters]

    def layer(self) -> moesaic.ExpertsLayer:
        return moesaic.ExpertsLayer(self.gate_up_proj, self.down_proj, activation=self.case.activation)


def _make_ids(case: LayerCase, generator: torch.Generator) -> torch.Tensor:
    shape = (case.tokens, case.experts)
    if case.routing == "skewed":
        popularity = 1.0 / torch.arange(1, case.experts + 1)
        scores = popularity.log() - torch.empty(shape).exponential_(generator=generator).log()
        ids = scores.topk(case.top_k).indices
    else:
        ids = torch.rand(shape, generator=generator).topk(case.top_k).indices
    if case.routing == "one":
        ids = torch.full_like(ids, case.experts // 2)
    if case.skip:
        chance = torch.rand(ids.shape, generator=generator)
        ids = ids.masked_fill(chance < 0.15, -1).masked_fill(chance > 0.9, case.experts)
    return ids.to(case.ids_dtype)


@lru_cache(maxsize=2)
def _base_weights(seed: int, e: int, h: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up_proj = (torch.randn(e, 2 * i, h, generator=generator) * h**-0.5).bfloat16()
    return gate_up_proj, (torch.randn(e, h, i, generator=generator) * i**-0.5).bfloat16()


def _make_adapter(case: LayerCase, adapter: AdapterCase, generator: torch.Generator) -> Adapter:
    h, i, e = case.hidden, case.intermediate, case.experts
    sizes = {"gate_up": (h, 2 * i), "gate": (h, i), "up": (h, i), "down": (i, h)}
    leaves = []
    for name, r in adapter.ranks.items():
        inputs, outputs = sizes[name]
        a = torch.randn(e * r, inputs, generator=generator) * inputs**-0.5
        # The adapter changes what its projection gives by half as much again: far more than a trained one does.
        b = torch.randn(outputs, r * e, generator=generator) * r**-0.5 * 0.5 / adapter.scales[name]
        if not adapter.peft:
            a, b = a.view(e, r, inputs), b.view(e, outputs, r)
        leaves += [tensor.to(adapter.dtype).requires_grad_() for tensor in (a, b)]
    return Adapter(adapter, e, leaves)


def make_problem(case: LayerCase, draw: int = 0) -> Problem:
    """Values of about unit variance in every intermediate result. Draws differ in everything but the base weights."""
    generator = torch.Generator().manual_seed(case.seed + (draw + 1) * 1_000_003)
    h, t, k = case.hidden, case.tokens, case.top_k
    gate_up_proj, down_proj = _base_weights(case.seed, case.experts, case.hidden, case.intermediate)
    weights = torch.rand(t, k, generator=generator) + 0.1
    return Problem(
        case,
        gate_up_proj,
        down_proj,
        torch.randn(t, h, generator=generator).to(case.hidden_dtype).requires_grad_(),
        _make_ids(case, generator),
        (weights / weights.sum(-1, keepdim=True)).bfloat16().to(case.weights_dtype).requires_grad_(),
        torch.randn(t, h, generator=generator).to(case.hidden_dtype),
        [_make_adapter(case, adapter, generator) for adapter in case.adapters],
    )


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().bfloat16().float()


def naive_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor, float]],
    activation: str = "silu",
) -> torch.Tensor:
    """The layer as one would write it first; `pairs` holds (name, a, b, scale) of all adapters."""
    intermediate = down_proj.shape[2]
    rows = {"gate_up": slice(None), "gate": slice(intermediate), "up": slice(intermediate, None), "down": slice(None)}
    out = 0.0 * hidden  # a function of its input even where no expert has a row
    for expert in range(down_proj.shape[0]):
        tokens, slots = torch.where(ids == expert)
        if len(tokens) == 0:
            continue
        gate_up, down = gate_up_proj[expert].to(hidden.dtype, copy=True), down_proj[expert].to(hidden.dtype, copy=True)
        for name, a, b, scale in pairs:
            (down if name == "down" else gate_up)[rows[name]] += scale * (b[expert] @ a[expert])
        gate, up = (hidden[tokens] @ gate_up.T).chunk(2, dim=-1)
        y = ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up) @ down.T
        out = out.index_add(0, tokens, weights[tokens, slots, None] * y)
    return out


def reference(problem: Problem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of `problem.leaves`, in fp32 and in the leaves' shapes."""
    hidden = _rounded(problem.hidden).requires_grad_()
    weights = problem.weights.detach().float().requires_grad_()
    leaves, pairs = [hidden, weights], []
    for adapter in problem.adapters:
        rounded = [_rounded(leaf).requires_grad_() for leaf in adapter.leaves]
        leaves += rounded
        pairs += adapter.pairs(rounded)
    activation = problem.case.activation
    out = naive_experts(hidden, problem.ids, weights, problem.gate_up_proj, problem.down_proj, pairs, activation)
    grads = torch.autograd.grad(out, leaves, _rounded(problem.d_out), allow_unused=True, materialize_grads=True)
    return out.detach(), list(grads)


class RelativeError:
    """Relative L2 error of one quantity, over one or more pairs of tensors."""

    def __init__(self) -> None:
        self._error = 0.0
        self._norm = 0.0

    def add(self, value: torch.Tensor, expected: torch.Tensor) -> None:
        value, expected = value.detach().double(), expected.detach().double()
        self._error += (value - expected).square().sum().item()
        self._norm += expected.square().sum().item()

    def __float__(self) -> float:
        """0 where everything is zero or empty."""
        if self._error == 0.0:
            return 0.0
        return (self._error / self._norm) ** 0.5 if self._norm > 0.0 else float("inf")


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    error = RelativeError()
    error.add(value, expected)
    return float(error)
