"""Tokens from logits, on the engine's threads: `sample`, `kept`, `process`; block-diffusion decoding; transformers.

With a temperature T > 0 the distribution of a row x is ``softmax(x / T)``, after the penalties. Filters cut it in
transformers' order, ``top_k, top_p, min_p, typical_p``, each on what the ones before left, renormalised. Tokens are
ordered by logit, largest first, equal ones by index, lower first; so `top_k` keeps exactly k, and `top_p` the fewest
tokens whose probabilities reach it: one stays while those before it sum up to less. The sets are exact for any top_p.

A token of -inf is never kept; tokens of +inf share the probability evenly. A row with a NaN, or of -inf alone, is an
error. ``temperature=0`` is greedy.

Random numbers are Philox4x32-10's, named by (seed, offset, row id, token): a row's token depends on its logits, the
options and these three numbers alone, not on threads or on the other rows. `row_ids` names the rows; without, they are
0, 1, 2, … in the order of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moesaic.sampling.block_diffusion import BlockDiffusion, Decoded
from moesaic.sampling.sampler import Options, kept, process, sample

if TYPE_CHECKING:
    from moesaic.sampling.generation import Sampler, generate

__all__ = ["BlockDiffusion", "Decoded", "Options", "Sampler", "generate", "kept", "process", "sample"]


def __getattr__(name: str) -> Any:
    # transformers is loaded by those who use it.
    if name in ("Sampler", "generate"):
        from moesaic.sampling import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
