"""Decoding with the sampler: inside transformers' generate(), and block diffusion."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moesaic.sampling import BlockDiffusion, Options, Sampler, generate, sample
from moesaic.sampling.generation import options_of

MASK = 31


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def test_generate_greedy_as_transformers_does(model):
    for options in ({}, {"repetition_penalty": 1.5}):
        stock = model.generate(PROMPT, max_new_tokens=12, do_sample=False, **options)
        ours = model.generate(PROMPT, max_new_tokens=12, do_sample=False, custom_generate=generate, **options)
        assert torch.equal(ours, stock)


def test_generate_draws_what_the_sampler_draws(model):
    arguments = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.8}
    output = model.generate(
        PROMPT, custom_generate=generate, sampling_seed=5, return_dict_in_generate=True, output_logits=True,
        output_scores=True, **arguments,
    )  # fmt: skip
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        expected = sample(logits, 0.9, 30, 0.8, seed=5, offset=4 + step)
        assert torch.equal(output.sequences[:, 4 + step], expected)
        assert torch.equal(scores.argmax(-1), expected) and ((scores == 0).sum(-1) == 1).all()
    again = model.generate(PROMPT, custom_generate=generate, sampling_seed=5, **arguments)
    assert torch.equal(again, output.sequences)
    other = model.generate(PROMPT, custom_generate=generate, sampling_seed=6, **arguments)
    assert not torch.equal(other, output.sequences)


def test_as_a_processor_of_stock_decoding(model):
    arguments = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    processors = LogitsProcessorList([Sampler(Options(temperature=0.9, top_k=30, top_p=0.8), seed=5)])
    stock = model.generate(PROMPT, logits_processor=processors, **arguments)
    arguments |= {"temperature": 0.9, "top_k": 30, "top_p": 0.8}
    assert torch.equal(stock, model.generate(PROMPT, custom_generate=generate, sampling_seed=5, **arguments))


def test_the_engine_takes_over_what_it_can():
    others, options = options_of([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.5)])
    assert (others, options) == ([], Options(temperature=0.5, top_k=3, top_p=0.5))
    swapped = [TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)]
    assert options_of(swapped) == ([swapped[0]], Options(temperature=0.5))
    foreign = [TopKLogitsWarper(3), NoRepeatNGramLogitsProcessor(2)]
    assert options_of(foreign) == (foreign, Options())
    keeps_two = [TopPLogitsWarper(0.5, min_tokens_to_keep=2)]
    assert options_of(keeps_two) == (keeps_two, Options())


def test_generate_refuses_beams(model):
    with pytest.raises(ValueError, match="num_beams is 3"):
        model.generate(PROMPT, max_new_tokens=2, num_beams=3, custom_generate=generate)


class Scripted:
    """A model whose logits say: at position i the token is i % 30, with the sureness given for i."""

    def __init__(self, sureness: dict[int, float], shifted: bool = False) -> None:
        self.sureness, self.shifted = sureness, shifted
        self.seen: list[list[int]] = []

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        self.seen.append(ids[0].tolist())
        logits = torch.zeros(*ids.shape, 32)
        for i in range(ids.shape[1]):
            place = i - 1 if self.shifted else i
            if place >= 0:
                logits[:, place, i % 30] = self.sureness.get(i, 1.0)
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("strategy", ["confidence", "margin", "entropy"])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_surest_positions_come_first(strategy, shifted):
    model = Scripted({2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0, 6: 5.0, 7: 6.0}, shifted)
    decoding = BlockDiffusion(4, 4, strategy, mask_token_id=MASK, shifted=shifted)
    decoded = decoding.generate(model, torch.tensor([[0, 1]]), max_new_tokens=6)
    assert decoded.sequences.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # Two positions of the second block are filled in the first two of its steps.
    filled = [8 - row.count(MASK) for row in model.seen]
    assert filled == [2, 3, 4, 5, 6, 7] and decoded.steps == 6
    order = [next(i for i in range(8) if a[i] != b[i]) for a, b in zip(model.seen, model.seen[1:], strict=False)]
    assert order == [3, 5, 4, 2, 7]
    assert set(decoded.seconds) == {"model", "sample", "fill"}


def test_sequential_goes_from_left_to_right_in_equal_shares():
    model = Scripted({})
    decoded = BlockDiffusion(5, 2, "sequential", mask_token_id=MASK).generate(model, torch.tensor([[0, 1]]), 5)
    assert decoded.sequences.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert model.seen == [[0, 1] + [MASK] * 5, [0, 1, 2, 3, 4, MASK, MASK]]


def test_threshold_takes_every_sure_token_at_once():
    model = Scripted(dict.fromkeys(range(1, 8), 20.0))
    decoded = BlockDiffusion(8, 8, mask_token_id=MASK, threshold=0.9).generate(model, torch.tensor([[0]]), 8)
    assert decoded.sequences.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert decoded.steps == 2  # position 8 is less sure


def test_sampled_decoding_is_reproducible_and_ends():
    def noise(ids: torch.Tensor) -> torch.Tensor:
        return torch.randn(*ids.shape, 32, generator=torch.Generator().manual_seed(int(ids.sum())))

    decoding = BlockDiffusion(4, 2, mask_token_id=MASK, options=Options(temperature=1.0, top_k=20), seed=3)
    first = decoding.generate(noise, torch.zeros(3, 2).long(), 10)
    assert torch.equal(first.sequences, decoding.generate(noise, torch.zeros(3, 2).long(), 10).sequences)
    assert first.steps == 6
    ended = BlockDiffusion(4, 4, mask_token_id=MASK, eos_token_id=3).generate(Scripted({}), torch.tensor([[0, 1]]), 12)
    assert ended.sequences.tolist() == [[0, 1, 2] + [3] * 11] and ended.steps == 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"block_length": 0}, ValueError, "block_length is 0"),
        ({"denoising_steps": 1.5}, TypeError, "denoising_steps is a float"),
        ({"strategy": "best"}, ValueError, "strategy is 'best'"),
        ({"threshold": 2.0}, ValueError, "threshold is 2.0"),
        ({"strategy": "entropy", "threshold": 0.5}, ValueError, "threshold"),
        ({"options": Options(repetition_penalty=1.2)}, ValueError, "options has penalties"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        BlockDiffusion(**{"mask_token_id": MASK, **arguments})


def test_wrong_prompts_and_logits():
    decoding = BlockDiffusion(2, 2, mask_token_id=MASK)
    with pytest.raises(ValueError, match="input_ids has shape"):
        decoding.generate(Scripted({}), torch.zeros(3).long(), 4)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        decoding.generate(Scripted({}), torch.zeros(1, 3).long(), 0)
    with pytest.raises(ValueError, match="a NaN"):
        decoding.generate(lambda ids: torch.full((*ids.shape, 8), math.nan), torch.zeros(1, 3).long(), 4)


@pytest.fixture(scope="module")
def adding():
    """examples/generate/diffusion.py."""
    path = Path(__file__).parents[2] / "examples" / "generate" / "diffusion.py"
    spec = importlib.util.spec_from_file_location("example_diffusion", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_adds(adding):
    prompts, sums = adding.problems(50, torch.Generator().manual_seed(3))

    def numbers(digits):
        return [int("".join(map(str, row))) for row in digits.tolist()]

    a, b = numbers(prompts[:, : adding.COLUMNS]), numbers(prompts[:, adding.COLUMNS :])
    assert numbers(sums) == [x + y for x, y in zip(a, b, strict=True)]


class CarryByHand:
    """Is sure of a digit whose neighbour on the right is there or decides the carry alone; else supposes no carry."""

    def __init__(self, columns: int, mask: int) -> None:
        self.columns, self.mask = columns, mask

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        n = self.columns
        a, b, digits = ids[:, :n], ids[:, n : 2 * n], ids[:, 2 * n :]
        column = a + b
        # The carry that each column gets shows in its digit; where that is hidden, the column may still decide alone.
        got = torch.where(digits == self.mask, -1, (digits - column) % 10)
        out = torch.where(column + got >= 10, 1, 0)
        out = torch.where(got >= 0, out, torch.where(column == 9, -1, (column > 9).long()))
        carry = torch.cat([out[:, 1:], torch.zeros_like(out[:, :1])], dim=1)
        logits = torch.zeros(*ids.shape, 10)
        sure = torch.nn.functional.one_hot((column + carry.clamp(min=0)) % 10, 10) * 9.0
        unsure = torch.nn.functional.one_hot(column % 10, 10) * 1.0
        logits[:, 2 * n :] = torch.where((carry >= 0)[..., None], sure, unsure)
        return logits


@pytest.mark.parametrize("strategy", ["confidence", "margin", "entropy"])
def test_who_fills_in_the_sure_digits_first_adds_rightly(adding, strategy):
    prompts, sums = adding.problems(40, torch.Generator().manual_seed(4))
    model = CarryByHand(adding.COLUMNS, adding.MASK)

    def right(order):
        decoding = BlockDiffusion(adding.COLUMNS, adding.COLUMNS, order, mask_token_id=adding.MASK)
        decoded = decoding.generate(model, prompts, adding.COLUMNS)
        return (decoded.sequences[:, 2 * adding.COLUMNS :] == sums).all(dim=1)

    assert right(strategy).all()
    assert not right("sequential").all()


def test_the_example_runs(adding, capsys):
    assert adding.main(["--steps", "2", "--problems", "20"]) == 0
    printed = capsys.readouterr().out
    assert "all right" in printed
    for strategy in adding.STRATEGIES:
        # By 12, 6 and 3 steps, and in the answers side by side.
        assert sum(strategy in line for line in printed.splitlines()) == 4
