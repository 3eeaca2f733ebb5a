"""Whole predictions: what they add up to, how they scale, what they refuse."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic.perf as perf
from moesaic.perf import Inference, Link, Parallelism, SimulationConfig, Topology, run_simulation

MACHINE = perf.Machine.named("emr-16c")
RATES = perf.LayerRates.derived(MACHINE, 16)

QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 64,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [1],
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip

PROMPT, ONE, COARSE = Inference(tokens=256), Topology(), SimulationConfig(granularity="coarse")
EVALUATOR = perf.GemmEvaluator(MACHINE, cache=False)


def run(
    inference: Inference = PROMPT,
    topology: Topology = ONE,
    parallelism: Parallelism | None = None,
    config: SimulationConfig = COARSE,
    model: dict[str, Any] = QWEN,
    evaluator: perf.GemmEvaluator = EVALUATOR,
) -> perf.SimulationResult:
    return run_simulation(topology, model, inference, parallelism, evaluator, config, RATES)


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("granularity", ["coarse", "fine"])
def test_everything_adds_up(phase, devices: int, granularity) -> None:  # type: ignore[no-untyped-def]
    inference = Inference(phase, 64, 2, 0 if phase == "train" else 5, lora_rank=16 if phase == "train" else 0)
    result = run(inference, Topology(devices=devices), config=SimulationConfig(granularity=granularity))
    assert result.milliseconds == pytest.approx(sum(step.milliseconds * step.count for step in result.steps))
    for step in result.steps:
        if not step.blocks:
            continue
        assert step.milliseconds == pytest.approx(sum(block.milliseconds * block.count for block in step.blocks))
        layers = [block.count for block in step.blocks if block.name in ("ffn", "experts")]
        assert sum(layers) == 6 and sum(b.count for b in step.blocks if b.name == "experts") == 5
        for block in step.blocks:
            assert block.compute_ms == pytest.approx(sum(operator.milliseconds for operator in block.operators))
            assert max(block.compute_ms, block.communication_ms) <= block.milliseconds * (1 + 1e-9)
            if devices == 1:
                assert block.communication_ms == 0.0 and block.strategy == "single"
    names = [step.name for step in result.steps]
    assert (
        names
        == {
            "prefill": ["prefill"] + ["decode"] * (5 if granularity == "fine" else 2),
            "decode": ["decode"] * (5 if granularity == "fine" else 2),
            "train": ["forward", "backward", "optimizer"],
        }[phase]
    )
    assert sum(step.count for step in result.steps if step.name == "decode") == inference.decode_tokens
    # More devices have more cache as well: a little more than one is possible.
    assert 0 < result.parallel_efficiency <= 1.15
    if devices == 1:
        assert result.parallel_efficiency == pytest.approx(1.0)
    assert result.memory["total"] == pytest.approx(sum(v for k, v in result.memory.items() if k != "total"))
    json.dumps(result.to_json(), allow_nan=False)


def test_every_strategy_against_auto() -> None:
    """`auto` is the best for each block, so no strategy asked for is faster; and it explains itself."""
    topology = Topology(devices=4)
    auto = run(topology=topology)
    for strategy in ("column", "row", "hybrid", "expert"):
        asked = run(topology=topology, parallelism=Parallelism(strategy))
        assert asked.milliseconds >= auto.milliseconds * (1 - 1e-9)
        experts = next(block for block in asked.steps[0].blocks if block.name == "experts")
        assert experts.strategy == strategy and experts.reason.endswith("asked for")
        best = next(block for block in auto.steps[0].blocks if block.name == "experts")
        assert strategy in best.reason
    assert run(topology=topology, parallelism=Parallelism(overlap=False)).milliseconds >= auto.milliseconds


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([2, 3, 4, 8]), st.floats(0.2, 400), st.floats(1, 20), st.sampled_from(["ring", "mesh"]))
def test_more_bandwidth_never_costs(devices: int, bandwidth: float, faster: float, kind) -> None:  # type: ignore[no-untyped-def]
    slow, fast = (
        run(topology=Topology(devices=devices, kind=kind, intra=Link(gbps, 3.0)))
        for gbps in (bandwidth, bandwidth * faster)
    )
    assert fast.milliseconds <= slow.milliseconds * (1 + 1e-9)
    assert fast.parallel_efficiency >= slow.parallel_efficiency * (1 - 1e-9)


def test_time_grows_with_tokens_and_context() -> None:
    times = [run(Inference(tokens=tokens)).milliseconds for tokens in (1, 16, 256, 2048)]
    assert times == sorted(times)
    decoded = run(Inference("decode", 1000, decode_tokens=50), config=SimulationConfig())
    per_token = [step.milliseconds for step in decoded.steps]
    assert per_token == sorted(per_token) and per_token[-1] > per_token[0]
    # A line between the first and the last token is what all of them make.
    coarse = run(Inference("decode", 1000, decode_tokens=50))
    assert coarse.milliseconds == pytest.approx(decoded.milliseconds, rel=0.02)
    few = run(Inference("decode", 1000, decode_tokens=50), config=SimulationConfig(max_simulated_tokens=4))
    assert len(few.steps) == 4 and few.milliseconds == pytest.approx(decoded.milliseconds, rel=0.02)


def test_hardware_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    MACHINE.save(file)
    for hardware in (file, str(file)):
        found = run_simulation(ONE, QWEN, PROMPT, None, hardware, COARSE, RATES)
        assert found.milliseconds == pytest.approx(run().milliseconds)


def test_every_node_has_rows_of_its_own() -> None:
    two = perf.GemmEvaluator(replace(MACHINE, numa_nodes=2), cache=False)
    one_node, two_nodes = (run(evaluator=evaluator).memory for evaluator in (EVALUATOR, two))
    assert two_nodes["scratch"] - one_node["scratch"] == 2 * 256 * 8 * 2048  # bf16 [T * k][H]


def test_training_is_forward_and_more() -> None:
    plain = run(Inference("train", 256, lora_rank=16))
    again = run(Inference("train", 256, lora_rank=16, recompute=True))
    forward, backward, optimizer = plain.steps
    assert again.milliseconds == pytest.approx(plain.milliseconds + forward.milliseconds)
    assert backward.milliseconds > forward.milliseconds > optimizer.milliseconds > 0
    assert again.memory["activations"] < plain.memory["activations"]
    # AdamW reads and writes 28 bytes of each of the adapters' parameters.
    parameters = plain.memory["adapters"] / 4
    gbps = MACHINE.figures(16)["gbps"][3]
    assert optimizer.milliseconds == pytest.approx(28 * parameters / (gbps * 1e6))
    assert plain.memory["gradients and optimizer"] == 12 * parameters
    per_expert = 16 * (2048 + 2 * 768) + 16 * (768 + 2048)
    attention = 16 * (2048 + (32 + 8) * 128) + 16 * (32 * 128 + 2048)
    assert parameters == 5 * 64 * per_expert + 6 * attention


def test_a_loss_makes_its_logits_again() -> None:
    forward, backward = (
        next(block for block in step.blocks if block.name == "head")
        for step in run(Inference("train", 64)).steps
        if step.blocks
    )
    once = 2.0 * 64 * 2048 * 151936
    products = [{o.name: o.flops for o in head.operators if o.kind == "gemm"} for head in (forward, backward)]
    assert products == [{"lm_head": once}, {"lm_head": once, "logits": once}]
    assert "loss" in [operator.name for operator in backward.operators]


def test_closed_formulas_are_a_lower_bound() -> None:
    closed = SimulationConfig(use_precise_evaluator=False, granularity="coarse")
    for phase, tokens in itertools.product(("prefill", "train"), (16, 512)):
        inference = Inference(phase, tokens, lora_rank=8)  # type: ignore[arg-type]
        precise, simple = run(inference), run(inference, config=closed)
        assert 0.2 * precise.milliseconds < simple.milliseconds < 1.02 * precise.milliseconds
        assert simple.prewarming.hits == simple.prewarming.misses == 0


def test_prewarming_changes_no_time_and_makes_hits() -> None:
    inference = Inference(tokens=128, decode_tokens=4)
    cold, warm = (perf.GemmEvaluator(MACHINE, cache=False) for _ in range(2))
    without = run(inference, config=SimulationConfig(enable_gemm_prewarm=False), model=DEEPSEEK, evaluator=cold)
    after = run(inference, config=SimulationConfig(), model=DEEPSEEK, evaluator=warm)
    assert without.milliseconds == after.milliseconds
    assert after.prewarming.shapes >= 24 and after.prewarming.misses == 0
    assert without.prewarming.misses == after.prewarming.shapes
    assert without.prewarming.hits + without.prewarming.misses == after.prewarming.hits


def test_skewed_routing_waits_for_the_busiest_device() -> None:
    topology = Topology(devices=8)
    inference = Inference(tokens=2048)

    def experts_ms(routing: str) -> float:
        result = run(inference, topology, Parallelism("expert", routing))
        return next(block.milliseconds for block in result.steps[0].blocks if block.name == "experts")

    assert experts_ms("concentrated:8") > 3 * experts_ms("uniform")
    assert experts_ms("zipf:1") > 1.3 * experts_ms("uniform")


def test_a_machine_a_file_and_a_name_are_the_same(tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "machine.json")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    coarse = SimulationConfig(granularity="coarse")
    expected = run().milliseconds
    for hardware in ("emr-16c", str(tmp_path / "machine.json"), MACHINE):
        for model in (QWEN, tmp_path / "config.json", perf.TransformerConfig.load(QWEN)):
            result = run_simulation(Topology(), model, Inference(tokens=256), None, hardware, coarse, RATES)
            assert result.milliseconds == pytest.approx(expected, rel=1e-6)  # the cache keeps six digits of parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert'"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_experts": -3}, "num_experts is -3"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": 10**30}, f"vocab_size is {10**30}, expected a whole number from 1 to {2**40}"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers is '1', expected a list"),
        ({"mlp_only_layers": [0.5]}, r"mlp_only_layers is \[0.5\]"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step is '2'"),
    ],
)
def test_a_bad_model_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(model={key: value for key, value in {**QWEN, **change}.items() if value is not None})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Inference(tokens=-1), "tokens is -1; expected a whole number from 1 on"),
        (lambda: Inference("decode"), "decode_tokens is 0"),
        (lambda: Inference("train", decode_tokens=2), "decode_tokens is 2; expected 0"),
        (lambda: Inference("sleep"), "phase is 'sleep'; expected prefill, decode or train"),  # type: ignore[arg-type]
        (lambda: Parallelism("diagonal"), "strategy is 'diagonal'"),  # type: ignore[arg-type]
        (lambda: Parallelism(routing="odd"), "routing is 'odd'"),
        (lambda: SimulationConfig(granularity="tiny"), "granularity is 'tiny'"),  # type: ignore[arg-type]
        (lambda: SimulationConfig(max_simulated_tokens=0), "max_simulated_tokens is 0"),
        (lambda: run(parallelism=Parallelism(routing="concentrated:4")), "routing is concentrated:4; expected from 8"),
        (
            lambda: run(
                model={**QWEN, "model_type": "qwen3"}, topology=Topology(devices=2), parallelism=Parallelism("expert")
            ),
            "strategy is 'expert'; the model has no experts",
        ),
    ],
)
def test_bad_input_is_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"tokens is 2\.5; expected a whole number"):
        Inference(tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"link\.bandwidth_gbps is 'fast'"):
        replace(Link(1.0), bandwidth_gbps="fast")


def test_a_simulation_leaves_no_garbage() -> None:
    run()
    gc.collect()
    run(Inference(tokens=256, decode_tokens=4))
    assert gc.collect() == 0


def test_the_first_simulation_meets_no_full_collection(tmp_path: Path) -> None:
    """The import ends with one. (Where it makes none, whether the simulation meets one depends on Python's version.)"""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    program = f"""
import gc
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "start" else None)
import moesaic.perf as perf
of_import = [generation for generation in collected if generation > 0]
collected.clear()
evaluator = perf.GemmEvaluator(perf.Machine.named("emr-16c"), cache=perf.Cache({str(tmp_path)!r}), space="published")
perf.run_simulation(
    perf.Topology(), {str(tmp_path / "config.json")!r}, perf.Inference("prefill", 128, 1, 4), None, evaluator
)
print(of_import[-1], collected.count(2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "0"]
