"""Rotary embeddings of transformers' attention layers by the engine.

A layer's forward calls a function of the file that its class stands in, `apply_rotary_pos_emb`. While a layer of that
file is served the engine's stands in its place, which gives the same to the last bit; it is tried before.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from moesaic.nn import rotary as engine

__all__ = ["restore", "serve"]

_NAME = "apply_rotary_pos_emb"
_Pair = tuple[torch.Tensor, torch.Tensor]


class _Rotary:
    """`apply_rotary_pos_emb` by the engine, where it computes the same, else as it was; and the layers that want it."""

    def __init__(self, function: Callable[..., _Pair]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> _Pair:
        plain = not args and kwargs.keys() <= {"unsqueeze_dim"} and kwargs.get("unsqueeze_dim", 1) == 1
        wanted = len(self.layers) > 0 and plain and all(isinstance(t, torch.Tensor) for t in (q, k, cos, sin))
        if wanted and engine.is_served(q, cos, sin) and engine.is_served(k, cos, sin):
            return engine.rotary(q, cos, sin), engine.rotary(k, cos, sin)
        return self.function(q, k, cos, sin, *args, **kwargs)


_lock = threading.Lock()


def serve(module: nn.Module) -> str | None:
    """Lets the engine turn the queries and keys of an attention layer. None, or why it does not; "" for what is no such
    layer."""
    with _lock:
        file, function = _find(module)
        if file is None or function is None:
            return ""
        size = getattr(module, "head_dim", 32)
        if size % 32 != 0:
            return f"its heads have {size} numbers, which its rotary embeddings turn; expected a multiple of 32"
        if not isinstance(function, _Rotary):
            if not _agrees(function):
                return "its rotary embeddings are of another kind"
            function = _Rotary(function)
            setattr(file, _NAME, function)
        function.layers.add(module)
        return None


def restore(module: nn.Module) -> bool:
    """Undoes `serve`; whether there was anything to undo."""
    with _lock:
        file, function = _find(module)
        if file is None or not isinstance(function, _Rotary) or module not in function.layers:
            return False
        function.layers.discard(module)
        if len(function.layers) == 0:
            setattr(file, _NAME, function.function)
        return True


def _find(module: nn.Module) -> tuple[ModuleType | None, Any]:
    """The file of the layer's class, and the function there that its forward calls."""
    kind = type(module)
    code = getattr(kind.forward, "__code__", None)
    if not isinstance(getattr(module, "is_causal", None), bool) or code is None or _NAME not in code.co_names:
        return None, None
    file = sys.modules.get(kind.__module__)
    return file, getattr(file, _NAME, None)


def _agrees(function: Callable[..., _Pair]) -> bool:
    """Whether `function` gives what the engine does, on heads of queries and of keys with angles of their own."""
    random = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        for shape in ((2, 3, 5, 64), (2, 1, 5, 64), (2, 5, 64), (2, 5, 64))
    )
    with torch.no_grad():
        try:
            stock = function(q, k, cos, sin)
            pairs = list(zip(stock, (q, k), strict=True))
            return all(torch.equal(theirs, engine.rotary(ours, cos, sin)) for theirs, ours in pairs)
        except Exception:  # of other arguments, results or devices
            return False
