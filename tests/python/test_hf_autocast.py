"""Models in fp32 under autocast to bf16, as TRL trains what it loads by name: what PyTorch takes in bf16 the engine
takes in bf16, and everything else is fp32 as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

import moesaic.hf
from fused_models import SMALL, bert, error, inputs, objective, output, qwen3, qwen3_moe, roberta, vit
from moesaic.hf import operators, rotary


def llama() -> nn.Module:
    """No norms between projections and rotary embeddings."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, head_dim=32, **SMALL))


def olmo2() -> nn.Module:
    """Its norms round what they give to the dtype of what they get."""
    return Olmo2ForCausalLM(Olmo2Config(vocab_size=50, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, **SMALL))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "roberta": roberta,
    "vit": vit,
    "qwen3": qwen3,
    "qwen3_moe": lambda: qwen3_moe(head_dim=32),
    "llama": llama,
    "olmo2": olmo2,
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype]]:
    """What the engine computes, and in which dtype."""
    seen: list[tuple[str, torch.dtype]] = []
    core = moesaic._core

    def watch(name: str, at: int) -> None:
        own = getattr(core, name)
        monkeypatch.setattr(core, name, lambda *a, **k: seen.append((name, a[at].dtype)) or own(*a, **k))

    for name in ("attention", "few_queries_attention", "rotary"):
        watch(name, 0)
    monkeypatch.setattr(rotary, "_FEW", 0)
    rotary._agrees.cache_clear()
    return seen


def given_to(model: nn.Module) -> dict[str, torch.Tensor]:
    given = inputs(model)
    return given if "pixel_values" in given else {"input_ids": torch.cat([given["input_ids"]] * 2, dim=1)}


def run(model: nn.Module, given: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Output and gradients."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = output(model, given)
    objective(out.float()).backward()
    return {"": out.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def operators_of(model: nn.Module) -> list[Any]:
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [operator for operator in found if isinstance(operator, operators.Operator)]


def compared(
    fused: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> list[float]:
    """Errors of the engine over PyTorch's. Gradients of biases of keys are 0, and rounding in all; that of the last
    norm's bias depends on nothing that is rounded."""
    names = [n for n in exact if "key.bias" not in n]
    assert all(error(fused[n], exact[n]) < 1e-5 for n in names if error(stock[n], exact[n]) < 1e-5)
    return [error(fused[n], exact[n]) / error(stock[n], exact[n]) for n in names if error(stock[n], exact[n]) >= 1e-5]


@pytest.mark.parametrize("name", MODELS)
def test_as_near_to_the_truth_as_pytorch(name: str, computed: list[tuple[str, torch.dtype]]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    given = given_to(model)
    exact = run(model, given, None)
    stock = run(model, given, torch.bfloat16)
    report = moesaic.hf.fuse(model)
    run(model, given, torch.bfloat16)  # norms look at what they replace
    used = operators_of(model)
    for operator in used:
        if operator.name != "layernorm" and type(operator).__name__ != "Head":  # which trains here
            operator.stock = None  # not called
    computed.clear()
    fused = run(model, given, torch.bfloat16)
    assert [m for m in report.replaced if m.operator.startswith("attention under autocast")] and len(used) >= 8
    if name != "vit":  # five tokens
        assert computed.count(("attention", torch.bfloat16)) == 2
    turned = [dtype for what, dtype in computed if what == "rotary"]
    assert len(turned) == 4 * sum("rotary" in m.operator for m in report.replaced) and set(turned) <= {torch.float32}
    assert fused.keys() == stock.keys() == exact.keys()
    assert all(values.dtype == stock[n].dtype for n, values in fused.items())
    assert 0 < error(fused[""], exact[""]) < 1.2 * error(stock[""], exact[""])
    ratios = compared(fused, stock, exact)
    assert max(ratios) < 3 and torch.tensor(ratios).log().mean().exp() < 1.15


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model = peft.get_peft_model(qwen3(), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    given = given_to(qwen3())
    exact = run(model, given, None)
    stock = run(model, given, torch.bfloat16)
    moesaic.hf.fuse(model)
    run(model, given, torch.bfloat16)  # norms look at what they replace
    for operator in operators_of(model):
        if type(operator).__name__ != "Head":
            operator.stock = None  # not called
    fused = run(model, given, torch.bfloat16)
    assert fused.keys() == stock.keys() and len(fused) == 1 + 2 * 2 * 7
    assert all(values.dtype == stock[n].dtype for n, values in fused.items())
    ratios = compared(fused, stock, exact)
    assert max(ratios) < 3 and torch.tensor(ratios).log().mean().exp() < 1.15


def test_in_turn_with_fp32_and_with_fp16(computed: list[tuple[str, torch.dtype]]) -> None:
    """Each call is computed in its own dtype, whichever went before; autocast to fp16 is PyTorch's."""
    model = qwen3_moe(head_dim=32).eval()
    given = given_to(model)
    with torch.no_grad():
        exact = output(model, given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = output(model, given)
        moesaic.hf.fuse(model)
        for _ in range(2):
            wide = output(model, given)
            assert wide.dtype == torch.float32 and 0 < error(wide, exact) < 1e-5
            with torch.autocast("cpu", dtype=torch.bfloat16):
                narrow = output(model, given)
            assert narrow.dtype == torch.bfloat16 and error(narrow, exact) < 1.2 * error(stock, exact)
        projection = model.model.layers[0].self_attn.q_proj
        output(model, given)
        wide_bytes = projection.__dict__["forward"].packed_bytes
        projection.weight.mul_(-50)  # what is packed in bf16 sees it, too
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert error(output(model, given), exact) > 0.01
        assert projection.__dict__["forward"].packed_bytes == wide_bytes / 2  # one copy
        computed.clear()
        with torch.autocast("cpu", dtype=torch.float16):
            half = projection(torch.randn(4, 64))
            output(model, given)
        assert half.dtype == torch.float16 and ("attention", torch.float16) not in computed


def test_norms_that_widen_and_norms_that_round() -> None:
    """Of bf16, with weights in fp32: Qwen's give fp32, OLMo's bf16."""
    x = torch.randn(5, 64).bfloat16()
    for model, dtype in ((qwen3(), torch.float32), (olmo2(), torch.bfloat16)):
        norm = model.model.norm
        norm.weight.data.normal_()
        stock = norm(x)
        moesaic.hf.fuse(model)
        with moesaic.profile() as profile:
            found = norm(x)
        assert any(row["name"] == "norm" for row in profile.phases())
        assert stock.dtype == found.dtype == dtype and error(found, stock) < 2**-8


def test_a_model_in_bf16_that_gets_fp32() -> None:
    """Autocast rounds it before each product."""
    model = bert().bfloat16().eval()
    layer = model.encoder.layer[0].intermediate
    x = torch.randn(3, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = layer(x)
        moesaic.hf.fuse(model)
        layer.__dict__["forward"].stock = None
        found = layer(x)
    assert found.dtype == stock.dtype == torch.bfloat16 and error(found, stock) < 1e-2


def test_losses_of_trl() -> None:
    """TRL's own function takes its logits in bf16 under autocast, and multiplies gradients in fp32."""
    chunked = pytest.importorskip("trl.kernels.chunked_logprob")
    torch.manual_seed(0)
    model = qwen3_moe().requires_grad_(False)
    weight, targets = model.lm_head.weight, torch.arange(40)
    x = torch.randn(40, 64, requires_grad=True)

    def loss(x: torch.Tensor, autocast: bool = True) -> tuple[torch.Tensor, torch.Tensor, set[Any]]:
        outputs = ("entropy",)
        with moesaic.profile() as profile, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = chunked.ChunkedLogProbFunction.apply(x, weight, None, targets, 1.0, 32, None, 1.0, outputs)
        (found[0] + found[1]).sum().backward()
        gradient, x.grad = x.grad, None
        assert gradient is not None
        names = {row["name"] for row in profile.phases() if row["category"] == "fused"}
        return torch.cat([found[0].detach(), found[1].detach()]), gradient, names

    exact, stock = loss(x, False), loss(x)
    assert not exact[2] and not stock[2]
    moesaic.hf.fuse(model)
    fused = loss(x)
    assert "gemm" in fused[2] and fused[0].dtype == stock[0].dtype and fused[1].dtype == torch.float32
    assert error(fused[0], exact[0]) < 1.2 * error(stock[0], exact[0])
    assert error(fused[1], exact[1]) < 2**-8  # gradients of logits and of x are rounded to bf16


def test_generation(computed: list[tuple[str, torch.dtype]]) -> None:
    """Token by token behind a prompt, with a cache of keys in fp32 and values in bf16, as PyTorch has them there."""
    torch.manual_seed(0)
    model = qwen3_moe(head_dim=32).eval()
    ids = torch.randint(3, 50, (2, 26))
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def logits() -> torch.Tensor:
        cache, steps = None, []
        for begin, end in [(0, 24), (24, 25), (25, 26)]:
            step = model(input_ids=ids[:, begin:end], **{name: cache}, use_cache=True)
            cache = step[name]
            steps.append(step.logits[:, -1])
        return torch.stack(steps)

    with torch.no_grad():
        exact = logits()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = logits()
            moesaic.hf.fuse(model)
            computed.clear()
            fused = logits()
    assert fused.dtype == stock.dtype and error(fused, exact) < 1.2 * error(stock, exact)
    attention = [(what, dtype) for what, dtype in computed if what != "rotary"]
    assert attention == 2 * [("attention", torch.bfloat16)] + 4 * [("few_queries_attention", torch.bfloat16)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """What runs again inside of backward runs under the same autocast, and has the same bits."""
    torch.manual_seed(0)
    model = qwen3().train()
    given = given_to(model)
    moesaic.hf.fuse(model)
    expected = run(model, given, torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = run(model, given, torch.bfloat16)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_regions_without_autocast_inside() -> None:
    model = bert().eval()
    layer = model.encoder.layer[0].intermediate
    x = torch.randn(3, 64)
    with torch.no_grad():
        exact = layer(x)
        moesaic.hf.fuse(model)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            found = layer(x)
    assert found.dtype == torch.float32 and error(found, exact) < 1e-6


def test_a_residual_in_bf16() -> None:
    """As the output of a product under autocast: the sum is bf16, and its norm's weights are fp32."""
    layer = bert().eval().encoder.layer[0].output
    x, residual = torch.randn(5, 96).bfloat16(), torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        exact = layer(x.float(), residual.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = layer(x, residual)
            moesaic.hf.fuse(layer)
            layer.__dict__["forward"].stock = None
            found = layer(x, residual)
    assert found.dtype == stock.dtype and error(found, exact) < 1.2 * error(stock, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_that_are_converted_afterwards(dtype: torch.dtype) -> None:
    """To what the engine does not compute: PyTorch does, and does not round fp64 under autocast."""
    torch.manual_seed(0)
    model = qwen3().eval()
    given = given_to(model)
    moesaic.hf.fuse(model)
    model.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = output(model, given)
        moesaic.hf.unfuse(model)
        stock = output(model, given)
    assert found.dtype == stock.dtype and error(found, stock) < (1e-2 if dtype == torch.float16 else 1e-12)


def test_traced_and_on_another_device() -> None:
    """A trace holds PyTorch's own operators; norms are tried on the CPU, whatever the default device is."""
    model = qwen3().eval().requires_grad_(False)  # PyTorch traces no others under autocast
    x = torch.randn(4, 64)
    projection, norm = model.model.layers[0].self_attn.q_proj, model.model.norm
    moesaic.hf.fuse(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert error(torch.jit.trace(projection, (x,))(x), projection(x)) < 1e-2
        assert error(torch.jit.trace(norm, (x.bfloat16(),))(x.bfloat16()), norm(x.bfloat16())) < 1e-2
    other = qwen3().eval()
    moesaic.hf.fuse(other)
    with torch.no_grad(), torch.device("meta"):
        assert other.model.norm(x.bfloat16()).dtype == torch.float32
