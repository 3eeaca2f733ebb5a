"""moesaic.nn.functional.attention against PyTorch in double precision, and where PyTorch computes it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import moesaic
from moesaic import _core
from moesaic.nn import functional

SHAPES = [(2, 3, 37, 53, 20), (1, 1, 16, 1, 64), (2, 2, 100, 513, 64), (3, 4, 64, 64, 32), (1, 2, 130, 4000, 128)]


def operands(batch: int, heads: int, queries: int, keys: int, size: int) -> list[torch.Tensor]:
    """As projections give them: the heads of a token side by side."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, rows, heads, size, generator=generator).bfloat16().transpose(1, 2)
        for rows in (queries, keys, keys)
    ]


def seen_by_all(batch: int, keys: int) -> torch.Tensor:
    mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    return mask


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    return torch.softmax(scores, -1) @ v.double()


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.detach().double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: tuple[int, int, int, int, int], masked: bool) -> None:
    q, k, v = operands(*shape)
    mask = seen_by_all(shape[0], shape[3]) if masked else None
    got = functional.attention(q, k, v, key_mask=mask)
    assert got.shape == q.shape and got.dtype == torch.bfloat16
    assert error(got, expected(q, k, v, shape[4] ** -0.5, mask)) < 5e-3
    assert error(functional.attention(q, k, v, 0.4, mask), expected(q, k, v, 0.4, mask)) < 5e-3
    # Whatever the memory between the numbers is.
    assert torch.equal(functional.attention(q.contiguous(), k.contiguous(), v.contiguous(), key_mask=mask), got)


def test_any_layout() -> None:
    q, k, v = operands(2, 1, 20, 30, 64)
    expected = functional.attention(q, k, v)
    spread = torch.zeros(2, 1, 20, 128, dtype=torch.bfloat16)[..., ::2].copy_(q)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (spread, turned, q.expand(2, 1, 20, 64)):
        assert torch.equal(functional.attention(other, k, v), expected)
    assert functional.attention(q[:1].expand(2, 1, 20, 64), k, v).shape == q.shape


def test_equal_scores_are_not_rounded_in_one_direction() -> None:
    for keys in range(1, 600, 7):
        q, k = torch.zeros(1, 1, 16, 64).bfloat16(), torch.randn(1, 1, keys, 64).bfloat16()
        assert torch.equal(functional.attention(q, k, torch.ones_like(k)), torch.ones_like(q)), keys


def test_large_scores() -> None:
    """e^score would overflow."""
    q, k, v = operands(1, 2, 32, 40, 64)
    assert error(functional.attention(q * 50, k * 50, v), expected(q * 50, k * 50, v, 0.125, None)) < 5e-3
    # Steps between scores are larger than what e^x has room for.
    for rows in (16, 3):
        q, k = torch.full((1, 1, rows, 64), 1e5).bfloat16(), torch.full((1, 1, 40, 64), 1e5).bfloat16()
        assert torch.allclose(functional.attention(q, k, torch.ones_like(k)), torch.ones_like(q))
    q, k, v = operands(1, 2, 32, 40, 64)
    assert functional.attention(q * 2e5, k * 2e5, v).isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1, 300, 70, 64), (3, 2, 50, 33, 40)], ids=str)
def test_same_bits_for_any_number_of_threads(shape: tuple[int, int, int, int, int]) -> None:
    q, k, v = operands(*shape)
    before, results = moesaic.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            moesaic.set_num_threads(threads)
            results.append(functional.attention(q, k, v, key_mask=seen_by_all(shape[0], shape[3])))
    finally:
        moesaic.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_threads_change_while_others_compute() -> None:
    """Memory is taken for as many threads as there are to the end of a call."""
    q, k, v = operands(2, 4, 100, 150, 64)
    before, expected = moesaic.get_num_threads(), functional.attention(q, k, v)
    wrong: list[int] = []

    def compute() -> None:
        wrong.extend(i for i in range(40) if not torch.equal(functional.attention(q, k, v), expected))

    workers = [threading.Thread(target=compute) for _ in range(3)]
    try:
        for worker in workers:
            worker.start()
        for threads in itertools.cycle((1, 3, 7)):
            if not any(worker.is_alive() for worker in workers):
                break
            moesaic.set_num_threads(threads)
    finally:
        for worker in workers:
            worker.join()
        moesaic.set_num_threads(before)
    assert wrong == []


def test_what_is_masked_does_not_count() -> None:
    q, k, v = operands(2, 2, 20, 30, 64)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 10:], mask[1] = False, False
    got = functional.attention(q, k, v, key_mask=mask)
    assert torch.equal(got[:1], functional.attention(q[:1], k[:1, :, :10], v[:1, :, :10]))
    # A query that sees no key: 0, as PyTorch has it.
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    assert not got[1].any() and not stock[1].any()


def test_nan_stays_where_it_is() -> None:
    q, k, v = operands(2, 2, 20, 30, 64)
    q[0, 1, 3, 5] = torch.nan
    got = functional.attention(q, k, v)
    assert got[0, 1, 3].isnan().all() and int(got.isnan().sum()) == 64
    q, k, v = operands(2, 2, 20, 30, 64)
    k[1, 0, 7, 2] = torch.nan
    got = functional.attention(q, k, v)
    assert got[1, 0].isnan().all() and int(got.isnan().sum()) == 20 * 64
    mask = torch.zeros(2, 30, dtype=torch.bool)
    assert functional.attention(q, k, v, key_mask=mask)[1, 0].isnan().all()


def test_where_pytorch_computes() -> None:
    q, k, v = operands(2, 2, 20, 30, 64)
    mask = seen_by_all(2, 30)

    def stock(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask[:, None, None, :])

    exact = [t.float() for t in (q, k, v)]
    assert torch.equal(functional.attention(*exact, key_mask=mask), stock(*exact))
    few = [t[:, :, :15, :20] for t in (q, k, v)]  # no multiple of 32
    assert torch.equal(functional.attention(*few), F.scaled_dot_product_attention(*few))
    wanted = [t.clone().requires_grad_() for t in few]
    functional.attention(*wanted).sum().backward()
    assert all(t.grad is not None and t.grad.any() for t in wanted)
    for none in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0])):
        assert torch.equal(functional.attention(*none), F.scaled_dot_product_attention(*none))
    assert functional.attention(q[:, :0], k[:, :0], v[:, :0]).shape == (2, 0, 20, 64)


#: Sequences, heads, heads of keys, queries, keys, numbers.
MANY = [(1, 8, 2, 100, 100, 64), (2, 6, 6, 64, 64, 32), (2, 4, 1, 33, 200, 20), (1, 2, 2, 16, 16, 128)]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_queries_of_heads_that_share_keys(shape: tuple[int, ...], masked: bool, causal: bool) -> None:
    q, k, v = few_operands(shape)
    mask = seen_by_all(shape[0], shape[4]) if masked else None
    got = functional.attention(q, k, v, None, mask, causal)
    assert error(got, expected_of_few(q, k, v, mask, causal)) < 5e-3
    if causal:  # what a query does not see does not count, whatever it is
        later = k.clone()
        later[:, :, -1] = torch.nan
        assert torch.equal(functional.attention(q, later, v, None, mask, True)[:, :, :-1], got[:, :, :-1])
    before = moesaic.get_num_threads()
    try:
        moesaic.set_num_threads(5)
        assert torch.equal(functional.attention(q, k, v, None, mask, causal), got)
    finally:
        moesaic.set_num_threads(before)


def gradients(
    tensors: list[torch.Tensor], d_out: torch.Tensor, run: Callable[..., torch.Tensor]
) -> list[torch.Tensor | None]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    run(*leaves).backward(d_out)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    "shape", [*MANY, (1, 4, 2, 300, 530, 64), (2, 3, 1, 270, 300, 40), (1, 1, 1, 513, 513, 32)], ids=str
)
def test_gradients(shape: tuple[int, ...], masked: bool, causal: bool) -> None:
    tensors = list(few_operands(shape))
    mask = seen_by_all(shape[0], shape[4]) if masked else None
    d_out = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    right = gradients([t.double() for t in tensors], d_out.double(), lambda *t: expected_of_few(*t, mask, causal))
    stale = [torch.full((1, 2, 700, 128), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
    gradients(stale, stale[0], functional.attention)  # leaves its memory for the next calls

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return functional.attention(*leaves, None, mask, causal)

    before, results = moesaic.get_num_threads(), []
    try:
        for threads in (1, 5, 16):
            moesaic.set_num_threads(threads)
            results.append(gradients(tensors, d_out, run))
    finally:
        moesaic.set_num_threads(before)
    for got, expected in zip(results[0], right, strict=True):
        assert got is not None and expected is not None and error(got, expected) < 5e-3
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
    # Whatever is saved: the result is that of a call that needs no gradient.
    with torch.no_grad():
        plain = run(*tensors)
    assert torch.equal(run(*(t.clone().requires_grad_() for t in tensors)), plain)


#: The first key of the queries of a row of so many queries and keys.
FIRST_KEYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "short sequences": lambda own: own // 9 * 9,
    "long sequences": lambda own: own // 150 * 150,
    "window": lambda own: own - 40,
    "any": lambda own: own * 37 % 500 - 30,
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", FIRST_KEYS)
@pytest.mark.parametrize("shape", [(2, 4, 2, 300, 330, 40), (1, 2, 1, 513, 513, 64), (2, 2, 2, 16, 16, 32)], ids=str)
def test_first_keys(shape: tuple[int, ...], kind: str, masked: bool, causal: bool) -> None:
    batch, heads, _, queries, keys, size = shape
    tensors = list(few_operands(shape))
    own = torch.arange(keys - queries, keys)
    first = torch.stack([FIRST_KEYS[kind](own), FIRST_KEYS[kind](own + 13) - 13])[:batch]
    mask = seen_by_all(batch, keys) if masked else None

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return functional.attention(*leaves, None, mask, causal, first)

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(keys) >= first[..., None]
        if causal:
            seen = seen & (torch.arange(keys) <= own[:, None])
        if mask is not None:
            seen = seen & mask[:, None]
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3) * size**-0.5).masked_fill(~seen[:, None], -torch.inf)
        nothing = ~seen.any(-1)[:, None, :, None]
        return torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0) @ v

    exact = [t.double() for t in tensors]
    d_out = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    stale = [torch.full((1, 2, 700, 128), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
    gradients(stale, stale[0], functional.attention)  # leaves its memory for the next calls
    before, results = moesaic.get_num_threads(), []
    try:
        for threads in (1, 5, 16):
            moesaic.set_num_threads(threads)
            results.append([run(*tensors), *gradients(tensors, d_out, run)])
    finally:
        moesaic.set_num_threads(before)
    for got, expected in zip(results[0], [right(*exact), *gradients(exact, d_out.double(), right)], strict=True):
        assert got is not None and expected is not None and error(got, expected) < 5e-3
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
    # PyTorch's, in fp32.
    assert error(run(*(t.float() for t in tensors)), right(*exact)) < 1e-5


def test_sequences_in_a_row_do_not_meet() -> None:
    """Of 256 tokens and more: NaN in one stays there, whoever computes the next; each is as if it were alone."""
    ends = (256, 556, 626)  # tiles of the last one are not full: what the second one left there must not count
    tensors = list(few_operands((1, 2, 1, 626, 626, 32)))
    for tensor, at in zip(tensors, (300, 344, 344), strict=True):
        tensor[:, :, at] = torch.nan
    first = torch.cat([torch.full((end - begin,), begin) for begin, end in itertools.pairwise((0, *ends))])[None]
    d_out = torch.randn(1, 2, 626, 32, generator=torch.Generator().manual_seed(4)).bfloat16()

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return functional.attention(*leaves, None, None, True, first)

    def alone(*leaves: torch.Tensor) -> torch.Tensor:
        return functional.attention(*leaves, None, None, True)

    before = moesaic.get_num_threads()
    try:
        for threads in (1, 5):
            moesaic.set_num_threads(threads)
            results = [run(*tensors), *gradients(tensors, d_out, run)]
            for begin, end in itertools.pairwise((0, *ends)):
                part = [t[:, :, begin:end] for t in tensors]
                expected = [alone(*part), *gradients(part, d_out[:, :, begin:end], alone)]
                for got, right in zip(results, expected, strict=True):
                    assert got is not None and right is not None
                    assert torch.equal(got[:, :, begin:end].nan_to_num(7.0), right.nan_to_num(7.0))
                    assert bool(right.isnan().any()) == (begin == 256)
    finally:
        moesaic.set_num_threads(before)


def test_first_keys_that_do_not_fit() -> None:
    q, k, v = operands(2, 2, 20, 30, 64)
    for wrong, kind, message in (
        (torch.zeros(2, 20), TypeError, "first_keys is torch.float32; expected a tensor of torch.int64"),
        ([0] * 20, TypeError, "first_keys is list; expected a tensor of torch.int64"),
        (torch.zeros(2, 30, dtype=torch.int64), ValueError, r"first_keys has shape \[2, 30\]; expected \[2, 20\]"),
    ):
        with pytest.raises(kind, match=message):
            functional.attention(q, k, v, first_keys=wrong)  # type: ignore[arg-type]
    first = torch.arange(20).repeat(2, 1)
    right = functional.attention(q, k, v, first_keys=first)
    for other in (first.t().contiguous().t(), first[:1].expand(2, 20)):
        assert torch.equal(functional.attention(q, k, v, first_keys=other), right)
    rows = [t.transpose(1, 2).flatten(2).contiguous() for t in (q, k, v)]
    for wrong, message in (
        (first.float(), "first_keys is \\[2, 20\\] of float32; expected \\[2, 20\\] of int64"),
        (first[:, :19], "first_keys is \\[2, 19\\] of int64; expected"),
        (first[0], "first_keys has 1 dimensions; expected 2"),
        (first.t().contiguous().t(), "first_keys has strides 1 and 2; expected a contiguous"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            _core.attention(*rows, 2, 1.0, first_keys=wrong)
    # Few queries: PyTorch.
    few = functional.attention(q[:, :, :3], k, v, first_keys=first[:, :3])
    assert error(few, right[:, :, :3]) < 1e-2


def test_gradients_of_any_layout() -> None:
    tensors = operands(2, 3, 40, 50, 64)
    d_out = torch.randn(2, 3, 40, 64).bfloat16()
    right = gradients(tensors, d_out, functional.attention)
    spread = torch.zeros(2, 3, 40, 128, dtype=torch.bfloat16)[..., ::2].copy_(d_out)
    for other in (spread, d_out.transpose(1, 2).contiguous().transpose(1, 2)):
        got = gradients([t.contiguous() for t in tensors], other, functional.attention)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    ones = gradients(tensors, torch.ones_like(d_out), functional.attention)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    functional.attention(*leaves).sum().backward()  # an expanded gradient
    assert all(torch.equal(leaf.grad, b) for leaf, b in zip(leaves, ones, strict=True))
    for wanted in range(3):  # of some alone
        leaves = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        functional.attention(*leaves).backward(d_out)
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(3)]
        assert torch.equal(leaves[wanted].grad, right[wanted])


def test_gradients_at_the_edges() -> None:
    """Queries that see no key, scores that e^x has no room for, NaN."""
    q, k, v = operands(2, 2, 20, 30, 64)
    d_out = torch.randn(2, 2, 20, 64).bfloat16()
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 10:], mask[1] = False, False
    d_q, d_k, d_v = gradients([q, k, v], d_out, lambda *t: functional.attention(*t, key_mask=mask))
    short = gradients(
        [q[:1], k[:1, :, :10], v[:1, :, :10]], d_out[:1], lambda *t: functional.attention(*t, key_mask=mask[:1, :10])
    )
    assert d_q is not None and d_k is not None and d_v is not None
    assert (
        torch.equal(d_q[:1], short[0])
        and torch.equal(d_k[:1, :, :10], short[1])
        and torch.equal(d_v[:1, :, :10], short[2])
    )
    assert not d_q[1].any() and not d_k[0, :, 10:].any() and not d_v[0, :, 10:].any() and not d_v[1].any()
    for factor in (50, 2e5):
        large = gradients([q * factor, k * factor, v], d_out, functional.attention)
        assert all(grad is not None and grad.isfinite().all() for grad in large)
    k[1, 0, 7] = -torch.inf
    _, d_k, d_v = gradients(
        [q.abs(), k, v], d_out, functional.attention
    )  # nobody sees it, nor do queries that are none
    assert d_k is not None and d_v is not None and d_k.isfinite().all() and d_v.isfinite().all()
    q, k, v = operands(2, 2, 20, 30, 64)
    q[0, 1, 3, 5] = torch.nan
    d_q, d_k, d_v = gradients([q, k, v], d_out, functional.attention)
    assert d_q is not None and d_k is not None and d_v is not None
    assert d_q[0, 1, 3].isnan().all() and int(d_q.isnan().sum()) == 64
    for grad in (d_k, d_v):
        assert grad[0, 1].isnan().all() and int(grad.isnan().sum()) == 30 * 64


def test_gradients_with_what_autograd_offers() -> None:
    tensors = operands(1, 2, 20, 30, 64)
    d_out = torch.randn(1, 2, 20, 64).bfloat16()
    right = gradients(tensors, d_out, functional.attention)
    for reentrant in (False, True):
        got = gradients(
            tensors,
            d_out,
            lambda *t: checkpoint(functional.attention, *t, use_reentrant=reentrant),  # noqa: B023
        )
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    (d_q,) = torch.autograd.grad(functional.attention(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        d_q.sum().backward()
    out = functional.attention(*leaves)
    with torch.no_grad():
        leaves[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    whole = torch.compile(lambda *t: functional.attention(*t) * 1, backend="eager", fullgraph=True)
    for got, expected in zip(gradients(tensors, d_out, whole), right, strict=True):
        assert got is not None and expected is not None and error(got, expected) < 1e-2
    # functorch's transforms have PyTorch's.
    by_transform = torch.func.grad(lambda t: (functional.attention(t, *tensors[1:]).float() * d_out.float()).sum())(
        tensors[0]
    )
    assert error(by_transform, right[0]) < 1e-2


#: Of these too.
FEW = [
    (1, 32, 4, 1, 100, 128),
    (2, 8, 8, 1, 300, 64),
    (2, 6, 2, 3, 129, 96),
    (1, 5, 5, 15, 40, 32),
    (3, 7, 7, 2, 1000, 64),
    (1, 12, 4, 1, 1, 256),
    (4, 16, 1, 7, 128, 32),
]


def few_operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, key_heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch, queries, heads, size, generator=generator).bfloat16().transpose(1, 2)
    k, v = (torch.randn(batch, key_heads, keys, size, generator=generator).bfloat16() for _ in range(2))
    return q, k, v


def expected_of_few(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for t in (k, v))
    scores = q.double() @ k.transpose(2, 3) * q.shape[3] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_queries(shape: tuple[int, ...], masked: bool, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = few_operands(shape)
    mask = seen_by_all(shape[0], shape[4]) if masked else None
    calls: list[int] = []
    own = _core.few_queries_attention
    monkeypatch.setattr(_core, "few_queries_attention", lambda *args: (calls.append(1), own(*args))[1])
    got = functional.attention(q, k, v, None, mask, causal)
    assert calls == [1] and got.shape == q.shape
    # The result alone is rounded.
    assert error(got, expected_of_few(q, k, v, mask, causal)) < 2.5e-3
    # A cache of more keys than are used, and queries in any order.
    spare = [torch.cat((t, torch.full_like(t, torch.nan)), 2)[:, :, : shape[4]] for t in (k, v)]
    assert torch.equal(functional.attention(q.contiguous(), *spare, None, mask, causal), got)
    # Others than the engine's own.
    with torch.enable_grad():
        wanted = functional.attention(q.clone().requires_grad_(), k, v, None, mask, causal)
    assert calls == [1, 1] and error(wanted, got) < 1e-2
    exact = functional.attention(q.float(), k.float(), v.float(), None, mask, causal)
    assert calls == [1, 1] and error(exact, expected_of_few(q, k, v, mask, causal)) < 1e-5


def test_few_queries_on_any_number_of_threads() -> None:
    before, results = moesaic.get_num_threads(), []
    q, k, v = few_operands((2, 6, 3, 5, 700, 64))
    try:
        for threads in (1, 2, 5, 16):
            moesaic.set_num_threads(threads)
            results.append(functional.attention(q, k, v, None, seen_by_all(2, 700), True))
    finally:
        moesaic.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_few_queries_that_see_nothing_or_nan() -> None:
    q, k, v = few_operands((2, 4, 2, 3, 300, 64))
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 140:], mask[1] = False, False
    got = functional.attention(q, k, v, key_mask=mask)
    assert not got[1].any() and error(got[:1], functional.attention(q[:1], k[:1, :, :140], v[:1, :, :140])) < 1e-3
    # The first of three queries sees none of one key.
    assert not functional.attention(q, k, v, None, torch.arange(300)[None].expand(2, 300) == 299, True)[:, :, :2].any()
    q[0, 1, 2, 5] = torch.nan
    got = functional.attention(q, k, v)
    assert got[0, 1, 2].isnan().all() and int(got.isnan().sum()) == 64
    q, k, v = few_operands((2, 4, 2, 3, 300, 64))
    v[1, 0, 7, 2] = torch.nan
    got = functional.attention(q, k, v)
    assert got[1, :2, :, 2].isnan().all() and int(got.isnan().sum()) == 6
    large = functional.attention(q * 50, k * 50, few_operands((2, 4, 2, 3, 300, 64))[2])
    assert error(large, expected_of_few(q * 50, k * 50, few_operands((2, 4, 2, 3, 300, 64))[2], None, False)) < 5e-3


def test_timers_see_the_stages() -> None:
    q, k, v = operands(2, 2, 40, 30, 64)
    with moesaic.profile() as p:
        functional.attention(q, k, v)
    seen = {row["name"] for row in p.phases() if row["category"] == "fused" and row["calls"]}
    assert seen == {"pack", "gemm", "softmax"}
    with moesaic.profile() as p:
        functional.attention(*few_operands((1, 4, 2, 1, 300, 64)))
    calls = {row["name"]: row["calls"] for row in p.phases() if row["category"] == "fused" and row["calls"]}
    assert calls == {"few_queries": 2 * 3 + 2}  # 128 keys at a time of each head, which is put together
    out = functional.attention(q.requires_grad_(), k, v)
    with moesaic.profile() as p:
        out.sum().backward()
    seen = {row["name"] for row in p.phases() if row["category"] == "fused" and row["calls"]}
    assert seen == {"pack", "backward_gemm", "backward_softmax"}


def test_bad_input() -> None:
    q, k, v = operands(2, 2, 20, 30, 64)
    mask = torch.ones(2, 30, dtype=torch.bool)
    bad: list[tuple[Any, str]] = [
        (lambda: functional.attention(1, k, v), "q is a int"),  # type: ignore[arg-type]
        (lambda: functional.attention(q[0], k, v), "q has shape"),
        (lambda: functional.attention(q, k.float(), v), "k has shape .* is torch.float32"),
        (lambda: functional.attention(q, k, v[:, :1]), "v has shape"),
        (lambda: functional.attention(q, k[..., :32], v), "k has shape"),
        (lambda: functional.attention(q, k, v[:, :, :20]), "v has shape"),
        (lambda: functional.attention(q, k[:, :0], v[:, :0]), "k has shape"),
        (lambda: functional.attention(q[:, :1], k, v), r"k has shape .* or a divisor of 1 heads"),
        (
            lambda: functional.attention(q, k[:, :, :19], v[:, :, :19], causal=True),
            "q has 20 rows; expected at most k's 19",
        ),
        (lambda: functional.attention(q, k, v, scale="0.5"), "scale is a str"),  # type: ignore[arg-type]
        (lambda: functional.attention(q, k, v, scale=float("nan")), "scale is nan"),
        (lambda: functional.attention(q, k, v, key_mask=mask[:1]), "key_mask has shape"),
        (lambda: functional.attention(q, k, v, key_mask=mask.float()), "key_mask is torch.float32"),
    ]
    for call, message in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    rows = [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    for heads in (0, 3):
        with pytest.raises(ValueError, match=f"heads is {heads}"):
            _core.attention(*rows, heads, 1.0)  # type: ignore[misc]
    with pytest.raises(ValueError, match="v has shape"):
        _core.attention(rows[0], rows[1], rows[2][:1], 2, 1.0)
    with pytest.raises(ValueError, match="k is float32; expected bfloat16"):
        _core.attention(rows[0], rows[1].float(), rows[2], 2, 1.0)
    few = [t[0] for t in (q, k, v)]
    for call, message in (
        (lambda: _core.few_queries_attention(*few, 0, 1.0), "out has 0 sequences"),
        (lambda: _core.few_queries_attention(*few, 3, 1.0), "k has 2 heads; expected a divisor of q's 2"),
        (
            lambda: _core.few_queries_attention(few[0][..., :20], few[1], few[2], 1, 1.0),
            "q has 20 columns",
        ),
        (lambda: _core.few_queries_attention(few[0], few[1][:1], few[2], 1, 1.0), "v has shape"),
        (
            lambda: _core.few_queries_attention(few[0], few[1].float(), few[2], 1, 1.0),
            "k is float32; expected bfloat16",
        ),
        (lambda: _core.few_queries_attention(few[0], few[1][:, :0], few[2][:, :0], 1, 1.0), "k has no rows"),
        (
            lambda: _core.few_queries_attention(few[0], few[1][:, :5], few[2][:, :5], 1, 1.0, None, True),
            "q has 20 rows",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()  # type: ignore[no-untyped-call]
    out, statistics = _core.attention(*rows, 2, 1.0, save=True)  # type: ignore[misc]
    out = out.view(rows[0].shape)
    _core.attention_backward(out, *rows, out, statistics, 2, 1.0)  # type: ignore[misc]
    for call, message in (
        (lambda: _core.attention_backward(out[:1], *rows, out, statistics, 2, 1.0), "d_out has shape"),
        (lambda: _core.attention_backward(out, *rows, out[:1], statistics, 2, 1.0), "out has shape"),
        (lambda: _core.attention_backward(out.float(), *rows, out, statistics, 2, 1.0), "d_out is float32"),
        (lambda: _core.attention_backward(out, *rows, out, statistics[:1], 2, 1.0), "statistics has 80 values"),
        (lambda: _core.attention_backward(out, *rows, out, statistics, 3, 1.0), "statistics has 160 values"),
        (lambda: _core.attention_backward(out, *rows, out, statistics, -2, 1.0), "heads is -2"),
        (lambda: _core.attention_backward(out, *rows, out, statistics, 10**14, 1.0), "heads is 100000000000000"),
        (lambda: _core.attention(*rows, 10**14, 1.0, save=True), "heads is 100000000000000"),
        (lambda: _core.attention_backward(out, *rows, out, None, 2, 1.0), "statistics is None"),
    ):
        with pytest.raises(ValueError, match=message):
            call()  # type: ignore[no-untyped-call]
    none = [row[:0] for row in (*rows, out)]
    grads = _core.attention_backward(none[3], *none, torch.empty(2, 0), 2, 1.0)  # type: ignore[misc]
    assert [grad.shape for grad in grads] == [(0, 128), (0, 128), (0, 128)]
    with pytest.raises(ValueError, match="bias has 30 values"):
        _core.attention(*rows, 2, 1.0, torch.zeros(30))  # type: ignore[misc]
