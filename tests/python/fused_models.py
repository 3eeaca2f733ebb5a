"""Tiny models for `moesaic.hf.fuse`, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)

import moesaic.hf

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}


def bert(**options: Any) -> nn.Module:
    return BertModel(BertConfig(vocab_size=50, max_position_embeddings=32, **SMALL, **options))


def roberta() -> nn.Module:
    return RobertaModel(RobertaConfig(vocab_size=50, max_position_embeddings=32, **SMALL))


def vit() -> nn.Module:
    return ViTModel(ViTConfig(image_size=16, patch_size=8, **SMALL))


def qwen3_moe(head_dim: int = 16) -> nn.Module:
    """The first layer is dense, the second has experts."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=50,
            num_key_value_heads=2,
            head_dim=head_dim,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            mlp_only_layers=[0],
            **SMALL,
        )
    )


def qwen3() -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=50, num_key_value_heads=2, head_dim=16, **SMALL))


def inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, ViTModel):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)}
    return {"input_ids": torch.randint(3, 50, (2, 11), generator=generator)}


def output(model: nn.Module, given: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    return model(**(given or inputs(model)))[0]  # type: ignore[no-any-return]


def objective(out: torch.Tensor) -> torch.Tensor:
    """A norm's own gradient of its squares would be rounding alone."""
    return (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum()


def three_ways(model: nn.Module) -> Iterator[str]:
    """The model in fp32 as it is ("exact"), in bf16 ("stock"), and that fused ("fused"), one after the other."""
    yield "exact"
    model.bfloat16()
    yield "stock"
    moesaic.hf.fuse(model)
    yield "fused"


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())
