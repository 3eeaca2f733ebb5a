"""Block-diffusion decoding: a model that predicts all masked positions at once fills them block by block, the surest
first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch

from moesaic.sampling.sampler import Options, sample

__all__ = ["BlockDiffusion", "Decoded", "Strategy"]

Strategy = Literal["confidence", "margin", "entropy", "sequential"]
_KINDS = {"confidence": "probability", "margin": "margin", "entropy": "entropy", "sequential": None}

#: (logits [n, V], row_ids [n], offset, kind of confidence or None) to (tokens [n], confidence [n] or None).
Draw = Callable[[torch.Tensor, torch.Tensor, int, "str | None"], "tuple[torch.Tensor, torch.Tensor | None]"]


@dataclass(slots=True)
class Decoded:
    """What decoding gave, and where its time went."""

    sequences: torch.Tensor
    """``[B, prompt + new]``: the prompt and what was filled in."""
    steps: int = 0
    """Forward passes of the model."""
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "sample": 0.0, "fill": 0.0})
    """By stage: the model; tokens and their confidence; the choice of positions and filling them in."""


class BlockDiffusion:
    """Fills masked positions of one block after another. In each step the model sees the whole sequence with its masks;
    for every position of the block that is still masked a token is drawn, and the surest of them stay.

    Args:
        block_length: positions in a block.
        denoising_steps: steps for a block; each fills an equal share of it, the first ones one more where it does not
            divide. More than `block_length` count as that.
        strategy: which tokens stay: ``"confidence"``: the most probable ones; ``"margin"``: those furthest ahead of the
            second; ``"entropy"``: those of the least uncertain distributions; ``"sequential"``: the leftmost.
        mask_token_id: what stands for a masked position.
        options: of the distributions drawn from, without penalties; by default greedy.
        threshold: with "confidence", also keeps every token at least so probable: fewer steps where the model is sure.
        shifted: the logits at a position predict the next one, as in Dream; else their own, as in LLaDA.
        eos_token_id: decoding ends once every sequence has one in a filled block; what comes after it becomes that.
        seed: of the random numbers, which are named by it, the step, the sequence and the position.
        draw: another sampler in the place of the engine's, for comparisons.

    Raises:
        ValueError, TypeError: an argument has a wrong value; the message names it.
    """

    def __init__(
        self,
        block_length: int = 32,
        denoising_steps: int = 32,
        strategy: Strategy = "confidence",
        *,
        mask_token_id: int,
        options: Options | None = None,
        threshold: float | None = None,
        shifted: bool = False,
        eos_token_id: int | None = None,
        seed: int = 0,
        draw: Draw | None = None,
    ) -> None:
        for name, value, least in (
            ("block_length", block_length, 1),
            ("denoising_steps", denoising_steps, 1),
            ("mask_token_id", mask_token_id, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is a {type(value).__name__}; expected a whole number")
            if value < least:
                raise ValueError(f"{name} is {value}; expected a whole number >= {least}")
        if strategy not in _KINDS:
            raise ValueError(f"strategy is {strategy!r}; expected one of {', '.join(map(repr, _KINDS))}")
        if threshold is not None and (strategy != "confidence" or not 0 < threshold <= 1):
            raise ValueError(f"threshold is {threshold} for strategy {strategy!r}; expected (0, 1] for 'confidence'")
        options = options or Options(temperature=0.0)
        if (options.repetition_penalty, options.frequency_penalty, options.presence_penalty) != (1.0, 0.0, 0.0):
            raise ValueError("options has penalties; expected none: block diffusion does not apply them")
        self.block_length = block_length
        self.denoising_steps = denoising_steps
        self.strategy = strategy
        self.mask_token_id = mask_token_id
        self.options = options
        self.threshold = threshold
        self.shifted = shifted
        self.eos_token_id = eos_token_id
        self.seed = seed
        self._draw = draw or self._sample

    @torch.no_grad()
    def generate(
        self, model: Callable[..., Any], input_ids: torch.Tensor, max_new_tokens: int = 128, **model_kwargs: Any
    ) -> Decoded:
        """Decodes a batch.

        Args:
            model: called as ``model(ids [B, n], **model_kwargs)``; returns logits ``[B, n, V]``, or an object with
                them as ``logits``. Every position must see all others.
            input_ids: ``[B, prompt]`` int64, the prompts, of one length.
            max_new_tokens: how many positions are filled at most; the last block is shorter where it does not divide.

        Raises:
            ValueError: a wrong shape or value; the logits have a row without a distribution.
        """
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected [B, prompt]")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        batch, prompt = input_ids.shape
        if self.shifted and prompt == 0:
            raise ValueError("input_ids is empty; shifted logits need a token before the first masked one")
        if prompt + max_new_tokens > _POSITIONS:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; prompt and new tokens may be {_POSITIONS} together")
        masks = torch.full((batch, max_new_tokens), self.mask_token_id, dtype=torch.int64, device=input_ids.device)
        decoded = Decoded(torch.cat([input_ids.to(torch.int64), masks], dim=1))
        for begin in range(prompt, prompt + max_new_tokens, self.block_length):
            end = min(begin + self.block_length, prompt + max_new_tokens)
            self._fill_block(model, model_kwargs, decoded, begin, end)
            if self._ended(decoded.sequences, prompt, end):
                break
        return decoded

    def _fill_block(
        self, model: Callable[..., Any], kwargs: dict[str, Any], decoded: Decoded, begin: int, end: int
    ) -> None:
        ids = decoded.sequences
        masked = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        masked[:, begin:end] = True
        length = end - begin
        steps = min(self.denoising_steps, length)
        for step in range(steps):
            share = length // steps + (1 if step < length % steps else 0)
            if not masked.any():
                break
            clock = perf_counter()
            output = model(ids, **kwargs)
            logits = getattr(output, "logits", output)
            clock = _lap(decoded, "model", clock)
            where = masked.nonzero()
            tokens, sureness = self._draw_masked(logits, where, decoded.steps)
            clock = _lap(decoded, "sample", clock)
            self._keep(ids, masked, where, tokens, sureness, length if step == steps - 1 else share)
            _lap(decoded, "fill", clock)
            decoded.steps += 1

    def _draw_masked(
        self, logits: torch.Tensor, where: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token for every masked position (b, i) in `where`, and how sure it is: larger is surer."""
        columns = where[:, 1] - 1 if self.shifted else where[:, 1]
        rows = logits[where[:, 0], columns]
        names = (where[:, 0] * _POSITIONS + where[:, 1]) % 2**32
        kind = _KINDS[self.strategy]
        tokens, confidence = self._draw(rows.to("cpu"), names.to("cpu"), step, kind)
        if confidence is not None and self.strategy == "entropy":
            confidence = -confidence
        return tokens.to(where.device), None if confidence is None else confidence.to(where.device)

    def _sample(
        self, logits: torch.Tensor, row_ids: torch.Tensor, offset: int, kind: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o = self.options
        arguments: dict[str, Any] = {"typical_p": o.typical_p, "row_ids": row_ids, "return_confidence": kind or False}
        result = sample(logits, o.temperature, o.top_k, o.top_p, o.min_p, self.seed, offset, **arguments)
        return (result, None) if kind is None else result

    def _keep(
        self,
        ids: torch.Tensor,
        masked: torch.Tensor,
        where: torch.Tensor,
        tokens: torch.Tensor,
        sureness: torch.Tensor | None,
        share: int,
    ) -> None:
        """Fills in the `share` surest tokens of each sequence, of equally sure ones the leftmost."""
        scores = torch.full(ids.shape, -torch.inf, device=ids.device)
        place = (where[:, 0], where[:, 1])
        scores[place] = -where[:, 1].float() if sureness is None else sureness
        rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        chosen = masked & (rank < share)
        if self.threshold is not None:
            chosen |= masked & (scores >= self.threshold)
        filled = ids.clone()
        filled[place] = tokens
        ids[chosen] = filled[chosen]
        masked &= ~chosen

    def _ended(self, ids: torch.Tensor, prompt: int, end: int) -> bool:
        if self.eos_token_id is None:
            return False
        after = (ids[:, prompt:end] == self.eos_token_id).cumsum(dim=1) > 0
        if not bool(after[:, -1].all()):
            return False
        ids[:, prompt:end][after] = self.eos_token_id
        ids[:, end:] = self.eos_token_id
        return True


#: Positions that have names of their own, for random numbers.
_POSITIONS = 2**20


def _lap(decoded: Decoded, stage: str, since: float) -> float:
    now = perf_counter()
    decoded.seconds[stage] += now - since
    return now
