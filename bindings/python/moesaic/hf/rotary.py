"""Rotary embeddings of transformers' attention layers by the engine.

The forward of such a layer calls a function that stands in the same file, `apply_rotary_pos_emb`. A served layer has
that forward with the engine's function under this name; all other names mean what they mean in that file, and what
`functools.wraps` has put around it stays. The engine gives the same bits (`moesaic.nn.functional.rotary`), which is
tried before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from moesaic.nn import rotary as engine

__all__ = ["restore", "serve"]

_NAME = "apply_rotary_pos_emb"
_DTYPES = (torch.bfloat16, torch.float32)
_Pair = tuple[torch.Tensor, torch.Tensor]

#: Numbers of queries and keys below which PyTorch's five passes take no longer than two calls of the engine: 36 heads
#: of 128, two AMX cores, us, two runs: 1 token 30, 35 and 57, 57, 8 53, 50 and 53, 49, 16 92, 92 and 65, 62.
_FEW = 48 << 10


class _Turning:
    """Stands as ``module.forward``; ``type(module).forward`` is what it replaces."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if isinstance(forward, FunctionType) and not torch.compiler.is_compiling():
            forward = _with_engine(forward)
        return forward(self.module, *args, **kwargs)


class _Names(dict[str, Any]):
    """Names of a file, but for those that are in here."""

    def __init__(self, file: dict[str, Any], **own: Any) -> None:
        super().__init__(own)
        self.file = file

    def __missing__(self, name: str) -> Any:
        return self.file[name]


def _decorated(function: FunctionType) -> FunctionType | None:
    """The function that a decorator made with `functools.wraps` calls; None if `function` is no such decorator, does
    not hold it in its closure, compiles it, or calls `_NAME` itself."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, FunctionType) or inner is function or hasattr(function, "_torchdynamo_orig_callable"):
        return None
    held = any(_holds(cell, inner) for cell in function.__closure__ or ())
    return inner if held and _NAME not in function.__code__.co_names else None


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False


@functools.cache
def _with_engine(forward: FunctionType) -> FunctionType:
    """The function `forward`, for which `_NAME` means the engine's; decorators stay around it (transformers 5.24 has
    one for arguments with older names)."""
    file, cells = forward.__globals__, forward.__closure__ or ()
    inner = _decorated(forward)
    if inner is not None:
        within = _with_engine(inner)
        return _copy(forward, file, tuple(CellType(within) if _holds(cell, inner) else cell for cell in cells))

    def turn(*args: Any, **kwargs: Any) -> _Pair:
        function = file[_NAME]  # as it is now: somebody may have replaced it
        plain = len(args) == 4 and kwargs in ({}, {"unsqueeze_dim": 1})
        served = _served(*args) if plain and _agrees(function) else None
        if served is not None:
            q, k, cos, sin = served
            return engine.turned(q, cos, sin), engine.turned(k, cos, sin)
        pair: _Pair = function(*args, **kwargs)
        return pair

    return _copy(forward, _Names(file, **{_NAME: turn}), cells)


def _copy(function: FunctionType, names: dict[str, Any], cells: tuple[CellType, ...]) -> FunctionType:
    own = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(own, function)
    return own


def _served(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...] | None:
    """What the engine is to turn; None where it may not."""
    if not all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (q, k)) or q.numel() + k.numel() < _FEW:
        return None
    # The heads of a token side by side, as a projection gives them and PyTorch's result would have them.
    if any(t.stride(3) != 1 or t.stride(1) != t.shape[3] for t in (q, k)):
        return None
    if getattr(cos, "dtype", None) == torch.float32:  # under autocast, of a model in fp32, projections are bf16
        q, k = (t.float() if t.dtype == torch.bfloat16 else t for t in (q, k))
    return (q, k, cos, sin) if engine.is_served(q, cos, sin) and engine.is_served(k, cos, sin) else None


def serve(module: nn.Module) -> str | None:
    """Lets the engine turn the queries and keys of an attention layer. None, or why it does not; "" for what is no such
    layer."""
    forward = type(module).forward
    if not isinstance(getattr(module, "is_causal", None), bool) or not isinstance(forward, FunctionType):
        return ""
    while (inner := _decorated(forward)) is not None:
        forward = inner
    function = forward.__globals__.get(_NAME)
    if function is None or _NAME not in forward.__code__.co_names:
        return ""
    if "forward" in module.__dict__:
        return "its forward was replaced already, by somebody else"
    weight = next(module.parameters(), None)
    if weight is None or weight.dtype not in _DTYPES or not weight.is_cpu:
        return "its weights are not bfloat16 or float32 on the CPU, where the engine turns queries and keys"
    size = getattr(module, "head_dim", 32)
    if size % 32 != 0:
        return f"its heads have {size} numbers, which its rotary embeddings turn; expected a multiple of 32"
    if hasattr(module, "qk_rope_head_dim") or _share(getattr(module, "config", None)) != 1:
        return "its rotary embeddings turn a part of each head"
    if not _agrees(function):
        return "its rotary embeddings are of another kind"
    module.__dict__["forward"] = _Turning(module)
    return None


def restore(module: nn.Module) -> bool:
    """Undoes `serve`; whether there was anything to undo."""
    if not isinstance(module.__dict__.get("forward"), _Turning):
        return False
    del module.__dict__["forward"]
    return True


def _share(config: Any) -> float:
    """Of a head's numbers that are turned."""
    parameters = getattr(config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return 1.0 if share is None else float(share)


@functools.cache
def _agrees(function: Callable[..., _Pair]) -> bool:
    """Whether `function` gives what the engine does, on heads of queries and of keys with angles of their own."""
    random = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        for shape in ((2, 3, 5, 64), (2, 1, 5, 64), (2, 5, 64), (2, 5, 64))
    )
    with torch.no_grad():
        try:
            stock = list(function(q, k, cos, sin))
        except Exception:  # of other arguments, or of another device
            return False
        found = [engine.rotary(x, cos, sin) for x in (q, k)]
        return len(stock) == 2 and all(
            isinstance(theirs, torch.Tensor) and torch.equal(theirs, ours)
            for theirs, ours in zip(stock, found, strict=True)
        )
