"""moesaic.nn.functional.rotary, and what moesaic.hf.fuse makes of transformers' rotary embeddings."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import moesaic.hf
from moesaic.hf import rotary as hook
from moesaic.nn.functional import rotary

STOCK = modeling_qwen3.apply_rotary_pos_emb
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
    return STOCK(x, x, cos, sin)[0]  # type: ignore[no-any-return]


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
        hook.engine.rotary(x[..., ::2], cos[..., ::2], sin[..., ::2])  # 32 numbers with gaps
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
    x = x.double().float().requires_grad_()
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


def qwen3(head_dim: int = 32) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    return Qwen3ForCausalLM(config).bfloat16().eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Shapes of what the engine turned. Afterwards transformers has its own function again."""
    seen: list[torch.Size] = []
    compute = moesaic._core.rotary
    monkeypatch.setattr(moesaic._core, "rotary", lambda x, *a, **k: seen.append(x.shape) or compute(x, *a, **k))
    yield seen
    gc.collect()
    assert modeling_qwen3.apply_rotary_pos_emb is STOCK


def rotaries(report: moesaic.hf.FuseReport) -> int:
    return sum(module.operator == "rotary" for module in report.replaced)


def test_fuse_and_the_way_back(calls: list[torch.Size]) -> None:
    model, other = qwen3(), qwen3()
    ids = torch.randint(0, 50, (2, 9))
    expected = other(ids).logits
    assert rotaries(moesaic.hf.fuse(model)) == 2
    calls.clear()  # of the probe
    model(ids)
    assert calls == 2 * [torch.Size((18, 128)), torch.Size((18, 64))]
    assert torch.equal(other(ids).logits, expected)  # a model that is not fused: the same bits
    assert rotaries(moesaic.hf.fuse(other)) == 2  # two models of a file
    moesaic.hf.unfuse(model)
    assert modeling_qwen3.apply_rotary_pos_emb is not STOCK
    assert moesaic.hf.unfuse(other) > 0
    assert modeling_qwen3.apply_rotary_pos_emb is STOCK
    calls.clear()
    assert torch.equal(other(ids).logits, expected) and not calls
    assert rotaries(moesaic.hf.fuse(model, attention=False)) == 0


def test_a_model_that_is_gone(calls: list[torch.Size]) -> None:
    model, other = qwen3(), qwen3()
    moesaic.hf.fuse(model)
    del model
    gc.collect()
    calls.clear()
    other(torch.randint(0, 50, (1, 4)))
    assert not calls
    moesaic.hf.fuse(other)
    moesaic.hf.unfuse(other)


def test_what_is_left_to_transformers(calls: list[torch.Size]) -> None:
    small = moesaic.hf.fuse(qwen3(head_dim=16))
    assert rotaries(small) == 0 and any("heads have 16 numbers" in m.reason for m in small.kept)
    model = qwen3()
    moesaic.hf.fuse(model)
    served = modeling_qwen3.apply_rotary_pos_emb
    calls.clear()
    x, cos, sin = example((2, 3, 4, 32, 2), torch.bfloat16)
    leaf = cos.clone().requires_grad_()
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x, cos.float(), sin.float()), {}),
        ((x, x, leaf, sin), {}),
        ((x.transpose(1, 2), x.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}),
        ((x.transpose(1, 2), x.transpose(1, 2), cos, sin, 2), {}),
        ((x.half(), x.half(), cos.half(), sin.half()), {}),
        ((x[..., :16], x[..., :16], cos[..., :16], sin[..., :16]), {}),
    ]
    for arguments, options in cases:
        for got, expected in zip(served(*arguments, **options), STOCK(*arguments, **options), strict=True):
            assert torch.equal(got, expected) and got.dtype == expected.dtype
    with pytest.raises(TypeError):
        served(x, x, cos, sin, another=1)
    assert not calls
    served(x, x, cos, sin, unsqueeze_dim=1)
    assert len(calls) == 2
    moesaic.hf.unfuse(model)


def test_functions_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hook._agrees(modeling_llama.apply_rotary_pos_emb)
    assert not hook._agrees(modeling_gptj.apply_rotary_pos_emb)  # pairs of neighbours, other arguments
    assert not hook._agrees(lambda q, k, cos, sin: STOCK(q, k, cos, 2 * sin))
    assert not hook._agrees(lambda q, k, cos, sin: (q, k, cos))  # type: ignore[arg-type, return-value]
    replaced = lambda q, k, cos, sin: STOCK(q, k, cos, 2 * sin)  # noqa: E731
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", replaced)
    report = moesaic.hf.fuse(qwen3())
    assert rotaries(report) == 0 and any("of another kind" in m.reason for m in report.kept)
    assert modeling_qwen3.apply_rotary_pos_emb is replaced


def test_a_function_that_was_replaced_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3()
    moesaic.hf.fuse(model)
    ours, later = modeling_qwen3.apply_rotary_pos_emb, lambda *a, **k: STOCK(*a, **k)
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", later)
    assert moesaic.hf.unfuse(model) > 0
    assert modeling_qwen3.apply_rotary_pos_emb is later  # somebody else's stays
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", ours)
    moesaic.hf.unfuse(model)
    assert modeling_qwen3.apply_rotary_pos_emb is STOCK
    monkeypatch.undo()
    modeling_qwen3.apply_rotary_pos_emb = STOCK


def test_models_of_other_threads(calls: list[torch.Size]) -> None:
    models = [qwen3() for _ in range(4)]
    ids = torch.randint(0, 50, (1, 5))
    errors: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            expected = model(ids).logits
            for _ in range(5):
                moesaic.hf.fuse(model)
                assert (model(ids).logits - expected).abs().max() < 0.1
                moesaic.hf.unfuse(model)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
