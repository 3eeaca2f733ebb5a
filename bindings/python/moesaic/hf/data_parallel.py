"""Models with released weights inside ``torch.nn.parallel.DistributedDataParallel``.

At first DDP sends all parameters of rank 0 to the others, into a released weight's one element, which fails. Nor is
there a need: each process packs the same checkpoint. The names of what DDP is to pass over it finds in an attribute of
the module that it wraps; PEFT's wrappers show that of the model inside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from moesaic.hf.released import ReleasedParameter

__all__ = ["leave_released_alone", "undo"]

_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"
#: Of a model's own names, in what DDP is given: the model, or PEFT's wrapper of it.
_PREFIXES = ("", "base_model.model.")


class _ReleasedNames:
    """The names of released parameters when they are asked for: PEFT changes them."""

    def __init__(self, model: nn.Module, others: Iterable[str]) -> None:
        self.model = model
        self.others = others

    def __iter__(self) -> Iterator[str]:
        yield from self.others
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, ReleasedParameter):
                yield from (prefix + name for prefix in _PREFIXES)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ReleasedNames:
        return _ReleasedNames(copy.deepcopy(self.model, memo), list(self.others))

    def __reduce__(self) -> Any:
        return list, (list(self.others),)  # pickles have true weights


def leave_released_alone(model: nn.Module) -> None:
    """Lets DDP around `model`, or around PEFT's wrapper of it, pass over parameters whose values the engine has."""
    others = getattr(model, _ATTRIBUTE, [])
    if not isinstance(others, _ReleasedNames):
        setattr(model, _ATTRIBUTE, _ReleasedNames(model, others))


def undo(model: nn.Module) -> None:
    """As before `leave_released_alone`."""
    names = model.__dict__.get(_ATTRIBUTE)
    if isinstance(names, _ReleasedNames):
        if names.others:
            setattr(model, _ATTRIBUTE, names.others)
        else:
            delattr(model, _ATTRIBUTE)
