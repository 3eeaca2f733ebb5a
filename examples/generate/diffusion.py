"""Teaches a small masked model to add, and lets it fill in the digits in one order or another.

``python examples/generate/diffusion.py --steps 2000``

A sum is written with its highest digit first. Who writes it from left to right has to know each carry before the digits
that it comes from; who begins where the carry is clear learns the next digit from its neighbour on the right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from moesaic.sampling import BlockDiffusion
from moesaic.sampling.block_diffusion import Strategy

COLUMNS = 12
BATCH = 48
MASK = 10
#: The share of columns whose two digits add up to 9, and hand on the carry that they get.
HAND_ON = 0.75
STRATEGIES: tuple[Strategy, ...] = ("confidence", "entropy", "margin", "sequential")


def problems(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts ``[n, 2 COLUMNS]``, the digits of two numbers, and their sums ``[n, COLUMNS]``, highest digits first."""
    a = torch.randint(0, 10, (n, COLUMNS), generator=generator)
    b = torch.randint(0, 10, (n, COLUMNS), generator=generator)
    b = torch.where(torch.rand(n, COLUMNS, generator=generator) < HAND_ON, 9 - a, b)
    a[:, 0] = b[:, 0] = 0  # room for the sum
    powers = 10 ** torch.arange(COLUMNS - 1, -1, -1)
    total = ((a + b) * powers).sum(dim=1, keepdim=True)
    return torch.cat([a, b], dim=1), total // powers % 10


class MaskedModel(nn.Module):
    """One transformer layer without a causal mask, over three lines of digits: two numbers and their sum."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(MASK + 1, hidden)
        self.lines = nn.Parameter(0.3 * torch.randn(3, 1, hidden))
        self.columns = nn.Parameter(0.3 * torch.randn(COLUMNS, hidden))
        self.layer = nn.TransformerEncoderLayer(hidden, 8, 8 * hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 10))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, 3 COLUMNS]`` digits, MASK among them, to logits ``[B, 3 COLUMNS, 10]``."""
        places = (self.lines + self.columns).flatten(0, 1)
        logits: torch.Tensor = self.head(self.layer(self.tokens(ids) + places))
        return logits


def train(model: MaskedModel, steps: int, seed: int, console: Console) -> None:
    """Hides a random share of each sum and learns to say what was there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 20), pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        prompts, sums = problems(BATCH, generator)
        hidden = torch.rand(sums.shape, generator=generator) < torch.rand(BATCH, 1, generator=generator)
        hidden[:, 0] |= ~hidden.any(dim=1)
        logits = model(torch.cat([prompts, sums.masked_fill(hidden, MASK)], dim=1))[:, 2 * COLUMNS :]
        loss = nn.functional.cross_entropy(logits[hidden], sums[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0:
            console.print(f"step {step}, loss {loss.item():.3f}", style="dim")


def compare(model: MaskedModel, prompts: torch.Tensor, sums: torch.Tensor, console: Console) -> dict[str, torch.Tensor]:
    """Answers all prompts with each strategy and number of steps; returns the answers of COLUMNS steps by strategy."""
    table = Table(title=f"{len(prompts)} sums that training did not see, {COLUMNS} digits each")
    table.add_column("strategy")
    for heading in ("steps", "all right", "digits right", "passes", "tokens/s", "model ms", "sample ms", "fill ms"):
        table.add_column(heading, justify="right")
    answers = {}
    BlockDiffusion(COLUMNS, 1, mask_token_id=MASK).generate(model, prompts, COLUMNS)  # what only a first call takes
    for steps in (COLUMNS, COLUMNS // 2, COLUMNS // 4, 1):
        for strategy in STRATEGIES if steps > 1 else STRATEGIES[:1]:  # one step fills in everything, in no order
            decoded = BlockDiffusion(COLUMNS, steps, strategy, mask_token_id=MASK).generate(model, prompts, COLUMNS)
            answer = decoded.sequences[:, 2 * COLUMNS :]
            if steps == COLUMNS:
                answers[strategy] = answer
            right = answer == sums
            table.add_row(
                strategy if steps > 1 else "any", str(steps),
                f"{right.all(dim=1).double().mean():.3f}", f"{right.double().mean():.3f}",
                str(decoded.steps), f"{answer.numel() / sum(decoded.seconds.values()):,.0f}",
                *(f"{1e3 * seconds:.1f}" for seconds in decoded.seconds.values()),
            )  # fmt: skip
        table.add_section()
    console.print(table)
    return answers


def show(prompts: torch.Tensor, sums: torch.Tensor, answers: dict[str, torch.Tensor], console: Console) -> None:
    """Three of the problems on which not all agree, side by side; of an answer only the wrong digits."""
    stacked = torch.stack(list(answers.values()))
    chosen = (stacked != stacked[0]).any(dim=2).any(dim=0).nonzero().flatten()[:3]
    lines = {"": prompts[:, :COLUMNS], "+": prompts[:, COLUMNS:], "=": sums}
    table = Table("", *(f"problem {i}" for i in chosen.tolist()), title=f"{COLUMNS} steps; a dot is a right digit")
    for name, digits in [*lines.items(), *answers.items()]:
        wrong = digits != sums if name in answers else torch.ones_like(digits, dtype=torch.bool)
        cells = [
            [str(d) if w else "." for d, w in zip(digits[i].tolist(), wrong[i].tolist(), strict=True)] for i in chosen
        ]
        table.add_row(name, *map("".join, cells), end_section=name == "=")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, decodes, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="of training (2000: about a minute on two cores)")
    parser.add_argument("--problems", type=int, default=500, help="to answer (500)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    torch.manual_seed(options.seed)
    model = MaskedModel()
    begin = time.perf_counter()
    train(model, options.steps, options.seed, console)
    console.print(f"{options.steps} steps in {time.perf_counter() - begin:.0f} s, seed {options.seed}")
    model.eval()
    prompts, sums = problems(options.problems, torch.Generator().manual_seed(options.seed + 1))
    show(prompts, sums, compare(model, prompts, sums, console), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
