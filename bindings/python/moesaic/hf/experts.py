"""The experts function that transformers calls for ``experts_implementation="moesaic"``."""

from __future__ import annotations

import torch
from torch import nn

from moesaic.autograd import moe_experts
from moesaic.hf.adapters import active_adapters
from moesaic.hf.blocks import WEIGHTS, weight
from moesaic.hf.packing import packed_layer

__all__ = ["experts_forward", "refuse_fp8_experts"]


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts block `self`, computed by the engine with the PEFT adapters that are active on it.

    Args:
        self: the experts block. Its weights are packed in the first call, unless ``moesaic.hf.prepare`` did it.
        hidden_states: ``[T, H]`` bf16 or fp32.
        top_k_index: ``[T, k]`` int64; -1 and E (expert parallelism's "not here") are skipped.
        top_k_weights: ``[T, k]`` bf16 or fp32.

    Returns:
        ``[T, H]`` in the dtype of `hidden_states`.

    Raises:
        ValueError: the engine cannot serve this block; its base weights would need a gradient; hidden_states is fp16.
    """
    layer = packed_layer(self)
    if torch.is_grad_enabled():
        _refuse_trainable(self)
    if hidden_states.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"hidden_states of {type(self).__name__} is {hidden_states.dtype}; the moesaic engine computes in bfloat16 "
            "and takes bfloat16 or float32: load the model with dtype=torch.bfloat16"
        )
    return moe_experts(hidden_states, top_k_index, top_k_weights, layer, active_adapters(self))


def _refuse_trainable(block: nn.Module) -> None:
    for name in WEIGHTS:
        parameter = weight(block, name)
        with torch._C.DisableTorchFunctionSubclass():  # which a released parameter would take for this flag, 10 us
            trainable = parameter is not None and parameter.requires_grad
        if trainable:
            raise ValueError(
                f"{name} of {type(block).__name__} requires a gradient, and the moesaic engine has none for base "
                "weights: it would silently not train. Freeze it (requires_grad_(False); PEFT does so) and train LoRA "
                "adapters, or run inference under torch.no_grad()"
            )


def refuse_fp8_experts(self: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
    """Stands in the registry of FP8 experts, so that they are refused with the reason."""
    raise ValueError(
        f"the moesaic engine cannot serve {type(self).__name__}: its weights are stored as FP8; load the model "
        "de-quantized, with quantization_config=FineGrainedFP8Config(dequantize=True)"
    )
