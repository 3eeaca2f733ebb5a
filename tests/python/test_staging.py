"""Calls on tensors that are not on the CPU: what is copied when, and that nobody looks too early.

Without a GPU, tensors of a class that the engine refuses stand in for those on a device, and a queue that copies only
when it must: memory that nobody waited for still holds values that would be seen in the results. What PyTorch itself
does on a GPU (streams, pinned memory) is tested there, and skipped elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moesaic
from layer_cases import AdapterCase, LayerCase, Problem, make_problem
from moesaic import staging

PEFT = AdapterCase({"gate_up": 5, "down": 3}, {"gate_up": 2.0, "down": 0.5}, peft=True, dtype=torch.float32)
CLASSIC = AdapterCase(
    {"gate": 2, "up": 7, "down": 3}, {"gate": 1.0, "up": 2.0, "down": 0.5}, peft=False, dtype=torch.bfloat16
)
CASE = LayerCase(7, tokens=45, experts=6, top_k=3, hidden=64, intermediate=48, adapters=(PEFT, CLASSIC), skip=True)
OTHER = LayerCase(
    9,
    tokens=33,
    experts=4,
    top_k=2,
    hidden=96,
    intermediate=40,
    adapters=(PEFT,),
    hidden_dtype=torch.float32,
    weights_dtype=torch.bfloat16,
    ids_dtype=torch.int32,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this host")

#: Which tensors are on a device: hidden, ids, weights, LoRA.
PLACES = [
    (True, True, True, True),
    (True, True, True, False),
    (True, False, False, False),
    (False, True, True, False),
    (False, False, False, True),
]


# A device without a device.


class Far(torch.Tensor):
    """A tensor whose memory only a queue may touch."""

    is_cpu = False
    is_cuda = True
    device = torch.device("cuda", 0)


class Farther(Far):
    """The same on a second device."""

    device = torch.device("cuda", 1)


KINDS = {kind.device: kind for kind in (Far, Farther)}


def far(tensor: torch.Tensor, kind: type[Far] = Far) -> Far:
    moved: Far = torch.Tensor._make_subclass(kind, tensor.detach().clone(), tensor.requires_grad)
    return moved


def near(tensor: torch.Tensor) -> torch.Tensor:
    """What is there now."""
    return tensor.detach().as_subclass(torch.Tensor).clone()


class LazyQueue:
    """Copies only what somebody waits for. One for each device, as every thread has a current stream on it."""

    pending: ClassVar[dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    waits: ClassVar[int] = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = self.pending.setdefault(device, [])

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu").as_subclass(torch.Tensor).fill_(99)

    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(KINDS[self.device], torch.full_like(tensor, 99))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape and target.stride() == source.stride()
        self.copies.append((target, source))

    def mark(self, timed: bool) -> Any:
        return LazyEvent(self, len(self.copies))


class LazyEvent:
    def __init__(self, queue: LazyQueue, count: int) -> None:
        self.queue, self.behind = queue, list(queue.copies[:count])

    def query(self) -> bool:
        return not any(copy is other for copy in self.behind for other in self.queue.copies)

    def synchronize(self) -> None:
        LazyQueue.waits += 1
        for copy in self.behind:
            if any(copy is other for other in self.queue.copies):
                run(copy)
        self.queue.copies[:] = [c for c in self.queue.copies if not any(c is done for done in self.behind)]

    def elapsed_time(self, other: LazyEvent) -> float:
        assert other.query()
        return 0.5


def run(copy: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, source = (tensor.detach().as_subclass(torch.Tensor) for tensor in copy)
    target.copy_(source)


def flush() -> None:
    """The device goes on."""
    for copies in LazyQueue.pending.values():
        for copy in copies:
            run(copy)
        copies.clear()


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LazyQueue]]:
    LazyQueue.pending, LazyQueue.waits = {}, 0
    monkeypatch.setattr(staging, "_queue", LazyQueue)
    yield LazyQueue
    staging._timed_copies.clear()


def placed(problem: Problem, places: tuple[bool, ...], move: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
    """The problem with leaves of its own, some of them moved."""
    copy = make_problem(problem.case)

    def leaf(tensor: torch.Tensor, moved: bool) -> torch.Tensor:
        return move(tensor).requires_grad_(tensor.requires_grad) if moved else tensor

    with torch.no_grad():
        copy.hidden = leaf(copy.hidden.detach().requires_grad_(), places[0])
        copy.ids = leaf(copy.ids, places[1])
        copy.weights = leaf(copy.weights.detach().requires_grad_(), places[2])
        for adapter in copy.adapters:
            adapter.leaves = [leaf(tensor.detach().requires_grad_(), places[3]) for tensor in adapter.leaves]
    return copy


def call(problem: Problem, layer: moesaic.ExpertsLayer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and the gradients of all leaves, through the calls without autograd."""
    out, saved = layer.forward(problem.hidden, problem.ids, problem.weights, problem.loras())
    assert saved is not None
    grads = layer.backward(saved, problem.d_out)
    found = [grads.hidden, grads.top_k_weights]
    for adapter, of in zip(problem.adapters, grads.lora, strict=True):
        for name in adapter.case.ranks:
            found += [getattr(of, name).a, getattr(of, name).b]
    return out, found


def views(problem: Problem) -> list[torch.Tensor]:
    """Hidden, weights, and LoRA tensors as the layer is given them."""
    pairs = [pair for adapter in problem.adapters for pair in adapter.pairs(adapter.leaves)]
    return [problem.hidden, problem.weights, *(tensor for _, a, b, _ in pairs for tensor in (a, b))]


@pytest.mark.parametrize("case", [CASE, OTHER], ids=["bf16", "fp32"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_results_are_the_same_and_lie_where_their_tensors_do(
    lazy: type[LazyQueue], case: LayerCase, places: tuple[bool, ...]
) -> None:
    problem = make_problem(case)
    layer = problem.layer()
    expected_out, expected = call(problem, layer)
    moved = placed(problem, places, far)
    out, grads = call(moved, layer)
    assert out.is_cpu is not places[0]
    if places[0]:
        assert bool((near(grads[0]) == 99).all()), "it is on its way: nobody waits for it"
    flush()
    assert torch.equal(near(out), expected_out)
    for tensor, grad, right in zip(views(moved), grads, expected, strict=True):
        assert grad.is_cpu == tensor.is_cpu and grad.dtype == tensor.dtype and grad.stride() == tensor.stride()
        assert torch.equal(near(grad), right)


def test_one_wait_for_all_inputs(lazy: type[LazyQueue]) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    moved = placed(problem, PLACES[0], far)
    out, _ = layer.forward(moved.hidden, moved.ids, moved.weights, moved.loras())
    assert lazy.waits == 1
    assert len(lazy.pending[Far.device]) == 1 and bool((near(out) == 99).all()), "the output is left in the queue"


def test_results_for_a_second_device_are_complete(lazy: type[LazyQueue]) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    _, expected = call(problem, layer)
    moved = placed(placed(problem, PLACES[1], far), (False, False, False, True), lambda t: far(t, Farther))
    moved.hidden, moved.ids, moved.weights = far(moved.hidden), far(moved.ids), far(moved.weights)
    _, grads = call(moved, layer)
    for grad, right in zip(grads[2:], expected[2:], strict=True):
        assert type(grad) is Farther and torch.equal(near(grad), right)
    assert bool((near(grads[0]) == 99).all())
    flush()
    assert torch.equal(near(grads[0]), expected[0])


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_autograd(lazy: type[LazyQueue], places: tuple[bool, ...]) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected_out = moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, layer, problem.loras())
    expected = torch.autograd.grad(expected_out, problem.leaves, problem.d_out)
    moved = placed(problem, places, far)
    out = moesaic.moe_experts(moved.hidden, moved.ids, moved.weights, layer, moved.loras())
    flush()
    assert torch.equal(near(out), expected_out)
    with torch.no_grad():  # what forward saw of hidden is what counts
        near_hidden = moved.hidden.detach().as_subclass(torch.Tensor)
        if places[0]:
            near_hidden.fill_(5)
    d_out = far(problem.d_out) if places[0] else problem.d_out
    grads = torch.autograd.grad(out, moved.leaves, d_out)
    flush()
    for grad, right in zip(grads, expected, strict=True):
        assert torch.equal(near(grad), right)


def test_copies_are_rows_of_a_profile(lazy: type[LazyQueue]) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    moved = placed(problem, PLACES[0], far)
    with moesaic.profile() as profile:
        call(moved, layer)
    rows = {row["name"]: row for row in profile.phases() if row["category"] == "transfer"}
    inputs = sum(tensor.nbytes for tensor in (problem.hidden, problem.ids, problem.weights))
    lora = sum(tensor.nbytes for adapter in problem.adapters for tensor in adapter.leaves)
    gradients = problem.hidden.nbytes + problem.weights.nbytes + lora
    assert rows["device_to_host"]["bytes"] == inputs + 2 * lora  # d_out is on the CPU here
    assert rows["host_to_device"]["bytes"] == problem.hidden.nbytes + gradients
    for row in rows.values():
        assert row["calls"] == 2 and row["thread_ms"] == pytest.approx(1.0)
        assert row["gbps"] == pytest.approx(row["bytes"] / 1e6) and row["gflops"] is None
    account = profile.document()["account"]
    assert sum(v for n, v in account.items() if n != "threads_x_wall_ms") == pytest.approx(account["threads_x_wall_ms"])
    assert not staging._timed_copies
    call(moved, layer)
    assert not staging._timed_copies, "nothing is kept while nobody profiles"


def test_refusals_name_the_argument(lazy: type[LazyQueue]) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    meta = torch.empty(1, device="meta")
    for name, value in (("hidden", meta), ("top_k_ids", meta), ("top_k_weights", meta)):
        arguments = {"hidden": far(problem.hidden), "top_k_ids": problem.ids, "top_k_weights": problem.weights}
        with pytest.raises(ValueError, match=f"{name} is on the meta device"):
            layer.forward(**(arguments | {name: value}))
    with pytest.raises(ValueError, match="top_k_ids"):
        layer.forward(far(problem.hidden), far(problem.ids + 100), far(problem.weights))
    with pytest.raises(ValueError, match="hidden has shape"):
        layer.forward(far(problem.hidden[:, :32].contiguous()), far(problem.ids), far(problem.weights))
    with pytest.raises(TypeError, match="hidden is a list"):
        layer.forward([1.0], problem.ids, problem.weights)  # type: ignore[arg-type]
    call(placed(problem, PLACES[0], far), layer)


# On a GPU.


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same strides there: PEFT's are views."""
    return tensor.detach().to("cuda")


def train(problem: Problem, layer: moesaic.ExpertsLayer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    out = moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, layer, problem.loras())
    return out, list(torch.autograd.grad(out, problem.leaves, problem.d_out.to(out.device)))


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for n, (tensor, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(tensor.cpu(), right), f"tensor {n} differs"


@needs_gpu
@pytest.mark.parametrize("case", [CASE, OTHER], ids=["bf16", "fp32"])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_gpu_equals_cpu_bit_by_bit(case: LayerCase, places: tuple[bool, ...]) -> None:
    problem = make_problem(case)
    layer = problem.layer()
    expected_out, expected = train(problem, layer)
    moved = placed(problem, places, on_gpu)
    out, grads = train(moved, layer)
    assert out.is_cuda == places[0]
    for leaf, grad in zip(moved.leaves, grads, strict=True):
        assert grad.device == leaf.device and grad.stride() == leaf.stride()
    assert_equal([out.detach(), *grads], [expected_out.detach(), *expected])
    out, grads = call(moved, layer)
    assert_equal([out, *grads[:2]], [expected_out.detach(), *expected[:2]])


@needs_gpu
def test_gpu_weights_can_be_packed() -> None:
    problem = make_problem(CASE)
    layer = moesaic.ExpertsLayer(problem.gate_up_proj.cuda(), problem.down_proj.cuda())
    assert_equal(call(problem, layer)[1], call(problem, problem.layer())[1])


@needs_gpu
def test_gpu_streams_order_both_ways() -> None:
    """Inputs are made late on a stream of their own, and overwritten at once; outputs are used at once."""
    problem = make_problem(CASE)
    layer = problem.layer()
    expected_out, expected = train(problem, layer)
    moved = placed(problem, PLACES[0], on_gpu)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream()):
            hidden = torch.full_like(moved.hidden, 3.0)
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                hidden.copy_(moved.hidden)
            hidden.requires_grad_()
            leaves = [hidden, *moved.leaves[1:]]
            out = moesaic.moe_experts(hidden, moved.ids, moved.weights, layer, moved.loras())
            twice = out.detach() * 2
            d_out = torch.zeros_like(out)
            torch.cuda._sleep(20_000_000)
            d_out.copy_(problem.d_out)
            with torch.no_grad():
                hidden.fill_(7.0)
            grads = torch.autograd.grad(out, leaves, d_out)
            torch.cuda._sleep(20_000_000)
            doubled = [grad * 2 for grad in grads]
            torch.cuda.current_stream().synchronize()
        assert_equal([twice, *doubled], [expected_out.detach() * 2, *(grad * 2 for grad in expected)])


@needs_gpu
def test_gpu_outputs_on_their_way_are_not_overwritten() -> None:
    """The device lags behind: many results wait in pinned memory at once."""
    case = LayerCase(11, tokens=256, experts=4, top_k=2, hidden=512, intermediate=64)
    problem = make_problem(case)
    layer = problem.layer()
    inputs = [torch.randn(256, 512).bfloat16() for _ in range(24)]
    expected = [layer.forward(x, problem.ids, problem.weights)[0] for x in inputs]
    delayed, stream = [], torch.cuda.Stream()
    for x in inputs:
        with torch.cuda.stream(stream):  # inputs in host memory, so that the output alone is the device's
            host = staging._queue(torch.device("cuda", 0)).host_like(expected[0])
            host.copy_(expected[0])
            torch.cuda._sleep(2_000_000)
            out, *_ = staging.forward(layer._core, x.cuda(), problem.ids, problem.weights, (), (), False)
            delayed.append(out)
    stream.synchronize()
    assert_equal(delayed, expected)


@needs_gpu
def test_gpu_threads_with_streams_of_their_own() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    draws = [make_problem(CASE, draw) for draw in range(6)]
    expected = [[train(draw, layer)[0].detach(), *train(draw, layer)[1]] for draw in draws]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(20):
                    draw = draws[(n + turn) % len(draws)]
                    hidden = draw.hidden.detach().cuda().requires_grad_()
                    weights = draw.weights.detach().cuda().requires_grad_()
                    out = moesaic.moe_experts(hidden, draw.ids.cuda(), weights, layer, draw.loras())
                    leaves = [hidden, weights, *draw.leaves[2:]]
                    grads = torch.autograd.grad(out, leaves, draw.d_out.cuda())
                    assert_equal([out.detach(), *grads], expected[(n + turn) % len(draws)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


@needs_gpu
def test_gpu_pinned_memory_is_recycled() -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this version of PyTorch does not count pinned memory")
    problem = make_problem(CASE)
    layer = problem.layer()
    moved = placed(problem, PLACES[0], on_gpu)

    def allocations() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.host_memory_stats()["num_host_alloc"])

    for _ in range(5):
        train(moved, layer)
    before = allocations()
    for _ in range(50):
        train(moved, layer)
    assert allocations() == before


@needs_gpu
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gpu_checkpoint(use_reentrant: bool) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    _, expected = train(problem, layer)
    moved = placed(problem, PLACES[0], on_gpu)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return moesaic.moe_experts(hidden, moved.ids, moved.weights, layer, moved.loras())

    out = checkpoint(forward, moved.hidden, use_reentrant=use_reentrant)
    out.backward(problem.d_out.cuda())
    assert_equal([leaf.grad for leaf in moved.leaves], expected)  # type: ignore[misc]


@needs_gpu
def test_gpu_hooks_for_saved_tensors_and_a_second_backward() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    _, expected = train(problem, layer)
    moved = placed(problem, PLACES[0], on_gpu)
    hooks: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda t: t.clone(), lambda t: t),
        (lambda t: t.cuda(), lambda t: t),  # everything comes back on the GPU
        (lambda t: t.cpu(), lambda t: t),  # or on the CPU
    ]
    for pack, unpack in hooks:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = moesaic.moe_experts(moved.hidden, moved.ids, moved.weights, layer, moved.loras())
        for _ in range(2):
            grads = torch.autograd.grad(out, moved.leaves, problem.d_out.cuda(), retain_graph=True)
            assert_equal(list(grads), expected)
            assert all(grad.is_cuda for grad in grads[:2])
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert_equal(train(moved, layer)[1], expected)


@needs_gpu
def test_gpu_frozen_and_strided_tensors() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected_out, expected = train(problem, layer)
    moved = placed(problem, PLACES[0], on_gpu)
    wide = torch.stack([moved.hidden.detach()] * 2, -1)[..., 0].requires_grad_()
    assert not wide.is_contiguous()
    out = moesaic.moe_experts(wide, moved.ids.t().contiguous().t(), moved.weights, layer, moved.loras())
    assert_equal([out.detach(), *torch.autograd.grad(out, wide, problem.d_out.cuda())], [expected_out, expected[0]])
    for leaf in moved.leaves[1:]:
        leaf.requires_grad_(False)
    assert_equal([torch.autograd.grad(train_out(moved, layer), moved.hidden, problem.d_out.cuda())[0]], expected[:1])
    with pytest.raises(RuntimeError, match=r"differentiated only once|used in the graph"):
        (grad,) = torch.autograd.grad(train_out(moved, layer).sum(), moved.hidden, create_graph=True)
        torch.autograd.grad(grad.square().sum(), moved.hidden)


def train_out(problem: Problem, layer: moesaic.ExpertsLayer) -> torch.Tensor:
    return moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, layer, problem.loras())


@needs_gpu
def test_gpu_no_tokens() -> None:
    problem = make_problem(LayerCase(3, tokens=0, experts=4, top_k=2, hidden=64, intermediate=32, adapters=(PEFT,)))
    moved = placed(problem, PLACES[0], on_gpu)
    out, grads = train(moved, problem.layer())
    assert out.shape == (0, 64) and out.is_cuda
    assert all(grad.is_cuda and not grad.any() for grad in grads)


@needs_gpu
def test_gpu_graphs_are_refused() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    moved = placed(problem, PLACES[0], on_gpu)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer.forward(moved.hidden, moved.ids, moved.weights)
    torch.cuda.synchronize()
    assert_equal(call(moved, layer)[1][:2], call(problem, layer)[1][:2])


@needs_gpu
def test_gpu_copies_are_rows_of_a_profile() -> None:
    problem = make_problem(LayerCase(5, tokens=2048, experts=4, top_k=2, hidden=1024, intermediate=32))
    layer = problem.layer()
    moved = placed(problem, PLACES[0], on_gpu)
    train(moved, layer)
    with moesaic.profile() as profile:
        for _ in range(3):
            train(moved, layer)
    rows = {row["name"]: row for row in profile.phases() if row["category"] == "transfer"}
    inputs = sum(tensor.nbytes for tensor in (problem.hidden, problem.ids, problem.weights))
    assert rows["device_to_host"]["bytes"] == 3 * (inputs + problem.d_out.nbytes)
    assert rows["host_to_device"]["bytes"] == 3 * (2 * problem.hidden.nbytes + problem.weights.nbytes)
    assert all(row["calls"] == 6 and row["gbps"] > 0.5 for row in rows.values())
