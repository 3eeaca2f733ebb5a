"""moesaic.nn against PyTorch in double precision: values, gradients, bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import moesaic
from moesaic.nn import PackedLinear
from moesaic.nn import functional as fused

#: (tokens, N, K): aligned, off every grid, one row, more columns than rows can be divided among threads.
SHAPES = [(64, 96, 64), (511, 770, 130), (1, 33, 47), (37, 768, 300)]
#: Relative L2. bf16: 2^-9 for each rounding on the way, at most three; fp32: the sums' rounding.
BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-6}

Tensors = dict[str, torch.Tensor]


def error(got: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert got is not None and expected is not None
    return float((got.detach().double() - expected.detach()).norm() / expected.detach().norm())


def tensors(tokens: int, n: int, k: int, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(tokens + n + k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(tokens, k).to(dtype),
        "weight": (normal(n, k) / k**0.5).to(dtype),
        "bias": normal(n).to(dtype),
        "residual": (normal(tokens, n) + 0.5).to(dtype),
        "gamma": normal(n).to(dtype),
        "beta": normal(n),
        "a": normal(4, k) / k**0.5,
        "b": normal(n, 4),
    }


def product(t: Tensors, lora: bool = False) -> torch.Tensor:
    out = F.linear(t["x"], t["weight"], t["bias"])
    return out + 0.5 * (t["x"] @ t["a"].t()) @ t["b"].t() if lora else out


def packed(t: Tensors, lora: bool = False) -> PackedLinear:
    return PackedLinear(t["weight"], t["bias"], moesaic.LoraPair(t["a"], t["b"], 0.5) if lora else ())


def layer_norm(x: torch.Tensor, t: Tensors, eps: float = 1e-12) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], t["gamma"], t["beta"], eps)


#: name -> (the function, the same in PyTorch, what it takes beside x and the weight)
Case = tuple[Callable[[Tensors, PackedLinear], torch.Tensor], Callable[[Tensors, bool], torch.Tensor]]
CASES: dict[str, Case] = {
    "gemm_bias": (
        lambda t, w: fused.gemm_bias(t["x"], w, t["residual"]),
        lambda t, lora: product(t, lora) + t["residual"],
    ),
    "gemm_bias_add_layernorm": (
        lambda t, w: fused.gemm_bias_add_layernorm(t["x"], w, t["residual"], t["gamma"], t["beta"]),
        lambda t, lora: layer_norm(product(t, lora) + t["residual"], t),
    ),
    "gemm_bias_add_rmsnorm": (
        lambda t, w: fused.gemm_bias_add_rmsnorm(t["x"], w, t["residual"], t["gamma"]),
        lambda t, lora: F.rms_norm(product(t, lora) + t["residual"], t["gamma"].shape, t["gamma"], 1e-6),
    ),
    "gemm_bias_gelu": (
        lambda t, w: fused.gemm_bias_gelu(t["x"], w),
        lambda t, lora: F.gelu(product(t, lora)),
    ),
    "gemm_bias_gelu_tanh": (
        lambda t, w: fused.gemm_bias_gelu(t["x"], w, approximate="tanh"),
        lambda t, lora: F.gelu(product(t, lora), approximate="tanh"),
    ),
    "gemm_bias_gelu_add_layernorm": (
        lambda t, w: fused.gemm_bias_gelu_add_layernorm(t["x"], w, t["residual"], t["gamma"], t["beta"]),
        lambda t, lora: layer_norm(F.gelu(product(t, lora)) + t["residual"], t),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    t = tensors(*shape, dtype)
    run, reference = CASES[name]
    out = run(t, packed(t))
    assert out.dtype == dtype and out.shape == (shape[0], shape[1])
    assert error(out, reference({k: v.double() for k, v in t.items()}, False)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("how", ["dense", "frozen", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, how: str, dtype: torch.dtype) -> None:
    t = tensors(130, 96, 80, dtype)
    trained = {"dense": ["weight", "bias", "gamma", "beta"], "frozen": [], "lora": ["a", "b"]}[how]
    trained += ["x", "residual"]
    reference = {k: v.double().requires_grad_(k in trained) for k, v in t.items()}
    t = {k: v.requires_grad_(k in trained) for k, v in t.items()}
    run, expected = CASES[name]
    d_out = torch.randn(130, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = run(t, packed(t, how == "lora"))
    out.backward(d_out)
    expected(reference, how == "lora").backward(d_out.double())
    for tensor in trained:
        if reference[tensor].grad is None:
            assert t[tensor].grad is None
            continue
        assert t[tensor].grad.dtype == t[tensor].dtype  # type: ignore[union-attr]
        # In fp32 LoRA's own products are PyTorch's.
        assert error(t[tensor].grad, reference[tensor].grad) < BOUND[dtype], tensor


@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_adapters_that_add_up(tokens: int) -> None:
    """Two in bf16, of two ranks and dtypes, one of them with gaps between its columns; one that does not train; and one
    without ranks."""
    n, k = 130, 200
    t = tensors(tokens, n, k, torch.bfloat16)
    generator = torch.Generator().manual_seed(tokens)
    a = [(torch.randn(r, k, generator=generator) / k**0.5) for r in (20, 3, 8, 0)]
    b = [torch.randn(n, r, generator=generator) for r in (20, 3, 8, 0)]
    a[1], b[1] = a[1].bfloat16(), b[1].bfloat16()
    a[2], b[2] = a[2].t().contiguous().t(), b[2].t().contiguous().t()
    scales = [0.5, 2.0, 1.5, 1.0]
    leaves = [t["x"], *a, *b]
    for leaf in leaves:
        leaf.requires_grad_(leaf is not a[1] and leaf is not b[1])
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    w = PackedLinear(t["weight"], t["bias"], [moesaic.LoraPair(*pair) for pair in zip(a, b, scales, strict=True)])
    out = fused.gemm_bias_gelu(t["x"], w)
    d_out = torch.randn(tokens, n, generator=generator).bfloat16()
    out.backward(d_out)
    x, factors = exact[0], exact[1:]
    expected = F.linear(x, t["weight"].double(), t["bias"].double())
    for left, right, scale in zip(factors[:4], factors[4:], scales, strict=True):
        expected = expected + scale * (x @ left.t()) @ right.t()
    expected = F.gelu(expected)
    expected.backward(d_out.double())
    assert error(out, expected) < BOUND[torch.bfloat16]
    for leaf, of_exact in zip(leaves, exact, strict=True):
        if not leaf.requires_grad or leaf.numel() == 0:
            assert leaf.grad is None or leaf.numel() == 0
            continue
        assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
        assert error(leaf.grad, of_exact.grad) < BOUND[torch.bfloat16], list(leaf.shape)


def test_an_adapter_alone_trains() -> None:
    """Of an input that wants no gradient, as the first layer's, and of one factor."""
    t = tensors(50, 96, 80, torch.bfloat16)
    t["b"].requires_grad_()
    d_out = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    fused.gemm_bias(t["x"], packed(t, True)).backward(d_out)
    exact = 0.5 * d_out.double().t() @ (t["x"].double() @ t["a"].double().t())
    assert error(t["b"].grad, exact) < BOUND[torch.bfloat16] and t["a"].grad is None and t["x"].grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_norms_and_gate_alone(dtype: torch.dtype) -> None:
    for tokens, n in [(3, 770), (200, 64), (1, 10), (65, 1022)]:
        t = tensors(tokens, n, 4, dtype)
        x = t["residual"]
        exact = x.double().requires_grad_()
        half = n // 2
        gamma, beta = t["gamma"].clone().requires_grad_(), t["beta"].clone().requires_grad_()
        double = {"gamma": gamma.detach().double().requires_grad_(), "beta": beta.detach().double().requires_grad_()}
        functions: list[tuple[Callable[..., torch.Tensor], torch.Tensor, tuple[Any, ...]]] = [
            (fused.layernorm, layer_norm(exact, double, 1e-5), (gamma, beta)),
            (fused.rmsnorm, F.rms_norm(exact, (n,), double["gamma"], 1e-6), (gamma,)),
            (fused.silu_mul, F.silu(exact[:, :half]) * exact[:, half:], ()),
        ]
        for function, expected, vectors in functions:
            given = x.clone().requires_grad_()
            out = function(given, *vectors)
            assert error(out, expected) < BOUND[dtype]
            d_out = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
            for tensor in (exact, *double.values(), gamma, beta):
                tensor.grad = None
            out.backward(d_out)
            expected.backward(d_out.double())
            assert error(given.grad, exact.grad) < BOUND[dtype], function
            for vector, name in zip(vectors, double, strict=False):
                assert error(vector.grad, double[name].grad) < BOUND[dtype], (function, name)
            with torch.no_grad():
                plain = function(x, *vectors)
                in_place = x.clone()
                result = function(in_place, *vectors, inplace=True)
            assert torch.equal(plain, out)
            assert torch.equal(result, plain) and result.data_ptr() == in_place.data_ptr()


def test_a_mean_far_from_zero_does_not_lose_the_variance() -> None:
    x = 1000 + torch.randn(8, 768, generator=torch.Generator().manual_seed(3))
    # The values themselves have steps of 2^-14 around 1000; the mean is off by a few of these at most.
    assert error(fused.layernorm(x), F.layer_norm(x.double(), (768,))) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    t = tensors(300, 258, 770, dtype)
    threads = moesaic.get_num_threads()

    def results() -> list[torch.Tensor]:
        lora = dtype == torch.bfloat16  # else its products are PyTorch's
        leaves = {k: v.clone().requires_grad_(k != "weight") for k, v in t.items()}
        out = CASES["gemm_bias_gelu_add_layernorm"][0](leaves, packed(leaves, lora))
        out.backward(torch.ones_like(out))
        trained = ("x", "residual", "gamma", "beta", *(("a", "b") if lora else ()))
        return [out.detach()] + [leaves[k].grad for k in trained]  # type: ignore[list-item]

    try:
        moesaic.set_num_threads(1)
        expected = results()
        for n in (2, 3, 16):
            moesaic.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True)), n
    finally:
        moesaic.set_num_threads(threads)


def test_leading_dimensions_strides_and_no_rows() -> None:
    t = tensors(24, 32, 48, torch.float32)
    w = packed(t)
    expected = fused.gemm_bias_gelu(t["x"], w)
    assert torch.equal(fused.gemm_bias_gelu(t["x"].view(2, 3, 4, 48), w), expected.view(2, 3, 4, 32))
    wide = torch.zeros(24, 60)
    wide[:, :48] = t["x"]
    assert torch.equal(fused.gemm_bias_gelu(wide[:, :48], w), expected)
    assert torch.equal(fused.gemm_bias_gelu(t["x"].t().contiguous().t(), w), expected)
    gamma, beta = t["gamma"].float(), t["beta"].to(torch.bfloat16)
    norm = fused.gemm_bias_add_layernorm(t["x"], w, t["residual"], gamma, beta.float())
    apart = torch.stack((gamma, gamma), 1)[:, 0], torch.stack((beta, beta), 1)[:, 1]
    assert torch.equal(fused.gemm_bias_add_layernorm(t["x"], w, t["residual"], *apart), norm)
    assert fused.gemm_bias_gelu(t["x"][:0], w).shape == (0, 32)
    assert torch.equal(fused.gemm_bias(t["x"][0], w), fused.gemm_bias(t["x"], w)[0])


def test_nan_stays_in_its_row() -> None:
    for dtype in BOUND:
        t = tensors(40, 32, 48, dtype)
        w = packed(t)
        clean = CASES["gemm_bias_gelu_add_layernorm"][0](t, w)
        t["x"][7, 3] = float("nan")
        out = CASES["gemm_bias_gelu_add_layernorm"][0](t, w)
        assert out[7].isnan().all()
        assert torch.equal(torch.cat((out[:7], out[8:])), torch.cat((clean[:7], clean[8:])))
        assert fused.gemm_bias_gelu(t["x"], w, approximate="tanh")[7].isnan().all()


def test_extreme_activations() -> None:
    x = torch.tensor([[-1e30, -100.0, -6.0, -0.0, 6.0, 100.0, 1e30, float("inf")]])
    w = PackedLinear(torch.eye(8))
    for approximate in ("none", "tanh"):
        finite = x[:, :7]
        out = fused.gemm_bias_gelu(F.pad(finite, (0, 1)), w, approximate=approximate)[:, :7]
        torch.testing.assert_close(out, F.gelu(finite, approximate=approximate), rtol=1e-6, atol=2e-6)
        leaf = F.pad(finite, (0, 1)).requires_grad_()
        fused.gemm_bias_gelu(leaf, w, approximate=approximate).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(
            leaf.grad[0],
            torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1, 0.5]),
            rtol=1e-6,
            atol=2e-7 if approximate == "tanh" else 4e-7,
        )


def test_a_weight_that_trains_is_packed_anew() -> None:
    t = tensors(16, 32, 48, torch.float32)
    weight = torch.nn.Parameter(t["weight"])
    w = PackedLinear(weight)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for _ in range(2):
        out = fused.gemm_bias(t["x"], w)
        assert error(out, F.linear(t["x"], weight).detach().double()) < 1e-6
        out.square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert error(fused.gemm_bias(t["x"], w), F.linear(t["x"], weight).double()) < 1e-6
    assert PackedLinear(t["weight"]).weight is None  # a frozen one is not kept


def test_checkpointing_and_second_derivatives() -> None:
    t = {k: v.requires_grad_() for k, v in tensors(16, 32, 48, torch.float32).items()}
    w = packed(t)
    run = CASES["gemm_bias_gelu_add_layernorm"][0]
    run(t, w).sum().backward()
    expected = t["x"].grad.clone()  # type: ignore[union-attr]
    t["x"].grad = None
    torch.utils.checkpoint.checkpoint(lambda: run(t, w), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert torch.equal(t["x"].grad, expected)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(run(t, w).square().sum(), t["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        grad.sum().backward()


def test_packed_linear_as_an_object() -> None:
    for dtype in BOUND:
        t = tensors(4, 33, 47, dtype)
        w = packed(t)
        assert (w.out_features, w.in_features, w.dtype) == (33, 47, dtype) and w.weight_bytes >= t["weight"].nbytes
        assert torch.equal(w.unpack(), t["weight"])
        assert copy.deepcopy(w) is w
        again = pickle.loads(pickle.dumps(w))
        assert torch.equal(fused.gemm_bias(t["x"], again), fused.gemm_bias(t["x"], w))
        assert repr(w) == f"PackedLinear(in_features=47, out_features=33, bias=True, dtype={dtype})"


def test_timers_see_the_stages() -> None:
    t = tensors(64, 32, 48, torch.bfloat16)
    leaves = {k: v.requires_grad_() for k, v in t.items()}
    with moesaic.profile() as p:
        CASES["gemm_bias_gelu_add_layernorm"][0](leaves, packed(leaves)).sum().backward()
        fused.gemm_bias_gelu(t["x"], packed(t)).sum().backward()
        fused.silu_mul(leaves["x"]).sum().backward()
    seen = {row["name"] for row in p.phases() if row["category"] == "fused" and row["calls"] > 0}
    backward = {"backward_norm", "backward_activation", "backward_gemm", "backward_silu_mul"}
    assert seen == {"pack", "gemm", "norm", "epilogue", "silu_mul"} | backward


def test_bad_input() -> None:
    t = tensors(8, 32, 48, torch.float32)
    w = packed(t)
    x, residual, gamma, beta = t["x"], t["residual"], t["gamma"], t["beta"]
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "weight is a list", lambda: PackedLinear([1.0])),  # type: ignore[arg-type]
        (ValueError, r"weight has shape \[3\]", lambda: PackedLinear(torch.zeros(3))),
        (ValueError, r"weight has shape \[0, 4\]", lambda: PackedLinear(torch.zeros(0, 4))),
        (ValueError, "weight is torch.float16", lambda: PackedLinear(torch.zeros(3, 4).half())),
        (ValueError, "weight is on meta", lambda: PackedLinear(torch.zeros(3, 4, device="meta"))),
        (ValueError, r"bias has shape \[4\]", lambda: PackedLinear(torch.zeros(3, 4), torch.zeros(4))),
        (TypeError, "bias is a float", lambda: PackedLinear(torch.zeros(3, 4), 1.0)),  # type: ignore[arg-type]
        (TypeError, "lora holds a int", lambda: PackedLinear(torch.zeros(3, 4), None, [1])),  # type: ignore[list-item]
        (
            ValueError,
            "lora has experts = 2",
            lambda: PackedLinear(
                torch.zeros(3, 4), None, moesaic.LoraPair(torch.zeros(4, 4), torch.zeros(3, 4), 1.0, experts=2)
            ),
        ),
        (
            ValueError,
            "lora has a",
            lambda: PackedLinear(torch.zeros(3, 4), None, moesaic.LoraPair(torch.zeros(2, 5), torch.zeros(3, 2), 1.0)),
        ),
        (TypeError, "w is a Tensor", lambda: fused.gemm_bias_gelu(x, t["weight"])),  # type: ignore[arg-type]
        (TypeError, "x is a int", lambda: fused.gemm_bias_gelu(1, w)),  # type: ignore[arg-type]
        (ValueError, r"x has shape \[8, 32\]; expected \[..., 48\]", lambda: fused.gemm_bias_gelu(residual, w)),
        (ValueError, "x is torch.bfloat16; expected torch.float32", lambda: fused.gemm_bias_gelu(x.bfloat16(), w)),
        (ValueError, "x is torch.int64", lambda: fused.layernorm(x.long())),
        (ValueError, "approximate is 'erf'", lambda: fused.gemm_bias_gelu(x, w, approximate="erf")),
        (
            ValueError,
            r"residual has shape \[7, 32\]",
            lambda: fused.gemm_bias_add_layernorm(x, w, residual[:7], gamma, beta),
        ),
        (
            ValueError,
            "residual has shape .* and is torch.bfloat16",
            lambda: fused.gemm_bias_add_layernorm(x, w, residual.bfloat16(), gamma, beta),
        ),
        (
            TypeError,
            "residual is None",
            lambda: fused.gemm_bias_add_layernorm(x, w, None, gamma, beta),  # type: ignore[arg-type]
        ),
        (
            ValueError,
            r"gamma has shape \[31\]",
            lambda: fused.gemm_bias_add_layernorm(x, w, residual, gamma[:31], beta),
        ),
        (ValueError, r"beta has shape \[31\]", lambda: fused.layernorm(residual, gamma, beta[:31])),
        (ValueError, "eps is -1", lambda: fused.rmsnorm(x, eps=-1)),
        (ValueError, "eps is nan", lambda: fused.rmsnorm(x, eps=float("nan"))),
        (TypeError, "eps is a str", lambda: fused.rmsnorm(x, eps="1")),  # type: ignore[arg-type]
        (ValueError, "x has 47 features", lambda: fused.silu_mul(x[:, :47])),
        (ValueError, "inplace is True, and x is not", lambda: fused.silu_mul(x.t(), inplace=True)),
        (
            ValueError,
            "inplace is True, and a gradient",
            lambda: fused.rmsnorm(x.clone().requires_grad_(), inplace=True),
        ),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()
    assert fused.gemm_bias_gelu(x, w).isfinite().all()


def test_tangents_are_refused() -> None:
    t = tensors(8, 32, 48, torch.float32)
    x, w, four = torch.randn(8, 48), packed(t), torch.randn(1, 2, 20, 64)
    layer = moesaic.ExpertsLayer(torch.randn(2, 32, 48), torch.randn(2, 48, 16))
    ids, weights = torch.zeros(8, 1, dtype=torch.long), torch.ones(8, 1)
    with forward_ad.dual_level():
        dual, heads, slots = (forward_ad.make_dual(tensor, tensor) for tensor in (x, four, weights))
        a, b = torch.randn(2, 48), forward_ad.make_dual(torch.randn(32, 2), torch.randn(32, 2))
        adapted = packed(t)
        adapted.lora = (moesaic.LoraPair(a, b, 1.0),)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("x", lambda: fused.gemm_bias_gelu(dual, w)),
            ("w.lora", lambda: fused.gemm_bias_gelu(x, adapted)),
            ("x", lambda: fused.layernorm(dual)),
            ("x", lambda: fused.rmsnorm(dual, inplace=True)),
            ("x", lambda: fused.silu_mul(dual)),
            ("v", lambda: fused.attention(four, four, heads)),
            ("hidden", lambda: moesaic.moe_experts(dual, ids, weights, layer)),
            ("top_k_weights", lambda: moesaic.moe_experts(x, ids, slots, layer)),
        ]
        for name, call in calls:
            with pytest.raises(NotImplementedError, match=f"{name} has a tangent"):
                call()
        assert fused.layernorm(x).shape == x.shape


def test_tensors_without_memory_are_refused() -> None:
    t = tensors(8, 32, 48, torch.float32)
    w = packed(t)
    with FakeTensorMode():
        fake, weight, logits = torch.zeros(8, 48), torch.zeros(32, 48), torch.zeros(2, 100)
        later, empty = torch.zeros(9, 48)[1:], torch.zeros(0, 48)
    taken, taken_later = torch.zeros(8, 48), torch.zeros(9, 48)[1:]
    taken_far = torch.empty(23_000_000, 48)[-64:]  # 4.4 GB, of which nothing is touched
    for tensor in (taken, taken_later, taken_far):
        tensor.untyped_storage().resize_(0)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("x", lambda: fused.gemm_bias_gelu(fake, w)),
        ("x", lambda: fused.layernorm(fake)),
        ("x", lambda: fused.layernorm(later)),
        ("x", lambda: fused.layernorm(taken)),
        ("x", lambda: fused.layernorm(taken_later)),
        ("x", lambda: fused.layernorm(taken_far)),
        ("x", lambda: fused.rmsnorm(fake, inplace=True)),
        ("x", lambda: fused.silu_mul(fake)),
        ("weight", lambda: PackedLinear(weight)),
        ("logits", lambda: moesaic.sampling.sample(logits)),
        ("logits", lambda: moesaic.sampling.kept(logits, 1.0, 5, 0.9)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"{name} has no memory behind it"):
            call()
    assert fused.silu_mul(empty).shape == (0, 24)
