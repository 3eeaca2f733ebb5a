"""moesaic.nn.functional.gemm_log_probs against PyTorch in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import moesaic
from moesaic.nn import PackedLinear
from moesaic.nn import functional as fused

#: (rows, K, V): one row; off every grid; several blocks of rows and slabs of the vocabulary; more rows than go at once.
SHAPES = [(1, 64, 100), (7, 96, 1001), (270, 40, 17000), (2100, 40, 3001)]
BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-6}


def case(rows: int, depth: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, W, bias and targets, every third of them the largest."""
    generator = torch.Generator().manual_seed(rows + depth + vocabulary)
    x = (2 * torch.randn(rows, depth, generator=generator)).to(dtype)
    weight = (torch.randn(vocabulary, depth, generator=generator) / depth**0.5).to(dtype)
    bias = torch.randn(vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[::3] = (x.double() @ weight.double().t() + bias).argmax(-1)[::3]
    return x, weight, bias, targets


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, scale: float) -> Any:
    z = (x @ weight.double().t() + bias.double()) * scale
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    return fused.TokenLogProbs(
        log_probs, -(p * log_p).sum(-1), (p * p).sum(-1).log(), z.mean(-1), z.argmax(-1) == targets
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias, targets = case(*shape, dtype)
    exact_x = x.double().requires_grad_()
    x.requires_grad_()
    w = PackedLinear(weight, bias)
    out, exact = fused.gemm_log_probs(x, w, targets, 0.7), reference(exact_x, weight, bias, targets, 0.7)
    assert torch.equal(out.is_top1, exact.is_top1)
    assert out.is_top1.any()
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
        torch.testing.assert_close(getattr(out, name).double(), getattr(exact, name), rtol=1e-6, atol=1e-5)
    with torch.no_grad():
        for got, again in zip(out, fused.gemm_log_probs(x, w, targets, 0.7), strict=True):
            assert torch.equal(got, again)
    generator = torch.Generator().manual_seed(1)
    d_log_probs, d_entropy = torch.randn(2, shape[0], generator=generator)
    for of_log_probs, of_entropy in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        x.grad = exact_x.grad = None
        for values in (out, exact):
            loss = of_log_probs * (values.log_probs * d_log_probs).sum() if of_log_probs else 0.0
            loss = loss + (of_entropy * (values.entropy * d_entropy).sum() if of_entropy else 0.0)
            loss.backward(retain_graph=True)
        assert x.grad is not None and exact_x.grad is not None
        assert x.grad.dtype == dtype
        # The entropy of a row whose probabilities are nearly equal is a small difference.
        bound = BOUND[dtype] * (3 if of_entropy else 1)
        assert float((x.grad.double() - exact_x.grad).norm() / exact_x.grad.norm()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    x, weight, bias, targets = case(300, 48, 9000, dtype)
    w = PackedLinear(weight, bias)
    before = moesaic.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            moesaic.set_num_threads(threads)
            x = x.detach().requires_grad_()
            out = fused.gemm_log_probs(x, w, targets)
            (out.log_probs.sum() + 0.1 * out.entropy.sum()).backward()
            found.append([*out, x.grad])
    finally:
        moesaic.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]


def test_rows_without_a_target_cost_nothing_and_are_zero() -> None:
    x, weight, bias, targets = case(50, 32, 200, torch.float32)
    w = PackedLinear(weight, bias)
    whole = fused.gemm_log_probs(x, w, targets)
    masked = targets.clone()
    masked[::2] = -100
    x[0] = float("nan")
    x.requires_grad_()
    out = fused.gemm_log_probs(x, w, masked)
    for got, expected in zip(out, whole, strict=True):
        assert not got[::2].any()
        torch.testing.assert_close(got[1::2], expected[1::2], rtol=1e-6, atol=1e-5)
    out.log_probs.sum().backward()
    assert x.grad is not None
    assert not x.grad[::2].any() and x.grad[1::2].all(-1).all()
    with moesaic.profile() as profile:
        nothing = fused.gemm_log_probs(x, w, torch.full_like(targets, -100))
        nothing.log_probs.sum().backward()
    assert not [row for row in profile.phases() if row["category"] == "fused"]


def test_nan_stays_in_its_row_and_infinities_count_as_nothing() -> None:
    x, weight, bias, targets = case(20, 32, 200, torch.float32)
    x[7, 3] = float("nan")
    bias[:100] = -float("inf")
    targets[:] = 150
    w = PackedLinear(weight, bias)
    x.requires_grad_()
    out = fused.gemm_log_probs(x, w, targets)
    out.log_probs.sum().backward()
    assert x.grad is not None
    others = torch.arange(20) != 7
    for values in (out.log_probs, out.entropy, out.log_sum_sq_probs, x.grad.sum(-1)):
        assert values[7].isnan() and values[others].isfinite().all()
    exact = (x.detach() @ weight[100:].t() + bias[100:]).log_softmax(-1)
    torch.testing.assert_close(out.log_probs.detach()[others], exact[others, 50])


def test_leading_dimensions_and_no_rows() -> None:
    x, weight, bias, targets = case(12, 32, 50, torch.float32)
    w = PackedLinear(weight, bias)
    flat = fused.gemm_log_probs(x, w, targets)
    apart = torch.stack([x, x], -1)[..., 0].view(3, 4, 32).transpose(0, 1)
    out = fused.gemm_log_probs(apart, w, targets.view(3, 4).t())
    for got, expected in zip(out, flat, strict=True):
        assert got.shape == (4, 3)
        assert torch.equal(got.t().reshape(-1), expected)
    empty = torch.empty(0, 32, requires_grad=True)
    out = fused.gemm_log_probs(empty, w, torch.empty(0, dtype=torch.int64))
    assert out.log_probs.shape == (0,)
    out.log_probs.sum().backward()


def test_bad_input() -> None:
    x, weight, bias, targets = case(4, 32, 50, torch.float32)
    w = PackedLinear(weight, bias)
    with pytest.raises(TypeError, match=r"w is a Tensor; expected a moesaic\.nn\.PackedLinear"):
        fused.gemm_log_probs(x, weight, targets)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"targets is a list; expected a torch\.Tensor"):
        fused.gemm_log_probs(x, w, [1, 2, 3, 4])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"targets has shape \[3\] and is torch\.int64; expected \[4\]"):
        fused.gemm_log_probs(x, w, targets[:3])
    with pytest.raises(
        ValueError, match=r"targets has shape \[4\] and is torch\.int32; expected \[4\] and torch\.int64"
    ):
        fused.gemm_log_probs(x, w, targets.int())
    targets[2] = 50
    with pytest.raises(ValueError, match=r"targets\[2\] is 50; expected less than 50, the size of the vocabulary"):
        fused.gemm_log_probs(x, w, targets)
    targets[2] = 0
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16; expected torch\.float32, as w was packed"):
        fused.gemm_log_probs(x.bfloat16(), w, targets)
    with pytest.raises(ValueError, match=r"x has shape \[4, 31\]; expected \[\.\.\., 32\]"):
        fused.gemm_log_probs(x[:, :31], w, targets)
    for scale in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scale is {scale}; expected a finite number"):
            fused.gemm_log_probs(x, w, targets, scale)
    with pytest.raises(ValueError, match=r"w\.weight requires a gradient; expected a frozen one"):
        fused.gemm_log_probs(x, PackedLinear(weight.clone().requires_grad_()), targets)
    with pytest.raises(ValueError, match=r"w\.bias requires a gradient; expected a frozen one"):
        fused.gemm_log_probs(x, PackedLinear(weight, bias.clone().requires_grad_()), targets)
    pair = moesaic.LoraPair(torch.zeros(2, 32), torch.zeros(50, 2), 1.0)
    with pytest.raises(ValueError, match="w has LoRA; expected none"):
        fused.gemm_log_probs(x, PackedLinear(weight, None, pair), targets)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x"):
        fused.gemm_log_probs(forward_ad.make_dual(x, torch.ones_like(x)), w, targets)
    x.requires_grad_()
    out = fused.gemm_log_probs(x, w, targets)
    (grad,) = torch.autograd.grad(out.log_probs.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"moesaic\.nn\.functional"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 5), (7, 1001), (40, 2600)], ids=str)
def test_logits_that_are_there(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = (4 * torch.randn(shape, generator=generator)).to(dtype)
    targets = torch.randint(shape[1], shape[:1], generator=generator)
    targets[3::4] = -100
    counts = targets >= 0
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    out = fused.log_probs(logits, targets, 0.7)
    log_p = (0.7 * exact).log_softmax(-1)
    expected = torch.where(counts, log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0], 0.0)
    entropy = torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0.0)
    torch.testing.assert_close(out.log_probs.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-6, atol=1e-5)
    d_log_probs, d_entropy = torch.randn(2, shape[0], generator=generator)
    ((out.log_probs * d_log_probs).sum() + (out.entropy * d_entropy).sum()).backward()
    ((expected * d_log_probs).sum() + (entropy * d_entropy).sum()).backward()
    assert logits.grad is not None and exact.grad is not None
    assert logits.grad.dtype == dtype
    assert not logits.grad[~counts].any()
    assert float((logits.grad.double() - exact.grad).norm() / exact.grad.norm()) < BOUND[dtype]


def test_gaps_between_rows_of_logits() -> None:
    whole = torch.randn(6, 300, generator=torch.Generator().manual_seed(9))
    targets = torch.arange(6)
    apart = whole[:, :200]
    for got, expected in zip(
        fused.log_probs(apart, targets), fused.log_probs(apart.contiguous(), targets), strict=True
    ):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="logits has shape"):
        fused.log_probs(whole[:, :0], targets)
    with pytest.raises(ValueError, match=r"expected \[6\] and torch\.int64, one for each row of logits"):
        fused.log_probs(whole, targets[:2])
    with pytest.raises(ValueError, match=r"logits is torch\.float16; expected torch\.bfloat16 or torch\.float32"):
        fused.log_probs(whole.half(), targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_same_bits_of_logits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    whole = torch.randn(2100, 700, generator=generator).to(dtype)  # more rows than go at once, and gaps between them
    targets = torch.randint(600, (2100,), generator=generator)
    before = moesaic.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            moesaic.set_num_threads(threads)
            leaf = whole.clone().requires_grad_()
            out = fused.log_probs(leaf[:, :600], targets)
            out.log_probs.sum().backward()
            found.append([*out, leaf.grad])
    finally:
        moesaic.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    exact = whole.double().requires_grad_()
    exact[:, :600].log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    assert float((found[0][-1].double() - exact.grad).norm() / exact.grad.norm()) < BOUND[dtype]  # type: ignore[union-attr]


def test_results_may_be_written_to() -> None:
    x, weight, _, targets = case(6, 32, 50, torch.float32)
    w = PackedLinear(weight)
    x.requires_grad_()
    expected, *_ = torch.autograd.grad(fused.gemm_log_probs(x, w, targets).log_probs.sum(), x)
    out = fused.gemm_log_probs(x, w, targets)
    out.mean_logits.add_(1)
    out.log_sum_sq_probs.zero_()
    out.log_probs.detach().clamp_(max=-1e9)
    (2 * out.log_probs.mul_(0.5)).sum().backward()
    torch.testing.assert_close(x.grad, expected)
