"""What of a model's config.json decides its GEMMs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "glm4", "olmo2", "granite", "phi3", "gemma2", "gemma3_text")
_MOE = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "olmoe",
    "flex_olmo",
    "phimoe",
    "granitemoe",
    "minimax_m2",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
)
_OWN_WIDTH = ("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe")
"""Whose experts have a width of their own, moe_intermediate_size; those of others have the dense FFN's."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token")
_MOST, _MOST_LAYERS, _MOST_EXPERTS = 2**40, 2**16, 2**16


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A decoder of blocks of attention and FFN, dense or of experts. Fields are those of transformers where it has
    them."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    experts: int = 0
    """Routed experts of a layer; 0: all layers are dense."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Of all shared experts together; 0: none."""
    dense_layers: int = 0
    """Layers whose FFN is dense."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """More than 0: multi-head latent attention."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def moe_layers(self) -> int:
        """Layers whose FFN is routed."""
        return self.num_hidden_layers - self.dense_layers

    def attention_products(self, split: Callable[[int], int] = lambda size: size) -> list[tuple[str, int, int]]:
        """(name, k, n) of the projections of one layer; `split` gives what one device has of a size that is split."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.kv_lora_rank == 0:
            width = self.head_dim * (heads + 2 * self.num_key_value_heads)
            return [
                ("attention.qkv_proj", hidden, split(width)),
                ("attention.o_proj", split(heads * self.head_dim), hidden),
            ]
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        found = [("attention.q_proj", hidden, split(query))]
        if self.q_lora_rank > 0:
            found = [
                ("attention.q_a_proj", hidden, self.q_lora_rank),
                ("attention.q_b_proj", self.q_lora_rank, split(query)),
            ]
        return [
            *found,
            ("attention.kv_a_proj", hidden, self.kv_lora_rank + self.qk_rope_head_dim),
            ("attention.kv_b_proj", self.kv_lora_rank, split(heads * (self.qk_nope_head_dim + self.v_head_dim))),
            ("attention.o_proj", split(heads * self.v_head_dim), hidden),
        ]

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> TransformerConfig:
        """From a config.json, its contents, or a folder that holds one.

        Raises:
            OSError: the file cannot be read.
            ValueError: an unknown architecture, a missing field, a size that makes no sense; one line that names the
            field.
        """
        if isinstance(source, Mapping):
            return cls._of(source, "config")
        if not os.fspath(source):
            raise ValueError("model is '', expected a config.json or a folder that holds one")
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ValueError(f"{path}: expected a JSON object")
        return cls._of(document, str(path))

    @classmethod
    def _of(cls, document: Mapping[str, Any], where: str) -> TransformerConfig:
        if isinstance(document.get("text_config"), dict):
            document = document["text_config"]
        kind = document.get("model_type")
        if kind is None:
            raise ValueError(f"{where}: model_type is missing")
        if kind not in _DENSE + _MOE:
            raise ValueError(f"{where}: model_type is {kind!r}, expected one of {', '.join(sorted(_DENSE + _MOE))}")

        def take(*names: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
            for name in names:
                value = document.get(name)
                if value is None:
                    continue
                if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                    raise ValueError(f"{where}: {name} is {value!r}, expected a whole number from {least} to {most}")
                return value
            if default is None:
                raise ValueError(f"{where}: {names[0]} is missing")
            return default

        hidden, heads = take("hidden_size"), take("num_attention_heads")
        layers = take("num_hidden_layers", most=_MOST_LAYERS)
        values: dict[str, Any] = {
            "model_type": kind,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": take("num_key_value_heads", default=heads),
            "head_dim": take("head_dim", default=max(hidden // heads, 1)),
            "vocab_size": take("vocab_size"),
            "intermediate_size": take("intermediate_size"),
            "dense_layers": layers,
        }
        if kind in _MOE:
            experts = take(*_EXPERTS, most=_MOST_EXPERTS)
            width = take("moe_intermediate_size", default=None if kind in _OWN_WIDTH else values["intermediate_size"])
            shared = take("n_shared_experts", "num_shared_experts", default=0, least=0) * width
            top_k = take(*_TOP_K)
            if top_k > experts:
                raise ValueError(f"{where}: num_experts_per_tok is {top_k}, expected at most the {experts} experts")
            values |= {
                "experts": experts,
                "experts_per_token": top_k,
                "moe_intermediate_size": width,
                "shared_intermediate_size": take("shared_expert_intermediate_size", default=shared, least=0),
                "dense_layers": _dense_layers(
                    layers,
                    first=take("first_k_dense_replace", default=0, least=0),
                    step=take("decoder_sparse_step", default=1),
                    only=_whole_numbers(document.get("mlp_only_layers"), f"{where}: mlp_only_layers"),
                ),
            }
        if document.get("kv_lora_rank") is not None:
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                values[name] = take(name)
            values["q_lora_rank"] = take("q_lora_rank", default=0, least=0)
        return cls(**values)


def _whole_numbers(value: Any, name: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise ValueError(f"{name} is {value!r}, expected a list of whole numbers")
    return value


def _dense_layers(layers: int, *, first: int, step: int, only: list[int]) -> int:
    return sum(i < first or i in only or (i + 1) % step != 0 for i in range(layers))
