"""Shapes and the GEMM evaluator."""

import dataclasses
import itertools
import logging
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic import _core, perf
from moesaic.perf import GemmEvaluator, GemmShape, Machine, timing
from moesaic.perf.gemm_evaluator import Configuration
from moesaic.perf.timing import ShapeTimer

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


# ---- tasks and what they share ----


def _milliseconds(machine: Machine, shape: GemmShape, threads: int, *configuration: int | str) -> float:
    problem = perf.gemm_evaluator.problem_of(shape, shape.form)
    return float(_core.TileEvaluator(machine.figures(threads)).estimate(problem, configuration)[1])


def test_tasks_of_the_last_columns_come_last():
    machine = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0})
    shape = GemmShape(m=64, k=2048, n=896, form="direct", packed=True)
    # Seven tasks of 128 columns on two threads take four rounds, as eight do; three of 256 and one of 128 two.
    for columns, rounded in ((128, 1024), (256, 1024)):
        whole = dataclasses.replace(shape, n=rounded)
        of_all, of_whole = (_milliseconds(machine, s, 2, 64, columns, 64, 32, 2048, "columns") for s in (shape, whole))
        assert of_all == pytest.approx(of_whole, rel=0.02)
    # One of 640 and one of 256 on two threads end together with the first.
    one = dataclasses.replace(shape, n=640)
    assert _milliseconds(machine, shape, 2, 64, 640, 64, 32, 2048, "columns") == pytest.approx(
        _milliseconds(machine, one, 2, 64, 640, 64, 32, 2048, "columns"), rel=0.2
    )


def test_half_of_a_mean_task_is_waited_for_where_threads_are_unlike():
    machine = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0, 16: 1.5})
    shape = GemmShape(m=21 * 192, k=768, n=512, form="direct", packed=True)
    configuration = (192, 512, 192, 512, 768, "columns")
    # 21 whole tasks, and the same with a small one behind them: that it is the last one changes little.
    whole, more = (
        _milliseconds(machine, dataclasses.replace(shape, m=rows), 16, *configuration) for rows in (4032, 4048)
    )
    assert whole < more < 1.05 * whole


def test_what_the_slowest_and_the_last_task_take_longer():
    machine = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0, 8: 1.3, 16: 1.5})

    def of_even(tasks: int) -> float:
        shape = GemmShape(m=tasks * 192, k=768, n=512, form="direct", packed=True)
        configuration = Configuration("direct", 192, 512, 192, 512, 768, "columns")
        parts = dict(GemmEvaluator(machine, 16, cache=False).estimate(shape, configuration).parts)
        waited = parts.pop("scheduling")
        del parts["dispatch"]
        return waited / sum(parts.values())

    # Rounds or not: half of a task, of which each thread has two, or three and a quarter.
    assert of_even(32) == pytest.approx(0.5 * 15 / 16 / 2)
    assert of_even(52) == pytest.approx(0.5 * 15 / 16 / 3.25)
    # No more tasks than threads: the slowest one, of the one that has its weights from memory.
    assert of_even(16) == pytest.approx(0.5, rel=0.02)
    assert of_even(8) == pytest.approx(2 * 1.3 - 1, rel=0.02)


def test_few_tasks_have_more_of_the_memory_each():
    machine = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0})
    kernels = machine.kernels["amx_bf16"]
    shape = GemmShape(m=16, k=4096, n=1024, form="direct", packed=True)
    configuration = (16, 512, 16, 512, 4096, "columns")
    two = _milliseconds(machine, shape, 16, *configuration)
    bytes_of_task = 2 * 4096 * 512
    assert two >= bytes_of_task / kernels.direct_gbps[1] * 1e-6
    assert two < 1.3 * bytes_of_task / kernels.direct_gbps[1] * 1e-6
    # What so many threads have together, not what each has alone: half of what they gain over all of them.
    eight = {1: 30.0, 8: 120.0, 16: 160.0}
    fewer = dataclasses.replace(machine, kernels={"amx_bf16": dataclasses.replace(kernels, direct_gbps=eight)})
    of_eight = _milliseconds(fewer, dataclasses.replace(shape, n=8 * 512), 16, *configuration)
    assert of_eight == pytest.approx(bytes_of_task / math.sqrt(120.0 / 8 * 160.0 / 16) * 1e-6, rel=0.05)
    many = dataclasses.replace(shape, n=16 * 512)
    assert _milliseconds(machine, many, 16, *configuration) >= bytes_of_task * 16 / kernels.direct_gbps[16] * 1e-6


@pytest.mark.parametrize("form", ["direct", "unpack"])
def test_tasks_of_few_rows_that_share_weights_each_read_most_of_them_from_memory(form):
    emr = Machine.named("emr-16c")

    def traffic(tasks: int, rows: int = 32, machine: Machine = emr, threads: int = 16, **changes: Any) -> float:
        """Milliseconds of memory, of so many tasks that have all columns."""
        shape = GemmShape(m=tasks * rows, k=1024, n=512, form=form, **changes)
        configuration = Configuration(form, rows, 512, rows, 512, 256 if form == "unpack" else 1024, "columns")
        return GemmEvaluator(machine, threads, cache=False).estimate(shape, configuration).parts["dram"]

    one = traffic(1)
    for tasks, each in ((2, 0.84), (4, 0.71), (8, 0.6), (16, 0.6)):
        assert traffic(tasks) == pytest.approx(tasks * each * one, rel=0.1)
    # Those that come later read nothing from memory.
    assert traffic(40) == pytest.approx(traffic(16), rel=0.1)
    # Not where weights are in the last-level cache, of more rows, on two threads, or without a matrix unit.
    assert traffic(8, cached=True) < 0.1 * traffic(8)
    assert traffic(8, rows=48) < 2 * traffic(1, rows=48)
    for machine, threads in ((emr, 2), (Machine.named("zen5-2c"), 2)):
        some = [traffic(tasks, 32, machine, threads) for tasks in (2, 8)]
        assert some[1] < 2 * some[0]


# ---- shapes ----


def test_shapes_of_deepseek_v3():
    shapes = perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [128, 1])
    assert len(shapes) >= 24 and len(set(shapes)) == len(shapes)
    sizes = {(s.name, s.groups, s.m, s.k, s.n) for s in shapes}
    assert {
        ("attention.q_a_proj", 1, 128, 7168, 1536),
        ("attention.q_b_proj", 1, 128, 1536, 24576),
        ("attention.kv_a_proj", 1, 128, 7168, 576),
        ("attention.kv_b_proj", 1, 128, 512, 32768),
        ("attention.o_proj", 1, 128, 16384, 7168),
        ("mlp.gate_up_proj", 1, 128, 7168, 36864),
        ("router", 1, 128, 7168, 256),
        ("shared_expert.down_proj", 1, 128, 2048, 7168),
        ("experts.gate_up_proj", 256, 4, 7168, 4096),
        ("experts.down_proj", 8, 1, 2048, 7168),
        ("lm_head", 1, 1, 7168, 129280),
    } <= sizes
    assert [GemmShape.from_key(s.key) for s in shapes] == shapes
    cached = dataclasses.replace(shapes[0], cached=True)
    assert GemmShape.from_key(cached.key) == cached != shapes[0]


def test_tensor_parallel_and_training_shapes():
    split = perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [16], tensor_parallel=[8])
    sizes = {s.name: (s.k, s.n) for s in split}
    assert sizes["attention.o_proj"] == (2048, 7168) and sizes["experts.gate_up_proj"] == (7168, 512)
    assert sizes["attention.q_a_proj"] == (7168, 1536)  # every device has all of it
    train = perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [64], training=True, lora_rank=8)
    sizes = {(s.name, s.form, s.k, s.n) for s in train}
    # B is a step more of the base products' contractions; P = dG B_g + dU B_u; Q = D B_d has the shape of X A^T.
    assert {
        ("attention.o_proj.backward", None, 7168, 16384),
        ("experts.gate_up_proj", "direct", 7168 + 32, 4096),
        ("experts.gate_up_lora", "direct", 7168, 32),
        ("experts.down_lora", "unpack", 2048, 32),
        ("experts.down_proj.backward", "direct", 7168 + 32, 2048),
        ("experts.gate_up_proj.backward", "unpack", 4096 + 32, 7168),
        ("experts.gate_up_lora.backward", "unpack", 4096, 32),
    } <= sizes
    # 64 tokens x 8 slots over 256 experts: 2 rows each, in one tile of the contraction.
    gradients = {(s.name, s.groups, s.m, s.k, s.n) for s in train if s.form == "gradient"}
    assert gradients == {
        ("experts.down_lora.dA", 256, 2048, 32, 32),
        ("experts.down_lora.dB", 256, 7168, 32, 32),
        ("experts.gate_up_lora.dA", 256, 8, 64, 7168),
    }  # dB of gate and up has the shape of dA of down
    skewed = perf.generate_transformer_gemm_shapes(
        DEEPSEEK_V3, [1], [4096], training=True, lora_rank=32, routing="concentrated:9"
    )
    lengths = {(s.groups, s.k) for s in skewed if s.name == "experts.down_lora.dB"}
    assert all(k % 32 == 0 and k <= 384 for _, k in lengths)
    assert sum(groups * k for groups, k in lengths) >= 8 * 4096
    assert {s.k for s in skewed if s.name == "experts.down_lora.dA"} == {2 * k for _, k in lengths}  # two bf16 parts


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "resnet"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"n_routed_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"vocab_size": 1.5}, "vocab_size"),
    ],
)
def test_a_bad_configuration_names_the_field(change, field):
    with pytest.raises(ValueError, match=field) as error:
        perf.generate_transformer_gemm_shapes(DEEPSEEK_V3 | change)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 500),
    experts=st.integers(1, 64),
    top_k=st.integers(1, 8),
    routing=st.sampled_from(["uniform", "zipf:1.0", "zipf:3", "zipf"]),
)
def test_expert_rows_add_up(tokens, experts, top_k, routing):
    top_k = min(top_k, experts)
    rows = perf.expert_rows(tokens, top_k, experts, routing)
    assert len(rows) == experts and sum(rows) == tokens * top_k
    assert max(rows) <= tokens and list(rows) == sorted(rows, reverse=True)


def test_routings_are_checked():
    assert perf.expert_rows(10, 2, 8, "concentrated:2") == (10, 10, 0, 0, 0, 0, 0, 0)
    for bad in ("even", "zipf:x", "zipf:-1", "concentrated:1", "uniform:2"):
        with pytest.raises(ValueError, match="routing"):
            perf.expert_rows(10, 2, 8, bad)
    for tokens, top_k, name in ((4, 9, "top_k is 9"), (4, 0, "top_k is 0"), (-1, 2, "tokens is -1")):
        with pytest.raises(ValueError, match=name):
            perf.expert_rows(tokens, top_k, 8)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="lora_rank is -64"):
        perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, lora_rank=-64)
    listed = GemmShape(groups=2, m=3, k=64, n=64, rows=[3, 2])
    assert hash(listed) == hash(GemmShape(groups=2, m=3, k=64, n=64, rows=(3, 2)))


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"m": -1}, "m"),
        ({"k": 0}, "k"),
        ({"n": 2.5}, "n"),
        ({"groups": 0}, "groups"),
        ({"input": "fp8"}, "input"),
        ({"weights": "int8"}, "weights"),
        ({"form": "winograd"}, "form"),
        ({"form": "gradient", "output": "bf16"}, "output"),
        ({"groups": 2, "m": 3, "rows": (3,)}, "rows"),
        ({"groups": 2, "m": 4, "rows": (3, 1)}, "m"),
    ],
)
def test_a_bad_shape_names_the_field(sizes, field):
    with pytest.raises(ValueError, match=f"^{field} "):
        GemmShape(**sizes)


# ---- the evaluator ----


def test_parts_add_up_and_the_largest_is_the_bound(machine):
    evaluator = GemmEvaluator(machine, cache=False)
    for shape in perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [1, 300], training=True, routing="zipf:1.0"):
        answer = evaluator.evaluate(shape)
        assert set(answer.parts) == {
            "arithmetic", "l1", "l2", "l3", "dram", "packing", "edge", "scheduling", "dispatch"
        }  # fmt: skip
        assert sum(answer.parts.values()) == pytest.approx(answer.milliseconds, rel=1e-9)
        assert min(answer.parts.values()) >= -1e-12 * answer.milliseconds
        assert answer.parts[answer.bound] == max(answer.parts.values())
        assert answer.source == "analytic"
        # No faster than arithmetic and memory allow.
        flops = 2.0 * sum(shape.group_rows) * shape.k * shape.n
        compute = perf.machine.at_threads(machine.compute_gflops, evaluator.threads)
        assert answer.milliseconds >= 0.999 * flops / compute * 1e-6
        weight_bytes = 2 * shape.groups * shape.k * shape.n
        read = perf.machine.at_threads(machine.dram_gbps, evaluator.threads)
        assert answer.milliseconds >= 0.999 * weight_bytes / read * 1e-6


def test_the_choice_is_the_best_of_the_candidates(machine):
    evaluator = GemmEvaluator(machine, cache=False)
    for shape in (GemmShape(m=77, k=1000, n=3000), GemmShape(groups=9, m=8, k=512, n=640, output="fp32")):
        ranked = evaluator.rank(shape, 10_000)
        times = [answer.milliseconds for answer in ranked]
        assert times == sorted(times) and len({answer.configuration for answer in ranked}) == len(ranked)
        chosen = evaluator.evaluate(shape)
        assert chosen.milliseconds == times[0]
        assert evaluator.estimate(shape, chosen.configuration).parts == chosen.parts


def test_long_contractions_are_cut_where_activations_leave_the_cache():
    evaluator = GemmEvaluator(Machine.named("emr-16c"), 1, cache=False)
    shape = GemmShape(m=384, k=8192, n=4096, form="unpack", packed=True)
    cut = evaluator.evaluate(shape)
    assert cut.configuration.call_depth == 256  # whose right factors L1 holds
    whole = evaluator.estimate(shape, dataclasses.replace(cut.configuration, call_depth=shape.k))
    # The whole contraction's activations, 6 MB, come from L3 for each tile column; a slice's once for eight of them.
    assert whole.parts["l3"] > 3 * cut.parts["l3"] and whole.milliseconds > cut.milliseconds
    # Without a matrix unit: what keeps 24 panels in a quarter of 1 MB, and only where they exceed half of it.
    machine = Machine.named("zen5-2c")
    kernels = machine.kernels["avx512_bf16"]
    alone = dataclasses.replace(kernels.per_thread[1], few_tile_ns=((), ()))
    without = {"avx512_bf16": dataclasses.replace(kernels, per_thread={1: alone})}
    lays_out = GemmEvaluator(dataclasses.replace(machine, kernels=without), 1, cache=False)
    assert lays_out.evaluate(shape).configuration.call_depth == 256
    assert lays_out.evaluate(dataclasses.replace(shape, k=512)).configuration.call_depth == 512
    # Kernels that interleave weights in registers need no slices.
    few = GemmEvaluator(machine, 1, cache=False)
    assert few.evaluate(shape).configuration.call_depth == 8192


def test_amx_waits_for_weights_that_nothing_prefetches():
    evaluator = GemmEvaluator(Machine.named("emr-16c"), 1, cache=False)

    def milliseconds(rows, columns):
        shape = GemmShape(m=rows, k=2048, n=2048, form="direct", output="fp32", packed=True)
        configuration = perf.gemm_evaluator.Configuration("direct", 384, 2048, 384, columns, 2048, "columns")
        return evaluator.estimate(shape, configuration).milliseconds

    for rows in (1, 16, 32):  # rows of one cell: calls that could prefetch for the next one are no faster
        assert milliseconds(rows, 2048) == pytest.approx(milliseconds(rows, 32), rel=0.02)
    # More rows meet the first piece of a task with nothing beside it, and of each call that is too wide to be told of.
    assert milliseconds(33, 128) == pytest.approx(milliseconds(33, 32), rel=0.02)
    assert milliseconds(33, 256) > 1.05 * milliseconds(33, 128)
    assert milliseconds(33, 2048) == pytest.approx(milliseconds(33, 32), rel=0.02)


def test_amx_s_unpack_form_passes_the_left_factor():
    def milliseconds(step_ns):
        description = Machine.named("emr-16c").to_json()
        for figures in description["kernels"]["amx_bf16"]["per_thread"].values():
            figures["step_ns"] = step_ns
        evaluator = GemmEvaluator(Machine.from_json(description), 1, cache=False)
        shape = GemmShape(m=384, k=1024, n=512, form="unpack", output="fp32", packed=True)
        configuration = perf.gemm_evaluator.Configuration("unpack", 384, 512, 384, 128, 256, "columns")
        return evaluator.estimate(shape, configuration).milliseconds

    # One of its panels of rows meets two of weights: what two of weights with one of rows take in the direct form.
    quick, slow = 14.0, 20.0
    assert milliseconds([[10, quick], [slow, 28]]) > 1.1 * milliseconds([[10, slow], [quick, 28]])


def test_amx_s_gradients_take_two_panels_of_one_factor_with_one_of_the_other():
    def milliseconds(rows, step_ns):
        description = Machine.named("emr-16c").to_json()
        for figures in description["kernels"]["amx_bf16"]["per_thread"].values():
            figures["step_ns"] = step_ns
        evaluator = GemmEvaluator(Machine.from_json(description), 1, cache=False)
        shape = GemmShape(m=rows, k=1024, n=512, form="gradient", output="fp32", packed=True)
        configuration = perf.gemm_evaluator.Configuration("gradient", 48, 512, 48, 512, 1024, "columns")
        return evaluator.estimate(shape, configuration).milliseconds

    # [rows - 1][columns - 1], panels of a cell: even panels of rows meet one of columns, a last one alone two of these.
    assert milliseconds(32, [[10, 14], [20, 28]]) == milliseconds(32, [[99, 99], [20, 99]])
    assert milliseconds(16, [[10, 14], [20, 28]]) == milliseconds(16, [[99, 14], [99, 99]])
    assert milliseconds(48, [[10, 14], [20, 28]]) == milliseconds(48, [[99, 14], [20, 99]])
    for of_pairs, of_the_last in ((30, 14), (20, 28)):
        assert milliseconds(48, [[10, of_the_last], [of_pairs, 28]]) > 1.02 * milliseconds(48, [[10, 14], [20, 28]])


def test_the_published_space_has_1800_candidates(machine):
    evaluator = GemmEvaluator(machine, cache=False, space="published")
    assert evaluator.evaluate(GemmShape(m=2000, k=4096, n=4096)).candidates == 1800
    pruned = GemmEvaluator(machine, cache=False).evaluate(GemmShape(m=2000, k=4096, n=4096))
    assert pruned.candidates < 900
    assert pruned.milliseconds == evaluator.evaluate(GemmShape(m=2000, k=4096, n=4096)).milliseconds


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(Machine.names()),
    m=st.integers(1, 5000),
    k=st.integers(1, 9000),
    n=st.integers(1, 9000),
    groups=st.integers(1, 40),
    output=st.sampled_from(["bf16", "fp32"]),
)
def test_more_work_never_takes_less_time(name, m, k, n, groups, output):
    evaluator = GemmEvaluator(Machine.named(name), cache=False)
    sizes = {"groups": groups, "m": m, "k": k, "n": n, "output": output}
    base = evaluator.evaluate(GemmShape(**sizes)).milliseconds
    assert base > 0
    assert evaluator.evaluate(GemmShape(**sizes | {"groups": 2 * groups})).milliseconds >= base
    assert evaluator.evaluate(GemmShape(**sizes | {"k": 2 * k})).milliseconds >= 0.9 * base


def test_more_bandwidth_and_faster_units_never_cost_time(machine):
    shapes = [GemmShape(m=m, k=2048, n=1024, groups=g) for m in (1, 40, 700) for g in (1, 16)]
    base = [e.milliseconds for e in GemmEvaluator(machine, cache=False).evaluate_many(shapes)]
    kernels = machine.kernels[machine.isa]
    faster_memory = dataclasses.replace(
        machine,
        dram_gbps={n: 2 * x for n, x in machine.dram_gbps.items()},
        kernels={
            machine.isa: dataclasses.replace(
                kernels,
                **{
                    name: {n: 2 * x for n, x in getattr(kernels, name).items()}
                    for name in ("direct_gbps", "unpack_gbps", "few_direct_gbps", "few_unpack_gbps")
                },
            )
        },
    )
    for other in (faster_memory, dataclasses.replace(machine, l3_gbps={n: 2 * x for n, x in machine.l3_gbps.items()})):
        times = [e.milliseconds for e in GemmEvaluator(other, cache=False).evaluate_many(shapes)]
        assert all(a <= b * (1 + 1e-9) for a, b in zip(times, base, strict=True))


def test_what_overlaps_less_takes_longer(machine):
    kernels = machine.kernels[machine.isa]
    shapes = [GemmShape(m=m, k=2048, n=1024, output=out) for m in (1, 40, 700) for out in ("fp32", "bf16")]

    def times(overlap, **changes):
        alone = dataclasses.replace(kernels.per_thread[1], overlap=overlap, unpack_overlap=overlap)
        kernel = dataclasses.replace(kernels, per_thread={1: alone})
        evaluator = GemmEvaluator(dataclasses.replace(machine, kernels={machine.isa: kernel}), cache=False)
        return [e.milliseconds for e in evaluator.evaluate_many([dataclasses.replace(s, **changes) for s in shapes])]

    for better, worse in ((3.0, 1.5), (1.5, 1.0)):
        assert all(a <= b * (1 + 1e-9) for a, b in zip(times(better), times(worse), strict=True))
    # Weights that the last-level cache holds come no slower than from memory.
    assert all(a <= b * (1 + 1e-9) for a, b in zip(times(1.0, cached=True), times(1.0), strict=True))


def test_skewed_rows_cost_more_than_even_ones(machine):
    evaluator = GemmEvaluator(machine, cache=False)
    sizes = {"k": 2048, "n": 1536}
    even = GemmShape(groups=32, m=256, **sizes)
    skewed = GemmShape.skewed(perf.expert_rows(1024, 8, 32, "zipf:2"), **sizes)
    assert sum(skewed.group_rows) == sum(even.group_rows) == 8192
    assert evaluator.evaluate(skewed).milliseconds > 0
    none = GemmShape.skewed([0, 0, 5, 5, 0], k=64, n=64)
    assert (none.groups, none.m, none.rows) == (2, 5, None)


def test_threads_and_tiers_are_checked(machine):
    for threads in (0, machine.threads + 1):
        with pytest.raises(ValueError, match="threads"):
            GemmEvaluator(machine, threads=threads, cache=False)
    with pytest.raises(ValueError, match="isa"):
        GemmEvaluator(machine, cache=False, isa="sse9")
    with pytest.raises(ValueError, match="space"):
        GemmEvaluator(machine, cache=False, space="all")
    with pytest.raises(ValueError, match="this host"):
        GemmEvaluator(machine, cache=False, mode="measured")


# ---- cache and prewarming ----


def test_answers_are_kept_by_machine_threads_and_version(tmp_path, machine, caplog, monkeypatch):
    shape = GemmShape(groups=3, m=9, rows=(9, 4, 4), k=256, n=384)
    cache = perf.Cache(tmp_path)
    first = GemmEvaluator(machine, cache=cache)
    with caplog.at_level(logging.DEBUG, "moesaic.perf"):
        answer = first.evaluate(shape)
        again = GemmEvaluator(machine, cache=perf.Cache(tmp_path))
        assert again.evaluate(shape) == answer  # the same numbers, cold or warm
        again.evaluate(shape)
    assert [r.message.split()[0] for r in caplog.records] == ["miss", "hit"]
    assert again.candidates == 0 and again.cache.stats().hits == 2
    others = [
        GemmEvaluator(machine, threads=1, cache=cache),
        GemmEvaluator(dataclasses.replace(machine, l1_ns=0.1), cache=cache),
        GemmEvaluator(machine, cache=cache, space="published"),
    ]
    assert not any(other.known(shape) for other in others) and first.known(shape)
    monkeypatch.setattr(_core, "gemm_model_version", 10**6)
    assert not GemmEvaluator(machine, cache=cache).known(shape)


def test_a_bad_entry_is_computed_anew(tmp_path):
    machine, shape = Machine.named("zen5-2c"), GemmShape(m=64, k=512, n=512)
    evaluator = GemmEvaluator(machine, cache=perf.Cache(tmp_path))
    right = evaluator.evaluate(shape)
    for bad in ([], {"x": 1}, [1.0, [1.0], "l1", [], 1, "analytic"], ["fast", [0] * 9, "l1", [0] * 7, 1, ""]):
        cache = perf.Cache(tmp_path)
        cache.put({evaluator.key(shape): bad})
        assert GemmEvaluator(machine, cache=cache).evaluate(shape) == right


def test_prewarm_and_history(tmp_path):
    machine = Machine.named("emr-16c")
    shapes = perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [128, 1], routing="zipf:1.0")
    evaluator = GemmEvaluator(machine, cache=perf.Cache(tmp_path), space="published")
    report = perf.prewarm(evaluator, shapes + shapes)
    assert (report.shapes, report.hits, report.misses) == (len(shapes), 0, len(shapes))
    assert report.candidates == 1800 * len(shapes) and 0 < report.cache_bytes < 10 << 20
    warm = GemmEvaluator(machine, cache=perf.Cache(tmp_path), space="published")
    again = perf.prewarm(warm, shapes)
    assert (again.hits, again.misses, again.candidates) == (len(shapes), 0, 0)
    assert warm.history() == []  # filling it is no use
    for _ in range(3):
        warm.evaluate(shapes[4])
    warm.evaluate(shapes[2])
    warm.cache.flush()
    assert GemmEvaluator(Machine.named("zen5-2c"), cache=perf.Cache(tmp_path)).history() == [shapes[4], shapes[2]]


def test_a_run_of_1680_look_ups_hits(tmp_path):
    evaluator = GemmEvaluator(Machine.named("zen5-2c"), cache=perf.Cache(tmp_path), space="published")
    shapes = perf.generate_transformer_gemm_shapes(DEEPSEEK_V3, [1], [1])[:7]
    perf.prewarm(evaluator, shapes)
    start = time.perf_counter()
    for _ in range(60 * 4):
        for shape in shapes:
            evaluator.evaluate(shape)
    assert time.perf_counter() - start < 5  # a bar of 20 ms on idle cores; this only catches a search in every look-up
    stats = evaluator.cache.stats()
    assert stats.hits == 1680 and stats.misses == 0


# ---- really run ----


def test_measured_mode_runs_the_best_few(here, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "_SECONDS", 0.05)
    moesaic.set_num_threads(2)
    evaluator = GemmEvaluator(here, cache=perf.Cache(tmp_path), mode="measured")
    shape = GemmShape(m=40, k=300, n=256, output="fp32")
    answer = evaluator.evaluate(shape)
    assert answer.source == "measured" and answer.milliseconds > 0
    assert sum(answer.parts.values()) == pytest.approx(answer.milliseconds)
    assert answer.configuration in [a.configuration for a in timing.finalists(evaluator.rank(shape, 10_000))]
    other = GemmEvaluator(here, cache=perf.Cache(tmp_path), mode="measured")
    assert other.evaluate(shape).milliseconds == answer.milliseconds  # from the cache


def test_the_longest_task_is_waited_for(machine):
    """Of 112 rows the first task has 64, the last one 48; of 128 both have 64."""
    evaluator = GemmEvaluator(machine, 2, False)
    whole = Configuration("direct", 96, 1024, 96, 128, 1408, "columns")
    uneven, even = (evaluator.estimate(GemmShape(m=m, k=1408, n=1024, form="direct"), whole) for m in (112, 128))
    assert uneven.parts["scheduling"] > even.parts["scheduling"] + 0.03 * uneven.milliseconds


def test_finalists_are_of_every_kind(machine):
    shape = GemmShape(m=448, k=1920, n=640, output="fp32", form="direct")
    ranked = GemmEvaluator(machine, 1, False).rank(shape, 10_000)

    def kind(answer):
        c = answer.configuration
        return c.task_rows, c.task_columns, c.call_rows

    near = [a for a in ranked if a.milliseconds <= 1.3 * ranked[0].milliseconds]
    there = dict.fromkeys(map(kind, near))
    some = timing.finalists(ranked, len(there) + 2)
    assert some[0] == ranked[0] and len(some) == len(set(map(repr, some))) == len(there) + 2
    assert [kind(a) for a in some][: len(there)] == list(there) and len(there) > 2
    # Then the second best of the first kinds that have one.
    seconds = [group[1] for group in ([a for a in near if kind(a) == of] for of in there) if len(group) > 1]
    assert some[len(there) :] == seconds[:2]
    assert timing.finalists(ranked[:1]) == ranked[:1]


class _Runs:
    """A timer of a host that others use: each round is as much slower as it likes, all of it."""

    def __init__(self, milliseconds):
        self._milliseconds, self._round = milliseconds, 0
        self.asked = []

    def measure(self, configurations, count):
        self.asked.append(list(configurations))
        rows = [[] for _ in configurations]
        for _ in range(count):
            self._round += 1
            for row, configuration in zip(rows, configurations, strict=True):
                row.append(self._milliseconds(configuration) * (1 + 0.37 * (self._round * 7 % 5)))
        return rows


def test_the_fastest_is_found_beside_others(machine, monkeypatch):
    monkeypatch.setattr(timing, "_SECONDS", 0.02)
    ranked = GemmEvaluator(machine, 1, False).rank(GemmShape(m=448, k=1920, n=640, form="direct"), 10_000)
    some = timing.finalists(ranked)
    assert len(some) == timing.FINALISTS == 16
    for best in range(len(some)):
        times = {a.configuration: 10.0 + 0.1 * ((i - best) % len(some)) for i, a in enumerate(some)}
        timer = _Runs(times.__getitem__)
        found, milliseconds = timing.fastest(timer, ranked)
        assert found is some[best] and 10.0 <= milliseconds < 25
        # The slower half stays behind, but for the model's choice.
        assert list(dict.fromkeys(map(len, timer.asked))) == [16, 8, 4, 2]
        assert all(ranked[0].configuration in asked for asked in timer.asked)
    alone, _ = timing.fastest(_Runs(lambda configuration: 1.0), ranked[:1])
    assert alone is ranked[0]


def test_what_looked_fastest_runs_anew(machine, monkeypatch):
    """Another one than the model's choice is lucky while there are several."""
    monkeypatch.setattr(timing, "_SECONDS", 0.02)
    ranked = GemmEvaluator(machine, 1, False).rank(GemmShape(m=448, k=1920, n=640, form="direct"), 10_000)
    lucky = timing.finalists(ranked)[7].configuration

    class Timer(_Runs):
        def measure(self, configurations, count):
            self.left = len(configurations)
            return super().measure(configurations, count)

    def milliseconds(configuration):
        if configuration == lucky:
            return 10.1 if timer.left == 2 else 5.0
        return 10.0 if configuration == ranked[0].configuration else 12.0

    timer = Timer(milliseconds)
    found, median = timing.fastest(timer, ranked)
    assert found is ranked[0] and median >= 10.0


def test_relative_times_are_those_of_their_rounds():
    assert timing.relative([[1.0, 20.0, 3.0], [2.0, 40.0, 6.0], [4.0, 80.0, 12.0]]) == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("rows", [70, 96])  # as stored tiles where a tier takes so many, and as cells
def test_every_candidate_gives_the_same_bits(here, rows):
    moesaic.set_num_threads(2)
    evaluator = GemmEvaluator(here, cache=False)
    shape = GemmShape(groups=2, m=rows, k=530, n=300, output="fp32", form="direct")
    gemm = _core.GroupedGemm(moesaic.isa(), perf.gemm_evaluator.problem_of(shape, "direct"))
    ranked = evaluator.rank(shape, 10_000)
    digests = set()
    some = ranked[:: max(1, len(ranked) // 10)]
    for answer in some:
        gemm.measure([answer.configuration.as_tuple()], 1)
        digests.add(gemm.digest())
    assert len(some) > 5 and len(digests) == 1


def test_products_take_turns_while_the_host_is_quiet(here, monkeypatch):
    monkeypatch.setattr(timing, "far_bytes", lambda l3: 1 << 20)
    monkeypatch.setattr(timing, "_LEAST_SECONDS", 0.0)
    evaluator = GemmEvaluator(here, cache=False)
    shapes = [GemmShape(m=5, k=64, n=128, output="fp32"), GemmShape(m=40, k=96, n=64)]
    cases = [(shape, evaluator.evaluate(shape).configuration) for shape in shapes]
    told: list[str] = []
    times = timing.time_in_turns(moesaic.isa(), cases, lambda: True, 10, 60.0, told.append, lambda: told.append("-"))
    assert [len(row) for row in times] == [10, 10] and all(ms > 0 for row in times for ms in row)
    assert [text == "-" for text in told] == [True, False] * timing.TURNS
    # Each run between two quiet moments counts: of every three moments one is not quiet, so one run of three does.
    moments = itertools.count()
    disturbed = timing.time_in_turns(moesaic.isa(), cases, lambda: next(moments) % 3 > 0, 10, 60.0, told.append)
    assert [len(row) for row in disturbed] == [10, 10] and next(moments) >= 60
    assert timing.time_in_turns(moesaic.isa(), cases, lambda: False, 10, 0.1, told.append) == [[], []]


def test_configurations_take_turns_in_another_order_each_round(monkeypatch):
    """One pass of each in a round, whose time is its own."""
    passes = []

    class Gemm:
        def __init__(self, isa, problem, far) -> None:
            pass

        def measure(self, configurations, count):
            (one,) = configurations
            passes.extend([one] * count)
            return [[float(len(passes) - 1)] * count]

    monkeypatch.setattr(timing._core, "GroupedGemm", Gemm)
    timer = ShapeTimer("portable", GemmShape(m=32, k=64, n=128), far=None)
    some = [Configuration("direct", 32, 32 * n, 32, 32, 64, "columns") for n in (1, 2, 4)]
    times = timer.measure(some, 20)
    rounds = [passes[at : at + 3] for at in range(0, 60, 3)]
    assert len(passes) == 60 and all(sorted(one) == sorted(c.as_tuple() for c in some) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 6  # all orders
    for configuration, row in zip(some, times, strict=True):
        assert len(row) == 20 and all(passes[int(at)] == configuration.as_tuple() for at in row)


def test_timing_takes_turns_over_both_forms(here):
    evaluator = GemmEvaluator(here, cache=False)
    shape = GemmShape(m=5, k=64, n=128, output="fp32")
    timer = ShapeTimer(moesaic.isa(), shape, far=None)
    ranked = evaluator.rank(shape, 10_000)
    assert {a.configuration.form for a in ranked} == {"direct", "unpack"}
    rows = timer.measure([a.configuration for a in ranked], 3)
    assert [len(row) for row in rows] == [3] * len(ranked)
