"""Fused dense layers and attention as differentiable functions. What they save belongs to autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moesaic import _core
from moesaic.autograd import differentiable_once
from moesaic.lora import LoraPair

__all__ = ["Fusion", "attention", "fused_linear", "once", "rows_of", "silu_mul"]


@dataclass(frozen=True, slots=True)
class Fusion:
    """What follows the GEMM: "none", "gelu" or "gelu_tanh"; "none", "layernorm" or "rmsnorm"."""

    activation: str = "none"
    norm: str = "none"
    eps: float = 0.0


def _compute(
    fusion: Fusion,
    packed: _core.PackedMatrix | None,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    lora: LoraPair | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    save: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    return _core.fused_linear(
        x,
        packed,
        bias=bias,
        addend=addend,
        lora_a=None if lora is None else lora.a,
        lora_b=None if lora is None else lora.b,
        lora_scale=1.0 if lora is None else lora.scale,
        activation=fusion.activation,
        residual=residual,
        norm=fusion.norm,
        gamma=gamma,
        beta=beta,
        eps=fusion.eps,
        save=save,
        out=out,
    )


class _FusedLinear(torch.autograd.Function):
    """Saves x where the weight or an adapter trains, what the adapter made of it, the activation's input, and the
    norm's result before gamma with 1 / std: it has values around 1, so that rounding it to bf16 costs the same whatever
    the mean was."""

    @staticmethod
    def forward(
        ctx: Any,
        fusion: Fusion,
        packed: _core.PackedMatrix | None,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        addend: torch.Tensor | None,
        lora_a: torch.Tensor | None,
        lora_b: torch.Tensor | None,
        lora_scale: float,
        residual: torch.Tensor | None,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        lora = None if lora_a is None or lora_b is None else LoraPair(lora_a, lora_b, lora_scale)
        out, pre, normalized, inverse_std, low = _compute(
            fusion, packed, x, bias, addend, lora, residual, gamma, beta, True
        )
        trains_lora = lora is not None and (lora.a.requires_grad or lora.b.requires_grad)
        trains = trains_lora or (weight is not None and weight.requires_grad)
        ctx.save_for_backward(
            x if trains else None, pre, normalized, inverse_std, gamma, lora_a, lora_b, low if trains_lora else None
        )
        ctx.fusion = fusion
        ctx.packed = packed
        ctx.lora_scale = lora_scale
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias, gamma, beta)]
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if d_out is None:
            return (None,) * 12
        x, pre, normalized, inverse_std, gamma, lora_a, lora_b, low = saved = ctx.saved_tensors
        fusion: Fusion = ctx.fusion
        weight_type, bias_type, gamma_type, beta_type = ctx.dtypes
        needs_x, needs_weight, needs_bias, needs_addend, needs_a, needs_b = ctx.needs_input_grad[2:8]
        needs_residual, needs_gamma, needs_beta = ctx.needs_input_grad[9:]
        d_x = d_weight = d_bias = d_a = d_b = d_gamma = d_beta = None
        d = d_out.contiguous()
        if fusion.norm != "none":
            d, d_gamma, d_beta = _core.norm_backward(fusion.norm, d, normalized, inverse_std, gamma)
            d_gamma = d_gamma.view(-1).to(gamma_type) if needs_gamma else None
            d_beta = d_beta.view(-1).to(beta_type) if needs_beta else None
        d_residual = d if needs_residual else None
        if ctx.packed is None:
            d_x = d
        elif needs_x or needs_weight or needs_bias or needs_addend or needs_a or needs_b:
            if fusion.activation != "none":
                d = _core.activation_backward(fusion.activation, d, pre)
            trains_lora = needs_a or needs_b
            if needs_x or trains_lora:
                d_x, *_, p = _core.fused_linear(
                    d,
                    ctx.packed,
                    transposed=True,
                    lora_a=lora_a,
                    lora_b=lora_b,
                    lora_scale=ctx.lora_scale,
                    save=trains_lora,
                    low_only=not needs_x,
                )
            if trains_lora:
                assert p is not None  # asked for
                d_a, d_b = _core.low_rank_backward(p, low, x, d)
                d_a, d_b = d_a.to(lora_a.dtype), d_b.to(lora_b.dtype)
            if needs_weight:
                d_weight = torch.mm(d.t(), x).to(weight_type)
            if needs_bias:
                d_bias = d.sum(0, dtype=torch.float32).to(bias_type)
        d_addend = d if needs_addend else None
        grads = (None, None, d_x, d_weight, d_bias, d_addend, d_a, d_b, None, d_residual, d_gamma, d_beta)
        return once(grads, (d_out, *saved))


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _core.silu_mul(x)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return once((_core.silu_mul_backward(d_out.contiguous(), x),), (d_out, x))


class _Attention(torch.autograd.Function):
    """Saves its arguments, the result, and two numbers of each query and head; not the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        first_keys: torch.Tensor | None,
        heads: int,
        key_heads: int,
        scale: float,
        causal: bool,
    ) -> torch.Tensor:
        out, statistics = _core.attention(
            q, k, v, heads, scale, bias, key_heads, causal, save=True, first_keys=first_keys
        )
        ctx.save_for_backward(q, k, v, out, statistics, bias, first_keys)
        ctx.plain = (heads, key_heads, scale, causal)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, statistics, bias, first_keys = saved = ctx.saved_tensors
        heads, key_heads, scale, causal = ctx.plain
        d_qkv = _core.attention_backward(
            d_out.contiguous().view(q.shape),
            q,
            k,
            v,
            out.view(q.shape),
            statistics,
            heads,
            scale,
            bias,
            key_heads,
            causal,
            first_keys,
        )
        grads = [
            grad.view(tensor.shape) if needed else None
            for grad, tensor, needed in zip(d_qkv, (q, k, v), ctx.needs_input_grad[:3], strict=True)
        ]
        return once((*grads, None, None, None, None, None, None), (d_out, *saved))


def once(
    grads: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """`grads`, which refuse to be differentiated again where create_graph asks for it."""
    if not torch.is_grad_enabled():  # create_graph=False
        return grads
    return differentiable_once("moesaic.nn.functional", grads, inputs)


def fused_linear(
    fusion: Fusion,
    packed: _core.PackedMatrix | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    residual: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    out: torch.Tensor | None = None,
    lora: LoraPair | None = None,
) -> torch.Tensor:
    """``norm(activation(x (W + lora)^T + bias + addend) + residual)``, or ``norm(x)`` without `packed`.

    Args:
        x, residual: ``[..., features]``; `addend` is ``[rows, features]``.
        packed: W; `weight` is the tensor it was packed from where that requires a gradient.
        out: where the result goes, 2-D as `x` then; only where nothing requires a gradient.
        lora: a change of bf16 weights, whose a and b have contiguous rows.
    """
    a, b, scale = (None, None, 1.0) if lora is None else (lora.a, lora.b, lora.scale)
    tensors = (x, weight, bias, addend, a, b, residual, gamma, beta)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not train and x.dim() <= 3 and x.is_contiguous() and (residual is None or residual.is_contiguous()):
        return _compute(fusion, packed, x, bias, addend, lora, residual, gamma, beta, False, out)[0]
    features = x.shape[-1] if packed is None else packed.rows
    shape = (*x.shape[:-1], features)
    x = rows_of(x)
    residual = None if residual is None else rows_of(residual)
    if not train:
        return _compute(fusion, packed, x, bias, addend, lora, residual, gamma, beta, False, out)[0].view(shape)
    result: torch.Tensor = _FusedLinear.apply(  # type: ignore[no-untyped-call]
        fusion, packed, x, weight, bias, addend, a, b, scale, residual, gamma, beta
    )
    return result.view(shape)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[rows, features]`` with contiguous features; a view wherever it can be one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(x[:, :I]) * x[:, I:]``; `out` as in `fused_linear`."""
    if torch.is_grad_enabled() and x.requires_grad:
        result: torch.Tensor = _SiluMul.apply(x)  # type: ignore[no-untyped-call]
        return result
    return _core.silu_mul(x, out)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    first_keys: torch.Tensor | None,
    heads: int,
    key_heads: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """``softmax(scale q k^T + bias) v`` head by head.

    Args:
        q: ``[B, T, heads D]``, bf16; `k` and `v` are ``[B, S, key_heads D]``.
        bias: ``[B, S]``, or None; it gets no gradient.
        first_keys: int64 ``[B, T]``, contiguous, or None: the first key that each query sees.
        heads: of queries; `key_heads` divides them.
        scale: of the scores.
        causal: the last query sees all keys, each one before it one less.

    Returns:
        ``[B T, heads D]``.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        result: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            q, k, v, bias, first_keys, heads, key_heads, scale, causal
        )
        return result
    return _core.attention(q, k, v, heads, scale, bias, key_heads, causal, first_keys=first_keys)
