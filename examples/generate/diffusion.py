"""Trains a small block-diffusion model on Python's documentation, and lets it write with each strategy.

``python examples/generate/diffusion.py --seconds 60``
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "finetune"))

import torch
from data import ANSWER, QUESTION, byte_tokenizer, python_questions
from rich.console import Console
from rich.table import Table
from torch import nn

from moesaic.sampling import BlockDiffusion, Options

LENGTH = 96
BATCH = 16


class MaskedModel(nn.Module):
    """A transformer without a causal mask: logits of every position from all others."""

    def __init__(self, vocabulary: int, hidden: int = 128, layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.places = nn.Parameter(torch.randn(LENGTH, hidden) * 0.02)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, n]`` tokens to logits ``[B, n, V]``."""
        logits: torch.Tensor = self.head(self.encoder(self.tokens(ids) + self.places[: ids.shape[1]]))
        return logits


def windows(tokenizer: Any, seed: int) -> torch.Tensor:
    """Rows of LENGTH tokens from the questions and answers, each from its beginning."""
    texts = [row["text"] for row in python_questions(seed)]
    ids = [tokenizer(text, add_special_tokens=False).input_ids[:LENGTH] for text in texts]
    return torch.tensor([row for row in ids if len(row) == LENGTH])


def train(model: MaskedModel, rows: torch.Tensor, mask: int, seconds: float, console: Console) -> int:
    """Hides a random share of each row and learns to say what was there. Returns the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    end, step, recent = time.perf_counter() + seconds, 0, 0.0
    while time.perf_counter() < end:
        batch = rows[torch.randint(0, len(rows), (BATCH,), generator=generator)]
        share = torch.rand(BATCH, 1, generator=generator).clamp(min=0.05)
        hidden = torch.rand(batch.shape, generator=generator) < share
        logits = model(batch.masked_fill(hidden, mask))
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch, reduction="none")
        loss = (losses * hidden / share).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent = 0.95 * recent + 0.05 * loss.item() if step else loss.item()
        step += 1
        if step % 100 == 0:
            console.print(f"step {step}, loss {recent:.3f}", style="dim")
    return step


@torch.no_grad()
def log_likelihood(model: MaskedModel, ids: torch.Tensor, prompt: int, mask: int) -> float:
    """How probable the model finds what was written: the mean log-probability of a new token with it alone hidden."""
    places = torch.arange(prompt, ids.shape[1])
    rows = ids.expand(len(places), -1).clone()
    rows[torch.arange(len(places)), places] = mask
    logits = model(rows)[torch.arange(len(places)), places]
    return float(logits.log_softmax(-1).gather(1, ids[0, places][:, None]).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, decodes, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="of training (60)")
    parser.add_argument("--question", default="What does str.join do?")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    torch.manual_seed(options.seed)
    tokenizer = byte_tokenizer()
    mask = len(tokenizer)
    model = MaskedModel(mask + 1)
    steps = train(model, windows(tokenizer, options.seed), mask, options.seconds, console)
    model.eval()
    console.print(f"{steps} steps in {options.seconds:.0f} s")

    prompt = tokenizer(f"{QUESTION}{options.question}{ANSWER}", add_special_tokens=False, return_tensors="pt").input_ids
    prompt = prompt[:, : LENGTH - 32]
    new = LENGTH - prompt.shape[1]
    table = Table("strategy", "steps", "log-probability", "model ms", "sample ms", "fill ms", title="16 a block")
    written = []
    # What the first call of a process takes besides belongs to no strategy.
    BlockDiffusion(16, 16, mask_token_id=mask).generate(hide(model, mask), prompt, 16)
    for strategy, denoising, temperature in [
        ("confidence", 16, 0.0), ("entropy", 16, 0.0), ("margin", 16, 0.0), ("sequential", 16, 0.0),
        ("confidence", 8, 0.0), ("confidence", 16, 0.6), ("sequential", 16, 0.6),
    ]:  # fmt: skip
        decoding = BlockDiffusion(
            16, denoising, strategy, mask_token_id=mask, options=Options(temperature=temperature), seed=options.seed
        )
        decoded = decoding.generate(hide(model, mask), prompt, new)
        name = strategy + (f", T {temperature}" if temperature else "")
        table.add_row(
            name,
            str(decoded.steps),
            f"{log_likelihood(model, decoded.sequences, prompt.shape[1], mask):.2f}",
            *(f"{1e3 * seconds:.1f}" for seconds in decoded.seconds.values()),
        )
        text = tokenizer.decode(decoded.sequences[0, prompt.shape[1] :])
        written.append(f"{name}, {denoising} steps a block: {text!r}")
    console.print(table)
    for line in written:
        console.print(line, markup=False, soft_wrap=True)
    return 0


def hide(model: MaskedModel, mask: int) -> Any:
    """The model, which may not answer with the mask itself."""

    def call(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids)
        logits[..., mask] = -torch.inf
        return logits

    return call


if __name__ == "__main__":
    sys.exit(main())
