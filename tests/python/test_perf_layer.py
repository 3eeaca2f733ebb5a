"""The model of an experts layer: its jobs are the engine's, its times behave, its rates are found again."""

from __future__ import annotations

import itertools
import math
import platform
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic import _core
from moesaic.perf import GemmEvaluator, GemmShape, Machine, calibration
from moesaic.perf.calibration import (
    _TIMERS,
    LayerCase,
    LayerRun,
    MeasuredLayer,
    _beyond_schedule,
    _weighted_median,
    alone,
    fit,
    fit_in_model,
    measure_layers,
)
from moesaic.perf.layer_model import ExpertsShape, LayerModel, adapters_in_place, job_slots
from moesaic.perf.layer_plan import Cut, JobCut, Stage, cut_jobs, run_jobs
from moesaic.perf.products import Products, resident_share
from moesaic.perf.rates import LayerRates, rates_path
from moesaic.perf.routing import RoutingLaw, inclusion_probabilities

MACHINE = Machine.named("emr-16c")


def model(threads: int = 16) -> LayerModel:
    evaluator = GemmEvaluator(MACHINE, threads, cache=False)
    return LayerModel(Products(evaluator), LayerRates.derived(MACHINE, threads))


@pytest.mark.parametrize("rank", [0, 16])
def test_only_rows_that_the_unpack_form_writes_are_results(rank: int) -> None:
    rows, hidden = (300, 0, 240, 3), 256
    for backward, written in ((False, "down"), (True, "gate_up_backward")):
        work = model().work(ExpertsShape(4, hidden, 128, 2, rank), rows, backward=backward)
        results = {group: of_group["result"] for group, of_group in work.items() if "result" in of_group}
        lora = written.replace("_backward", "") + ("_lora_backward" if backward else "_lora")
        assert set(results) == ({written, lora} if rank else {written})  # an adapter has its part of a product's time
        assert sum(results.values()) == pytest.approx(sum(rows) * hidden)


@pytest.mark.parametrize("tokens", [1, 7, 200, 1500])
@pytest.mark.parametrize("routing", ["uniform", "hot"])
def test_jobs_are_the_engines(tokens: int, routing: str) -> None:
    experts, hidden, intermediate, top_k = 6, 96, 160, 2
    layer = moesaic.ExpertsLayer(
        torch.randn(experts, 2 * intermediate, hidden), torch.randn(experts, hidden, intermediate)
    )
    ids = torch.rand(tokens, experts).topk(top_k).indices
    if routing == "hot":
        ids[:, 0], ids[:, 1] = 4, ids[:, 1] % 4
    _core.reset_timers()
    _core.set_timers_enabled(True)
    try:
        layer.forward(torch.randn(tokens, hidden), ids, torch.rand(tokens, top_k))
        calls, _ = _core.calls()
    finally:
        _core.set_timers_enabled(False)
    rows = torch.bincount(ids.flatten(), minlength=experts).tolist()
    # On several NUMA nodes each of them has the jobs of its shard of I.
    nodes = sum(node["pus"] > 0 for node in _core.topology()["nodes"])
    jobs = cut_jobs(rows, hidden, -(-intermediate // (32 * nodes)) * 32)
    assert nodes * len(jobs) == calls[-1]["jobs"]
    assert sum(job.rows for job in jobs) == tokens * top_k


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "tokens", "routing"),
    [
        (ExpertsShape(6, 96, 160, 2, 0), 40, "uniform"),
        (ExpertsShape(6, 96, 160, 2, 16), 40, "uniform"),
        (ExpertsShape(40, 256, 384, 2, 8), 60, "uniform"),  # many jobs: the last ones are cut finer
        (ExpertsShape(40, 640, 640, 2, 0), 150, "zipf"),  # and the first one, which has most rows
        (ExpertsShape(6, 320, 416, 2, 48), 1500, "concentrated:2"),  # chunks of experts
        (ExpertsShape(16, 4096, 32, 8, 0), 480, "uniform"),  # more jobs than there is memory for
        (ExpertsShape(16, 4096, 96, 8, 16), 480, "uniform"),
        (ExpertsShape(16, 4096, 32, 8, 24), 480, "uniform"),
        (ExpertsShape(16, 4096, 32, 8, 48), 480, "uniform"),  # adapters leave jobs less than these may take
    ],
)
def test_slots_and_tasks_are_the_engines(shape: ExpertsShape, tokens: int, routing: str, threads: int) -> None:
    before = moesaic.get_num_threads()
    moesaic.set_num_threads(threads)
    _core.reset_timers()
    _core.set_timers_enabled(True)
    try:
        (measured,) = measure_layers([LayerCase(shape, tokens, routing)], 1)
        calls, _ = _core.calls()
    finally:
        _core.set_timers_enabled(False)
        moesaic.set_num_threads(before)
    told = model(threads)
    jobs = cut_jobs(measured.rows, shape.hidden, shape.intermediate)
    for kind in ("forward", "backward"):
        call = next(call for call in calls if call["kind"] == kind)
        backward, in_place = kind == "backward", adapters_in_place(shape, measured.rows, 1)
        jobs_shape = replace(shape, rank=0) if in_place else shape
        slots = job_slots(jobs_shape, jobs, threads, 1, backward=backward, keeps_z=in_place and backward)
        prediction = getattr(told, kind)(shape, measured.rows)
        assert (call["jobs"], call["job_slots"], call["job_tasks"]) == (len(jobs), slots, prediction.tasks), kind


rows_of_experts = st.lists(st.integers(0, 900), min_size=1, max_size=40).filter(any)


@settings(max_examples=60, deadline=None)
@given(rows_of_experts, st.integers(1, 33), st.integers(1, 6))
def test_a_schedule_is_no_better_than_its_limits(rows: list[int], threads: int, slots: int) -> None:
    jobs = cut_jobs(rows, 256, 512)
    chains = [
        [Stage(Cut.WHOLE, 0.001), Stage(Cut.INTERMEDIATE, 0.01 * job.rows), Stage(Cut.HIDDEN, 0.005 * job.rows)]
        for job in jobs
    ]
    cut = JobCut.choose(len(jobs), 256, 512, threads, slots)
    schedule = run_jobs(chains, cut, threads, slots, 0.0)
    busy = sum(stage.thread_ms for chain in chains for stage in chain)
    assert schedule.busy_ms == pytest.approx(busy)
    assert schedule.makespan_ms >= busy / threads * (1 - 1e-9)
    longest = max(
        sum(stage.thread_ms / max(cut.parts(stage.cut, tail=t) for t in (False, True)) for stage in chain)
        for chain in chains
    )
    assert schedule.makespan_ms >= longest * (1 - 1e-9)
    # Graham: list scheduling is at most what all work and the longest chain take one after the other.
    if slots >= len(jobs):
        chain_ms = max(sum(s.thread_ms / cut.parts(s.cut, tail=False) for s in chain) for chain in chains)
        assert schedule.makespan_ms <= (busy / threads + chain_ms) * (1 + 1e-9)
    one = run_jobs(chains, cut, 1, slots, 0.0)
    assert one.makespan_ms == pytest.approx(busy)


def test_the_fullest_expert_begins() -> None:
    rows = [3, 9, 0, 9, 40, 1, 5]
    assert [job.rows for job in cut_jobs(rows, 64, 64)] == [40, 9, 9, 5, 3, 1]
    # Experts 0-2, 3-5 and 6: the second group has the fullest one, then the first.
    assert [job.rows for job in cut_jobs(rows, 64, 64, 3)] == [40, 9, 1, 9, 3, 5]


def test_two_jobs_on_two_threads_by_hand() -> None:
    # Cut in four and two parts: 4 + 2 tasks a job of 1 and 3 ms, two threads, no idle time.
    cut = JobCut(intermediate=4, hidden=2, tail_jobs=0, tail_intermediate=4, tail_hidden=2)
    chain = [Stage(Cut.INTERMEDIATE, 4.0), Stage(Cut.HIDDEN, 6.0)]
    assert run_jobs([chain, chain], cut, 2, 2, 0.0).makespan_ms == 10.0
    # One job: both stages split over both.
    assert run_jobs([chain], cut, 2, 1, 0.0).makespan_ms == 5.0
    # A task costs half a millisecond more: 6 tasks, three on each thread.
    assert run_jobs([chain], cut, 2, 1, 0.5).makespan_ms == 6.5
    # One of two threads takes half as long again as the mean: 1.5 and 0.83 beside 0.83 and 0.83, then 4.5 beside 1.5.
    late = run_jobs([chain], cut, 2, 1, 0.0, {2: 1.5}.__getitem__)
    assert late.makespan_ms == pytest.approx(1.5 + 2.5 / 3 + 4.5) and late.busy_ms == pytest.approx(10.0)
    # Nothing waits for a part of a stage that is whole.
    whole = JobCut(intermediate=1, hidden=1, tail_jobs=0, tail_intermediate=1, tail_hidden=1)
    assert run_jobs([chain], whole, 2, 1, 0.0, {1: 9.0}.__getitem__).makespan_ms == 10.0


def test_hot_experts_take_longer_than_even_ones() -> None:
    shape, tokens = ExpertsShape(64, 2048, 768, 4, 16), 256
    even = RoutingLaw.parse("uniform").rows(64, 4, tokens)
    predict = model()
    # Few rows an expert: reading the weights decides, so fewer experts take less time...
    few = RoutingLaw.parse("concentrated:8").rows(64, 4, tokens)
    assert predict.forward(shape, few).milliseconds < predict.forward(shape, even).milliseconds
    # ...and many: arithmetic does, and it is the same.
    many, hot = RoutingLaw.parse("uniform").rows(64, 4, 16384), RoutingLaw.parse("concentrated:8").rows(64, 4, 16384)
    assert predict.forward(shape, hot).milliseconds == pytest.approx(predict.forward(shape, many).milliseconds, rel=0.2)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 64), st.booleans())
def test_time_grows_with_rows_and_rank_and_never_beats_the_limit(tokens: int, rank: int, backward: bool) -> None:
    predict = model()
    call = predict.backward if backward else predict.forward
    shape = ExpertsShape(16, 512, 384, 2, rank)
    rows = (tokens // 8,) * 16
    if not any(rows):
        return
    now = call(shape, rows)
    more_rows = tuple(r + 16 for r in rows)
    more = call(shape, more_rows)
    # The number of rows from which the engine packs adapters is not the model's: there it may see a step down.
    if adapters_in_place(shape, rows, 1) == adapters_in_place(shape, more_rows, 1):
        assert more.milliseconds > now.milliseconds * 0.999
    assert call(replace(shape, rank=rank + 32), rows).milliseconds > now.milliseconds
    figures = MACHINE.figures(16)
    assert now.milliseconds >= now.flops / figures["compute_gflops"] * 1e-6
    assert now.idle_ms >= -1e-9 and sum(now.phases.values()) <= 16 * now.milliseconds


def test_more_threads_are_no_slower() -> None:
    shape = ExpertsShape(32, 1024, 768, 4, 16)
    rows = RoutingLaw.parse("zipf:1").rows(32, 4, 2000)
    times = [model(threads).forward(shape, rows).milliseconds for threads in (1, 2, 4, 8, 16)]
    assert times == sorted(times, reverse=True) and times[0] / times[-1] > 6


def test_rows_that_fill_no_panel_are_those_that_weights_are_transposed_for() -> None:
    """Between 63 and 95 rows, which the evaluator takes so, and not between 64 and 96, which cells take."""
    products = Products(GemmEvaluator(Machine.named("zen5-2c"), 2, cache=False))
    below, above = (products.thread_ms("direct", rows, 2048, 768) for rows in (63, 95))
    assert products.thread_ms("direct", 79, 2048, 768) == below.towards(above, 0.5)
    cells = [products.thread_ms("direct", rows, 2048, 768) for rows in (64, 96)]
    assert products.thread_ms("direct", 80, 2048, 768) == cells[0].towards(cells[1], 0.5)
    assert below != cells[0]


def test_narrow_products_of_measured_rows_may_take_more_than_a_panel() -> None:
    products = Products(GemmEvaluator(Machine.named("zen5-2c"), 2, cache=False))
    whole = products.figures["step_ns"][0][0]
    products.figures["few_tile_ns"] = [[0.06 * whole * rows for rows in range(1, 25)]] * 2
    lanes = [products.lanes(rows) for rows in range(1, 65)]
    assert lanes == sorted(lanes) and lanes[23] > 16


def test_numa_nodes_share_each_expert() -> None:
    """Two nodes, each with half of the cores and of I: the same arithmetic; each packs and merges all rows."""
    two = replace(MACHINE, numa_nodes=2)
    products = Products(GemmEvaluator(two, 16, cache=False))
    rates = LayerRates.derived(two, 16)
    shape = ExpertsShape(32, 1024, 768, 4, 16)
    rows = RoutingLaw.parse("uniform").rows(32, 4, 800)
    shared, whole = LayerModel(products, rates), model()
    for backward in (False, True):
        of_two = shared.work(shape, rows, backward=backward)
        of_one = whole.work(shape, rows, backward=backward)
        packed, merged = ("scatter_pack", "merge_backward") if backward else ("pack_input", "merge")
        assert of_two[packed]["pack"] == 2 * of_one[packed]["pack"]
        assert of_two[merged]["merge"] == 2 * of_one[merged]["merge"]
        activation = "activation_backward" if backward else "activation"
        assert of_two[activation] == of_one[activation]
    assert shared.forward(shape, rows).jobs == 2 * whole.forward(shape, rows).jobs
    assert shared.forward(shape, rows).milliseconds < 1.5 * whole.forward(shape, rows).milliseconds
    odd = replace(shape, intermediate=1000)  # 32 blocks: 16 in each
    assert shared.forward(odd, rows).milliseconds > shared.forward(shape, rows).milliseconds


@given(st.integers(1, 256), st.integers(1, 8), st.floats(0, 3), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_routing_deals_all_slots(experts: int, top_k: int, exponent: float, tokens: int) -> None:
    top_k = min(top_k, experts)
    law = RoutingLaw("zipf", exponent=exponent)
    rows = law.rows(experts, top_k, tokens)
    assert len(rows) == experts and sum(rows) == tokens * top_k and 0 <= min(rows) <= max(rows) <= tokens
    assert rows == law.rows(experts, top_k, tokens)
    probability = inclusion_probabilities(law.popularity(experts, top_k), top_k)
    assert probability.sum() == pytest.approx(top_k) and (np.diff(probability) <= 1e-12).all()


def test_routing_is_that_of_the_benchmarks() -> None:
    from moesaic.commands.layer_case import LayerShape, parse_routing, route

    ids, _ = route(parse_routing("zipf"), LayerShape(64, 1, 1, 4, 0), 20000, torch.Generator().manual_seed(1))
    drawn = sorted(torch.bincount(ids.flatten(), minlength=64).tolist(), reverse=True)
    said = sorted(RoutingLaw.parse("zipf").rows(64, 4, 20000), reverse=True)
    # 4 sigma of a binomial, and 2% for the approximation.
    for a, b in zip(drawn, said, strict=True):
        assert abs(a - b) <= 4 * math.sqrt(2 * a) + 0.02 * 20000


@pytest.mark.parametrize(
    ("text", "message"),
    [("even", "expected uniform"), ("zipf:x", "expected"), ("zipf:-1", "expected"), ("concentrated:0", "expected")],
)
def test_bad_routing_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingLaw.parse(text)


def test_bad_laws_and_layers_are_named() -> None:
    with pytest.raises(ValueError, match="kind is 'zipff'"):
        RoutingLaw("zipff")
    with pytest.raises(ValueError, match="exponent is -1"):
        RoutingLaw("zipf", exponent=-1.0)
    for law in (RoutingLaw(), RoutingLaw("zipf")):
        with pytest.raises(ValueError, match=r"top_k is 8; expected at most 4 \(experts\)"):
            law.rows(4, 8, 10)
    with pytest.raises(ValueError, match="rows holds -1"):
        model().forward(ExpertsShape(4, 64, 64, 2), (3, -1, 2, 4))


def test_rates_are_found_again() -> None:
    """Times made from known rates, by the model itself: the fit must come back to them."""
    truth = replace(
        LayerRates.derived(MACHINE, 16),
        direct=1.3,
        unpack=1.1,
        packing=0.5,
        swiglu_backward=2.5,
        lora_write=0.9,
        call=80.0,
        call_backward=120.0,
        waiting=0.04,
        waiting_backward=0.1,
    )
    start = model()
    world = LayerModel(start.products, truth)
    measured = []
    for shape, tokens, routing in [
        (ExpertsShape(16, 768, 512, 2, 0), 16, "uniform"),
        (ExpertsShape(16, 768, 512, 2, 16), 64, "uniform"),
        (ExpertsShape(8, 512, 640, 2, 64), 900, "concentrated:2"),
        (ExpertsShape(8, 1024, 384, 4, 16), 512, "zipf"),
    ]:
        rows = RoutingLaw.parse(routing).rows(shape.experts, shape.top_k, tokens)
        of_case = alone(world, shape, rows)
        phases = {}
        for backward in (False, True):
            for group, work in of_case.work(shape, rows, backward=backward).items():
                phases[group] = truth.thread_ms(work)
        forward, backward_ms = of_case.forward(shape, rows).milliseconds, of_case.backward(shape, rows).milliseconds
        measured.append(MeasuredLayer(LayerCase(shape, tokens, routing), rows, forward, backward_ms, 1.0, phases))
    found = fit(start, measured)
    for name in ("swiglu_forward", "swiglu_backward", "pack"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.03), name
    assert found.packing > 2 * start.rates.packing  # a small part of four cases, which the start holds back
    for name in ("call", "call_backward", "waiting", "waiting_backward"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name
    shape, rows = ExpertsShape(24, 640, 384, 2, 8), RoutingLaw.parse("zipf").rows(24, 2, 333)
    again = alone(LayerModel(start.products, found), shape, rows)
    expected = alone(world, shape, rows)
    assert again.forward(shape, rows).milliseconds == pytest.approx(
        expected.forward(shape, rows).milliseconds, rel=0.02
    )
    assert again.backward(shape, rows).milliseconds == pytest.approx(
        expected.backward(shape, rows).milliseconds, rel=0.02
    )


def test_a_group_counts_by_its_share_of_the_call() -> None:
    """Sorting slots takes twice as long where that is next to nothing of a call: the rate is that of the other one."""
    start = model()
    shape = ExpertsShape(16, 768, 512, 2, 0)
    measured, shares = [], []
    for tokens, times in ((2, 2.0), (1600, 1.0)):
        rows = RoutingLaw.parse("uniform").rows(shape.experts, shape.top_k, tokens)
        of_case = alone(start, shape, rows)
        phases = {}
        for backward in (False, True):
            for group, work in of_case.work(shape, rows, backward=backward).items():
                phases[group] = start.rates.thread_ms(work) * (times if group == "routing" else 1.0)
        shares.append(phases["routing"] / sum(phases.values()))
        ms = of_case.forward(shape, rows).milliseconds, of_case.backward(shape, rows).milliseconds
        measured.append(MeasuredLayer(LayerCase(shape, tokens), rows, *ms, 1.0, phases))
    assert shares[0] < 0.1 * shares[1]
    assert fit(start, measured).slot == pytest.approx(start.rates.slot, rel=0.1)


def test_only_a_matrix_unit_unpacks_for_next_to_nothing() -> None:
    unit, vectors = (LayerRates.derived(Machine.named(name), 2) for name in ("emr-16c", "zen5-2c"))
    assert unit.packing < 0.2 * unit.unpack
    assert vectors.packing == vectors.unpack


def test_packing_has_a_rate_of_its_own() -> None:
    """Few rows wait for weights while these are unpacked: a layer may take nothing for it, or all of it."""
    told = model()
    shape, rows = ExpertsShape(64, 768, 512, 2, 0), (2,) * 64
    free, paid = (LayerModel(told.products, replace(told.rates, packing=rate)) for rate in (0.0, 1.0))
    for way, phase in (("forward", "down"), ("backward", "gate_up_backward")):
        work = told.work(shape, rows, backward=way == "backward")[phase]
        less, more = (getattr(one, way)(shape, rows) for one in (free, paid))
        assert work["packing"] > 0.1 * work["unpack"] > 0
        assert more.phases[phase] - less.phases[phase] == pytest.approx(work["packing"])
        assert more.milliseconds > less.milliseconds


def test_layers_inside_of_a_model() -> None:
    shape, rows = ExpertsShape(24, 640, 288, 6, 16), (75,) * 24
    told = model()
    rates = replace(told.rates, call=80.0, call_backward=90.0, python=50.0, python_backward=40.0)
    slower = replace(rates, in_model=1.25, in_model_backward=1.5)
    products = told.products.with_resident(8 * shape.weight_bytes)
    for way, factor, call in (("forward", 1.25, 0.08), ("backward", 1.5, 0.09)):
        one, other = (getattr(LayerModel(products, some), way)(shape, rows) for some in (rates, slower))
        assert other.milliseconds - call == pytest.approx(factor * (one.milliseconds - call))
        assert other.phases["down_lora" if way == "forward" else "down_lora_backward"] > 0
        assert sum(other.phases.values()) == pytest.approx(factor * sum(one.phases.values()))
        # Not where its calls follow each other, nor where it is larger than the cache.
        assert getattr(LayerModel(products, slower, alone=True), way)(shape, rows) == one
        large = replace(shape, experts=2400)
        times = [getattr(LayerModel(products, some), way)(large, rows * 100).milliseconds for some in (rates, slower)]
        assert times[0] == times[1]
    # Times of steps that have these factors, of which the second repetition is disturbed.
    of_call = {
        way: getattr(LayerModel(products, rates), way)(shape, rows).milliseconds for way in ("forward", "backward")
    }
    alone_ms = [of_call["forward"]] * 8 + [of_call["backward"]] * 8
    inside = [0.03 + 1.25 * (ms - 0.08) for ms in alone_ms[:8]] + [0.05 + 1.5 * (ms - 0.09) for ms in alone_ms[8:]]
    turns = [(inside, alone_ms), ([9.0] * 16, [9.0] * 16), (inside, alone_ms)]
    found = fit_in_model(LayerModel(told.products, rates), shape, turns)
    assert found.in_model == pytest.approx(1.25) and found.in_model_backward == pytest.approx(1.5)
    assert replace(found, in_model=1.0, in_model_backward=1.0) == rates
    # What a call costs was found to be more than a small layer takes: nothing to tell a factor from.
    slow = LayerModel(told.products, replace(rates, call=900.0, call_backward=900.0))
    assert fit_in_model(slow, shape, [([0.3] * 16, [0.2] * 16)]) == slow.rates


def test_no_factor_from_layers_that_are_larger_than_the_cache() -> None:
    told = model()
    rates = replace(told.rates, in_model=3.0, in_model_backward=3.0)
    turns = [([1.0] * 16, [0.5] * 16)]
    found = fit_in_model(LayerModel(told.products, rates), ExpertsShape(2400, 640, 288, 6, 16), turns)
    assert found == replace(rates, in_model=1.0, in_model_backward=1.0)


def test_rates_are_kept(tmp_path: Path) -> None:
    rates = LayerRates.derived(MACHINE, 16)
    path = tmp_path / "folder" / "rates.json"
    rates.save(path)
    assert LayerRates.load(path) == rates
    path.write_text(path.read_text().replace('"rank"', '"rang"'))
    with pytest.raises(ValueError, match=r"rates\.rank is missing"):
        LayerRates.load(path)
    rates.save(path)
    path.write_text(re.sub(r'("rank": )[^,}]+', r"\1null", path.read_text()))
    with pytest.raises(ValueError, match=r"rates\.json: rates\.rank is None"):
        LayerRates.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a file of layer rates"):
        LayerRates.load(path)


def test_rates_that_come_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept ones come before them, and machines without any get derived ones."""
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))
    shipped = LayerRates.of(MACHINE, 16)
    assert shipped.direct != LayerRates.derived(MACHINE, 16).direct
    other = replace(MACHINE, name="elsewhere")
    assert LayerRates.of(other, 16) == LayerRates.derived(other, 16)
    replace(shipped, pack=0.5).save(rates_path(MACHINE, 16))
    assert LayerRates.of(MACHINE, 16).pack == 0.5 and LayerRates.of(MACHINE, 8).pack == shipped.pack


# (experts, H, I, k, rank, tokens, routing, forward ms, backward ms): the AMX host of docs/experiments; its shipped
# rates were fitted to other rows of that table. Mixtral's row is not among these: docs/predictions tells why.
@pytest.mark.parametrize(
    ("sizes", "tokens", "routing", "forward_ms", "backward_ms"),
    [
        ((128, 2048, 768, 8, 16), 1024, "uniform", 13.0, 18.5),
        ((32, 2048, 768, 8, 16), 4096, "uniform", 21.6, 32.2),
        ((128, 2048, 768, 8, 16), 4096, "concentrated:16", 20.5, 31.0),
        ((128, 2040, 760, 8, 16), 4096, "uniform", 23.1, 35.0),
    ],
)
def test_an_amx_host_is_predicted(
    sizes: tuple[int, ...], tokens: int, routing: str, forward_ms: float, backward_ms: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))
    shape = ExpertsShape(*sizes)
    evaluator = GemmEvaluator(MACHINE, 16, cache=False)
    rows = RoutingLaw.parse(routing).rows(shape.experts, shape.top_k, tokens)
    predict = alone(LayerModel(Products(evaluator), LayerRates.of(MACHINE, 16)), shape, rows)
    assert predict.forward(shape, rows).milliseconds == pytest.approx(forward_ms, rel=0.15)
    assert predict.backward(shape, rows).milliseconds == pytest.approx(backward_ms, rel=0.15)


def test_products_are_the_evaluators() -> None:
    evaluator = GemmEvaluator(MACHINE, 4, cache=False)
    answer = evaluator.evaluate(GemmShape(groups=16, m=64, k=512, n=1024, output="fp32", form="direct", packed=True))
    expected = (answer.milliseconds - answer.parts["scheduling"] - answer.parts["dispatch"]) * 4 / 16
    products = Products(evaluator)
    product = products.thread_ms("direct", 64, 512, 1024)
    assert product.total == pytest.approx(expected) and product.stream == pytest.approx(answer.parts["dram"] / 4)
    assert product.packing == pytest.approx(answer.parts["packing"] / 4) and product.packing > 0
    half = product.scaled(0.5)
    assert half.total == pytest.approx(expected / 2) and half.packing == pytest.approx(product.packing / 2)
    # What fits the cache is found there again, of more a part.
    shares = [resident_share(times) for times in (0.0, 1.0, 1.1, 1.5, 2.0, 3.0, 5.0, float("inf"))]
    assert shares[:2] == [1.0, 1.0] and shares[-2:] == [0.0, 0.0] and sorted(shares, reverse=True) == shares
    assert shares[4] == pytest.approx(0.203, abs=0.001) == pytest.approx(math.exp(-2 * (1 - shares[4])), abs=0.001)
    l3 = MACHINE.figures(4)["l3_bytes"]
    streams = [
        products.with_resident(times * l3).thread_ms("direct", 64, 512, 1024).stream for times in (0.5, 0.9, 9.0)
    ]
    assert streams[0] < streams[1] < streams[2] == product.stream
    # Between the rows that are evaluated the time lies between theirs.
    low, high = (products.thread_ms("direct", rows, 512, 1024).total for rows in (192, 256))
    assert low < products.thread_ms("direct", 209, 512, 1024).total < high


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExpertsShape(0, 1, 1, 1), "experts is 0"),
        (lambda: ExpertsShape(4, 8, 8, 5), "top_k is 5; expected at most 4"),
        (lambda: model().forward(ExpertsShape(4, 8, 8, 1), (1, 2)), "rows has 2 entries; expected 4"),
        (lambda: replace(LayerRates.derived(MACHINE, 1), pack=-1.0), "rates.pack is -1"),
    ],
)
def test_bad_input_is_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


def test_cases_take_turns_and_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ExpertsShape(4, 64, 32, 2, 4)
    cases = [LayerCase(shape, 6), LayerCase(replace(shape, rank=0), 9), LayerCase(replace(shape, hidden=96), 6)]
    times = itertools.count(200, -1)  # the least comes last
    order: list[tuple[LayerCase, object]] = []

    def call(run: LayerRun) -> tuple[float, float]:
        order.append((run.case, run._layer))
        time = float(next(times)) if run.case is cases[0] else 7.0
        return time, 2 * time

    monkeypatch.setattr(LayerRun, "call", call)
    monkeypatch.setattr(LayerRun, "profiled", lambda run: (42.0, dict.fromkeys(_TIMERS, 1.0), [0.5, 0.25]))
    disturbed = itertools.cycle([True, True, True, False])
    found = measure_layers(cases, calibration.TURNS, min, lambda: next(disturbed), seconds=60)
    runs = [case for case, _ in order]
    # Each turn warms a case up and then repeats it; the next turn comes back to it.
    assert [case for case, _ in itertools.groupby(runs)] == cases * calibration.TURNS
    assert len({id(layer) for _, layer in order}) == 2
    # The least of all runs but the first of each turn, whoever disturbed them.
    of_first = [200.0 - i for i, case in enumerate(c for c in runs if c is cases[0])]
    assert found[0].forward_ms == min(of_first) and found[0].backward_ms == 2 * found[0].forward_ms
    assert [one.forward_ms for one in found[1:]] == [7.0, 7.0] and all(one.undisturbed for one in found)
    # Phases without what the timers add, twice the time of these.
    assert [set(one.phases.values()) for one in found[1:]] == [{0.5}, {0.5}]
    assert [sum(one.rows) for one in found] == [12, 18, 12]
    assert {one.python_ms for one in found} == {(0.5, 0.25)}


@pytest.mark.parametrize(("ms", "count"), [(0.25, 8), (1.5, 2), (20.0, 1)])
def test_layers_settle_before_they_are_timed(monkeypatch: pytest.MonkeyPatch, ms: float, count: int) -> None:
    calls = []

    def call(run: LayerRun) -> tuple[float, float]:
        calls.append(run)
        return ms, 2 * ms

    monkeypatch.setattr(LayerRun, "call", call)
    object.__new__(LayerRun).settle()
    assert len(calls) == count


def test_what_calls_take_beyond_their_schedules() -> None:
    def of(call: float, share: float) -> list[tuple[float, float]]:
        return [(call + (1 + share) * schedule, schedule) for schedule in (0.1, 0.4, 2.0, 7.5)]

    assert _beyond_schedule(of(0.25, 0.05), 0.1) == pytest.approx((0.25, 0.05))
    one_more = [*of(0.25, 0.05), (2.0, 1.0)]  # which is far off
    assert _beyond_schedule(one_more, 0.1) == pytest.approx((0.25, 0.05))
    # No less than passes in Python, and no share below 0.
    fixed, share = _beyond_schedule(of(0.05, 0.05), 0.1)
    assert fixed == pytest.approx(0.1) and 0.0 <= share < 0.05
    fixed, share = _beyond_schedule(of(0.3, -0.05), 0.1)
    assert 0.1 <= fixed < 0.3 and share == 0.0


def test_a_call_costs_what_relative_errors_say() -> None:
    # As many tell of much as of little, but these weigh more.
    assert _weighted_median([(5.0, 1.0), (1.0, 3.0), (9.0, 1.0)]) == 1.0
    assert _weighted_median([(5.0, 1.0), (1.0, 1.0), (9.0, 1.0)]) == 5.0
    assert _weighted_median([(-2.0, 0.1)]) == -2.0


def test_new_jobs_begin_before_others_are_helped() -> None:
    cut = JobCut(intermediate=4, hidden=1, tail_jobs=0, tail_intermediate=4, tail_hidden=1)
    chains = [[Stage(Cut.INTERMEDIATE, 4.0)], [Stage(Cut.WHOLE, 1.0)], [Stage(Cut.WHOLE, 3.0)]]
    # The second worker has the other two jobs one after the other, while the first has all parts of its own.
    assert run_jobs(chains, cut, 2, 3, 0.0).makespan_ms == 4.0
    # Two under way at most are no bound here; one is.
    assert run_jobs(chains, cut, 2, 2, 0.0).makespan_ms == 4.0
    assert run_jobs(chains, cut, 2, 1, 0.0).makespan_ms == 6.0


def test_long_jobs_are_cut_finer() -> None:
    cut = JobCut.choose(40, 640, 640, 8, 40)
    assert cut.parts(Cut.INTERMEDIATE, tail=False) == 1 and cut.parts(Cut.INTERMEDIATE, tail=True) > 1
    for least, intermediate, hidden in ((1, 1, 1), (2, 3, 3), (3, 5, 3), (100, 5, 3)):  # 5 units, 20 columns by 8
        assert cut.parts(Cut.INTERMEDIATE, tail=False, least=least) == intermediate
        assert cut.parts(Cut.HIDDEN, tail=False, least=least) == hidden
        assert cut.parts(Cut.WHOLE, tail=False, least=least) == 1
    # The expert with half of all rows, 31 of a task in each stage, and the last ones.
    rows = (380,) + (10,) * 39
    assert _core.parts_of_long_job(380, sum(rows), 8) == 8
    assert model(8).forward(ExpertsShape(40, 640, 640, 2, 0), rows).tasks == (2 + 5 + 3) + 31 * 4 + 8 * (2 + 3 + 3)


def test_sweeps_over_adapters_in_place() -> None:
    assert _core.sweeps_in_place(128, 2048, 16) == 16  # ranges of 128 features, all experts
    assert _core.sweeps_in_place(128, 100, 16) == 7  # of sixteen at least
    assert _core.sweeps_in_place(128, 2048, 64) == 32  # 64 experts are what L2 takes of these
    whole, across = ExpertsShape(32, 512, 256, 2, 16), ExpertsShape(40, 512, 256, 2, 16)
    rows = (2,) * 16 + (0,) * 16  # one vector of two
    for backward, times in ((False, 1), (True, 2)):
        suffix = "_backward" if backward else ""
        of_whole = model().work(whole, rows, backward=backward)[f"gate_up_lora{suffix}"]
        read = 16 * (16 * 512 + 16 * 2 * 256)
        assert of_whole["sweep"] == read + (16 * (32 * 512 + 32 * 2 * 256) if backward else 0)
        assert of_whole["sweep_product"] == times * 32 * 16 * (512 + 2 * 256)
        assert of_whole["sweep_row"] == times * 32 * (512 + 2 * 256)
        # 40 experts are no whole vectors, which then lie across two lines: three of gradients, one that is read.
        of_across = model().work(across, rows + (0,) * 8, backward=backward)[f"gate_up_lora{suffix}"]
        read = 16 * (16 * 512 + 2 * 16 * 2 * 256)
        assert of_across["sweep"] == read + (16 * (40 * 512 + 2 * 48 * 2 * 256) if backward else 0)


def test_weights_that_fill_the_cache_take_longer() -> None:
    evaluator = GemmEvaluator(MACHINE, 16, cache=False)
    most = 0.6 * MACHINE.l3_bytes
    assert Products(evaluator, resident_bytes=0.5 * most).filled == pytest.approx(0.5)
    assert Products(evaluator, resident_bytes=3 * most).filled == 1.0
    shape = ExpertsShape(16, 512, 384, 2)
    of_half = LayerModel(Products(evaluator, resident_bytes=0.5 * most), LayerRates.derived(MACHINE, 16))
    first = of_half.work(shape, (8,) * 16, backward=False)["gate_up"]
    assert first["cache_filled"] == pytest.approx(0.5 * first["cache"]) and first["cache"] > 0
    # What has just been read is not pushed out: further rows of the same experts.
    hot = of_half.work(shape, (2000,) * 16, backward=False)["gate_up"]
    assert hot["cache_filled"] < 0.5 * hot["cache"]


def test_adapters_share_the_time_of_products_by_their_flops() -> None:
    shape = ExpertsShape(16, 512, 384, 2, 16)
    work = model().work(shape, (300,) * 16, backward=False)
    for base, lora, k in (("gate_up", "gate_up_lora", 512), ("down", "down_lora", 384)):
        form = "direct" if base == "gate_up" else "unpack"
        assert work[lora][form] / work[base][form] == pytest.approx(16 / k)
    assert set(work) | set(model().work(shape, (300,) * 16, backward=True)) == set(_TIMERS)


def test_jobs_that_several_threads_share_are_handed_over() -> None:
    shape = ExpertsShape(16, 512, 384, 2)
    alone_on_theirs = model(16).work(shape, (32,) * 16, backward=False)
    shared = model(16).work(shape, (32,) * 4 + (0,) * 12, backward=False)
    assert alone_on_theirs["gate_up"]["handed"] == alone_on_theirs["down"]["handed"] == 0
    # Four threads a job of two panels of rows: three of them read what the first one packed.
    assert shared["gate_up"]["handed"] == 4 * 3 * 2 * 512 / 32
    assert shared["down"]["handed"] == 4 * 3 * 2 * 384 / 32
    assert model(2).work(shape, (32,) * 4 + (0,) * 12, backward=False)["gate_up"]["handed"] == 0
    # Each tile is written where they have read another one, however many they are.
    assert alone_on_theirs["pack_input"]["claimed"] == alone_on_theirs["activation"]["claimed"] == 0
    for rows in ((32,) * 4, (32,) * 8):
        backward = [False, True]
        forward, back = (model(16).work(shape, rows + (0,) * (16 - len(rows)), backward=way) for way in backward)
        assert forward["pack_input"]["claimed"] == back["scatter_pack"]["claimed"] == len(rows) * 2 * 512 / 32
        assert forward["activation"]["claimed"] == len(rows) * 2 * 384 / 32
        assert back["activation_backward"]["claimed"] == 2 * forward["activation"]["claimed"]
    # Three threads for two jobs: half of each is another's.
    assert model(3).work(shape, (32,) * 2 + (0,) * 14, backward=False)["pack_input"]["claimed"] == 2 * 16


def test_rates_of_this_host_fit_any_description_of_it() -> None:
    here = replace(MACHINE, source="measured", name=platform.node() or "here", cpu=_core.cpu_name())
    again = replace(here, l2_ns=9.0)
    assert here.identity != again.identity and rates_path(here, 2) == rates_path(again, 2) != rates_path(here, 1)
    for other in (MACHINE, replace(here, cpu="another"), replace(here, source="figures")):
        assert rates_path(other, 2) != rates_path(here, 2)
        assert rates_path(other, 2) != rates_path(replace(other, l2_ns=9.0), 2)
