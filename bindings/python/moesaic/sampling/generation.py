"""The sampler inside transformers' ``generate()``.

``model.generate(..., custom_generate=moesaic.sampling.generate)`` decodes as usual, with its own cache, stopping
criteria and processors; penalty, temperature, filters and the draw are the engine's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from moesaic.sampling.sampler import Options, sample

__all__ = ["Sampler", "generate", "options_of"]


class Sampler(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Draws a token for each row, and leaves it alone: its score is 0, all others are -inf. Whatever picks a token
    afterwards, argmax or multinomial, finds this one.

    Args:
        options: of the distribution; the penalties' context are the tokens so far.
        seed: of the random numbers. The offset is the number of tokens so far, the row's id its place in the batch, so
            a call with the same arguments gives the same token.
        reuse: write into one tensor again and again; not where the scores of several steps are kept.
    """

    def __init__(self, options: Options, seed: int = 0, reuse: bool = False) -> None:
        self.options = options
        self.seed = seed
        self._reuse = reuse
        self._scores: torch.Tensor | None = None
        self._drawn: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``[rows, n]`` tokens so far and ``[rows, V]`` logits to scores of the logits' shape, dtype and device."""
        o = self.options
        penalised = (o.repetition_penalty, o.frequency_penalty, o.presence_penalty) != (1.0, 0.0, 0.0)
        drawn = sample(
            scores.to("cpu"),
            o.temperature,
            o.top_k,
            o.top_p,
            o.min_p,
            self.seed,
            input_ids.shape[1],
            typical_p=o.typical_p,
            repetition_penalty=o.repetition_penalty,
            frequency_penalty=o.frequency_penalty,
            presence_penalty=o.presence_penalty,
            context=input_ids.to("cpu") if penalised else None,
        )
        index = drawn.to(scores.device)[:, None]
        result = self._empty(scores)
        self._drawn = index
        return result.scatter_(1, index, 0.0)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        known = self._scores
        if known is not None and (known.shape, known.dtype, known.device) == (like.shape, like.dtype, like.device):
            assert self._drawn is not None  # set with it
            return known.scatter_(1, self._drawn, -math.inf)
        scores = torch.full_like(like, -math.inf, memory_format=torch.contiguous_format)
        if self._reuse:
            self._scores = scores
        return scores


def options_of(processors: Sequence[Any]) -> tuple[list[Any], Options]:
    """Divides transformers' processors into those that the engine takes over, the last ones, and those before them.

    The engine's are, in this order and with nothing between: repetition penalty, temperature, top-k, top-p, min-p,
    typical-p, as ``generate()`` makes them of its arguments.

    Returns:
        What is left to run before the engine, and the engine's options.
    """
    options = Options()
    stage = len(_ORDER)
    cut = len(processors)
    for processor in reversed(processors):
        place = _place(processor)
        if place is None or place >= stage:
            break
        stage, cut = place, cut - 1
        name, attribute = _ORDER[place][1:]
        options = replace(options, **{name: getattr(processor, attribute)})
    return list(processors[:cut]), options


_ORDER: tuple[tuple[type, str, str], ...] = (
    (RepetitionPenaltyLogitsProcessor, "repetition_penalty", "penalty"),
    (TemperatureLogitsWarper, "temperature", "temperature"),
    (TopKLogitsWarper, "top_k", "top_k"),
    (TopPLogitsWarper, "top_p", "top_p"),
    (MinPLogitsWarper, "min_p", "min_p"),
    (TypicalLogitsWarper, "typical_p", "mass"),
)


def _place(processor: Any) -> int | None:
    """Its place in _ORDER; None for one that the engine does not take over."""
    for place, (kind, _, _) in enumerate(_ORDER):
        if type(processor) is not kind:
            continue
        plain = (
            getattr(processor, "min_tokens_to_keep", 1) == 1
            and getattr(processor, "filter_value", -math.inf) == -math.inf
            and getattr(processor, "prompt_ignore_length", None) is None
        )
        top_p = getattr(processor, "top_p", 1.0)
        return place if plain and top_p > 0 else None
    return None


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: Any,
    sampling_seed: int = 0,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=moesaic.sampling.generate, sampling_seed=0)``.

    Takes ``do_sample`` and its options, and greedy decoding. Of equal logits the lower token comes first, so that top-k
    keeps exactly k where transformers keeps all equal ones. With ``output_scores`` the scores are 0 for the drawn token
    and -inf elsewhere; ``output_logits`` are the model's.

    Raises:
        ValueError: beam search.
    """
    if getattr(generation_config, "num_beams", 1) not in (None, 1):
        raise ValueError(f"num_beams is {generation_config.num_beams}; expected 1: one sequence a row")
    others, options = options_of(logits_processor)
    if not generation_config.do_sample:
        options = replace(options, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
    config = copy.deepcopy(generation_config)
    config.do_sample = False  # what is left is to take the one token with a score
    keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
    processors = LogitsProcessorList([*others, Sampler(options, sampling_seed, reuse=not keeps_scores)])
    return model._sample(input_ids, processors, stopping_criteria, config, **model_kwargs)
