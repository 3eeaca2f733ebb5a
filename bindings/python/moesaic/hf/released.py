"""Base weights whose only copy is the engine's.

A released parameter keeps its place, shape, dtype and device, over one element of memory (a view with zero strides:
PEFT, the Trainer, ``.to()`` and parameter counts go on working, which they do not with meta or empty tensors or deleted
attributes). Its values are unpacked from the engine when something reads them, so that saving the model, pickling it or
merging an adapter with ``safe_merge`` meets the true weights and never zeros. Writing to it is an error. Moving it to
another device (``.to()``, ``.cuda()``, accelerate's hooks in every forward) moves the one element.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moesaic.hf.blocks import IMPLEMENTATION, WEIGHTS, implementation
from moesaic.layer import ExpertsLayer

__all__ = ["ReleasedBlock", "ReleasedParameter", "ReleasedWeight", "is_released", "release_block", "restore_block"]

# What may be asked of a released weight without its values.
_PASSIVE = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__", "is_same_size"),
        *("stride", "storage_offset", "is_contiguous", "storage", "untyped_storage", "_typed_storage", "data_ptr"),
        *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "get_device"),
        *("is_pinned", "is_shared", "has_names", "_is_view", "_has_compatible_shallow_copy_type", "__hash__"),
        *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook"),
    )
)
# Moves, as long as the dtype stays; with any other argument they read the values.
_MOVES = frozenset(("to", "cpu", "cuda"))
_MOVE_ARGUMENTS = frozenset(("device", "dtype", "non_blocking", "copy"))
_IN_PLACE_OPERATOR = re.compile("__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
# Attributes that are views of the values.
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where the values of a released weight are."""

    layer: ExpertsLayer
    index: int
    """0: gate_up_proj, 1: down_proj."""

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, in new memory."""
        return self.layer.unpack(dtype)[self.index]


class ReleasedWeight(torch.Tensor):
    """A weight whose values are in the engine; see the module's text."""

    _moesaic_source: Source

    @property
    def source(self) -> Source:
        """Where the values are."""
        return self._moesaic_source

    def values(self) -> torch.Tensor:
        """The weight as an ordinary tensor, unpacked into new memory."""
        return self.source.unpack(self.dtype).to(self.device)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Metadata comes from the view, values from the engine; writing is refused."""
        kwargs = kwargs or {}
        name, attribute = func.__name__, None
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if _writes(name, attribute, args, kwargs):
            raise ValueError(
                "a base weight of an experts block was released to the moesaic engine and cannot be written to "
                f"(by {attribute or name}): call moesaic.hf.restore(model) first"
            )
        if name == "detach" or (name == "__get__" and attribute == "data"):
            return _weight_like(args[0])
        if name in _PASSIVE or (attribute is not None and attribute not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _MOVES:
            moved = _moved(func, args, kwargs)
            if moved is not None:
                return moved
        args, kwargs = tree_map_only(ReleasedWeight, ReleasedWeight.values, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedWeight:
        if id(self) not in memo:
            memo[id(self)] = _weight_like(self)
        result: ReleasedWeight = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(self.values(), protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, values in the moesaic engine)"


class ReleasedParameter(ReleasedWeight, nn.Parameter):
    """A released parameter of an experts block."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
        """What ``type(parameter)(data)`` gives, as accelerate calls it: released if `data` is, else an ordinary one."""
        if isinstance(data, ReleasedWeight):
            return _claim(nn.Parameter(_placeholder(data), requires_grad), data.source)
        return nn.Parameter(data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedWeight:
        if id(self) not in memo:
            parameter = nn.Parameter(_placeholder(self), self.requires_grad)
            memo[id(self)] = _claim(parameter, self.source)
        result: ReleasedParameter = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce(nn.Parameter(self.values(), self.requires_grad), protocol)


class ReleasedBlock:
    """What an experts block can do besides while its weights are released: mixed in before its own class."""

    _writable: Callable[[nn.Module], AbstractContextManager[None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, unless it would run on something else than the engine."""
        name = implementation(self)  # type: ignore[arg-type]
        if name != IMPLEMENTATION:
            raise ValueError(
                f"experts_implementation is {name!r}, but the base weights of {type(self).__name__} were released to "
                f"the moesaic engine: call moesaic.hf.restore(model) first, or set it to {IMPLEMENTATION!r}"
            )
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # .to(dtype), .cuda() and the like would give the view its full size back.
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        released = {name: p for name, p in parameters.items() if isinstance(p, ReleasedParameter)}
        parameters.update(dict.fromkeys(released))
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            parameters.update(released)
        for name, parameter in released.items():
            with torch.no_grad():
                one = fn(torch.zeros(1, dtype=parameter.dtype, device=parameter.device))
            if torch._has_compatible_shallow_copy_type(parameter, one):
                _set_data(parameter, one.expand(parameter.shape))
            else:
                moved = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
                parameters[name] = _claim(moved, parameter.source)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        load = super()._load_from_state_dict  # type: ignore[misc]
        if not any(prefix + name in state_dict for name in WEIGHTS):
            load(state_dict, prefix, *args)
            return
        with self._writable(self):  # type: ignore[arg-type]
            load(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReleasedBlock:
        # Not through __reduce_ex__, which would unpack the weights.
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle holds the true weights, and what it loads is an ordinary block.
        return _ordinary_block, (_original_class(type(self)), self.__dict__.copy())


def is_released(block: nn.Module) -> bool:
    """Whether some base weight of `block` is the engine's alone."""
    return isinstance(block, ReleasedBlock)


def release_block(
    block: nn.Module, layer: ExpertsLayer, writable: Callable[[nn.Module], AbstractContextManager[None]]
) -> int:
    """Frees the base weights of `block`, which `layer` holds packed.

    Args:
        block: the experts block.
        layer: its packed weights.
        writable: makes the parameters ordinary ones for a while, to load a state into them.

    Returns:
        Bytes that the parameters held and hold no longer.
    """
    freed = 0
    for index, name in enumerate(WEIGHTS):
        parameter = block._parameters[name]
        assert parameter is not None
        if isinstance(parameter, ReleasedParameter):
            continue
        freed += parameter.nbytes
        _set_data(parameter, _placeholder(parameter))
        _claim(parameter, Source(layer, index))
    if not is_released(block):
        block.__class__ = _released_class(type(block), writable)
    return freed


def restore_block(block: nn.Module) -> None:
    """Gives `block` its base weights back, as the engine holds them, in the parameters' own dtype and device."""
    released = {n: p for n, p in block._parameters.items() if isinstance(p, ReleasedParameter)}
    unpacked: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
    for parameter in released.values():
        source = parameter.source
        key = (id(source.layer), parameter.dtype)
        if key not in unpacked:
            unpacked[key] = source.layer.unpack(parameter.dtype)
        data = unpacked[key][source.index].to(parameter.device)
        del parameter._moesaic_source
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        parameter.data = data
    if is_released(block):
        block.__class__ = _original_class(type(block))


_released_classes: dict[type, type] = {}


def _released_class(original: type, writable: Callable[[nn.Module], AbstractContextManager[None]]) -> type:
    if original not in _released_classes:
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        names["_writable"] = staticmethod(writable)
        # Under its own name: transformers, accelerate and PEFT look classes up by it.
        _released_classes[original] = type(original.__name__, (ReleasedBlock, original), names)
    return _released_classes[original]


def _original_class(released: type) -> type[Any]:
    return released.__bases__[1]


def _ordinary_block(original: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    block = original.__new__(original)
    block.__dict__.update(state)
    return block


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _weight_like(weight: ReleasedWeight, one: torch.Tensor | None = None) -> ReleasedWeight:
    placeholder = _placeholder(weight) if one is None else one.expand(weight.shape)
    result = placeholder.as_subclass(ReleasedWeight)
    result._moesaic_source = weight.source
    return result


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReleasedWeight | None:
    """`args[0]` where `func` would move it to, its values still in the engine; None where they are asked for."""
    weight = args[0]
    others = (*args[1:], *kwargs.values())
    if any(isinstance(other, torch.Tensor) for other in others) or not kwargs.keys() <= _MOVE_ARGUMENTS:
        return None
    origin = "cpu" if weight.is_meta else weight.device  # the values are in the engine, wherever the view is
    one: torch.Tensor = func(torch.zeros(1, dtype=weight.dtype, device=origin), *args[1:], **kwargs)
    if one.dtype != weight.dtype:
        return None
    if one.device == weight.device:
        return weight  # type: ignore[no-any-return]
    return _weight_like(weight, one)


def _claim(parameter: nn.Parameter, source: Source) -> ReleasedParameter:
    # In place, as torch itself turns an uninitialized parameter into one: whoever holds the parameter keeps it.
    parameter.__class__ = ReleasedParameter
    assert isinstance(parameter, ReleasedParameter)
    parameter._moesaic_source = source
    return parameter


def _set_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = data


def _reduce(tensor: torch.Tensor, protocol: Any) -> Any:
    return torch.Tensor.__reduce_ex__(tensor, protocol)  # type: ignore[no-untyped-call]


def _writes(name: str, attribute: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(kwargs.get("out"), ReleasedWeight):
        return True
    written = args[0] if args else None
    if isinstance(written, (list, tuple)):
        written = next((item for item in written if isinstance(item, ReleasedWeight)), None)
    if not isinstance(written, ReleasedWeight):
        return False
    if attribute is not None:
        return name == "__set__" and attribute == "data"
    in_place = name.endswith("_") and not name.endswith("__") and name not in _PASSIVE
    return in_place or name == "__setitem__" or _IN_PLACE_OPERATOR.fullmatch(name) is not None
