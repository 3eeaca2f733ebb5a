"""What `bench layer` runs: shapes, presets, routing, and how many operations and bytes a layer needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class LayerShape:
    """One experts layer and its adapter: E experts, hidden size H, intermediate size I, top-k, LoRA rank r (0:
    without)."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    rank: int

    @property
    def lora_values_per_expert(self) -> int:
        """Elements of one expert's adapter: A and B of gate_up (one A for both) and of down."""
        return self.rank * ((self.hidden + 2 * self.intermediate) + (self.intermediate + self.hidden))

    @property
    def weights_per_expert(self) -> int:
        """Elements of one expert's base weights."""
        return 3 * self.hidden * self.intermediate


def with_rank(shape: LayerShape, rank: int) -> LayerShape:
    """The same layer with an adapter of another rank."""
    return replace(shape, rank=rank)


@dataclass(frozen=True)
class Work:
    """Operations or bytes of one forward and of one backward."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Preset:
    """A layer of a known model, or a known measurement; what a preset does not fix is left None."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    rank: int | None = None
    tokens: int | None = None
    warmup: int | None = None
    reps: int | None = None


PRESETS: dict[str, Preset] = {
    "qwen3-30b-a3b": Preset(128, 2048, 768, 8),
    "qwen3-235b-a22b": Preset(128, 4096, 1536, 8),
    "deepseek-v3": Preset(256, 7168, 2048, 8),
    "deepseek-v2-lite": Preset(64, 2048, 1408, 6),
    "mixtral-8x7b": Preset(8, 4096, 14336, 2),
    "tiny": Preset(8, 128, 96, 2, rank=8, tokens=64),
    "published": Preset(256, 7168, 2048, 8, rank=16, tokens=128, warmup=5, reps=20),
}


def flops(shape: LayerShape, tokens: int) -> Work:
    """FLOP each way (a multiplication and an addition are two), frozen base weights: 6 T k H I, and for LoRA with one A
    for gate and up 2 T k r (2 H + 3 I) forward, twice that backward."""
    rows = tokens * shape.top_k
    base = 6 * rows * shape.hidden * shape.intermediate
    lora = 2 * rows * shape.lora_values_per_expert
    return Work(base + lora, base + 2 * lora)


def bytes_moved(
    shape: LayerShape,
    tokens: int,
    *,
    experts_hit: int,
    weight_bytes: int,
    lora_itemsize: int,
    saved_bytes: int,
    itemsize: int,
) -> Work:
    """Bytes that must cross the memory bus at least once.

    Forward: packed weights and LoRA of the experts hit, saved state, X, out. Backward: the same weights and LoRA, saved
    state, the LoRA gradients of all experts, dO, dX.

    Args:
        experts_hit: experts with at least one row.
        weight_bytes: packed weights of all experts.
        lora_itemsize: bytes of one element of an adapter and of its gradient.
        saved_bytes: what forward keeps for backward.
        itemsize: bytes of one element of X, out, dO and dX.
    """
    weights = weight_bytes * experts_hit // shape.experts
    lora = shape.lora_values_per_expert * experts_hit * lora_itemsize
    lora_gradients = shape.lora_values_per_expert * shape.experts * lora_itemsize
    rows = 2 * tokens * shape.hidden * itemsize
    return Work(weights + lora + saved_bytes + rows, weights + lora + saved_bytes + lora_gradients + rows)


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts: 'uniform'; 'zipf' (the n-th most popular expert is chosen in proportion to 1/n); or
    'concentrated' on `among` experts, uniformly."""

    kind: str
    among: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.among}" if self.kind == "concentrated" else self.kind


def parse_routing(text: str) -> Routing:
    """'uniform', 'zipf' or 'concentrated:N'. ValueError for anything else."""
    if text in ("uniform", "zipf"):
        return Routing(text)
    kind, _, number = text.partition(":")
    if kind == "concentrated" and number.isdecimal() and int(number) > 0:
        return Routing(kind, int(number))
    raise ValueError(f"'{text}' is not uniform, zipf or concentrated:N")


def route(
    routing: Routing, shape: LayerShape, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws k different experts for each token, and their weights.

    Returns:
        ids [T, k] int64 and weights [T, k] fp32, positive, each row adding up to 1.

    Raises:
        ValueError: `concentrated` names fewer than k experts or more than there are.
    """
    if routing.kind == "concentrated" and not shape.top_k <= routing.among <= shape.experts:
        raise ValueError(f"concentrated:{routing.among}: expected {shape.top_k} (top-k) to {shape.experts} (experts)")
    # Popular experts lie anywhere in memory, not in its first part.
    order = torch.randperm(shape.experts, generator=generator)
    log_popularity = torch.zeros(shape.experts)
    if routing.kind == "zipf":
        log_popularity = -torch.log(torch.arange(1, shape.experts + 1, dtype=torch.float32))
    elif routing.kind == "concentrated":
        log_popularity[routing.among :] = -torch.inf
    # Gumbel's trick: the k largest of log p + noise are k draws without replacement.
    uniform = torch.rand(tokens, shape.experts, generator=generator).clamp_(min=1e-20)
    keys = log_popularity - torch.log(torch.clamp(-torch.log(uniform), min=1e-20))
    ids = order[torch.topk(keys, shape.top_k, dim=1).indices]
    weights = torch.softmax(torch.randn(tokens, shape.top_k, generator=generator), dim=1)
    return ids, weights
