"""What is run: the question of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesaic.perf.fields import one_of, whole

__all__ = ["Inference", "Phase"]

Phase = Literal["prefill", "decode", "train"]


@dataclass(frozen=True)
class Inference:
    """What is run.

    Attributes:
        phase: 'prefill': the prompt, and then `decode_tokens`; 'decode': these alone, behind a context of `tokens`;
            'train': one step.
        tokens: of each sequence.
        batch: sequences.
        decode_tokens: tokens that each sequence goes on with.
        lora_rank: of the adapters on attention and experts; only read in training and where they stay apart.
        recompute: training computes forward again in backward instead of saving activations.
    """

    phase: Phase = "prefill"
    tokens: int = 128
    batch: int = 1
    decode_tokens: int = 0
    lora_rank: int = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        one_of("phase", self.phase, ("prefill", "decode", "train"))
        whole("tokens", self.tokens, 1)
        whole("batch", self.batch, 1)
        whole("decode_tokens", self.decode_tokens, 1 if self.phase == "decode" else 0)
        whole("lora_rank", self.lora_rank, 0)
        if self.phase == "train" and self.decode_tokens:
            raise ValueError(f"decode_tokens is {self.decode_tokens}; expected 0 with phase 'train'")
