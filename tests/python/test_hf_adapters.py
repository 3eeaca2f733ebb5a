"""PEFT's LoRA on the experts, never materialized, trains as PEFT's own does."""

from __future__ import annotations

import contextlib
import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import moesaic.hf
from hf_models import (
    LOGITS,
    assert_same_training,
    blocks,
    build,
    distance,
    gradients,
    logits,
    needs_peft_20,
    pair,
    tokens,
)

peft = pytest.importorskip("peft")

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def config(*parameters: str, **options: Any) -> Any:
    """LoRA on `parameters` (both expert weights if none is named), random on both sides so that it counts from the
    start."""
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    return peft.LoraConfig(
        target_modules=options.pop("target_modules", []), target_parameters=parameters or EXPERTS, **options
    )


def adapted(model: Any, *configs: Any) -> Any:
    """`model` under PEFT with one adapter for each config, the first called "default"."""
    torch.manual_seed(3)
    model = peft.get_peft_model(model, configs[0])
    for n, more in enumerate(configs[1:]):
        model.add_adapter(f"extra{n}", more)
    return model.eval()


def adapted_pair(*configs: Any, model_type: str = "qwen3_moe") -> tuple[Any, Any]:
    engine, stock = pair(model_type)
    return adapted(engine, *configs), adapted(stock, *configs)


def without_adapters(model: Any) -> torch.Tensor:
    with model.disable_adapter():
        return logits(model)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"r": 1}, id="rank-1"),
        pytest.param({"r": 33, "lora_alpha": 100}, id="rank-33"),
        pytest.param({"use_rslora": True}, id="rslora"),
        pytest.param({"rank_pattern": {"down_proj": 7}, "alpha_pattern": {"down_proj": 3}}, id="rank_pattern"),
        pytest.param({"target_modules": ["q_proj", "o_proj"]}, id="attention"),
    ],
)
def test_trains_as_stock(options: dict[str, Any]) -> None:
    engine, stock = adapted_pair(config(**options))
    assert_same_training(engine, stock)
    assert distance(logits(engine), without_adapters(engine)) > 10 * LOGITS


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_or_columns_of_a_weight_as_inputs(transposed: bool) -> None:
    """By what the block says when PEFT makes its adapters; PEFT 0.19.0 and later versions understand the opposite."""
    models = pair()
    for block in (*blocks(models[0]), *blocks(models[1])):
        block.is_transposed = transposed
    engine, stock = (adapted(model, config()) for model in models)
    for block in (*blocks(engine), *blocks(stock)):
        block.is_transposed = False
    assert_same_training(engine, stock)


@pytest.mark.parametrize("parameters", EXPERTS)
def test_one_projection_only(parameters: str) -> None:
    assert_same_training(*adapted_pair(config(parameters)))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_other_families(model_type: str) -> None:
    assert_same_training(*adapted_pair(config(), model_type=model_type))


def test_classic_targets_per_expert() -> None:
    """gate_proj, up_proj and down_proj of each expert: PEFT turns them into one gate_up of twice the rank."""
    classic = peft.LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], r=4, init_lora_weights=False)
    engine, stock = adapted_pair(classic)
    if not any(isinstance(module, peft.tuners.lora.layer.ParamWrapper) for module in stock.modules()):
        pytest.skip(f"peft {peft.__version__} does not convert adapters of single experts")
    assert_same_training(engine, stock)


@needs_peft_20
def test_several_active_adapters_add_up() -> None:
    engine, stock = adapted_pair(config(), config(r=6, lora_alpha=3))
    for name in ("default", "extra0"):
        for model in (engine, stock):
            model.set_adapter(name)
        assert_same_training(engine, stock)
    alone = logits(engine)
    for model in (engine, stock):
        model.base_model.set_adapter(["default", "extra0"])
    assert_same_training(engine, stock)
    assert distance(logits(engine), alone) > 10 * LOGITS


def test_disabled_adapters() -> None:
    engine, stock = adapted_pair(config())
    plain = logits(build())
    assert distance(without_adapters(engine), plain) < LOGITS
    assert distance(without_adapters(stock), plain) < LOGITS
    assert_same_training(engine, stock)


@pytest.mark.parametrize("order", ["prepare first", "PEFT first", "no prepare"])
@pytest.mark.parametrize("release", [True, False])
def test_order_of_prepare_and_peft(order: str, release: bool) -> None:
    model = build()
    if order == "prepare first":
        moesaic.hf.prepare(model, release=release, progress=False)
    model.set_experts_implementation("moesaic")
    model = adapted(model, config())
    if order == "PEFT first":
        moesaic.hf.prepare(model, release=release, progress=False)
    assert_same_training(model, adapted(build(), config()))


def test_nothing_is_materialized() -> None:
    engine, stock = adapted_pair(config())
    wrapper = peft.tuners.lora.layer.ParamWrapper
    with mock.patch.object(wrapper, "get_delta_weight", side_effect=AssertionError), contextlib.ExitStack() as stack:
        if hasattr(wrapper, "get_delta_factors"):
            stack.enter_context(mock.patch.object(wrapper, "get_delta_factors", side_effect=AssertionError))
        gradients(engine)
        with pytest.raises(AssertionError):
            gradients(stock)


def test_blocks_on_another_implementation_are_left_to_peft() -> None:
    model, reference = adapted(build(), config()), adapted(build(), config())
    expected, expected_gradients = gradients(reference)
    loss, found = gradients(model)  # never touched by prepare: PEFT's own path, in the same process
    assert loss == expected
    assert all(torch.equal(found[name], expected_gradients[name]) for name in expected_gradients)


def test_adapters_in_float32_on_a_bfloat16_base() -> None:
    model = build().to(torch.bfloat16)
    model = adapted(model, config())
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    moesaic.hf.prepare(model, progress=False)
    _, found = gradients(model)
    assert found
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


def test_adapters_in_bfloat16() -> None:
    engine, stock = adapted_pair(config())
    for model in (engine, stock):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    for name, parameter in stock.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    loss, found = gradients(engine)
    expected_loss, expected = gradients(stock)
    assert loss == pytest.approx(expected_loss, rel=LOGITS)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    assert all(distance(found[name], expected[name]) < 3e-2 for name in expected)


def test_under_autocast() -> None:
    engine, stock = adapted_pair(config())
    expected = logits(stock)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distance(logits(engine), expected) < 2 * distance(logits(stock), expected) + LOGITS
        _, found = gradients(engine)
    assert all(gradient.dtype == torch.float32 and gradient.norm() > 0 for gradient in found.values())


def test_a_change_through_data_counts() -> None:
    engine, stock = adapted_pair(config())
    before = logits(engine)
    for model in (engine, stock):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.mul_(-1.5)
    assert distance(logits(engine), before) > 10 * LOGITS
    assert_same_training(engine, stock)


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("safe_merge", [True, False])
def test_merge_and_unmerge(release: bool, safe_merge: bool) -> None:
    model = build()
    plain = logits(model)
    moesaic.hf.prepare(model, release=release, progress=False)
    engine, stock = adapted(model, config()), adapted(build(), config())
    expected = logits(stock)
    assert distance(logits(engine), expected) < LOGITS
    for model in (engine, stock):
        model.merge_adapter(safe_merge=safe_merge)
    assert distance(logits(engine), expected) < LOGITS
    assert distance(logits(engine), logits(stock)) < LOGITS
    engine.unmerge_adapter()
    assert distance(logits(engine), expected) < LOGITS
    with engine.disable_adapter():
        assert distance(logits(engine), plain) < LOGITS


def test_adapters_disabled_while_merged() -> None:
    engine, _ = adapted_pair(config())
    engine.merge_adapter()
    with engine.disable_adapter():
        assert distance(logits(engine), logits(build())) < LOGITS


@pytest.mark.parametrize("safe_merge", [True, False])
def test_merge_and_unload(safe_merge: bool) -> None:
    engine, stock = adapted_pair(config())
    expected = logits(stock)
    merged = engine.merge_and_unload(safe_merge=safe_merge)
    assert distance(logits(merged), expected) < LOGITS
    moesaic.hf.restore(merged)
    assert distance(logits(merged), expected) < LOGITS


def test_unload_leaves_the_base() -> None:
    engine, _ = adapted_pair(config())
    assert distance(logits(engine.unload()), logits(build())) < LOGITS


@pytest.mark.parametrize("order", ["prepare first", "PEFT first"])
def test_modules_to_save_is_refused(order: str) -> None:
    """It copies the experts, with a config of their own, to train them in full."""
    whole = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    model = build()
    if order == "PEFT first":
        model = peft.get_peft_model(model, whole)
        with pytest.raises(ValueError, match=r"modules_to_save"):
            moesaic.hf.prepare(model, progress=False)
        return
    moesaic.hf.prepare(model, progress=False)
    model = peft.get_peft_model(model, whole)
    with pytest.raises(ValueError, match="requires a gradient"):
        gradients(model)
    assert distance(logits(model), logits(build())) < LOGITS


@needs_peft_20
def test_adapter_goes_into_the_stock_model(tmp_path: Path) -> None:
    engine, _ = adapted_pair(config(target_modules=["q_proj"]))
    engine.save_pretrained(str(tmp_path))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 300_000  # no base weight among them
    stock = peft.PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    assert distance(logits(engine), logits(stock)) < 2e-2
    again = build()
    moesaic.hf.prepare(again, progress=False)
    again = peft.PeftModel.from_pretrained(again, str(tmp_path)).eval()
    assert torch.equal(logits(again), logits(engine))


def test_exceptions_leave_no_adapter_behind() -> None:
    engine, _ = adapted_pair(config())
    layer = engine.base_model.model.model.layers[0]
    (block,) = blocks(engine)
    ids, weights = torch.zeros(5, 1).long(), torch.ones(5, 1)
    with pytest.raises(ValueError, match="hidden_states"):
        layer.mlp.experts(torch.zeros(5, 64).half(), ids, weights)
    (plain,) = blocks(build())
    with torch.no_grad():
        hidden = torch.randn(5, 64)
        assert distance(block(hidden, ids, weights), plain(hidden, ids, weights)) < LOGITS
        assert distance(layer.mlp.experts(hidden, ids, weights), plain(hidden, ids, weights)) > 10 * LOGITS


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    engine, stock = adapted_pair(config())
    expected = gradients(engine)[1]
    for model in (engine, stock):
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same_training(engine, stock)
    found = gradients(engine)[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_threads_with_different_adapters() -> None:
    """Adapters of a forward that runs on another thread are none of this one's."""
    engine, _ = adapted_pair(config())
    base = build()
    moesaic.hf.prepare(base, progress=False)
    other = copy.copy(blocks(engine)[0].__dict__)
    expected, plain = logits(engine), without_adapters(engine)
    assert other == blocks(engine)[0].__dict__  # a forward leaves nothing on the block
    results: dict[str, list[torch.Tensor]] = {"adapted": [], "plain": []}

    def run(name: str, model: Any) -> None:
        results[name] += [logits(model) for _ in range(8)]

    threads = [threading.Thread(target=run, args=item) for item in (("adapted", engine), ("plain", base))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, expected) for out in results["adapted"])
    assert all(torch.equal(out, plain) for out in results["plain"])
    assert len(results["plain"]) == 8


def test_wrong_adapter_dtype_names_it() -> None:
    engine, _ = adapted_pair(config())
    for name, parameter in engine.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.half()
    with pytest.raises(ValueError, match="lora"):
        engine(input_ids=tokens())
