"""Rotary embeddings of transformers' attention layers after moesaic.hf.fuse."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import moesaic.hf
from moesaic.hf import rotary as hook

STOCK = modeling_qwen3.apply_rotary_pos_emb


def qwen3(head_dim: int = 32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        **options,
    )
    return Qwen3ForCausalLM(config).bfloat16().eval()


def layer_of(kind: type[nn.Module]) -> nn.Module:
    return kind(qwen3().config, 0).bfloat16().eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what the engine turns, of however few tokens."""
    seen: list[torch.Size] = []
    compute = moesaic._core.rotary
    monkeypatch.setattr(moesaic._core, "rotary", lambda x, *a, **k: seen.append(x.shape) or compute(x, *a, **k))
    monkeypatch.setattr(hook, "_FEW", 0)
    hook._agrees.cache_clear()
    return seen


def rotaries(report: moesaic.hf.FuseReport) -> int:
    return sum("rotary" in module.operator for module in report.replaced)


def alone(model: nn.Module) -> None:
    """Serves its rotary embeddings, and nothing else."""
    for module in model.modules():
        assert hook.serve(module) in (None, "")


IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
TURNED = 2 * [torch.Size((18, 128)), torch.Size((18, 64))]


def test_the_bits_of_transformers_and_the_way_back(calls: list[torch.Size]) -> None:
    model, other = qwen3(), qwen3()
    stock = model(IDS).logits
    stock.float().square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    alone(model)
    calls.clear()  # of what was tried before
    logits = model(IDS).logits
    assert calls == TURNED and torch.equal(logits, stock)
    logits.float().square().sum().backward()
    assert sorted(calls) == sorted(2 * TURNED)
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, gradients, strict=True))
    calls.clear()
    assert torch.equal(other(IDS).logits, stock) and not calls  # a model of that file that is not fused
    assert moesaic.hf.unfuse(model) == 2
    assert torch.equal(model(IDS).logits, stock) and not calls
    assert moesaic.hf.unfuse(model) == 0 and modeling_qwen3.apply_rotary_pos_emb is STOCK


def test_fuse_reports_them(calls: list[torch.Size]) -> None:
    model = qwen3()
    for _ in range(2):  # once more is as good as once
        report = moesaic.hf.fuse(model)
        assert rotaries(report) == 2 and "2 x Qwen3Attention: attention, rotary" in str(report)
        assert len({module.name for module in report.replaced}) == len(report.replaced) == moesaic.hf.unfuse(model)
    assert rotaries(moesaic.hf.fuse(model, attention=False)) == 0
    assert rotaries(moesaic.hf.fuse(qwen3().float())) == 2


def test_few_tokens_are_left_to_pytorch(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen3()
    alone(model)
    calls.clear()
    monkeypatch.setattr(hook, "_FEW", 18 * (128 + 64) + 1)
    model(IDS)
    assert not calls
    model(torch.cat((IDS, IDS), dim=1))
    assert len(calls) == 4


def test_copies_and_pickles_are_of_their_own(calls: list[torch.Size]) -> None:
    model = qwen3()
    stock = model(IDS).logits
    alone(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        moesaic.hf.unfuse(model)
        calls.clear()
        with torch.no_grad():
            other.model.layers[0].self_attn.q_proj.weight.zero_()
            assert not torch.equal(other(IDS).logits, stock) and calls == TURNED
            calls.clear()
            assert torch.equal(model(IDS).logits, stock) and not calls
        assert moesaic.hf.unfuse(other) == 2
        alone(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: list[torch.Size]) -> None:
    model = qwen3().train()
    alone(model)
    embedded = model.model.embed_tokens(IDS).detach().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=x).logits.float().square().sum()  # type: ignore[no-any-return]

    (expected,) = torch.autograd.grad(run(embedded), embedded)
    leaf = embedded.detach().clone().requires_grad_()
    calls.clear()
    checkpoint(run, leaf, use_reentrant=reentrant).backward()
    assert len(calls) == 3 * len(TURNED) and torch.equal(leaf.grad, expected)  # type: ignore[arg-type]


def test_no_grad_inference_mode_and_autocast(calls: list[torch.Size]) -> None:
    model = qwen3()
    stock = model(IDS).logits
    alone(model)
    calls.clear()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, stock)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, stock)
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS)
    assert calls == 3 * TURNED


def test_what_a_call_leaves_to_transformers(calls: list[torch.Size]) -> None:
    forward = inspect.unwrap(modeling_qwen3.Qwen3Attention.forward)
    turn = hook._with_engine(forward).__globals__["apply_rotary_pos_emb"]
    assert hook._agrees(STOCK)
    calls.clear()
    x = torch.randn(2, 4, 3, 32).bfloat16().transpose(1, 2)
    cos, sin = torch.randn(2, 4, 32).bfloat16(), torch.randn(2, 4, 32).bfloat16()
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x.float(), x.float(), cos, sin), {}),
        ((x, x, cos.clone().requires_grad_(), sin), {}),
        ((x.transpose(1, 2), x.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}),
        ((x.transpose(1, 2), x.transpose(1, 2), cos, sin, 2), {}),
        ((x.half(), x.half(), cos.half(), sin.half()), {}),
        ((x[..., :16], x[..., :16], cos[..., :16], sin[..., :16]), {}),
        ((x.contiguous(), x.contiguous(), cos, sin), {}),  # head after head in memory
        ((x, x), {"cos": cos, "sin": sin}),
    ]
    for arguments, options in cases:
        for got, expected in zip(turn(*arguments, **options), STOCK(*arguments, **options), strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()
    for arguments in ((x, x, cos), (x, None, cos, sin)):
        with pytest.raises((TypeError, AttributeError)):
            turn(*arguments)
    assert not calls
    for options in ({}, {"unsqueeze_dim": 1}):
        for angles in ((cos, sin), (cos.float(), sin.float())):  # the latter under autocast
            for got, expected in zip(turn(x, x, *angles, **options), STOCK(x, x, *angles), strict=True):
                assert torch.equal(got, expected) and got.stride() == expected.stride() and got.dtype == expected.dtype
    assert len(calls) == 8


def test_layers_that_are_not_served(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(model: nn.Module) -> set[str]:
        report = moesaic.hf.fuse(model)
        assert rotaries(report) == 0
        return {module.reason for module in report.kept if module.class_name == "Qwen3Attention"}

    assert any("heads have 16 numbers" in reason for reason in reasons(qwen3(head_dim=16)))
    assert any("on the CPU" in reason for reason in reasons(qwen3().half()))
    part = qwen3()
    part.config.rope_parameters["partial_rotary_factor"] = 0.5
    assert any("a part of each head" in reason for reason in reasons(part))
    replaced = qwen3()
    for layer in replaced.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    assert any("replaced already" in reason for reason in reasons(replaced))
    latent = qwen3()
    for layer in latent.model.layers:
        layer.self_attn.qk_rope_head_dim = 32
    assert any("a part of each head" in reason for reason in reasons(latent))
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: STOCK(q, k, cos, 2 * sin))
    assert any("of another kind" in reason for reason in reasons(qwen3()))
    assert hook.serve(nn.Linear(2, 2)) == ""


def test_functions_of_another_kind() -> None:
    assert hook._agrees(modeling_llama.apply_rotary_pos_emb)
    others: list[Callable[..., Any]] = [
        modeling_gptj.apply_rotary_pos_emb,  # pairs of neighbours, other arguments
        lambda q, k, cos, sin: STOCK(q, k, cos, -sin),
        lambda q, k, cos, sin: STOCK(q, k, cos, sin)[:1],
        lambda q, k, cos, sin: (1, 2),
    ]
    assert not any(hook._agrees(other) for other in others)


def test_what_is_replaced_behind_it_counts(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    model, stock = qwen3(), qwen3()
    alone(model)
    calls.clear()
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", lambda q, k, cos, sin: STOCK(q, k, cos, 2 * sin))
    patched = stock(IDS).logits
    calls.clear()
    assert torch.equal(model(IDS).logits, patched) and set(calls) <= {(10, 192), (10, 64)}  # what was tried
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", STOCK)
    own = modeling_qwen3.Qwen3Attention.forward

    class Replaced:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", Replaced())
    calls.clear()
    attention = model.model.layers[0].self_attn
    angles = torch.randn(1, 9, 32).bfloat16(), torch.randn(1, 9, 32).bfloat16()
    assert attention(torch.randn(2, 9, 64).bfloat16(), angles, None)[0].shape == (2, 9, 64) and not calls


def decorated(function: Callable[..., Any], seen: list[str], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return function(self, *args, **kwargs)

    return around


def test_decorators_stay_around_a_forward(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, seen = qwen3()(IDS).logits, list[str]()
    own = modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3Attention, "forward", decorated(decorated(own, seen, "inner"), seen, "outer")
    )
    model = qwen3()
    alone(model)
    calls.clear()
    assert torch.equal(model(IDS).logits, stock) and calls == TURNED and seen == 2 * ["outer", "inner"]
    # One that was put there since, and one that keeps what it calls where nobody finds it.
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", decorated(own, seen, "another"))
    calls.clear()
    seen.clear()
    assert torch.equal(model(IDS).logits, stock) and calls == TURNED and seen == 2 * ["another"]
    hidden = functools.wraps(own)(lambda *args, call=[own], **kwargs: call[0](*args, **kwargs))
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", hidden)
    calls.clear()
    assert torch.equal(model(IDS).logits, stock) and not calls
    assert hook.serve(qwen3().model.layers[0].self_attn) == ""


def test_decorators_that_look_at_what_they_call(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_qwen3.Qwen3Attention.forward
    stock, signature = qwen3()(IDS).logits, inspect.signature(own)
    marked = decorated(own, [], "")
    marked.mark = "kept"  # type: ignore[attr-defined]

    @functools.wraps(marked)
    def looks(*args: Any, **kwargs: Any) -> Any:
        assert marked.mark == "kept" and inspect.signature(marked) == signature  # type: ignore[attr-defined]
        return marked(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", looks)
    model = qwen3()
    alone(model)
    calls.clear()
    assert torch.equal(model(IDS).logits, stock) and calls == TURNED
    # One that calls the function itself: this call counts, and not those of what it calls.
    seen: list[int] = []
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda *args: seen.append(1) or STOCK(*args))

    @functools.wraps(own)
    def turns(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        apply_rotary_pos_emb(*(torch.zeros(1, 1, 1, 32) for _ in range(2)), *(torch.zeros(1, 1, 32) for _ in range(2)))  # type: ignore[name-defined]  # noqa: F821
        return own(self, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", turns)
    calls.clear()
    assert torch.equal(model(IDS).logits, stock) and not set(calls) & set(TURNED) and len(calls) > 2 and seen


def test_compiled_forwards_are_left_alone(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, own = qwen3()(IDS).logits, modeling_qwen3.Qwen3Attention.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3Attention, "forward", torch.compile(own, backend="eager", fullgraph=True, dynamic=False)
    )
    model = qwen3()
    assert {hook.serve(layer.self_attn) for layer in model.model.layers} == {""}
    # One that was served before its class was compiled.
    monkeypatch.undo()
    monkeypatch.setattr(hook, "_FEW", 0)
    alone(model)
    monkeypatch.setattr(
        modeling_qwen3.Qwen3Attention, "forward", torch.compile(own, backend="eager", fullgraph=True, dynamic=False)
    )
    assert torch.equal(model(IDS).logits, stock)


class InheritsForward(modeling_qwen3.Qwen3Attention):
    """Its class stands in another file than the function that its forward calls."""


def test_a_class_of_another_file(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    attention, stock = layer_of(InheritsForward), layer_of(modeling_qwen3.Qwen3Attention)
    stock.load_state_dict(attention.state_dict())
    assert hook.serve(attention) is None
    calls.clear()
    x = torch.randn(2, 9, 64).bfloat16()
    angles = torch.randn(1, 9, 32).bfloat16(), torch.randn(1, 9, 32).bfloat16()
    assert torch.equal(attention(x, angles, None)[0], stock(x, angles, None)[0]) and len(calls) == 2
    # All other names mean what they mean in that file, also what they mean since.
    eager = modeling_qwen3.eager_attention_forward
    attention.config._attn_implementation = "eager"
    seen: list[int] = []
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", lambda *a, **k: seen.append(1) or eager(*a, **k))
    attention(x, angles, None)
    assert seen == [1]


def test_a_file_that_calls_it_in_two_ways(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import torch
from torch import nn

def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

def apply_rotary_pos_emb(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [x * cos + rotate_half(x) * sin for x in (q, k) if x is not None]
    return turned[0] if k is None else tuple(turned)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.is_causal, self.weight = True, nn.Parameter(torch.ones(1))

    def forward(self, q, k, cos, sin, *, other=None):
        both = apply_rotary_pos_emb(q, k, cos, sin)
        return *both, apply_rotary_pos_emb(q, cos=cos, sin=sin), other, super().extra_repr()
"""
    file = ModuleType("two_ways")
    monkeypatch.setitem(sys.modules, "two_ways", file)
    exec(compile(text, "two_ways", "exec"), file.__dict__)
    layer = file.Attention()
    q, k = (torch.randn(1, 4, heads, 32).transpose(1, 2) for heads in (3, 1))
    cos, sin = torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    expected = layer(q, k, cos, sin, other=7)
    assert hook.serve(layer) is None
    calls.clear()
    got = layer(q, k, cos, sin, other=7)
    assert len(calls) == 2 and got[3:] == expected[3:] == (7, "")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[:3], expected[:3], strict=True))


def test_compiled_models_have_their_own_forward(calls: list[torch.Size]) -> None:
    attention = layer_of(modeling_qwen3.Qwen3Attention)
    x = torch.randn(2, 9, 64).bfloat16()
    angles = torch.randn(1, 9, 32).bfloat16(), torch.randn(1, 9, 32).bfloat16()
    with torch.no_grad():
        expected = attention(x, angles, None)[0]
        assert hook.serve(attention) is None
        calls.clear()
        compiled = torch.compile(attention, backend="eager")
        assert torch.equal(compiled(x, angles, None)[0], expected) and not calls
