"""The sampler: what is kept of a distribution, what is drawn from it, and how sure that was."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, overload

import torch

from moesaic import _core

__all__ = ["Confidence", "Options", "kept", "process", "sample"]

Confidence = Literal["probability", "margin", "entropy"]


@dataclass(frozen=True, slots=True)
class Options:
    """What makes a distribution of logits; see `sample`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@overload
def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    return_confidence: Literal[False] = False,
    *,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    context: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    *,
    return_confidence: Literal[True] | Confidence,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    context: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    return_confidence: bool | Confidence = False,
    *,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    context: torch.Tensor | None = None,
    row_ids: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draws one token for each row.

    Args:
        logits: ``[rows, V]`` bf16, fp16 or fp32 on the CPU, any strides; only read.
        temperature: 0: greedy, the first of the largest logits.
        top_k: keeps the k most probable tokens; 0: off.
        top_p: in (0, 1]: keeps the fewest most probable tokens whose probabilities reach it.
        min_p: in [0, 1]: keeps tokens at least so many times as probable as the most probable one.
        seed: of the random numbers, 0 to 2^64 - 1.
        offset: which draw of that seed, 0 to 2^64 - 1: the number of the step, say.
        return_confidence: also return, of the distribution drawn from (filtered and renormalised; with temperature 0
            softmax(logits)): True or ``"probability"``: the token's probability; ``"margin"``: the largest probability
            less the second largest; ``"entropy"``: its entropy in nats.
        typical_p: in (0, 1]: keeps the fewest tokens nearest to the distribution's entropy that reach it.
        repetition_penalty: > 0: divides logits >= 0 and multiplies others, for tokens in `context`.
        frequency_penalty: is subtracted as often as the token is in `context`.
        presence_penalty: is subtracted where the token is in `context`.
        context: ``[rows, n]`` int64 or int32: the tokens so far; numbers outside [0, V) are padding.
        row_ids: ``[rows]`` int64 or int32 from 0 to 2^32 - 1: names the rows for the random numbers.

    Returns:
        Token ids ``[rows]`` int64, and with `return_confidence` also that, ``[rows]`` fp32.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or value, or a row has no distribution (a NaN, or
            -inf alone); the message names it.
    """
    ids = torch.empty(_rows(logits), dtype=torch.int64)
    confidence = torch.empty(ids.shape[0], dtype=torch.float32) if return_confidence else None
    for name, number in (("seed", seed), ("offset", offset)):
        if type(number) is not int:
            _check_number(name, number, whole=True)
        if not 0 <= number < 2**64:
            raise ValueError(f"{name} is {number}; expected 0 to 2^64 - 1")
    _run(
        logits,
        (temperature, top_k, top_p, min_p, typical_p),
        (repetition_penalty, frequency_penalty, presence_penalty),
        context,
        stream=(seed, offset, row_ids),
        ids=ids,
        confidence=confidence,
        kind=return_confidence if isinstance(return_confidence, str) else "probability",
    )
    return ids if confidence is None else (ids, confidence)


def kept(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    context: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which tokens `sample` draws from: a boolean mask ``[rows, V]``. Arguments and errors as there."""
    rows = _rows(logits)
    mask = torch.empty((rows, logits.shape[1]), dtype=torch.bool)
    _run(
        logits,
        (temperature, top_k, top_p, min_p, typical_p),
        (repetition_penalty, frequency_penalty, presence_penalty),
        context,
        mask=mask.view(torch.uint8).view(-1),
    )
    return mask


def process(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    context: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What transformers' processors would leave: penalised logits over the temperature where kept, -inf elsewhere.

    Args:
        out: where they are written, in the shape and dtype of `logits`; `logits` itself: in place. None: a new tensor.

    Returns:
        `out`, or the new tensor. With temperature 0 the token's logit and -inf. Other arguments and errors as in
        `sample`.
    """
    _rows(logits)
    scores = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    _run(
        logits,
        (temperature, top_k, top_p, min_p, typical_p),
        (repetition_penalty, frequency_penalty, presence_penalty),
        context,
        scores=scores,
    )
    return scores


def _rows(logits: torch.Tensor) -> int:
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits is a {type(logits).__name__}; expected a torch.Tensor")
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}; expected [rows, V]")
    return logits.shape[0]


_Filters = tuple[float, int, float, float, float]
_Penalties = tuple[float, float, float]
_FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


_PLAIN = frozenset((int, float))


def _check_number(name: str, value: object, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a {'whole ' if whole else ''}number")


def _run(
    logits: torch.Tensor,
    filters: _Filters,
    penalties: _Penalties,
    context: torch.Tensor | None,
    *,
    stream: tuple[int, int, torch.Tensor | None] = (0, 0, None),
    ids: torch.Tensor | None = None,
    confidence: torch.Tensor | None = None,
    kind: str = "probability",
    mask: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> None:
    """The one call of the engine. Checks types, and what has no place in C++; values are checked there."""
    numbers = (*filters, *penalties)
    # Asking one by one what they are takes a microsecond of a call's five.
    if type(filters[1]) is not int or not _PLAIN.issuperset(map(type, numbers)):
        for name, value in zip((*_FILTERS, *_PENALTIES), numbers, strict=True):
            _check_number(name, value, whole=name == "top_k")
    if not -(2**63) <= filters[1] < 2**63:
        raise ValueError(f"top_k is {filters[1]}; expected a whole number >= 0 (0: off)")
    if context is None and penalties != (1.0, 0.0, 0.0):
        raise ValueError("context is missing; penalties need the tokens so far, [rows, n]")
    _core.sample(logits, filters, penalties, context, stream, ids, confidence, kind, mask, scores)
