"""Descriptions of machines: files, and measuring this host."""

import dataclasses
import json
import types

import pytest

import moesaic
from moesaic import _core
from moesaic.perf import GemmEvaluator, GemmShape, Machine, measure
from moesaic.perf.check import gemm_shapes
from moesaic.perf.gemm_evaluator import Configuration


def test_descriptions_that_come_with_the_package():
    assert Machine.names() == ["emr-16c", "spr-2x60c", "zen5-2c"]
    for name in Machine.names():
        machine = Machine.named(name)
        assert machine.name == name and "not this machine" in machine.source
        assert Machine.find(name) == machine
    assert Machine.named("spr-2x60c").threads == 120 and Machine.named("spr-2x60c").sockets == 2


def test_save_and_load(machine, tmp_path):
    path = tmp_path / "m.json"
    machine.save(path)
    again = Machine.load(path)
    assert again == machine and again.identity == machine.identity and Machine.find(str(path)) == machine
    assert dataclasses.replace(machine, l2_ns=9.0).identity != machine.identity


def _paths(document, prefix=()):
    for key, value in document.items():
        yield (*prefix, key)
        if key in ("kernels", "per_thread") or prefix[-1:] in (("kernels",), ("per_thread",)):
            yield from _paths(value, (*prefix, key))


def test_cores_that_share_what_computes():
    machine = Machine.named("emr-16c")
    kernels = machine.kernels["amx_bf16"]
    alone = kernels.per_thread[1]
    assert kernels.of_each(1) == alone
    # Not measured with so many: as much slower as multiply-adds are.
    factor = 16 * kernels.compute_gflops[1] / kernels.compute_gflops[16]
    assert kernels.of_each(16).step_ns[1][1] == pytest.approx(factor * alone.step_ns[1][1])
    assert kernels.of_each(16).pack_gbps == pytest.approx(alone.pack_gbps / factor)
    shared = alone.slower(3.0)
    measured = dataclasses.replace(kernels, per_thread={1: alone, 16: shared})
    assert measured.of_each(16) == shared and measured.of_each(8).step_ns < shared.step_ns
    both = dataclasses.replace(machine, kernels={"amx_bf16": measured})
    assert Machine.from_json(both.to_json()) == both
    shape = GemmShape(m=512, k=2048, n=4096, packed=True)
    times = [GemmEvaluator(m, 16, cache=False).evaluate(shape).milliseconds for m in (machine, both)]
    assert times[1] > 1.5 * times[0]
    late = dataclasses.replace(machine, uneven={1: 1.0, 16: 1.5})
    assert GemmEvaluator(late, 16, cache=False).evaluate(shape).milliseconds > times[0]


def test_no_step_is_faster_than_the_ceiling():
    for isa, runs in _core.kernel_tiers():
        if not runs:
            continue
        probe = _core.KernelProbe(isa)
        probe.turn()
        measured = probe.figures(1e-3)
        left, right = measured["left_panels"], measured["right_panels"]
        product_ns = 2 * max(ns for row in measured["step_ns"] for ns in row)
        slow = probe.figures(product_ns)
        for i in range(left):
            for j in range(right):
                assert slow["step_ns"][i][j] == pytest.approx((i + 1) * (j + 1) * product_ns)
        # The same calls took what they took: the rest of them takes less.
        for name in ("cell_ns", "call_ns", "unpack_tile_ns"):
            assert slow[name] <= measured[name]
        assert slow["few_tile_ns"] == measured["few_tile_ns"] and slow["pack_gbps"] == measured["pack_gbps"]


def test_a_slow_thread_computes_slowly():
    """How far threads differ is waiting: what the slowest one computes, and most of what it reads, takes it longer."""
    alike = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0})
    unlike = dataclasses.replace(alike, uneven={1: 1.0, 16: 1.3})
    configuration = Configuration("direct", 128, 128, 128, 128, 1024, "columns")
    takes = {}
    for cached in (True, False):
        for tasks in (4, 16):
            shape = GemmShape(m=128, k=1024, n=128 * tasks, output="fp32", packed=True, cached=cached)
            one, other = (GemmEvaluator(m, 16, cache=False).estimate(shape, configuration) for m in (alike, unlike))
            task = {name: time * 16 / tasks for name, time in one.parts.items() if name != "dispatch"}
            whole = sum(task.values()) - task["scheduling"]
            slowest = unlike.figures(16)["uneven"][tasks - 1] - 1
            waits = slowest * (whole - 0.2 * task["dram"])
            assert other.milliseconds - one.milliseconds == pytest.approx(waits)
            assert (task["dram"] > 0) != cached
            takes[cached, tasks] = whole
            assert {k: v for k, v in other.parts.items() if k != "scheduling"} == pytest.approx(
                {k: v for k, v in one.parts.items() if k != "scheduling"}
            )
    assert takes[True, 4] == pytest.approx(takes[True, 16])  # but for memory, beside others as by itself


def test_a_matrix_unit_waits_for_tiles_from_l2():
    machine = Machine.named("emr-16c")
    slow = dataclasses.replace(machine, l2_gbps={n: gbps / 2 for n, gbps in machine.l2_gbps.items()})
    shape = GemmShape(m=256, k=1024, n=128 * 16, output="fp32", packed=True, cached=True)
    configuration = Configuration("direct", 256, 128, 256, 128, 1024, "columns")
    one, other = (GemmEvaluator(m, 16, cache=False).estimate(shape, configuration).parts["l2"] for m in (machine, slow))
    assert one > 0 and 1.8 * one < other < 2.1 * one


def test_few_rows_fetch_what_comes_next_themselves():
    """Products that take as long as the memory: beside it, also where no call prefetches for the next one."""
    machine = Machine.named("zen5-2c")
    kernels = machine.kernels[machine.isa]
    tile_ns = 1024 / kernels.few_direct_gbps[1]
    each = dataclasses.replace(kernels.per_thread[1], few_tile_ns=((tile_ns,) * 24, (tile_ns,) * 24))
    kernels = dataclasses.replace(kernels, per_thread={1: each})
    machine = dataclasses.replace(machine, kernels={machine.isa: kernels})
    shape = GemmShape(m=8, k=4096, n=128, output="fp32", packed=True)
    configuration = Configuration("direct", 16, 128, 16, 128, 4096, "columns")
    milliseconds = GemmEvaluator(machine, 1, cache=False).estimate(shape, configuration).milliseconds
    memory_ms = tile_ns * (128 // 16) * (4096 // 32) * 1e-6
    assert 1.2 * memory_ms < milliseconds < 1.5 * memory_ms


def test_rows_that_a_thread_has_read_before():
    machine = dataclasses.replace(Machine.named("emr-16c"), uneven={1: 1.0})
    slow_l3 = dataclasses.replace(machine, l3_gbps={n: gbps / 4 for n, gbps in machine.l3_gbps.items()})

    def more(columns, rows=256):
        """Of a slower L3, for each task of 128 columns that a thread has."""
        shape = GemmShape(m=rows, k=1024, n=columns, output="fp32", packed=True)
        c = Configuration("direct", rows, 128, rows, 128, 1024, "columns")
        slow, fast = (GemmEvaluator(m, 16, cache=False).estimate(shape, c).milliseconds for m in (slow_l3, machine))
        return (slow - fast) / (columns / 128 / 16)

    one, four = more(128 * 16), more(128 * 64)
    assert four < 0.7 * one  # the rows come from there once
    assert more(128 * 64, 2048) > 0.9 * more(128 * 16, 2048)  # more than L2 holds: each time


def test_one_thread_counts_at_its_best_and_several_as_usual():
    alone, together = measure._Rates(1), measure._Rates(2)
    for rates in (alone, together):
        rates.gbps += [[100.0, 50.0, 60.0, 20.0], [90.0, 40.0, 30.0, 25.0], [80.0, 45.0, 35.0, 10.0]]
    assert alone.caches() == [100.0, 50.0, 50.0, 25.0]  # none gives more than the one before
    assert together.caches() == [90.0, 45.0, 35.0, 20.0]
    assert alone.time([3.0, 1.0, 2.0]) == 1.0 and together.time([3.0, 1.0, 2.0]) == 2.0
    assert alone.rate([3.0, 1.0, 2.0]) == 3.0 and together.rate([3.0, 1.0, 2.0]) == 2.0


def test_threads_hand_tiles_to_each_other():
    machine = Machine.named("emr-16c")
    free = dataclasses.replace(machine, claim_ns={1: 0.0})
    shape = GemmShape(m=512, k=2048, n=4096)
    tiles = 512 // 16 * 2048 // 32

    def milliseconds(some: Machine, shape: GemmShape, threads: int = 16) -> float:
        return GemmEvaluator(some, threads, cache=False).evaluate(shape).milliseconds

    def share(pieces: int) -> float:  # of all packing, that is waited for
        return (1 + 0.3 * 15 / pieces) / 16

    claimed = dataclasses.replace(free, claim_ns={1: 0.0, 16: 1600.0})
    # Half of it is for the tile, half for the rows of bf16, of which fp32 has two.
    for given, ns in (("bf16", 1600.0), ("fp32", 2400.0)):
        some = dataclasses.replace(shape, input=given)
        best = GemmEvaluator(free, 16, cache=False).evaluate(some).configuration
        both = [GemmEvaluator(m, 16, cache=False).estimate(some, best).milliseconds for m in (claimed, free)]
        assert both[0] - both[1] == pytest.approx(tiles * ns * 1e-6 * share(48))
    packed = dataclasses.replace(shape, packed=True)
    assert milliseconds(machine, packed) == milliseconds(free, packed)
    # Each of them reads all tiles once, of which the others have packed theirs, half of it beside its products, and
    # packs rows that others have read.
    shape = GemmShape(m=256, k=2048, n=16 * 128)
    configuration = Configuration("direct", 256, 128, 256, 128, 2048, "columns")
    near, far = (dataclasses.replace(free, fetch_ns={1: 0.0, 16: ns}, uneven={1: 1.0}) for ns in (0.0, 80.0))
    for some, tiles in ((shape, 256 // 16 * 2048 // 32), (dataclasses.replace(shape, packed=True), 0)):
        times = [GemmEvaluator(m, 16, cache=False).estimate(some, configuration).milliseconds for m in (far, near)]
        assert times[0] - times[1] == pytest.approx(tiles * 80.0 * 15 / 16 * (0.5 + share(44)) * 1e-6)
    assert milliseconds(machine, shape, 1) == milliseconds(free, shape, 1)
    # Pieces that are fewer than threads: a whole one is waited for.
    few = GemmShape(m=16, k=128, n=16 * 128)
    configuration = Configuration("direct", 16, 128, 16, 128, 128, "columns")
    times = [GemmEvaluator(m, 16, cache=False).estimate(few, configuration).milliseconds for m in (claimed, free)]
    assert times[0] - times[1] == pytest.approx(4 * 1600e-6 / 4)


def test_a_missing_figure_is_named():
    whole = Machine.named("emr-16c").to_json()
    fields = [path for path in _paths(whole) if path != ("kernels", "amx_bf16")]
    assert len(fields) > 30
    for path in fields:
        document = json.loads(json.dumps(whole))
        at = document
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        with pytest.raises(ValueError, match=path[-1]) as error:
            Machine.from_json(document, "m.json")
        assert "\n" not in str(error.value) and str(error.value).startswith("m.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threads", 0),
        ("threads", 2.5),
        ("l2_bytes", -1),
        ("dram_ns", "fast"),
        ("dram_ns", float("nan")),
        ("l3_gbps", {}),
        ("l3_gbps", {"1": -5}),
        ("l3_gbps", {"none": 5}),
        ("kernels", []),
        ("isa", "amx"),
        ("name", 7),
    ],
)
def test_a_figure_that_makes_no_sense_is_named(field, value):
    with pytest.raises(ValueError, match="kernels.amx" if field == "isa" else field):
        Machine.from_json(Machine.named("zen5-2c").to_json() | {field: value})


def test_unknown_machines_and_files(tmp_path):
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(ValueError, match="emr-16c"):
        Machine.named("mine")
    with pytest.raises(ValueError, match="not JSON"):
        Machine.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        Machine.load(tmp_path / "none")


def test_this_host_is_measured_once(tmp_path, monkeypatch, here):
    monkeypatch.setenv("MOESAIC_CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(Machine, "measure", classmethod(lambda cls, progress=None: calls.append(1) or here))
    assert Machine.here() == here and Machine.here() == here and len(calls) == 1
    (path,) = tmp_path.glob("machine-*.json")
    path.write_text("{}")  # an old or broken description is measured anew
    assert Machine.here() == here and len(calls) == 2


@pytest.mark.parametrize(
    ("told", "really", "held"),
    [
        (256 << 20, 512 << 20, 256 << 20),  # all of it
        (256 << 20, 200 << 20, 256 << 20),  # three quarters of it are read at L3's rate
        (256 << 20, 150 << 20, 128 << 20),
        (256 << 20, 40 << 20, 32 << 20),
        (256 << 20, 0, 32 << 20),  # more than the rate of L3 was measured with, 8 MB a thread
        (12 << 20, 0, 12 << 20),  # nor where that is all there is
    ],
)
def test_what_a_guest_gets_of_the_last_level_cache(told, really, held):
    """Two threads with 2 MB of L2 each; 100 GB/s from as much of L3 as is really there, 20 from memory."""

    class Reads:
        def read(self, block_bytes, seconds):
            assert seconds > 0
            return 100.0 if 2 * block_bytes <= really else 20.0

    host = object.__new__(measure._Host)  # without measuring
    host.l2, host.shared_l3, host.l3, host.threads = 2 << 20, told, told, 2
    assert host.l3_held(Reads(), [400.0, 200.0, 100.0, 20.0]) == held
    assert host.l3_held(Reads(), [400.0, 200.0, 21.0, 20.0]) == told  # as slow as memory: nothing tells them apart


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_measured_figures_make_sense(monkeypatch, threads):
    monkeypatch.setattr(measure, "far_bytes", lambda l3: 16 << 20)  # quick; whether that is far does not matter here
    monkeypatch.setattr(measure, "ROUNDS", 2)
    monkeypatch.setattr(measure, "_KERNEL_TURNS", 2)
    monkeypatch.setattr(measure, "_OTHER_KERNEL_TURNS", 1)
    moesaic.set_num_threads(threads)
    machine = Machine.measure()
    assert machine.source == "measured" and machine.isa == moesaic.isa() and machine.threads == threads
    assert machine.l1_ns <= machine.l2_ns <= machine.l3_ns <= machine.dram_ns
    assert machine.l1_gbps[1] >= machine.l2_gbps[1] >= machine.l3_gbps[1] >= machine.dram_gbps[1] > 0
    kernels = machine.kernels[machine.isa]
    for rates in (kernels.direct_gbps, kernels.unpack_gbps, kernels.few_direct_gbps, kernels.few_unpack_gbps):
        assert all(0 < rates[n] < 1.4 * machine.dram_gbps[n] for n in (1, threads))
    assert 1 <= kernels.per_thread[1].overlap <= 3
    # Of one thread, and of all at the same time.
    assert set(kernels.per_thread) == {1, threads} and set(machine.uneven) == set(measure._counts(threads))
    assert machine.uneven[1] == 1 and all(1 <= uneven < n + 1e-9 for n, uneven in machine.uneven.items())
    for factor in (machine.direct_factor, machine.unpack_factor):
        assert set(factor) <= {1, threads} and factor[1] == 1
    for handed in (machine.claim_ns, machine.fetch_ns):
        assert handed[1] == 0 <= handed[threads] < 1e5
    for each in kernels.per_thread.values():
        assert min(min(row) for row in each.step_ns) > 0 and each.again_ns >= each.cell_ns >= 0
    alone, together = kernels.per_thread[1], kernels.per_thread[threads]
    assert alone.no_slower_than(together) == alone
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("readers", [16, 1])
def test_claims_are_what_makes_packing_take_as_long_as_measured(readers):
    machine = Machine.named("emr-16c")
    world = measure._claiming(machine, 16, 1700.0)
    claims = []
    for form, k, given in measure._IN_TASKS:
        shape = measure._in_tasks(16, form, k, given)
        configuration = measure._cut(shape, form, 16, readers)
        assert shape.n // configuration.task_columns == readers
        assert shape.m // configuration.task_rows * readers == 16
        evaluator = GemmEvaluator(world, 16, cache=False)
        whole, packed = (
            evaluator.estimate(some, configuration).parts["packing"]
            for some in (shape, dataclasses.replace(shape, packed=True))
        )
        packing_ms = whole - packed + machine.job_us[16] * 1e-3
        tasks = measure._EqualTasks(shape, configuration, None, [(packing_ms, 1.2), (9.0, 2.0), (0.0, 1.0)])
        claims.append(tasks.claim_ns(machine, 16))
        quick = measure._EqualTasks(shape, configuration, None, [(0.0, 1.2)])
        assert quick.claim_ns(machine, 16) == 0.0
    assert claims == pytest.approx([1700.0] * 3)


@pytest.mark.parametrize("threads", [2, 3, 4, 6, 12, 13, 14, 16, 18, 30, 60, 128])
def test_equal_tasks_are_as_many_as_threads(threads):
    for readers in (threads, 1):
        for form, k, given in measure._IN_TASKS:
            shape = measure._in_tasks(threads, form, k, given)
            c = measure._cut(shape, form, threads, readers)
            tasks = -(-shape.m // c.task_rows) * -(-shape.n // c.task_columns)
            assert shape.m >= measure._FEWEST_OF_CELLS and c.task_rows >= 48
            assert shape.m * shape.n * 2 <= 256 << 20  # bytes of results, kept while a host is described
            assert tasks == threads and -(-shape.n // c.task_columns) == readers
            assert shape.m % c.task_rows == shape.n % c.task_columns == 0


def test_products_that_describe_a_host_are_not_predicted():
    held_out = {(shape.groups, shape.m, shape.k, shape.n) for shape in gemm_shapes()}
    assert len(held_out) == 40 and held_out.isdisjoint(
        (shape.groups, shape.m, shape.k, shape.n) for shape in measure._PRODUCTS
    )
    in_tasks = (measure._in_tasks(tasks, *one) for tasks in range(2, 257) for one in measure._IN_TASKS)
    assert held_out.isdisjoint((shape.groups, shape.m, shape.k, shape.n) for shape in in_tasks)


@pytest.mark.parametrize("direct, unpack", [(-18, 9), (0, -30)])
def test_the_factors_of_products_are_found_again(direct, unpack):
    """Times made with known ones."""
    machine = Machine.named("emr-16c")
    for form in ("direct", "unpack"):
        machine = measure._with_factor(machine, 16, form, 1.0)
    measurement = object.__new__(measure.Measurement)  # without a host
    measurement._host = types.SimpleNamespace(threads=16)
    world = measure._with_factor(machine, 16, "direct", 1.02**direct)
    world = measure._with_factor(world, 16, "unpack", 1.02**unpack)
    measurement._products = []
    assert measurement._with_factors(machine) == machine  # nothing has run yet
    for shape in measure._PRODUCTS:
        answer = GemmEvaluator(world, 16, cache=False).evaluate(shape)
        times = [answer.milliseconds * noise for noise in (0.9, 1.0, 1.5)]
        measurement._products.append(measure._Product(shape, answer.configuration, None, times))
    found = measurement._with_factors(machine)
    assert found.direct_factor == {1: 1.0, 16: pytest.approx(1.02**direct)}
    assert found.unpack_factor == {1: 1.0, 16: pytest.approx(1.02**unpack)}


def test_what_the_factors_of_products_multiply():
    machine = Machine.named("emr-16c")

    def ratio(form: str, shape: GemmShape, threads: int = 16, rows: int = 256) -> float:
        """Of what cells take with that form's factor at 1.25 to what they take with it at 1."""
        slower = measure._with_factor(machine, 16, form, 1.25 * machine.figures(16)[f"{form}_factor"])
        depth = 256 if shape.form == "unpack" else shape.k
        c = Configuration(shape.form, rows, 256, rows, 256, depth, "columns")
        one, other = (GemmEvaluator(m, threads, cache=False).estimate(shape, c) for m in (machine, slower))
        assert sum(other.parts.values()) == pytest.approx(other.milliseconds)
        return other.parts["arithmetic"] / one.parts["arithmetic"]

    direct = GemmShape(groups=64, m=256, k=1024, n=1024, form="direct", output="fp32", packed=True, cached=True)
    unpack = dataclasses.replace(direct, form="unpack")
    assert ratio("direct", direct) == pytest.approx(1.25, rel=0.02) and ratio("unpack", direct) == 1
    assert ratio("unpack", unpack) == pytest.approx(1.25, rel=0.02) and ratio("direct", unpack) == 1
    # Calls that meet each weight once are the direct form's kind; one thread was measured alone.
    once = dataclasses.replace(unpack, m=32)
    assert ratio("direct", once, rows=32) > 1.05 and ratio("unpack", once, rows=32) == 1
    assert ratio("direct", direct, threads=1) == 1


def test_forms_for_few_rows_have_no_factor():
    machine = Machine.named("zen5-2c")
    slower = measure._with_factor(measure._with_factor(machine, 2, "direct", 1.5), 2, "unpack", 1.5)
    for form in ("direct", "unpack"):
        shape = GemmShape(groups=64, m=4, k=1024, n=1024, form=form)
        one, other = (GemmEvaluator(m, 2, cache=False).evaluate(shape) for m in (machine, slower))
        assert one == other


def test_the_better_of_two_figures():
    one = Machine.named("zen5-2c").kernels["avx512_bf16"].per_thread[1]
    few = dataclasses.replace(one, few_tile_ns=((5.0, 6.0), (7.0, 8.0)))
    slower = dataclasses.replace(few.slower(2.0), overlap=1.0)
    assert few.no_slower_than(slower) == few
    assert slower.no_slower_than(few) == dataclasses.replace(few, overlap=1.0)
    mixed = dataclasses.replace(few, cell_ns=few.cell_ns + 1, pack_gbps=2 * few.pack_gbps)
    assert few.no_slower_than(mixed) == dataclasses.replace(few, pack_gbps=mixed.pack_gbps)


def test_the_rate_of_weights_makes_the_model_say_what_was_measured():
    machine = Machine.named("emr-16c")  # few rows are decided by the memory there
    rows = measure._stream_rows(machine.kernels[machine.isa].per_thread[1], 200.0, machine.dram_gbps[1], True, 0)
    assert rows["direct"] == rows["unpack"]  # no forms for few
    rows = rows["direct"]
    told = measure._stream_gbps(machine, machine.isa, 1, "direct", rows)
    # Streams do not wait for each other: how uneven threads are plays no part.
    alike, unlike = (dataclasses.replace(machine, uneven={1: 1.0, 16: uneven}) for uneven in (1.0, 1.4))
    of_all = measure._stream_gbps(alike, machine.isa, 16, "direct", rows)
    assert measure._stream_gbps(unlike, machine.isa, 16, "direct", rows) == pytest.approx(of_all)
    slower = {count: 0.7 * told[count] for count in rows[:1]}
    fitted, _ = measure._with_rate(machine, machine.isa, 1, "direct_gbps", slower)
    assert measure._stream_gbps(fitted, machine.isa, 1, "direct", slower) == pytest.approx(slower, rel=0.1)
    unpack_gbps = 0.8 * measure._stream_gbps(machine, machine.isa, 1, "unpack", rows)[rows[0]]
    unpacked = {(machine.isa, "unpack", rows[0]): (unpack_gbps, unpack_gbps)}
    direct = {(machine.isa, "direct", count): (gbps, gbps) for count, gbps in told.items()}
    again = measure._with_supply(machine, machine.isa, {1: direct | unpacked}).kernels[machine.isa]
    assert again.per_thread[1].overlap == machine.kernels[machine.isa].per_thread[1].overlap
    before = machine.kernels[machine.isa]
    assert again.direct_gbps[1] == pytest.approx(before.direct_gbps[1], rel=0.1)
    assert again.unpack_gbps[1] < before.unpack_gbps[1]
    assert again.few_direct_gbps[1] == again.direct_gbps[1] and again.few_unpack_gbps[1] == again.unpack_gbps[1]
    # The best moments tell how well things overlap, the mean of few rows the rate.
    usual = {key: (gbps, 0.8 * gbps) for key, (gbps, _) in direct.items()}
    third = measure._with_supply(machine, machine.isa, {1: usual | unpacked}).kernels[machine.isa]
    assert third.per_thread[1].overlap == again.per_thread[1].overlap
    assert third.direct_gbps[1] < 0.95 * again.direct_gbps[1]
    # Where products take nearly all of the time, nothing is told about the memory: it is the memory's own rate.
    portable = Machine.named("zen5-2c")
    isa = portable.isa
    many = {384: 0.95 * measure._stream_gbps(portable, isa, 1, "direct", [384])[384]}
    hardly, _ = measure._with_rate(portable, isa, 1, "direct_gbps", many)
    assert hardly.kernels[isa].direct_gbps[1] == pytest.approx(portable.dram_gbps[1], rel=0.1)


def test_the_forms_for_few_rows_have_rates_of_their_own():
    machine = Machine.named("zen5-2c")
    isa, most = machine.isa, machine.dram_gbps[2]
    kernels = dataclasses.replace(
        machine.kernels[isa],
        **{name: {2: most} for name in ("few_direct_gbps", "few_unpack_gbps", "direct_gbps", "unpack_gbps")},
    )
    machine = dataclasses.replace(machine, kernels={isa: kernels})
    rows = measure._stream_rows(kernels.per_thread[1], 50.0, machine.dram_gbps[1], False, kernels.most_few_rows)
    assert rows["unpack"] == measure._FEW_ROWS == rows["direct"][:3] and min(rows["direct"][3:]) >= 64
    assert all(count % 16 == 0 and count > kernels.most_few_rows for count in rows["direct"][3:])  # cells take them
    streams = {}
    for form, share in (("direct", 0.9), ("unpack", 0.8)):
        for count, gbps in measure._stream_gbps(machine, isa, 2, form, rows[form]).items():
            usual = gbps * (share if count in measure._FEW_ROWS else 1.0)
            streams[isa, form, count] = (usual, usual)
    found = measure._with_supply(machine, isa, {2: streams}).kernels[isa]
    assert found.direct_gbps[2] == pytest.approx(most, rel=0.05)
    assert 0.85 * most < found.few_direct_gbps[2] < 0.97 * most
    assert 0.73 * most < found.few_unpack_gbps[2] < 0.92 * most
    assert found.unpack_gbps[2] == found.few_unpack_gbps[2]


@pytest.mark.parametrize("overlap", measure._FEW_OVERLAPS)
def test_how_well_the_forms_for_few_rows_overlap_is_found(overlap):
    machine = Machine.named("zen5-2c")
    isa = machine.isa
    kernels = machine.kernels[isa]
    of_both = dataclasses.replace(kernels.per_thread[2], few_overlap=overlap)
    rates = {name: {2: 50.0} for name in ("few_direct_gbps", "few_unpack_gbps")}
    known = dataclasses.replace(kernels, per_thread={**kernels.per_thread, 2: of_both}, **rates)
    memory = {**machine.dram_gbps, 2: 50.0}  # fast enough that computing shows
    told = dataclasses.replace(machine, kernels={isa: known}, dram_gbps=memory)
    streams = {}
    for form in ("direct", "unpack"):
        for rows, gbps in measure._stream_gbps(told, isa, 2, form, measure._FEW_ROWS).items():
            streams[isa, form, rows] = (1.2 * gbps, gbps)  # what whole tries took counts
    plain = dataclasses.replace(machine, dram_gbps=memory)
    found = measure._with_supply(plain, isa, {2: streams}).kernels[isa]
    assert found.per_thread[2].few_overlap == overlap
    assert found.few_direct_gbps[2] == pytest.approx(50, rel=0.03) == found.few_unpack_gbps[2]
