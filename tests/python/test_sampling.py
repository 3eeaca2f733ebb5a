"""moesaic.sampling from Python: names, shapes, types, errors; the same sets as transformers' processors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import moesaic
from moesaic.sampling import kept, process, sample

INF = math.inf


def normal(rows: int, columns: int, deviation: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [10, 300, 20_000])
def test_results_and_their_types(dtype, columns):
    logits = normal(4, columns).to(dtype)
    before = logits.clone()
    ids = sample(logits)
    assert ids.dtype == torch.int64 and ids.shape == (4,)
    assert ((ids >= 0) & (ids < columns)).all()
    ids, probability = sample(logits, 0.7, 5, 0.9, return_confidence=True, seed=3)
    assert probability.dtype == torch.float32 and probability.shape == (4,)
    mask = kept(logits, 0.7, 5, 0.9)
    assert mask.dtype == torch.bool and mask.shape == logits.shape
    assert mask.gather(1, ids[:, None]).all()
    expected = (logits.double() / 0.7).masked_fill(~mask, -INF).softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(probability.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(logits, before)


def test_greedy_is_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -INF, 5.0], [-0.0, 0.0, -1.0]])
    ids, probability = sample(logits, temperature=0, return_confidence=True)
    assert ids.tolist() == [1, 0, 0]
    torch.testing.assert_close(probability, logits.softmax(-1).amax(-1))


def test_any_strides():
    logits = normal(6, 40)
    expected = sample(logits, seed=4)
    assert torch.equal(sample(logits.t().contiguous().t(), seed=4), expected)
    wide = torch.cat([logits, normal(6, 24)], dim=1)[:, :40]
    assert torch.equal(sample(wide, seed=4), expected)
    assert sample(logits[:0]).shape == (0,)


def test_seeds_offsets_and_names_of_rows():
    logits = normal(1, 50).expand(2000, 50)
    first = sample(logits, seed=1)
    assert torch.equal(sample(logits, seed=1), first)
    assert not torch.equal(sample(logits, seed=2), first)
    assert not torch.equal(sample(logits, seed=1, offset=1), first)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, seed=1, row_ids=order), first[order])
    assert not torch.equal(sample(logits, seed=2**64 - 1, offset=2**64 - 1), first)


def test_threads_change_nothing():
    logits = normal(3, 60_000, 1.0)
    threads = moesaic.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            moesaic.set_num_threads(n)
            results.append([sample(logits, **options) for options in ({}, {"top_p": 0.9}, {"top_k": 50})])
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    finally:
        moesaic.set_num_threads(threads)


@pytest.mark.parametrize("columns", [100, 3000])
def test_sets_are_those_of_transformers(columns):
    # fp32 sums may misplace a boundary there: of 40 random rows none is so close.
    logits = normal(40, columns)
    ids = torch.zeros(40, 1, dtype=torch.int64)
    scaled = TemperatureLogitsWarper(0.8)(ids, logits)
    for options, processors in [
        ({"top_k": 20}, [TopKLogitsWarper(20)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"top_k": 30, "top_p": 0.8}, [TopKLogitsWarper(30), TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"typical_p": 0.7}, [TypicalLogitsWarper(0.7)]),
        (
            {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
            [TopKLogitsWarper(50), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02)],
        ),
    ]:
        expected = scaled
        for processor in processors:
            expected = processor(ids, expected)
        assert torch.equal(kept(logits, 0.8, **options), expected > -INF), options
        torch.testing.assert_close(process(logits, 0.8, **options), expected)
        for dtype in (torch.bfloat16, torch.float16):
            scores = logits.to(dtype)
            mask = kept(scores, 0.8, **options)
            assert process(scores, 0.8, **options, out=scores) is scores
            assert torch.equal(scores > -INF, mask)


def test_penalties():
    logits = normal(3, 50)
    context = torch.tensor([[1, 1, 4, -1], [0, 49, 3, 3], [7, 70, 7, 7]])
    inside = context.clamp(0, 49)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[1, 1, 4], [0, 49, 3], [7, 7, 7]]), logits)
    torch.testing.assert_close(process(logits, repetition_penalty=1.3, context=context), expected)
    counts = torch.zeros(3, 50).scatter_add_(1, inside, ((context >= 0) & (context < 50)).float())
    expected = logits - 0.4 * counts - 0.25 * (counts > 0)
    scores = process(logits, frequency_penalty=0.4, presence_penalty=0.25, context=context)
    torch.testing.assert_close(scores, expected)
    chosen = sample(torch.zeros(1, 5), 0, repetition_penalty=2.0, presence_penalty=1.0, context=torch.tensor([[0, 1]]))
    assert chosen.tolist() == [2]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ({"temperature": math.nan}, ValueError, "temperature is nan"),
        ({"temperature": INF}, ValueError, "temperature is inf"),
        ({"temperature": "1"}, TypeError, "temperature is a str"),
        ({"top_k": -1}, ValueError, "top_k is -1"),
        ({"top_k": 2.5}, TypeError, "top_k is a float"),
        ({"top_k": -(2**70)}, ValueError, "top_k is"),
        ({"top_p": 0.0}, ValueError, "top_p is 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p is 1.1"),
        ({"top_p": math.nan}, ValueError, "top_p is nan"),
        ({"min_p": -0.1}, ValueError, "min_p is -0.1"),
        ({"typical_p": 0.0}, ValueError, "typical_p is 0.0"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"offset": 2**64}, ValueError, "offset is"),
        ({"return_confidence": "best"}, ValueError, "return_confidence is"),
        (
            {"repetition_penalty": 0.0, "context": torch.zeros(2, 1, dtype=torch.int64)},
            ValueError,
            "repetition_penalty",
        ),
        ({"repetition_penalty": 1.5}, ValueError, "context is missing"),
        (
            {"context": torch.zeros(3, 1, dtype=torch.int64), "presence_penalty": 1.0},
            ValueError,
            r"context has shape \[3, 1\] of int64; expected \[2, n\] of int64 or int32",
        ),
        (
            {"context": torch.zeros(2, 1), "presence_penalty": 1.0},
            ValueError,
            r"context has shape \[2, 1\] of float32; expected \[2, n\] of int64 or int32",
        ),
        ({"row_ids": torch.tensor([0, -1])}, ValueError, "row_ids is -1"),
        (
            {"row_ids": torch.tensor([0])},
            ValueError,
            r"row_ids has shape \[1\] of int64; expected \[2\] of int64 or int32",
        ),
        (
            {"row_ids": torch.zeros(2)},
            ValueError,
            r"row_ids has shape \[2\] of float32; expected \[2\] of int64 or int32",
        ),
    ],
)
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        sample(normal(2, 8), **options)
    assert sample(normal(2, 8)).shape == (2,)


@pytest.mark.parametrize(
    ("logits", "error", "text"),
    [
        ([1.0], TypeError, "logits is a list"),
        (torch.zeros(4), ValueError, "logits has shape"),
        (torch.zeros(2, 0), ValueError, "vocabulary of 0"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            ValueError,
            r"logits has shape \[2, 3\] of int64; expected \[rows, V\] of bfloat16, float16 or float32",
        ),
        (torch.zeros(2, 3, dtype=torch.float64), ValueError, "logits is torch.float64"),
        (torch.tensor([[0.0, 1.0], [0.0, math.nan]]), ValueError, "a NaN in row 1"),
        (torch.full((1, 300), -INF), ValueError, "nothing but -infinity in row 0"),
    ],
)
def test_wrong_logits(logits, error, text):
    for call in (sample, kept, process):
        with pytest.raises(error, match=text):
            call(logits)
    with pytest.raises((TypeError, ValueError)):
        sample(logits, temperature=0)


def test_infinities_share_the_probability():
    logits = torch.tensor([[0.0, INF, 4.0, INF]]).expand(4000, 4)
    ids, probability = sample(logits, return_confidence=True)
    assert set(ids.tolist()) == {1, 3} and (probability == 0.5).all()
    assert 1700 < (ids == 1).sum() < 2300
    assert kept(logits[:1], 1.0, 1, 1.0).tolist() == [[False, True, False, False]]


def test_scratch_memory_is_given_back():
    sample(normal(2, 100_000))
    moesaic.trim_memory()
    assert sample(normal(2, 100_000)).shape == (2,)
