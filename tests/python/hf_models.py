"""Tiny random transformers models, and how far two of them are apart.

Every model has one block of experts, unless a test asks for more: what routes the tokens then lies before everything
that the engine computes, so that a rounding error never flips a token to another expert, on no host.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 7):
    pytest.skip(f"transformers {transformers.__version__} is older than 5.7", allow_module_level=True)

import moesaic.hf  # noqa: E402

#: PEFT 0.19 refuses a second adapter of parameters, and loads none with these versions of transformers.
needs_peft_20 = pytest.mark.skipif(
    importlib.util.find_spec("peft") is not None and importlib.metadata.version("peft").startswith("0.19."),
    reason="PEFT 0.19 cannot do it",
)

VOCABULARY = 128
EXPERTS = 8

#: The layer keeps 5e-3 (relative L2); what lies behind it (norms, the head) may double that, in gradients the router's
#: softmax and attention add differences of large terms.
LOGITS = 1e-2
GRADIENTS = 3e-2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}

#: Families of the plain layout: model type, and what its config needs besides.
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "granitemoe": {},
    "minimax_m2": {},
    "hunyuan_v1_moe": {},
    "glm4_moe": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "flex_olmo": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 3,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "layer_types": ["full_attention"],
    },
    "deepseek_v2": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
}


def build(model_type: str = "qwen3_moe", **changes: Any) -> Any:
    """A model in fp32 whose weights are bf16 numbers, experts large enough to dominate what it computes. The test is
    skipped where this version of transformers does not know the type."""
    if model_type == "granitemoe":
        modeling = importlib.import_module("transformers.models.granitemoe.modeling_granitemoe")
        if hasattr(modeling, "GraniteMoeParallelExperts"):
            pytest.skip(f"transformers {transformers.__version__} has linear layers of GraniteMoE's own (before 5.13)")
    sizes = {**_SIZES, **PLAIN.get(model_type, {}), **changes}
    try:
        config = transformers.AutoConfig.for_model(model_type, **sizes)
    except (KeyError, ValueError) as error:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}: {error}")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, block in moesaic.hf.find_blocks(model):
            for parameter in block.parameters(recurse=False):
                nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[-1]))
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def pair(model_type: str = "qwen3_moe", **changes: Any) -> tuple[Any, Any]:
    """The same model twice: one prepared for the engine, its base experts frozen in both, and a stock one."""
    stock = build(model_type, **changes)
    freeze_experts(stock)
    engine = copy.deepcopy(stock)
    moesaic.hf.prepare(engine, progress=False)
    return engine, stock


def freeze_experts(model: nn.Module) -> None:
    for _, block in moesaic.hf.find_blocks(model):
        block.requires_grad_(False)


def blocks(model: nn.Module) -> list[Any]:
    return [block for _, block in moesaic.hf.find_blocks(model)]


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens() if ids is None else ids).logits
    return result


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss on `tokens()`, and the gradient of every parameter that has one."""
    model.zero_grad()
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def assert_same_training(engine: Any, stock: Any) -> None:
    """Loss, logits and all gradients of one step agree, and experts' adapters, if any, are among them."""
    assert distance(logits(engine), logits(stock)) < LOGITS
    loss, found = gradients(engine)
    stock_loss, expected = gradients(stock)
    assert loss == pytest.approx(stock_loss, rel=LOGITS)
    assert found.keys() == expected.keys()
    assert found
    errors = {name: distance(found[name], expected[name]) for name in expected if expected[name].norm() > 0}
    assert not {name: error for name, error in errors.items() if not error < GRADIENTS}


def each_storage(model: nn.Module) -> Iterator[int]:
    """Bytes behind each parameter of the experts blocks."""
    for block in blocks(model):
        for parameter in block._parameters.values():
            yield parameter.untyped_storage().nbytes()


warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
