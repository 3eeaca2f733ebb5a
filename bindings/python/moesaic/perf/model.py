"""A transformer as blocks of operators: what each takes on one device, and what it communicates when devices share it.

A block is a chain of operators that a strategy shares as a whole:

    column   every product is cut along its outputs; an all-gather follows each
    row      every product is cut along its inputs; an all-reduce follows each
    hybrid   the first products are cut along their outputs, the last along its inputs; one all-reduce ends the block
    expert   (experts blocks) each device has some experts and some tokens: two all-to-alls, and an all-gather at the
    end

The experts are the engine's (`layer_model`); everything else is taken to be products as good as the engine's, and
elementwise operators at the memory's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.perf.communication import Collective, Topology, collective_ms
from moesaic.perf.layer_model import ExpertsShape, LayerModel
from moesaic.perf.layer_plan import ceil_div
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.products import Evaluates
from moesaic.perf.routing import RoutingLaw
from moesaic.perf.shapes import GemmShape

__all__ = ["Block", "Communication", "Operator", "Transformer", "Workload"]

_BF16, _FP32 = 2, 4
_LONG_CONTRACTION = 1 << 14
# Softmax and the products of attention on cached keys reach about half of the ceiling in the library that computes
# them.
_ATTENTION_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Operator:
    """One operator on one device.

    Attributes:
        name: what it is.
        kind: 'gemm', 'experts', 'attention', 'elementwise' or 'adapter'.
        milliseconds: forward or backward, whichever the block is for.
        flops: that it needs.
        bytes: that it must read and write, at least.
        bound: what limits it, in the evaluator's words.
    """

    name: str
    kind: str
    milliseconds: float
    flops: float
    bytes: float
    bound: str


@dataclass(frozen=True)
class Communication:
    """Collectives of one block with one strategy: (operation, bytes)."""

    operations: tuple[tuple[Collective, float], ...]

    def milliseconds(self, topology: Topology, share: float = 1.0) -> float:
        """All of them, on a share of their bytes."""
        return sum(collective_ms(operation, topology, count * share) for operation, count in self.operations)


Ways = dict[str, tuple[tuple[Operator, ...], Communication]]
"""By strategy: the operators of the device that has most to do, and what is communicated."""


@dataclass(frozen=True)
class Block:
    """Operators that follow each other and are shared in one way.

    Attributes:
        name: 'attention', 'ffn', 'experts' or 'head'.
        count: how often the model has it.
        strategies: the ways to share it.
    """

    name: str
    count: int
    strategies: Ways

    def compute_ms(self, strategy: str) -> float:
        """All operators of one of the blocks."""
        return sum(operator.milliseconds for operator in self.strategies[strategy][0])


@dataclass(frozen=True)
class Workload:
    """What one pass through the model works on.

    Attributes:
        tokens: computed at a time, in all sequences together.
        context: keys that a token sees on average.
        keys: cached keys that are read once, in all sequences together.
        backward: whether this is the backward pass.
        logits: tokens that go through the LM head.
    """

    tokens: int
    context: float
    keys: float
    backward: bool = False
    logits: int = 1


class Transformer:
    """Operators of a model on one kind of device.

    Args:
        config: the model.
        evaluator: of the device's machine.
        layers: predicts the engine's layers there.
        routing: how tokens choose experts.
        lora_rank: of the adapters on attention and experts; 0: none.
        precise: False: closed formulas only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        evaluator: Evaluates,
        layers: LayerModel,
        routing: RoutingLaw,
        *,
        lora_rank: int = 0,
        precise: bool = True,
    ) -> None:
        self.config = config
        self.evaluator = evaluator
        self.layers = layers
        self.routing = routing
        self.lora_rank = lora_rank
        self._precise = precise
        figures = evaluator.machine.figures(evaluator.threads)
        self._peak_gflops: float = figures["compute_gflops"]
        self._memory_gbps: float = figures["gbps"][3]
        self.dispatch_ms: float = figures["job_us"] * 1e-3

    def blocks(self, work: Workload, devices: int) -> list[Block]:
        """The blocks of one pass, each for `devices` devices, with every strategy that can share it."""
        config = self.config
        blocks = [Block("attention", config.num_hidden_layers, self._attention(work, devices))]
        if config.dense_layers:
            blocks.append(Block("ffn", config.dense_layers, self._ffn(work, devices, config.intermediate_size)))
        if config.moe_layers:
            blocks.append(self.experts_block(work, devices, 0))
        blocks.append(Block("head", 1, self._head(work, devices)))
        return blocks

    def experts_block(self, work: Workload, devices: int, draw: int) -> Block:
        """All experts blocks, with one draw of the routing."""
        return Block("experts", self.config.moe_layers, self._experts(work, devices, draw))

    def asking(self, evaluator: Evaluates, layers: LayerModel) -> Transformer:
        """The same model of another evaluator's times."""
        return Transformer(
            self.config, evaluator, layers, self.routing, lora_rank=self.lora_rank, precise=self._precise
        )

    # Products and other operators.

    def product(
        self, name: str, m: int, k: int, n: int, *, adapter: bool = False, backward: bool = False
    ) -> list[Operator]:
        """y [m, n] = x [m, k] W^T, or dx [m, k] = dy [m, n] W, with an adapter where it has one."""
        if backward:
            k, n = n, k
        flops, count = 2.0 * m * k * n, _BF16 * (float(m) * (k + n) + float(k) * n)
        if self._precise:
            # Only with fp32 results may the kernels cut a contraction, which those of the LM head's backward need.
            output = "bf16" if k <= _LONG_CONTRACTION else "fp32"
            answer = self.evaluator.evaluate(GemmShape(m=m, k=k, n=n, output=output))
            operators = [Operator(name, "gemm", answer.milliseconds, flops, count, answer.bound)]
        else:
            arithmetic, memory = flops / self._peak_gflops * 1e-6, count / self._memory_gbps * 1e-6
            bound = "arithmetic" if arithmetic > memory else "dram"
            operators = [Operator(name, "gemm", max(arithmetic, memory) + self.dispatch_ms, flops, count, bound)]
        if adapter and self.lora_rank:
            operators.append(self.adapter(name, m, k, n, backward=backward))
        return operators

    def adapter(self, name: str, m: int, k: int, n: int, *, backward: bool) -> Operator:
        """x A^T B^T beside a product, narrow products that memory limits, as PyTorch computes them (fused ones take
        less of it); backward has its gradients besides."""
        rank, times = self.lora_rank, 2 if backward else 1
        flops, count = 2.0 * m * rank * (k + n), _BF16 * float(m) * (k + 2 * n + 2 * rank) + _FP32 * rank * float(k + n)
        ms = max(flops / self._peak_gflops, count / self._memory_gbps) * 1e-6 + 2 * self.dispatch_ms
        return Operator(f"{name} adapter", "adapter", times * ms, times * flops, times * count, "dram")

    def elementwise(self, name: str, values: float, *, passes: float = 2.0) -> Operator:
        """An operator that reads and writes each value so many times, as bf16, at the memory's rate."""
        count = _BF16 * values * passes
        return Operator(name, "elementwise", count / self._memory_gbps * 1e-6 + self.dispatch_ms, 0.0, count, "dram")

    # Blocks.

    def _attention(self, work: Workload, devices: int) -> Ways:
        config, tokens, hidden = self.config, work.tokens, self.config.hidden_size
        share = min(devices, config.num_attention_heads)
        heads = ceil_div(config.num_attention_heads, share)
        kv_heads = ceil_div(config.num_key_value_heads, min(share, config.num_key_value_heads))
        if config.kv_lora_rank > 0:
            key_size, value_size = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
            cached = float(config.kv_lora_rank + config.qk_rope_head_dim)
        else:
            key_size = value_size = config.head_dim
            cached = 2.0 * kv_heads * config.head_dim
        *projections, (out_name, out_k, out_n) = config.attention_products(lambda size: ceil_div(size, share))
        operators = [self.elementwise("norm", tokens * hidden)]
        for name, k, n in projections:
            operators += self.product(name, tokens, k, n, adapter=True, backward=work.backward)
        projected = sum(n for _, _, n in projections)
        operators.append(self.elementwise("rope", tokens * projected))
        operators.append(self._scores(work, heads, key_size, value_size, cached))
        operators += self.product(out_name, tokens, out_k, out_n, adapter=True, backward=work.backward)
        operators.append(self.elementwise("residual", tokens * hidden, passes=3))
        out = float(tokens * hidden)
        values = float(tokens * config.num_attention_heads * value_size)
        ways = self._ways(
            devices,
            column=(("all_gather", _BF16 * values), ("all_gather", _BF16 * out)),
            row=(("all_reduce", _FP32 * float(tokens * projected * share)), ("all_reduce", _FP32 * out)),
            hybrid=(("all_reduce", _FP32 * out),),
        )
        return {name: (tuple(operators), communication) for name, communication in ways.items()}

    def _scores(self, work: Workload, heads: int, key_size: int, value_size: int, cached: float) -> Operator:
        """Softmax(q K^T) V; backward takes 2.5 times the operations."""
        factor = 2.5 if work.backward else 1.0
        flops = 2.0 * work.tokens * work.context * heads * (key_size + value_size) * factor
        count = _BF16 * (work.keys * cached + work.tokens * heads * (key_size + value_size)) * factor
        arithmetic = flops / (self._peak_gflops * _ATTENTION_EFFICIENCY) * 1e-6
        memory = count / self._memory_gbps * 1e-6
        bound = "arithmetic" if arithmetic > memory else "dram"
        return Operator("attention", "attention", max(arithmetic, memory) + self.dispatch_ms, flops, count, bound)

    def _ffn(self, work: Workload, devices: int, intermediate: int, name: str = "") -> Ways:
        tokens, hidden = work.tokens, self.config.hidden_size
        share = ceil_div(intermediate, devices)
        operators = [] if name else [self.elementwise("norm", tokens * hidden)]
        operators += self.product(f"{name}gate_up_proj", tokens, hidden, 2 * share, backward=work.backward)
        operators.append(self.elementwise(f"{name}swiglu", tokens * share, passes=3))
        operators += self.product(f"{name}down_proj", tokens, share, hidden, backward=work.backward)
        if not name:
            operators.append(self.elementwise("residual", tokens * hidden, passes=3))
        out = float(tokens * hidden)
        ways = self._ways(
            devices,
            column=(("all_gather", _BF16 * float(tokens * intermediate)), ("all_gather", _BF16 * out)),
            row=(("all_reduce", _FP32 * 2.0 * tokens * intermediate), ("all_reduce", _FP32 * out)),
            hybrid=(("all_reduce", _FP32 * out),),
        )
        return {way: (tuple(operators), communication) for way, communication in ways.items()}

    def _experts(self, work: Workload, devices: int, draw: int) -> Ways:
        config, tokens, hidden = self.config, work.tokens, self.config.hidden_size
        rows = self.routing.rows(config.experts, config.experts_per_token, tokens, seed=draw)
        router = self.product("router", tokens, hidden, config.experts, backward=work.backward)
        around = [self.elementwise("norm", tokens * hidden), *router]
        if config.shared_intermediate_size:
            shared = self._ffn(work, devices, config.shared_intermediate_size, "shared_")
            around += next(iter(shared.values()))[0]
        around.append(self.elementwise("residual", tokens * hidden, passes=3))
        slots, out = float(tokens * config.experts_per_token), float(tokens * hidden)
        ways = self._ways(
            devices,
            column=(("all_gather", _BF16 * slots * config.moe_intermediate_size), ("all_gather", _BF16 * out)),
            row=(("all_reduce", _FP32 * 2.0 * slots * config.moe_intermediate_size), ("all_reduce", _FP32 * out)),
            hybrid=(("all_reduce", _FP32 * out),),
        )
        cut = ExpertsShape(
            config.experts,
            hidden,
            ceil_div(config.moe_intermediate_size, devices),
            config.experts_per_token,
            self.lora_rank,
        )
        operators = (*around, self._engine(cut, rows, work))
        found = {name: (operators, communication) for name, communication in ways.items()}
        if devices > 1 and config.experts >= devices:
            # The device whose experts have most rows is waited for.
            size = ceil_div(config.experts, devices)
            busiest = max(
                (rows[first : first + size] for first in range(0, config.experts, size)), key=lambda part: sum(part)
            )
            part = ExpertsShape(
                len(busiest),
                hidden,
                config.moe_intermediate_size,
                min(config.experts_per_token, len(busiest)),
                self.lora_rank,
            )
            sent = _BF16 * slots / devices * hidden
            moved = Communication((("all_to_all", sent), ("all_to_all", sent), ("all_gather", _BF16 * out)))
            found["expert"] = ((*around, self._engine(part, busiest, work)), moved)
        return found

    def _engine(self, shape: ExpertsShape, rows: Sequence[int], work: Workload) -> Operator:
        if sum(rows) == 0:
            return Operator("experts", "experts", 0.0, 0.0, 0.0, "dispatch")
        if self._precise:
            predict = self.layers.backward if work.backward else self.layers.forward
            call = predict(shape, rows)
            ms, flops, count = call.milliseconds, call.flops, call.dram_bytes
        else:
            flops, count = self.layers.limits(shape, rows, backward=work.backward)
            ms = max(flops / self._peak_gflops, count / self._memory_gbps) * 1e-6 + self.dispatch_ms
        arithmetic = flops / self._peak_gflops > count / self._memory_gbps
        return Operator("experts", "experts", ms, flops, count, "arithmetic" if arithmetic else "dram")

    def _head(self, work: Workload, devices: int) -> Ways:
        config, tokens = self.config, work.logits
        share = ceil_div(config.vocab_size, devices)
        operators = [self.elementwise("norm", tokens * config.hidden_size)]
        operators += self.product("lm_head", tokens, config.hidden_size, share, backward=work.backward)
        if work.backward:
            # The engine's loss keeps no logits and makes them again. What else it does with them takes, both ways, as
            # long as 5.6 to 6 passes over them (16 threads and two cores with AMX, 2,048 tokens of 151,936).
            operators += self.product("logits", tokens, config.hidden_size, share)
            operators.append(self.elementwise("loss", tokens * share, passes=6))
        logits = float(tokens * config.vocab_size)
        ways = self._ways(
            devices,
            column=(("all_gather", _BF16 * logits),),
            row=(("all_reduce", _FP32 * logits),),
        )
        return {name: (tuple(operators), communication) for name, communication in ways.items()}

    @staticmethod
    def _ways(devices: int, **ways: tuple[tuple[Collective, float], ...]) -> dict[str, Communication]:
        if devices == 1:
            return {"single": Communication(())}
        return {name: Communication(operations) for name, operations in ways.items()}
