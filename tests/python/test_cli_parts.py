"""What `moesaic bench layer` is made of: the model of its work, routing, reference, peers and statistics."""

import json
import math
import mmap
import sys

import pytest
import torch

import fake_kt_kernel
import moesaic
from moesaic import _core
from moesaic.commands import kt_peer, layer_case, layer_reference, measure, sweep
from moesaic.commands.layer_bench import Point
from moesaic.commands.layer_case import LayerShape, Routing, Work, parse_routing, route
from moesaic.commands.layer_data import make_adapter, make_batch, make_weights, overlapping_weights
from moesaic.commands.measure import Ceiling, Repetition
from moesaic.commands.output import first_line, print_json
from moesaic.commands.peers import PEERS
from moesaic.commands.variants import Call, UnavailableError, Variant, timed
from moesaic.profiles.document import spread

SHAPE = LayerShape(experts=5, hidden=32, intermediate=24, top_k=2, rank=3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_flops_of_a_known_layer():
    # 4,096 tokens x 8 rows x 6 x 2,048 x 768 FLOP, and 2 x rows x 16 x (2,048 + 3 x 768 + 2,048) for the adapter.
    work = layer_case.flops(LayerShape(128, 2048, 768, 8, 16), 4096)
    lora = 2 * 32768 * 16 * (2048 + 2304 + 2048)
    assert work == Work(309_237_645_312 + lora, 309_237_645_312 + 2 * lora)


def test_bytes_count_what_each_way_moves():
    work = layer_case.bytes_moved(
        SHAPE, 10, experts_hit=2, weight_bytes=5 * 1000, lora_itemsize=4, saved_bytes=77, itemsize=2
    )
    lora = 3 * 4 * (32 + 48 + 24 + 32)  # A and B of gate_up and down, fp32, one expert
    assert work.forward == 2 * 1000 + 2 * lora + 77 + 2 * 10 * 32 * 2
    assert work.backward == work.forward + 5 * lora


@pytest.mark.parametrize("text", ["uniform", "zipf", "concentrated:3"])
def test_routing_picks_different_experts(text):
    routing = parse_routing(text)
    assert str(routing) == text
    ids, weights = route(routing, SHAPE, 200, generator())
    assert ids.shape == weights.shape == (200, 2)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert ((ids >= 0) & (ids < 5)).all()
    assert (ids[:, 0] != ids[:, 1]).all()
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(200))
    again, _ = route(routing, SHAPE, 200, generator())
    assert torch.equal(ids, again)


def test_routing_has_the_distribution_it_names():
    shape = LayerShape(experts=10, hidden=8, intermediate=8, top_k=1, rank=0)
    draws = 20000

    def shares(routing: Routing) -> torch.Tensor:
        ids, _ = route(routing, shape, draws, generator())
        return torch.bincount(ids.flatten(), minlength=10).double().sort(descending=True).values / draws

    # With one expert a token the shares are the probabilities, each within 6 standard deviations.
    harmonic = 1 / torch.arange(1, 11, dtype=torch.float64)
    for routing, expected in [
        (Routing("uniform"), torch.full((10,), 0.1, dtype=torch.float64)),
        (Routing("zipf"), harmonic / harmonic.sum()),
        (Routing("concentrated", 4), torch.tensor([0.25] * 4 + [0.0] * 6, dtype=torch.float64)),
    ]:
        error = (shares(routing) - expected).abs()
        assert (error <= 6 * (expected * (1 - expected) / draws).sqrt()).all(), routing


@pytest.mark.parametrize(
    "text", ["", "Uniform", "concentrated", "concentrated:", "concentrated:0", "concentrated:-1", "x:1"]
)
def test_unknown_routing_is_refused(text):
    with pytest.raises(ValueError, match="uniform, zipf or concentrated"):
        parse_routing(text)


@pytest.mark.parametrize("among", [1, 6])
def test_concentration_must_fit(among):
    with pytest.raises(ValueError, match="expected 2"):
        route(Routing("concentrated", among), SHAPE, 4, generator())


def test_overlapping_weights_differ_and_are_small():
    weights = overlapping_weights(20, 64, 128, generator())
    assert weights.shape == (20, 64, 128)
    assert weights.untyped_storage().nbytes() < 20 * 64 * 128 * 2
    flat = weights.float().reshape(20, -1)
    correlation = torch.corrcoef(flat) - torch.eye(20)
    assert correlation.abs().max() < 0.1  # 6 / sqrt(8192)
    assert flat.var() * 128 == pytest.approx(1.0, abs=0.1)
    full = make_weights(SHAPE, generator(1), full_copy=True)
    frugal = make_weights(SHAPE, generator(1), full_copy=False)
    assert torch.equal(full.gate_up, frugal.gate_up) and torch.equal(full.down, frugal.down)
    assert full.down.is_contiguous()


def dense_forward(batch, weights, adapter):
    """Written down differently from the reference: every token alone, W + scale B A materialised from PEFT's layout."""
    out = []
    for token in range(batch.tokens):
        y = torch.zeros(batch.hidden.shape[1])
        for slot, expert in enumerate(batch.ids[token].tolist()):
            gate_up, down = weights.gate_up[expert].float(), weights.down[expert].float()
            if adapter is not None:
                deltas = []
                for pair in (adapter.gate_up, adapter.down):
                    rank = pair.a.shape[0] // pair.experts
                    a = pair.a[expert * rank : (expert + 1) * rank].bfloat16().float()
                    b = (
                        torch.stack([pair.b[:, i * pair.experts + expert] for i in range(rank)], dim=1)
                        .bfloat16()
                        .float()
                    )
                    deltas.append(pair.scale * b @ a)
                gate_up, down = gate_up + deltas[0], down + deltas[1]
            gate, up = (gate_up @ batch.hidden[token].float()).chunk(2)
            y = y + batch.router[token, slot] * (down @ (gate * torch.sigmoid(gate) * up))
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_reference_is_the_layer(rank):
    shape = LayerShape(5, 32, 24, 2, rank)
    weights, adapter = make_weights(shape, generator(1), full_copy=True), make_adapter(shape, generator(2))
    batch = make_batch(shape, 9, Routing("zipf"), generator(3))
    expected = layer_reference.reference(batch, weights, adapter, torch.arange(9))
    out = dense_forward(batch, weights, adapter)
    leaves = [batch.hidden, batch.router, *(adapter.parameters() if adapter else [])]
    d_hidden, d_router, *d_lora = torch.autograd.grad(out, leaves, batch.d_out.float())
    result = layer_reference.LayerResult(out, d_hidden, d_router, d_lora)
    errors = layer_reference.errors(result, expected)
    assert (errors["d_lora"] is None) == (rank == 0)
    # fp32 against fp32; hidden and the adapter take their gradients through bf16 (2^-9 an element).
    assert errors["output"] < 1e-5 and errors["d_router"] < 1e-5
    assert errors["d_hidden"] < 4e-3
    assert (errors["d_lora"] or 0.0) < 4e-3


def test_reference_of_some_tokens_is_the_whole_with_a_masked_gradient():
    weights, adapter = make_weights(SHAPE, generator(1), full_copy=True), make_adapter(SHAPE, generator(2))
    batch = make_batch(SHAPE, 20, Routing("uniform"), generator(3))
    checked = torch.tensor([0, 7, 19])
    part = layer_reference.reference(batch, weights, adapter, checked)
    batch.d_out.copy_(layer_reference.masked_gradient(batch, checked))
    whole = layer_reference.reference(batch, weights, adapter, torch.arange(20))
    torch.testing.assert_close(part.output, whole.output[checked])
    torch.testing.assert_close(part.d_hidden, whole.d_hidden)
    torch.testing.assert_close(part.d_router, whole.d_router)
    for a, b in zip(part.d_lora, whole.d_lora, strict=True):
        torch.testing.assert_close(a, b)


def test_large_layers_are_checked_on_fewer_tokens():
    small, large = LayerShape(8, 128, 96, 2, 8), LayerShape(256, 7168, 2048, 8, 16)
    assert torch.equal(layer_reference.checked_tokens(small, 100), torch.arange(100))
    checked = layer_reference.checked_tokens(large, 100_000)
    assert 0 < len(checked) < 100_000
    assert len(torch.unique(checked)) == len(checked) and checked[-1] < 100_000


@pytest.fixture
def kt_kernel(monkeypatch):
    """A stand-in for kt-kernel, whose training classes need AVX512-BF16."""
    monkeypatch.setitem(sys.modules, "kt_kernel", fake_kt_kernel)
    monkeypatch.setattr(kt_peer, "_threads", None)
    fake_kt_kernel.KTMoEWrapper.made.clear()


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("rank", [0, 3, 16])
def test_peers_compute_the_layer(name, rank, kt_kernel):
    if name.startswith("kt_kernel") and rank == 0:
        pytest.skip("kt-kernel has no way without an adapter; see test_kt_kernel_where_it_cannot_run")
    shape = LayerShape(5, 64, 48, 2, rank)
    weights, adapter = make_weights(shape, generator(1), full_copy=True), make_adapter(shape, generator(2))
    batch = make_batch(shape, 33, Routing("concentrated", 4), generator(3))  # one expert has no row
    expected = layer_reference.reference(batch, weights, adapter, torch.arange(33))
    try:
        peer = PEERS[name](batch, weights, adapter)
    except UnavailableError as error:
        pytest.skip(str(error))
    for _ in range(2):  # the second time with whatever the first one left
        out = peer.forward()
        assert out.dtype == torch.bfloat16
        d_hidden, d_router, *d_lora = peer.gradients(peer.backward(out, batch.d_out))
        errors = layer_reference.errors(layer_reference.LayerResult(out, d_hidden, d_router, d_lora), expected)
        assert all(error is None or error < 2e-2 for error in errors.values()), errors
    with torch.no_grad():
        assert layer_reference.relative_l2(peer.forward(), out) == 0.0


def test_kt_kernel_with_one_copy_and_with_two(kt_kernel):
    shape = LayerShape(3, 32, 16, 2, 4)
    weights, adapter = make_weights(shape, generator(1), full_copy=True), make_adapter(shape, generator(2))
    batch = make_batch(shape, 5, Routing("uniform"), generator(3))
    PEERS["kt_kernel"](batch, weights, adapter)
    PEERS["kt_kernel_repack"](batch, weights, adapter)
    assert [wrapper.share_backward_bb for wrapper in fake_kt_kernel.KTMoEWrapper.made] == [False, True]


def test_kt_kernel_where_it_cannot_run(kt_kernel, monkeypatch):
    shape = LayerShape(3, 32, 16, 2, 4)
    weights, adapter = make_weights(shape, generator(1), full_copy=True), make_adapter(shape, generator(2))
    batch = make_batch(shape, 5, Routing("uniform"), generator(3))
    with pytest.raises(UnavailableError, match="rank 0"):
        PEERS["kt_kernel"](batch, weights, None)
    monkeypatch.setattr(kt_peer, "_threads", 4000)
    with pytest.raises(UnavailableError, match="4000 threads"):
        PEERS["kt_kernel"](batch, weights, adapter)
    monkeypatch.setattr(kt_peer, "_threads", None)

    def refuse(**arguments):
        raise RuntimeError("AMX SFT backend not available.\nPlease recompile")

    monkeypatch.setattr(fake_kt_kernel, "KTMoEWrapper", refuse)
    with pytest.raises(UnavailableError, match=r"cannot train this layer here: AMX SFT backend not available\.$"):
        PEERS["kt_kernel"](batch, weights, adapter)
    monkeypatch.setitem(sys.modules, "kt_kernel", None)  # as if it were not installed
    with pytest.raises(UnavailableError, match=r"not installed|does not load"):
        PEERS["kt_kernel"](batch, weights, adapter)


def test_timed_counts_page_faults():
    class Touching(Variant):
        def forward(self):
            block = mmap.mmap(-1, 64 * mmap.PAGESIZE)
            for page in range(64):
                block[page * mmap.PAGESIZE] = 1
            return self.leaves[0] * 2

    batch = make_batch(SHAPE, 4, Routing("uniform"), generator())
    call = timed(Touching(batch, []), save=False)
    # Fewer where the kernel gives huge pages.
    assert call.forward_faults >= 1 and call.backward_ms is None and call.backward_faults is None
    assert call.total_ms == call.forward_ms > 0


def test_points_of_a_sweep():
    assert sweep.powers_of_two(1) == [1]
    assert sweep.powers_of_two(2) == [1, 2]
    assert sweep.powers_of_two(6) == [1, 2, 4, 6]
    found = sweep.points({"tokens": [8, 16, 8], "threads": [2, 1], "rank": [4]})
    assert found == [Point(8, 2, 4), Point(16, 2, 4), Point(8, 1, 4)]


def test_relative_l2():
    assert layer_reference.relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert layer_reference.relative_l2(torch.tensor([0.0, 2.0]), torch.zeros(2)) == 2.0


def test_spread():
    values = [4.0, 1.0, 3.0, 2.0]
    assert spread(values) == {
        "min": 1.0,
        "median": 2.5,
        "mean": 2.5,
        "std": pytest.approx(1.25**0.5),
        "max": 4.0,
    }


def test_limit_is_the_slower_of_both_roofs():
    ceiling = Ceiling(compute_gflops=100.0, read_gbps=10.0)
    assert ceiling.limit_ms(flops=10**9, bytes_moved=10**6) == pytest.approx(10.0)
    assert ceiling.limit_ms(flops=10**6, bytes_moved=10**9) == pytest.approx(100.0)


def call(forward_ms, backward_ms):
    return Call(forward_ms, backward_ms, 0, 0)


def test_fraction_of_limit_leaves_out_unsteady_repetitions():
    fast, slow = Ceiling(100.0, 10.0), Ceiling(80.0, 10.0)
    work, few_bytes = Work(10**9, 2 * 10**9), Work(0, 0)
    repetitions = [
        Repetition(call(20.0, 25.0), fast, fast),  # 10 / 20, 20 / 25
        Repetition(call(40.0, 40.0), fast, fast),  # 10 / 40, 20 / 40
        Repetition(call(10.0, 20.0), fast, slow),  # would be the best
        Repetition(call(10.0, 20.0), fast, Ceiling(100.0, 8.9)),  # the other ceiling moved
        Repetition(call(25.0, 25.0), slow, slow),  # 12.5 / 25, 25 / 25
    ]
    assert [repetition.steady() for repetition in repetitions] == [True, True, False, False, True]
    fraction = measure.fraction_of_limit(repetitions, work, few_bytes)
    assert fraction == {"forward": pytest.approx(0.5), "backward": pytest.approx(0.8)}
    assert measure.fraction_of_limit(repetitions[2:4], work, few_bytes) == {"forward": None, "backward": None}
    forward_only = [Repetition(call(20.0, None), fast, fast)]
    assert measure.fraction_of_limit(forward_only, work, few_bytes) == {"forward": pytest.approx(0.5), "backward": None}
    assert measure.median_ceiling(repetitions) == Ceiling(100.0, 10.0)


@pytest.fixture
def pool():
    """Lets a test change threads and their source."""
    threads, source = moesaic.get_num_threads(), _core.get_thread_source()
    yield
    _core.set_thread_source(source)
    moesaic.set_num_threads(threads)


@pytest.mark.parametrize("source", ["openmp", "own"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_probes_run_on_any_pool(pool, source, threads):
    _core.set_thread_source(source)
    moesaic.set_num_threads(threads)
    assert _core.measure_compute("portable", threads, 0.005) > 0
    read = _core.ReadProbe(threads, 1 << 22)
    assert read.bytes >= 1 << 22 and read.bytes % (threads << 19) == 0
    assert "byte loads" in read.method
    assert read.measure(0.005) > 0
    assert _core.ReadProbe(1, 1).bytes == 1 << 19


def test_probes_refuse_what_they_cannot_measure(pool):
    moesaic.set_num_threads(2)
    unavailable = [probe["isa"] for probe in _core.compute_probes() if not probe["available"]]
    for isa in ["no_such_isa", *unavailable]:
        with pytest.raises(ValueError, match=isa):
            _core.measure_compute(isa, 1, 0.01)
    for seconds in (0.0, -1.0, 61.0, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            _core.measure_compute("portable", 1, seconds)
    for threads in (0, 3):
        with pytest.raises(ValueError, match="threads"):
            _core.measure_compute("portable", threads, 0.01)
        with pytest.raises(ValueError, match="threads"):
            _core.ReadProbe(threads)
    with pytest.raises(ValueError, match="bytes"):
        _core.ReadProbe(1, -1)
    with pytest.raises(MemoryError):
        _core.ReadProbe(1, 1 << 60)
    read = _core.ReadProbe(2, 1 << 20)
    moesaic.set_num_threads(3)
    with pytest.raises(ValueError, match="3 threads"):
        read.measure(0.01)
    moesaic.set_num_threads(2)
    assert read.measure(0.001) > 0


def test_json_has_no_nan(capsys):
    print_json({"error": math.nan, "rows": [{"ratio": -math.inf, "ms": 1.5}], "pair": (1, math.inf), "name": "nan"})
    document = json.loads(capsys.readouterr().out)
    assert document == {"error": None, "rows": [{"ratio": None, "ms": 1.5}], "pair": [1, None], "name": "nan"}


def test_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\nthree")) == "three"
    assert first_line(AssertionError()) == "AssertionError"


def test_what_libraries_print_is_not_json(run_python):
    result = run_python(
        """
import atexit, os
from moesaic.commands.output import print_json, stdout_for_json
atexit.register(lambda: os.write(1, b"goodbye"))
with stdout_for_json(True):
    print("from Python")
    os.write(1, b"hello from a library")
    with stdout_for_json(True):
        pass
print_json({"answer": 42})
"""
    )
    assert json.loads(result.stdout) == {"answer": 42}
    assert all(text in result.stderr for text in ("from Python", "hello from a library", "goodbye"))
