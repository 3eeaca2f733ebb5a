"""moesaic.nn.functional.rotary: the bits of PyTorch, gradients, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moesaic
from moesaic.nn.functional import rotary

SIZES = [(2, 3, 7, 64, 2), (2, 5, 33, 32, 1), (1, 1, 1, 128, 1), (3, 2, 4, 96, 3), (2, 2, 5, 20, 2)]


def example(size: tuple[int, ...], dtype: torch.dtype, heads_inside: bool = False) -> tuple[torch.Tensor, ...]:
    """x ``[B, heads, T, D]``, as a projection gives it or with `heads_inside` the other way in memory, cos, sin."""
    batch, heads, tokens, features, of_angles = size
    random = torch.Generator().manual_seed(1)
    if heads_inside:
        x = torch.randn(batch, heads, tokens, features, generator=random)
    else:
        x = torch.randn(batch, tokens, heads, features, generator=random).transpose(1, 2)
    cos, sin = (torch.randn(of_angles, tokens, features, generator=random) for _ in range(2))
    return tuple(t.to(dtype) for t in (x, cos, sin))


def stock(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(1)) + (turned * sin.unsqueeze(1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads_inside", [False, True])
def test_the_bits_of_pytorch(size: tuple[int, ...], dtype: torch.dtype, heads_inside: bool) -> None:
    x, cos, sin = example(size, dtype, heads_inside)
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, got = stock(theirs, cos, sin), rotary(ours, cos, sin)
    assert torch.equal(got, expected)
    assert torch.equal(rotary(x, cos, sin), expected)  # without a gradient
    d_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected.backward(d_out)
    got.backward(d_out)
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_the_engine_runs_where_it_may() -> None:
    x, cos, sin = example(SIZES[0], torch.bfloat16)
    leaf = x.clone().requires_grad_()
    with moesaic.profile() as profile:
        rotary(leaf, cos, sin).sum().backward()
    assert {row["name"] for row in profile.phases() if row["category"] == "fused"} == {"rotary", "backward_rotary"}
    other, other_cos, other_sin = example(SIZES[-1], torch.bfloat16)  # heads of 20
    with moesaic.profile() as profile:
        rotary(other, other_cos, other_sin)
        torch.func.vmap(lambda t: rotary(t, cos, sin))(x[None])
        rotary(x[..., ::2], cos[..., ::2], sin[..., ::2])  # 32 numbers with gaps
    assert [row["calls"] for row in profile.phases() if row["category"] == "fused"] == [1]


def test_memory_with_gaps_and_negative_views() -> None:
    x, cos, sin = example((2, 4, 6, 64, 2), torch.bfloat16)
    assert torch.equal(rotary(x[:, 1:3], cos, sin), stock(x[:, 1:3], cos, sin))
    assert torch.equal(
        rotary(x[..., ::2], cos[..., 1::2], sin[..., ::2]), stock(x[..., ::2], cos[..., 1::2], sin[..., ::2])
    )
    negative = torch._neg_view(x)
    assert torch.equal(rotary(negative, cos, sin), stock(negative, cos, sin))
    assert rotary(x[:0], cos[:0], sin[:0]).shape == (0, 4, 6, 64)


def test_more_than_one_derivative() -> None:
    x, cos, sin = example((1, 2, 3, 32, 1), torch.float32)
    x = x.requires_grad_()
    (first,) = torch.autograd.grad((rotary(x, cos, sin) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    (their_first,) = torch.autograd.grad((stock(x, cos, sin) ** 3).sum(), x, create_graph=True)
    (their_second,) = torch.autograd.grad((their_first**2).sum(), x)
    torch.testing.assert_close(first, their_first)
    torch.testing.assert_close(second, their_second)


def test_threads_change_no_bit() -> None:
    x, cos, sin = example((3, 8, 300, 128, 3), torch.bfloat16)
    threads = moesaic.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            moesaic.set_num_threads(count)
            results.append(rotary(x, cos, sin))
    finally:
        moesaic.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_nan_and_infinity_pass() -> None:
    x, cos, sin = example((1, 1, 2, 32, 1), torch.bfloat16)
    x = x.clone()
    x[0, 0, 0, 3], x[0, 0, 1, 20] = torch.nan, torch.inf
    assert torch.equal(rotary(x, cos, sin).isnan(), stock(x, cos, sin).isnan())
    assert torch.equal(rotary(x, cos, sin).isinf(), stock(x, cos, sin).isinf())


def test_bad_input() -> None:
    x, cos, sin = example((2, 3, 4, 32, 2), torch.bfloat16)
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "x is a int", lambda: rotary(1, cos, sin)),  # type: ignore[arg-type]
        (ValueError, r"x has shape \[3, 4, 32\]", lambda: rotary(x[0], cos, sin)),
        (ValueError, "even D", lambda: rotary(x[..., :31], cos, sin)),
        (ValueError, "cos is torch.float32", lambda: rotary(x, cos.float(), sin)),
        (ValueError, r"sin has shape \[2, 3, 32\]; expected \[2, 4, 32\]", lambda: rotary(x, cos, sin[:, :3])),
        (ValueError, "cos requires a gradient", lambda: rotary(x, cos.clone().requires_grad_(), sin)),
        (ValueError, "x is torch.float16", lambda: rotary(x.half(), cos, sin)),
        (ValueError, "x is on meta", lambda: rotary(x.to("meta"), cos, sin)),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x"):
        rotary(torch.autograd.forward_ad.make_dual(x, x), cos, sin)
    rows = x.transpose(1, 2).reshape(8, 96)
    for arguments, message in (
        ((rows[0], cos[0], sin[0]), "x has 1 dimension"),
        ((rows, cos[0, :, :20], sin[0]), "cos has 20 columns; expected a multiple of 32 that divides x's 96"),
        ((rows, cos[0, :3], sin[0]), "cos has 3 rows; expected a divisor of x's 8"),
        ((rows, cos[0], sin[0, :1]), r"sin has shape \[1, 32\]; expected \[4, 32\]"),
        ((rows.float(), cos[0], sin[0]), "cos is bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            moesaic._core.rotary(*arguments)
