"""Attention of fused models of transformers: whether the engine computes it, from what masks, and what comes out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")

from transformers import BertConfig, BertModel

import moesaic.hf
from fused_models import SMALL, bert, error, objective, output, qwen3_moe, three_ways


@pytest.fixture
def engine_attention(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the queries for which the engine computed attention."""
    from moesaic import _core

    seen: list[torch.Size] = []

    def watch(own: Any) -> Any:
        def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(q.shape)
            return own(q, *args, **kwargs)  # type: ignore[no-any-return]

        return attention

    for name in ("attention", "few_queries_attention"):
        monkeypatch.setattr(_core, name, watch(getattr(_core, name)))
    return seen


@pytest.mark.parametrize("padded", [False, True])
def test_attention_of_an_encoder(padded: bool, engine_attention: list[torch.Size]) -> None:
    model = bert().eval()
    given = {"input_ids": torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))}
    if padded:
        given["attention_mask"] = torch.ones(2, 24, dtype=torch.long)
        given["attention_mask"][1, 17:] = 0
    with torch.no_grad():
        exact = output(model, given)
        model.bfloat16()
        stock = output(model, given)
        moesaic.hf.fuse(model)
        fused = output(model, given)
        seen = slice(None) if not padded else slice(0, 17)  # what is computed for padding nobody reads
        assert error(fused[:, seen], exact[:, seen]) < 1.2 * error(stock[:, seen], exact[:, seen])
        assert engine_attention == [torch.Size([2, 24, 64])] * 2
        moesaic.hf.fuse(model, attention=False)
        output(model, given)
    assert len(engine_attention) == 2
    moesaic.hf.fuse(model)
    model.train()
    with torch.no_grad():
        output(model, given)  # dropout
    assert len(engine_attention) == 2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [bert, qwen3_moe])
def test_gradients_through_attention(
    make: Callable[[], nn.Module], padded: bool, engine_attention: list[torch.Size]
) -> None:
    model = make().eval()
    given = {"input_ids": torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))}
    if padded:
        given["attention_mask"] = torch.ones(2, 24, dtype=torch.long)
        given["attention_mask"][1, 17:] = 0
    gradients: dict[str, torch.Tensor] = {}
    for way in three_ways(model):
        model.zero_grad()
        objective(output(model, given)[:, :17]).backward()  # what is computed for padding nobody reads
        gradients[way] = torch.cat(
            [
                p.grad.double().flatten()
                for name, p in model.named_parameters()
                if p.grad is not None and any(part in name for part in ("query", "key", "value", "_proj", "embed"))
            ]
        )
    assert len(engine_attention) == 2
    assert error(gradients["fused"], gradients["exact"]) < 1.2 * error(gradients["stock"], gradients["exact"])


@pytest.mark.parametrize("prompt", [9, 24])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_of_a_decoder_with_a_cache(padded: bool, prompt: int, engine_attention: list[torch.Size]) -> None:
    """Two sequences, token by token behind a prompt of few or of many tokens."""
    model = qwen3_moe(head_dim=32).eval()
    ids = torch.randint(3, 50, (2, prompt + 4), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    # As transformers has it from 5.24 on, and before.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for way in ("exact", "stock", "fused"):
            if way == "stock":
                model.bfloat16()
            if way == "fused":
                report = moesaic.hf.fuse(model)
                assert sum(m.operator.startswith("attention") for m in report.replaced) == 2
            cache, steps = None, []
            for begin, end in [(0, prompt), *((n, n + 1) for n in range(prompt, prompt + 4))]:
                given = {"attention_mask": mask[:, :end]} if padded else {}
                step = model(input_ids=ids[:, begin:end], **{name: cache}, use_cache=True, **given)
                cache = step[name]
                steps.append(step.logits[:, -1])
            logits[way] = torch.stack(steps)
    assert engine_attention.count(torch.Size([8, 1, 32])) == 2 * 4
    assert engine_attention.count(torch.Size([8, 9, 32] if prompt == 9 else [2, 24, 128])) == 2
    assert error(logits["fused"], logits["exact"]) < 1.2 * error(logits["stock"], logits["exact"])


@pytest.mark.parametrize("make", [bert, qwen3_moe])
def test_under_autocast(make: Callable[[], nn.Module], engine_attention: list[torch.Size]) -> None:
    """To the model's own dtype, as TRL trains: nothing changes."""
    model = make().eval()
    given = {"input_ids": torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))}
    results = {}
    for way in three_ways(model):
        if way == "fused":
            operators = [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]
            for operator in operators:
                if type(operator).__name__ != "Head":  # which trains here
                    operator.stock = None  # not called
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way != "exact"):
            out = output(model, given)
        objective(out).backward()
        grad = next(p.grad for n, p in model.named_parameters() if "embed" in n and p.grad is not None)
        results[way] = torch.cat([out.detach().double().flatten(), grad.double().flatten()])
    assert len(engine_attention) == 2 and operators
    assert error(results["fused"], results["exact"]) < 1.2 * error(results["stock"], results["exact"])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        moesaic.hf.attention.attention_forward(
            nn.Module(), *(torch.randn(1, 2, 24, 32).bfloat16() for _ in range(3)), None
        )
    assert len(engine_attention) == 2


@pytest.mark.parametrize("make", [bert, qwen3_moe])
def test_under_transforms_of_functions(make: Callable[[], nn.Module], engine_attention: list[torch.Size]) -> None:
    """Which the engine's functions have no rules for."""
    model = make().bfloat16().eval()
    given = {"input_ids": torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))}
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return objective(torch.func.functional_call(model, parameters, (), given)[0])

    stock = torch.func.grad(of)(parameters)
    moesaic.hf.fuse(model)
    fused = torch.func.grad(of)(parameters)
    assert engine_attention == [] and all(torch.equal(fused[name], stock[name]) for name in stock)


def test_attention_whose_name_says_more(engine_attention: list[torch.Size]) -> None:
    """Falcon compares the name itself, and would go another way with the engine's."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=50, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = FalconForCausalLM(config).bfloat16().eval()
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        reasons = {m.name: m.reason for m in moesaic.hf.fuse(model).kept}
        assert "does not use the name of its attention to look" in reasons["transformer.h.0.self_attention"]
        assert error(model(input_ids=ids).logits, stock) < 2e-2
    assert engine_attention == []


def test_masks_of_keys(engine_attention: list[torch.Size]) -> None:
    """One row for all queries; and one that changes after it was looked at."""
    from moesaic.hf.attention import attention_forward

    q, k, v = (torch.randn(2, 4, 24, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    for _ in range(2):
        got = attention_forward(nn.Module(), q, k, v, mask)[0].transpose(1, 2)
        assert error(got, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)) < 1e-2
        mask[1, 0, 0, 9:] = False
    assert len(engine_attention) == 2
    own = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril(-3)  # the first queries see nothing
    attention_forward(nn.Module(), q, k, v, own)
    assert len(engine_attention) == 2


def test_masks_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may remember its own mask in the middle of a look."""
    from moesaic.hf import attention

    masks = [torch.ones(1, 1, 24, 24, dtype=torch.bool).tril() for _ in range(2)]
    masks[1][..., :5] = False
    found = [attention._read_mask(mask, 1, 24, 24) for mask in masks]

    def entry(which: int, look: Callable[[], torch.Tensor]) -> Any:
        return ((look, masks[which]._version, (1, 24, 24), found[which]),)

    def interrupted() -> torch.Tensor:
        monkeypatch.setattr(attention, "_last", entry(1, lambda: masks[1]))
        return masks[0]

    monkeypatch.setattr(attention, "_last", entry(0, interrupted))
    assert attention._read(masks[0], 1, 24, 24) is found[0]
    assert attention._read(masks[1], 1, 24, 24) is found[1]


def test_masks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where layers with a window and others take turns."""
    from moesaic.hf import attention

    read: list[torch.Tensor] = []
    own = attention._read_mask
    monkeypatch.setattr(attention, "_read_mask", lambda mask, *sizes: read.append(mask) or own(mask, *sizes))
    causal = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    window = causal.clone().triu_(-5)
    for _ in range(3):
        for mask in (causal, window):
            assert (attention._read(mask, 1, 24, 24).first is None) == (mask is causal)
    assert len(read) == 2
    window[..., 20, 18] = False
    assert attention._read(window, 1, 24, 24) is None and len(read) == 3
    window = causal.clone().triu_(-7)
    with torch.inference_mode():  # an evaluation, then training with the same mask
        attention._read(window, 1, 24, 24)
    q = torch.randn(1, 2, 24, 32).bfloat16().requires_grad_()
    attention.attention_forward(nn.Module(), q, q, q, window)[0].sum().backward()
    assert q.grad is not None
    for _ in range(9):  # what is not there any more is not kept
        attention._read(causal.clone(), 1, 24, 24)
    assert len(attention._last) == attention._KEPT_MASKS


def test_what_masks_say() -> None:
    """Of masks as transformers makes them, whole and with a key more or less, which says something else."""
    from moesaic.hf.attention import _read_mask, _Seen

    def shown(seen: _Seen, queries: int, keys: int) -> torch.Tensor:
        own = torch.arange(seen.there - queries, seen.there)[:, None]
        shown = torch.ones(2, queries, seen.there, dtype=torch.bool)
        if seen.causal:
            shown &= torch.arange(seen.there) <= own
        if seen.keys is not None:
            shown &= seen.keys[:, None]
        if seen.first is not None:
            shown &= torch.arange(seen.there) >= seen.first[..., None]
        return F.pad(shown, (0, keys - seen.there))

    generator = torch.Generator().manual_seed(0)
    for queries, there, keys in ((24, 24, 24), (20, 30, 30), (20, 30, 40)):  # the last of a cache of a fixed length
        own, key = torch.arange(there - queries, there)[:, None], torch.arange(keys)
        causal = (key <= own).repeat(2, 1, 1)
        window, sequences = causal & (key > own - 6), causal & (key // 7 == own // 7)
        left, right = torch.ones(2, 1, keys, dtype=torch.bool), torch.ones(2, 1, keys, dtype=torch.bool)
        left[1, :, :9], right[1, :, there - 12 :] = False, False
        masks = (causal, window, sequences, causal & left, window & left, causal & right, window & right)
        for mask in (*masks, *(mask[:1].expand(2, -1, -1) for mask in masks)):
            found = _read_mask(mask[:, None], 2, queries, keys)
            assert found is not None and torch.equal(shown(found, queries, keys), mask)
            for _ in range(20):
                other = mask.clone()
                at = tuple(int(torch.randint(n, (1,), generator=generator)) for n in other.shape)
                other[at] ^= True
                found = _read_mask(other[:, None], 2, queries, keys)
                assert found is None or torch.equal(shown(found, queries, keys), other)
    assert _read_mask(torch.ones(2, 2, 4, 4, dtype=torch.bool), 2, 4, 4) is None  # of heads of their own
    assert _read_mask(torch.zeros(2, 1, 4, 4), 2, 4, 4) is None
    assert _read_mask(torch.ones(3, 1, 4, 4, dtype=torch.bool).tril(), 2, 4, 4) is None  # of another batch


@pytest.mark.parametrize("trained", [False, True])
def test_sequences_that_share_a_row(trained: bool, engine_attention: list[torch.Size]) -> None:
    """As packing has them: positions begin anew with each."""
    model = qwen3_moe().eval()
    ids = torch.randint(3, 50, (1, 60), generator=torch.Generator().manual_seed(0))
    parts = [slice(0, 7), slice(7, 40), slice(40, 60)]
    given: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(part.stop - part.start) for part in parts])[None],
        "use_cache": False,  # with a cache transformers takes them for one sequence
    }
    results: dict[str, torch.Tensor] = {}
    for way in three_ways(model):
        model.zero_grad()
        with torch.set_grad_enabled(trained):
            out = output(model, given)
            results[way] = out.detach()
            if trained:
                objective(out).backward()
                results[way] = torch.cat(
                    [p.grad.double().flatten() for n, p in model.named_parameters() if "_proj" in n]
                )
    assert engine_attention == [torch.Size([1, 60, 64])] * 2
    assert error(results["fused"], results["exact"]) < 1.2 * error(results["stock"], results["exact"])
    if not trained:
        alone = torch.cat([output(model, {"input_ids": ids[:, part]}) for part in parts], dim=1)
        assert error(results["fused"], alone) < 2e-2


@pytest.mark.parametrize("padded", [None, "left", "right"])
def test_a_sliding_window(padded: str | None, engine_attention: list[torch.Size]) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 10}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, **sizes)).eval()
    given = {"input_ids": torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))}
    real = slice(None)
    if padded is not None:
        real = slice(7, None) if padded == "left" else slice(0, 17)
        given["attention_mask"] = torch.zeros(2, 24, dtype=torch.long)
        given["attention_mask"][:, real] = 1
        given["attention_mask"][0] = 1
    results: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for way in ("exact", "stock", "fused"):
            if way == "stock":
                model.bfloat16()
            if way == "fused":
                assert sum(m.operator.startswith("attention") for m in moesaic.hf.fuse(model).replaced) == 2
            results[way] = output(model, given)[:, real]
    assert engine_attention == [torch.Size([2, 24, 64])] * 2
    assert error(results["fused"], results["exact"]) < 1.2 * error(results["stock"], results["exact"])


def test_generation_with_either_cache(engine_attention: list[torch.Size]) -> None:
    model = qwen3_moe(head_dim=32).bfloat16().eval()
    moesaic.hf.fuse(model)
    ids = torch.randint(3, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = []
    for cache in ("dynamic", "static"):
        engine_attention.clear()
        tokens.append(model.generate(ids, cache_implementation=cache, **how))
        assert engine_attention == [torch.Size([2, 24, 128])] * 2 + [torch.Size([8, 1, 32])] * (2 * 5)
    assert torch.equal(*tokens)


def test_attention_that_is_not_served(engine_attention: list[torch.Size]) -> None:
    decoder = qwen3_moe().bfloat16().eval()
    moesaic.hf.fuse(decoder)
    decoder(input_ids=torch.randint(3, 50, (2, 15))).logits.sum().backward()  # gradients of few queries
    with torch.no_grad():
        decoder(input_ids=torch.randint(3, 50, (2, 5)))  # few queries, heads of 16
        mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
        mask[..., 12:, 3:9:2] = False  # what later queries do not see lies in the middle
        decoder(input_ids=torch.randint(3, 50, (1, 24)), attention_mask=mask)
    eager = BertModel(BertConfig(vocab_size=50, attn_implementation="eager", **SMALL)).bfloat16()
    reasons = {m.name: m.reason for m in moesaic.hf.fuse(eager).kept}
    assert reasons["encoder.layer.0.attention.self"] == "its attention is 'eager'; expected 'sdpa'"
    reasons = {m.name: m.reason for m in moesaic.hf.fuse(bert().half()).kept}
    assert reasons["encoder.layer.0.attention.self"] == "its weights are float16; expected bfloat16 or float32"
    wide = bert().eval()
    moesaic.hf.fuse(wide)
    with torch.no_grad():
        output(wide, {"input_ids": torch.randint(3, 50, (2, 24))})  # in fp32 it is PyTorch's
    # Masks of more than padding: each query sees keys of its own.
    model = bert().bfloat16().eval()
    given = {"input_ids": torch.randint(3, 50, (1, 24))}
    with torch.no_grad():
        expected = output(model, {**given, "attention_mask": mask})
        moesaic.hf.fuse(model)
        assert error(output(model, {**given, "attention_mask": mask}), expected) < 2e-2
    assert engine_attention == []


def test_another_attention_after_fuse(engine_attention: list[torch.Size]) -> None:
    model = bert().bfloat16().eval()
    stock = copy.deepcopy(model)
    moesaic.hf.fuse(model)
    given = {"input_ids": torch.randint(3, 50, (2, 24))}
    for one in (stock, model):
        one.set_attn_implementation("eager")
    with torch.no_grad():
        weights = [one(**given, output_attentions=True).attentions for one in (stock, model)]
        assert [w.shape for w in weights[0]] == [w.shape for w in weights[1]] == [torch.Size([2, 4, 24, 24])] * 2
        model.set_attn_implementation("sdpa")
        output(model, given)
    assert engine_attention == []  # fuse anew for that
