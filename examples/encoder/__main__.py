"""A BERT encoder with fused operators beside the stock one: `python examples/encoder --help`."""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time

import torch
from transformers import BertConfig, BertModel

import moesaic
import moesaic.hf

#: Relative L2 between fused and stock output: what the roundings of twelve layers add up to.
BOUND = {"bf16": 3e-2, "fp32": 1e-4}


def main() -> int:
    """Runs both; 0, or 1 if their outputs differ."""
    parser = argparse.ArgumentParser(description="A BERT-base encoder with random weights, stock and fused, in turn.")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--dtype", choices=tuple(BOUND), default="bf16")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--train", action="store_true", help="forward and backward, all weights trained, no dropout")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=max(512, args.tokens),
    )
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    stock = BertModel(config, add_pooling_layer=False).to(dtype).eval()
    fused = copy.deepcopy(stock)
    report = moesaic.hf.fuse(fused)
    print(f"{args.layers} layers, hidden {args.hidden}, {args.batch} x {args.tokens} tokens, {args.dtype}, ", end="")
    print(f"{moesaic.isa()}, {moesaic.get_num_threads()} threads\n{report}\n")
    ids = torch.randint(1000, 30000, (args.batch, args.tokens))

    def step(model: BertModel) -> torch.Tensor:
        with torch.set_grad_enabled(args.train):
            out: torch.Tensor = model(ids).last_hidden_state
            if args.train:
                out.backward(torch.ones_like(out))
                model.zero_grad()
        return out.detach()

    expected, got = step(stock).double(), step(fused).double()
    error = float((got - expected).norm() / expected.norm())
    times: dict[str, list[float]] = {"stock": [], "fused": []}
    for _ in range(args.reps):
        for name, model in (("stock", stock), ("fused", fused)):
            start = time.perf_counter()
            step(model)
            times[name].append((time.perf_counter() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"  {name}  {value:10,.1f} ms  {args.batch * args.tokens / value * 1e3:12,.0f} tokens/s")
    print(f"  {medians['stock'] / medians['fused']:.2f}x")
    same = error <= BOUND[args.dtype]
    sign = "=" if same else "DIFFERENT:"
    print(f"\n{sign} outputs differ by {error:.1e} (relative L2); the bar is {BOUND[args.dtype]:.0e}")
    with moesaic.profile() as p:
        step(fused)
    print("\n  stage                 thread time, ms")
    for row in p.phases():
        if row["category"] == "fused" and row["calls"]:
            print(f"  {row['name']:20}  {row['thread_ms']:15,.1f}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
