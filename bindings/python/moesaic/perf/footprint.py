"""What a model takes in the memory of each device."""

from __future__ import annotations

from moesaic.perf.inference import Inference
from moesaic.perf.layer_model import ExpertsShape
from moesaic.perf.model_config import TransformerConfig

__all__ = ["adapter_parameters", "memory_bytes"]

_MIB = float(1 << 20)


def adapter_parameters(model: TransformerConfig, rank: int) -> int:
    """Parameters of adapters on attention and experts, in all layers."""
    if rank == 0:
        return 0
    experts = 0
    if model.experts:
        layer = ExpertsShape(model.experts, model.hidden_size, model.moe_intermediate_size, 1, rank)
        experts = model.experts * layer.lora_values * model.moe_layers
    attention = sum(rank * (k + n) for _, k, n in model.attention_products()) * model.num_hidden_layers
    return experts + attention


def _other_parameters(model: TransformerConfig) -> float:
    """Everything but the routed experts."""
    attention = sum(k * n for _, k, n in model.attention_products())
    shared = model.hidden_size * (3 * model.shared_intermediate_size + model.experts)
    dense = 3 * model.hidden_size * model.intermediate_size
    total = attention * model.num_hidden_layers + shared * model.moe_layers + dense * model.dense_layers
    return float(total + 2 * model.vocab_size * model.hidden_size)


def memory_bytes(
    model: TransformerConfig, run: Inference, devices: int, threads: int, numa_nodes: int = 1
) -> dict[str, float]:
    """Bytes on each device by what holds them, and their total.

    bf16 weights, one copy; fp32 adapters, with gradients and two moments in training; bf16 keys and values; what
    forward saves for backward, or the hidden states of every layer and all of one layer where it is computed again;
    the engine's scratch memory. Weights, adapters and caches are divided among the devices, activations are not.

    Args:
        model: the model.
        run: what it computes.
        devices: among which weights are divided.
        threads: of the engine on each.
        numa_nodes: of each; every one has its own rows of the experts' results.
    """
    tokens = run.batch * run.tokens
    lora = adapter_parameters(model, run.lora_rank)
    cached = model.kv_lora_rank + model.qk_rope_head_dim or 2 * model.num_key_value_heads * model.head_dim
    experts = 0.0
    if model.experts:
        shape = ExpertsShape(model.experts, model.hidden_size, model.moe_intermediate_size, 1)
        experts = float(shape.weight_bytes * model.moe_layers)
    rows = 2.0 * tokens * model.hidden_size * max(model.experts_per_token, 1) * numa_nodes
    memory = {
        "experts": experts / devices,
        "other weights": 2.0 * _other_parameters(model) / devices,
        "adapters": 4.0 * lora / devices,
        "scratch": (64 + 8 * threads) * _MIB + rows,
    }
    if run.phase == "train":
        memory["gradients and optimizer"] = 12.0 * lora / devices
        memory["activations"] = _activations(model, run, tokens)
    else:
        sequence = run.tokens + run.decode_tokens
        memory["keys and values"] = 2.0 * cached * model.num_hidden_layers * run.batch * sequence / devices
    memory["total"] = sum(memory.values())
    return memory


def _activations(model: TransformerConfig, run: Inference, tokens: int) -> float:
    attention = 2.0 * tokens * (4 * model.hidden_size + 3 * model.num_attention_heads * model.head_dim)
    experts = 4.0 * tokens * model.experts_per_token * (model.moe_intermediate_size + run.lora_rank)
    dense = 2.0 * tokens * (3 * model.intermediate_size + 2 * model.hidden_size)
    logits = 6.0 * tokens * model.vocab_size  # bf16, and fp32 for the loss
    if run.recompute:
        return 2.0 * tokens * model.hidden_size * model.num_hidden_layers + attention + max(experts, dense) + logits
    return attention * model.num_hidden_layers + experts * model.moe_layers + dense * model.dense_layers + logits
