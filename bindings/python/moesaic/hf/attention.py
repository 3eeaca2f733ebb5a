"""Attention of encoders and of decoders in transformers by the engine.

transformers looks up by name, in each call, the function that computes a layer's attention: the name is in the layer's
configuration. A served layer has a copy of that with the engine's name; masks are made as before.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from moesaic.hf.operators import product_dtype
from moesaic.nn import functional
from moesaic.nn.attention import MANY_QUERIES, is_served

__all__ = ["attention_forward", "register", "restore", "serve"]

_NAME = "moesaic"
_KEPT = "_moesaic_config"  # of a served layer: its configuration as it was


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``AttentionInterface``'s function: the engine where it computes the same, else transformers' own "sdpa".

    Returns:
        ``[B, T, heads, D]``, and None for the attention weights.
    """
    config = module.__dict__.get(_KEPT)
    if config is not None and config._attn_implementation != "sdpa":  # set_attn_implementation was called since
        found: tuple[torch.Tensor, torch.Tensor | None] = _set_since(module)(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **({} if is_causal is None else {"is_causal": is_causal}),
            **kwargs,
        )
        return found
    if torch.is_autocast_enabled("cpu") and query.is_cpu:  # what it does before PyTorch's own
        query, key, value = (t.to(product_dtype(t.dtype)) for t in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    number = scaling is None or (isinstance(scaling, (int, float)) and math.isfinite(scaling))
    plain = (
        number
        and dropout == 0.0
        and not any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap", "s_aux"))
    )
    # Without a mask the first token of a prompt sees the first key.
    causal = causal and attention_mask is None and query.shape[2] > 1
    if plain and not (causal and query.shape[2] > key.shape[2]) and _may_run(query, key, value):
        seen: _Seen | None = _Seen(query.shape[2] if causal else key.shape[2], causal=causal)
        if attention_mask is not None:
            seen = _read(attention_mask, query.shape[0], query.shape[2], key.shape[2])
        if seen is not None and (seen.first is None or query.shape[2] >= MANY_QUERIES):
            key, value = key[:, :, : seen.there], value[:, :, : seen.there]
            out = functional.attention(query, key, value, scaling, seen.keys, seen.causal, seen.first)
            return out.transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return stock


def _may_run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    if any(not t.is_cpu or t.dtype != query.dtype or t.dim() != 4 for t in (query, key, value)):
        return False
    same = query.shape[0] == key.shape[0] and key.shape == value.shape and query.shape[3] == key.shape[3]
    divides = key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    return same and divides and is_served(query, key, value)


class _Seen(NamedTuple):
    """Which keys queries see, as `moesaic.nn.functional.attention` takes it."""

    there: int
    """Keys up to the last one that any query sees: those behind are not there yet, of a cache of a fixed length."""
    keys: torch.Tensor | None = None
    causal: bool = False
    first: torch.Tensor | None = None


#: The last masks that were looked at, and what came of them: layers of a kind have the same one. Replaced as a whole,
#: for other threads have models and masks of their own.
_last: tuple[tuple[weakref.ref[torch.Tensor], int, tuple[int, int, int], _Seen | None], ...] = ()
_KEPT_MASKS = 4


def _read(mask: torch.Tensor, batch: int, queries: int, keys: int) -> _Seen | None:
    """`_read_mask`, once for all layers."""
    global _last
    if mask.is_inference():  # such tensors do not tell when they change
        return _read_mask(mask, batch, queries, keys)
    sizes = (batch, queries, keys)
    for entry in _last:
        if entry[0]() is mask and entry[1:3] == (mask._version, sizes):
            return entry[3]
    with torch.inference_mode(False):  # training may meet the same mask
        found = _read_mask(mask, batch, queries, keys)
    _last = ((weakref.ref(mask), mask._version, sizes, found), *_last[: _KEPT_MASKS - 1])
    return found


def _read_mask(mask: torch.Tensor, batch: int, queries: int, keys: int) -> _Seen | None:
    """What a mask says of padding (all queries see the same keys), of each query that sees none behind its own, and of
    sequences that share a row or windows (none before the first). None for any other mask."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] != keys:
        return None
    if mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries):
        return None
    seen = mask[:, 0]
    at = seen[:, -1].any(0).nonzero()
    count = int(at[-1]) + 1 if len(at) > 0 else keys
    if mask.stride(2) == 0 or mask.shape[2] == 1 or bool((seen == seen[:, -1:]).all()):
        return _Seen(count, seen[:, -1, :count].clone().expand(batch, count))  # not to keep the whole mask
    if queries == keys:
        count = keys  # padding at the end of all sequences is no end of a cache
    if queries > count or bool(seen[..., count:].any()) or bool(seen[:, 0, count - queries + 1 :].any()):
        return None
    seen = seen[..., :count]
    someone = seen.any(1)
    key = torch.arange(count, device="cpu")
    expected = someone[:, None] & (key <= key[count - queries :, None])
    padding = None if bool(someone.all()) else someone.expand(batch, count)
    if torch.equal(seen, expected):
        return _Seen(count, padding, causal=True)
    first = torch.from_numpy(seen.numpy().argmax(-1))  # which, unlike PyTorch's, stops at the first
    first.masked_fill_((first == 0) & ~seen[..., 0], count)  # there is none
    expected &= key >= first[..., None]
    if torch.equal(seen, expected):
        return _Seen(count, padding, causal=True, first=first.expand(batch, queries))
    return None


def _set_since(module: Any) -> Any:
    """The function of the implementation that the model was set to; the layer is no longer served."""
    from transformers import AttentionInterface

    restore(module)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(module.config._attn_implementation, eager)


def register() -> None:
    """Makes the engine's function known to transformers by its name, with the masks of "sdpa"."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_NAME, attention_forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)


@functools.cache
def _only_looks_up(kind: type) -> bool:
    """Whether the name of the implementation chooses the function that computes attention, and nothing else that "sdpa"
    would choose: Falcon and those that select keys compare it themselves."""
    try:
        text = "".join(
            inspect.getsource(c) for c in kind.__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")
        )
    except (OSError, TypeError):
        return False
    name = r"(?:self\.)?config\._attn_implementation"
    text, lookups = re.subn(rf"get_interface\(\s*{name}|ALL_ATTENTION_FUNCTIONS\[\s*{name}", "", text)
    text = re.sub(rf'{name}\s*[!=]=\s*"eager"', "", text)  # which neither name is
    return lookups > 0 and "_attn_implementation" not in text


def serve(module: nn.Module) -> str | None:
    """Lets the engine compute the attention of a layer. None, or why it does not; "" for what is no such layer."""
    config: Any = getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if not isinstance(getattr(module, "is_causal", None), bool) or name is None:
        return ""
    if name != "sdpa":
        return f"its attention is {name!r}; expected 'sdpa'"
    if not _only_looks_up(type(module)):  # type: ignore[arg-type]
        return "its class does not use the name of its attention to look a function up, or not for that alone"
    dtype = next((p.dtype for p in module.parameters()), None)
    if dtype not in (torch.bfloat16, torch.float32):
        return f"its weights are {str(dtype).removeprefix('torch.')}; expected bfloat16 or float32"
    own = copy.copy(config)
    own._attn_implementation_internal = _NAME  # without what it does to configurations inside of this one
    module.__dict__[_KEPT] = config
    module.config = own
    return None


def restore(module: nn.Module) -> bool:
    """Undoes `serve`; whether there was anything to undo."""
    config = module.__dict__.pop(_KEPT, None)
    if config is None:
        return False
    module.config = config
    return True
