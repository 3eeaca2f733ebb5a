"""What else draws tokens from logits: transformers' pipeline, the same compiled, NumPy; and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moesaic.commands.compiled import compile_for
from moesaic.commands.variants import UnavailableError

Setting = Mapping[str, Any]
Call = Callable[[torch.Tensor], object]


def pipeline(setting: Setting) -> Call:
    """transformers' processors for this setting, softmax, multinomial: what ``generate(do_sample=True)`` does with the
    logits of a step."""
    try:
        from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
    except ImportError as error:
        raise UnavailableError("transformers is not installed") from error
    processors = LogitsProcessorList()
    if setting.get("top_k"):
        processors.append(TopKLogitsWarper(setting["top_k"]))
    if setting.get("top_p", 1.0) < 1:
        processors.append(TopPLogitsWarper(setting["top_p"]))
    no_ids = torch.zeros(1, 1, dtype=torch.int64)

    def draw(logits: torch.Tensor) -> torch.Tensor:
        scores = processors(no_ids, logits.float())
        return torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    return draw


def compiled(setting: Setting, example: torch.Tensor) -> Call:
    """The same through torch.compile, compiled for the shape of `example`."""
    return compile_for(pipeline(setting), example, dynamic=False)


def numpy(setting: Setting) -> Call:
    """One row after another on one thread: partition for top-k, a sort for top-p, Gumbel noise for the draw."""
    import numpy as np

    random = np.random.default_rng(0)
    top_k, top_p = setting.get("top_k", 0), setting.get("top_p", 1.0)

    def draw_row(x: Any) -> int:
        ids = np.argpartition(x, -top_k)[-top_k:] if top_k else None
        kept = x if ids is None else x[ids]
        if top_p < 1:
            order = np.argsort(-kept)
            p = np.exp(kept[order] - kept[order[0]])
            before = np.cumsum(p) - p
            order = order[: np.searchsorted(before, top_p * p.sum())]
            kept, ids = kept[order], order if ids is None else ids[order]
        best = int(np.argmax(kept + random.gumbel(size=kept.shape).astype(np.float32)))
        return best if ids is None else int(ids[best])

    return lambda logits: [draw_row(row) for row in logits.float().numpy()]


def reference_kept(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """The tokens that a setting keeps, by sorting in double precision."""
    values, order = logits.double().sort(dim=-1, descending=True, stable=True)
    weights = (values - values[:, :1]).exp()
    top_k = setting.get("top_k") or logits.shape[1]
    weights[:, top_k:] = 0
    before = weights.cumsum(-1) - weights
    keep = torch.ones_like(weights, dtype=torch.bool)
    if setting.get("top_p", 1.0) < 1:
        keep = before < setting["top_p"] * weights.sum(-1, keepdim=True)
    keep[:, top_k:] = False
    return torch.zeros_like(keep).scatter_(1, order, keep)


def diffusion_draw(logits: torch.Tensor, row_ids: torch.Tensor, offset: int, kind: str | None) -> Any:
    """Greedy tokens and their probabilities as LLaDA's loop computes them with PyTorch."""
    tokens = logits.argmax(-1)
    if kind is None:
        return tokens, None
    probabilities = torch.nn.functional.softmax(logits.float(), dim=-1)
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1)
