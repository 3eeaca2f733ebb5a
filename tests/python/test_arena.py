"""Outputs, saved tensors and gradients come from memory that is used again."""

from __future__ import annotations

import gc
import resource
import threading

import torch

import moesaic
from layer_cases import AdapterCase, LayerCase, Problem, make_problem

ADAPTER = AdapterCase({"gate_up": 8, "down": 8}, {"gate_up": 1.0, "down": 1.0}, peft=True, dtype=torch.float32)
# Much memory for little arithmetic: a state of more than 2 MiB.
CASE = LayerCase(11, tokens=256, experts=4, top_k=2, hidden=32, intermediate=1024, adapters=(ADAPTER,))
TINY = LayerCase(12, tokens=1, experts=1, top_k=1, hidden=32, intermediate=32)


def step(problem: Problem, layer: moesaic.ExpertsLayer) -> list[torch.Tensor]:
    out = moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, layer, problem.loras())
    return [out, *torch.autograd.grad(out, problem.leaves, problem.d_out)]


def test_training_steps_take_no_fresh_memory() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    for _ in range(5):
        step(problem, layer)
    before, faults = moesaic.memory_stats(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        step(problem, layer)
    after = moesaic.memory_stats()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert after["allocations"] - before["allocations"] >= 200 * 8  # out, state, and six gradients
    assert after["reused"] - before["reused"] == after["allocations"] - before["allocations"]
    assert after["in_use_bytes"] == before["in_use_bytes"]
    assert after["cached_bytes"] <= before["cached_bytes"]
    # One step touches more than 3 MB: 800 pages if they were fresh. What remains is PyTorch's and the allocator's own.
    assert faults < 200 * 50, f"{faults} minor faults in 200 steps"


def test_memory_in_use_is_never_handed_out_again() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected = [tensor.clone() for tensor in step(problem, layer)]
    kept = [step(problem, layer) for _ in range(8)]
    addresses = [tensor.untyped_storage().data_ptr() for tensors in kept for tensor in tensors]
    assert len(set(addresses)) == len(addresses)
    views = [tensors[0][5:7, ::3] for tensors in kept]  # views keep the memory too
    kept = [tensors[1:] for tensors in kept]
    for _ in range(20):
        step(problem, layer)
    for tensors, view in zip(kept, views, strict=True):
        assert torch.equal(view, expected[0][5:7, ::3])
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected[1:], strict=True))


def test_blocks_are_aligned_and_exact() -> None:
    problem = make_problem(CASE)
    out, *grads = step(problem, problem.layer())
    for tensor in (out, *grads):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # so that torch.save writes no more than the tensor


def test_large_blocks_start_on_huge_pages() -> None:
    problem = make_problem(CASE)
    _, saved = problem.layer().forward(problem.hidden, problem.ids, problem.weights)
    assert saved is not None and saved.state.nbytes >= 2 << 20
    assert saved.state.data_ptr() % (2 << 20) == 0


def test_counts_follow_the_tensors() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    gc.collect()
    before = moesaic.memory_stats()
    out, saved = layer.forward(problem.hidden, problem.ids, problem.weights)
    assert saved is not None
    during = moesaic.memory_stats()
    assert during["blocks_in_use"] == before["blocks_in_use"] + 2
    used = during["in_use_bytes"] - before["in_use_bytes"]
    assert out.nbytes + saved.nbytes <= used <= 1.125 * (out.nbytes + saved.nbytes) + 4096
    assert during["peak_in_use_bytes"] >= during["in_use_bytes"]
    del out, saved
    after = moesaic.memory_stats()
    assert (after["blocks_in_use"], after["in_use_bytes"]) == (before["blocks_in_use"], before["in_use_bytes"])


def test_trim_returns_everything_that_is_kept() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    step(problem, layer)
    kept = step(problem, layer)
    expected = [tensor.clone() for tensor in kept]
    cached = moesaic.memory_stats()["cached_bytes"]
    assert cached > 0
    assert moesaic.trim_memory() == cached
    assert moesaic.memory_stats()["cached_bytes"] == 0
    assert moesaic.trim_memory() == 0
    assert all(torch.equal(tensor, other) for tensor, other in zip(step(problem, layer), expected, strict=True))
    assert all(torch.equal(tensor, other) for tensor, other in zip(kept, expected, strict=True))


def test_memory_that_is_not_used_again_goes_back() -> None:
    moesaic.trim_memory()
    big = make_problem(CASE)
    step(big, big.layer())
    cached = moesaic.memory_stats()["cached_bytes"]
    assert cached > 2 << 20
    tiny = make_problem(TINY)
    layer = tiny.layer()
    moesaic.set_num_threads(1)  # nothing here to share out
    with torch.no_grad():
        for _ in range(2 * 4096):
            moesaic.moe_experts(tiny.hidden, tiny.ids, tiny.weights, layer)
    assert moesaic.memory_stats()["cached_bytes"] < 64 << 10, "eight thousand calls later"


def test_what_is_kept_is_bounded_when_sizes_change() -> None:
    moesaic.trim_memory()
    layer = make_problem(CASE).layer()
    most = 0
    for tokens in range(600, 6000, 200):
        hidden = torch.zeros(tokens, CASE.hidden, dtype=torch.bfloat16)
        ids, weights = torch.full((tokens, 2), -1), torch.zeros(tokens, 2)
        tensors = layer.forward(hidden, ids, weights)
        stats = moesaic.memory_stats()
        most = max(most, stats["in_use_bytes"])
        del tensors
        stats = moesaic.memory_stats()
        peak = stats["peak_in_use_bytes"]
        assert stats["in_use_bytes"] + stats["cached_bytes"] <= 1.25 * peak + (64 << 20)
    assert most > 20 << 20


def test_threads_recycle_together() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected = [tensor.clone() for tensor in step(problem, layer)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            held: list[list[torch.Tensor]] = []
            for n in range(15):
                held.append(step(problem, layer))
                if n % 3 == 2:
                    for tensors in held:
                        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))
                    held.clear()
                moesaic.trim_memory()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)
