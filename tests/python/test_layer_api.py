"""The experts layer as a Python object: attributes, errors, determinism, processes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from layer_cases import AdapterCase, LayerCase, Problem, make_problem
from moesaic import _core

ADAPTER = AdapterCase({"gate_up": 4, "down": 3}, {"gate_up": 2.0, "down": 0.5}, peft=True, dtype=torch.float32)
CASE = LayerCase(21, tokens=40, experts=5, top_k=2, hidden=96, intermediate=64, adapters=(ADAPTER,))

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def results(problem: Problem, layer: moesaic.ExpertsLayer) -> list[torch.Tensor]:
    """Output and all gradients."""
    out, saved = layer.forward(problem.hidden, problem.ids, problem.weights, problem.loras())
    assert saved is not None
    grads = layer.backward(saved, problem.d_out)
    lora = [g for adapter in grads.lora for pair in (adapter.gate_up, adapter.down) if pair for g in (pair.a, pair.b)]
    return [out, grads.hidden, grads.top_k_weights, *[g for g in lora if g is not None]]


def as_bytes(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def test_attributes() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size) == (5, 96, 64)
    assert layer.weight_format == "bf16"
    assert (
        repr(layer)
        == "ExpertsLayer(num_experts=5, hidden_size=96, intermediate_size=64, weight_format='bf16', activation='silu')"
    )


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate"), [(5, 96, 64), (3, 100, 50), (1, 257, 129), (8, 512, 256)]
)
def test_there_is_one_copy_of_the_weights(experts: int, hidden: int, intermediate: int) -> None:
    layer = make_problem(LayerCase(1, 1, experts, 1, hidden, intermediate)).layer()
    tiles = (
        3 * experts * (-(-hidden // 32) * 32) * (-(-intermediate // 32) * 32)
    )  # tiles of 16 rows and 32 columns, and pairs
    assert 2 * 3 * experts * hidden * intermediate <= layer.weight_bytes <= 1.02 * 2 * tiles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_back_as_they_were_given(dtype: torch.dtype) -> None:
    for hidden, intermediate in ((96, 64), (77, 45)):
        problem = make_problem(LayerCase(2, 1, 3, 1, hidden, intermediate))
        given = problem.gate_up_proj.to(dtype), problem.down_proj.to(dtype)
        strided = [weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in given]
        for weights in (given, strided):
            unpacked = moesaic.ExpertsLayer(*weights).unpack(dtype)
            for weight, expected in zip(unpacked, given, strict=True):
                assert weight.dtype == dtype and torch.equal(weight, expected.bfloat16().to(dtype))


def test_the_caller_may_free_its_weights() -> None:
    problem = make_problem(CASE)
    weights = problem.gate_up_proj.clone(), problem.down_proj.clone()
    layer = moesaic.ExpertsLayer(*weights)
    expected = as_bytes(results(problem, layer))
    for weight in weights:
        weight.fill_(float("nan"))
    assert as_bytes(results(problem, layer)) == expected


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_copies_share_the_weights_and_pickles_carry_them(activation: str) -> None:
    problem = make_problem(replace(CASE, activation=activation))
    layer = problem.layer()
    expected = as_bytes(results(problem, layer))
    assert copy.deepcopy(layer) is layer and copy.copy(layer) is layer
    restored = pickle.loads(pickle.dumps(layer))
    assert restored.weight_bytes == layer.weight_bytes and restored.activation == layer.activation == activation
    assert as_bytes(results(problem, restored)) == expected


def test_results_do_not_depend_on_threads_or_on_their_source() -> None:
    routings: tuple[dict[str, Any], ...] = ({"routing": "skewed", "skip": True}, {"routing": "one"})
    for n, routing in enumerate(routings):
        case = LayerCase(30 + n, 300, 7, 3, 160, 72, adapters=(ADAPTER,), hidden_dtype=torch.float32, **routing)
        problem = make_problem(case)
        expected = None
        for source in ("own", "openmp"):
            _core.set_thread_source(source)
            assert _core.get_thread_source() == source
            for threads in (1, 2, 3):
                moesaic.set_num_threads(threads)
                assert moesaic.get_num_threads() == threads
                for _ in range(2):
                    tensors = as_bytes(results(problem, problem.layer()))
                    expected = expected or tensors
                    assert tensors == expected, (source, threads)


def test_nan_stays_in_its_rows() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected = results(problem, layer)
    with torch.no_grad():
        problem.hidden[7] = float("nan")
        problem.hidden[9, 3] = float("inf")
    out, d_hidden, d_weights, *_ = results(problem, layer)
    others = [row for row in range(CASE.tokens) if row not in (7, 9)]
    assert out[7].isnan().all() and not out[9].isfinite().all()
    assert d_hidden[7].isnan().all() and d_weights[7].isnan().all()
    for value, plain in zip((out, d_hidden, d_weights), expected[:3], strict=True):
        assert torch.equal(value[others], plain[others])


def test_a_nan_weight_of_a_skipped_slot_is_ignored() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    problem.ids[3, 0], problem.ids[4, 1] = -1, CASE.experts
    expected = as_bytes(results(problem, layer))
    with torch.no_grad():
        problem.weights[3, 0] = problem.weights[4, 1] = float("nan")
    assert as_bytes(results(problem, layer)) == expected
    with torch.no_grad():
        problem.weights[5, 0] = float("nan")
    out, d_hidden, *_ = results(problem, layer)
    assert out[5].isnan().all() and d_hidden[5].isnan().all()
    assert not out[3].isnan().any() and not out[6].isnan().any()


def test_only_skipped_slots() -> None:
    problem = make_problem(CASE)
    problem.ids.fill_(-1)
    out, *grads = results(problem, problem.layer())
    assert not out.any() and all(not grad.any() for grad in grads)


# What is wrong, the error, and what its message says. Each changes the arguments of moe_experts in place.
BAD_ARGUMENTS: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("hidden is a list", lambda a: a.update(hidden=[[1.0]]), TypeError, "hidden is a list"),
    ("hidden fp16", lambda a: a.update(hidden=a["hidden"].half()), ValueError, "hidden is .*float16; expected"),
    ("hidden fp64", lambda a: a.update(hidden=a["hidden"].double()), ValueError, "hidden is torch.float64"),
    ("hidden int", lambda a: a.update(hidden=a["hidden"].int()), ValueError, "hidden is .*int32"),
    ("hidden 1-d", lambda a: a.update(hidden=a["hidden"][0]), ValueError, r"hidden has shape \[96\]"),
    ("hidden 3-d", lambda a: a.update(hidden=a["hidden"][None]), ValueError, r"hidden has shape \[1, 40, 96\]"),
    ("hidden 4-d", lambda a: a.update(hidden=a["hidden"][None, None]), ValueError, "hidden has shape"),
    ("hidden 0-d", lambda a: a.update(hidden=torch.tensor(1.0)), ValueError, r"hidden has shape \[\]"),
    ("hidden too wide", lambda a: a.update(hidden=torch.zeros(40, 97)), ValueError, r"hidden has shape \[40, 97\]"),
    ("hidden meta", lambda a: a.update(hidden=a["hidden"].to("meta")), ValueError, "hidden is on the meta device"),
    ("hidden sparse", lambda a: a.update(hidden=a["hidden"].detach().to_sparse()), ValueError, "hidden"),
    ("ids fp32", lambda a: a.update(ids=a["ids"].float()), ValueError, "top_k_ids is .*float32; expected int"),
    ("ids int16", lambda a: a.update(ids=a["ids"].short()), ValueError, "top_k_ids is torch.int16; expected int64"),
    ("ids bool", lambda a: a.update(ids=a["ids"].bool()), ValueError, "top_k_ids is torch.bool"),
    ("ids short", lambda a: a.update(ids=a["ids"][:-1]), ValueError, r"top_k_ids has shape \[39, 2\]"),
    ("ids 1-d", lambda a: a.update(ids=a["ids"][:, 0]), ValueError, r"top_k_ids has shape \[40\]"),
    ("ids none", lambda a: a.update(ids=None), TypeError, "top_k_ids is a NoneType"),
    ("id too large", lambda a: a["ids"].__setitem__((3, 1), 6), ValueError, r"top_k_ids\[3, 1\] is 6; expected -1"),
    ("id too small", lambda a: a["ids"].__setitem__((0, 0), -2), ValueError, r"top_k_ids\[0, 0\] is -2"),
    ("id huge", lambda a: a["ids"].__setitem__((39, 1), 2**40), ValueError, r"top_k_ids\[39, 1\] is 1099511627776"),
    ("no slots", lambda a: a.update(ids=a["ids"][:, :0], weights=a["weights"][:, :0]), ValueError, "ids has k = 0"),
    ("weights fp16", lambda a: a.update(weights=a["weights"].half()), ValueError, "top_k_weights is .*float16"),
    ("weights shape", lambda a: a.update(weights=a["weights"][:, :1]), ValueError, r"weights has shape \[40, 1\]"),
    ("weights float", lambda a: a.update(weights=0.5), TypeError, "top_k_weights is a float"),
    ("layer", lambda a: a.update(layer=torch.nn.Linear(2, 2)), TypeError, "layer is a Linear"),
    ("lora a dict", lambda a: a.update(lora={"gate": None}), TypeError, "lora is a dict"),
    ("lora holds a string", lambda a: a.update(lora=[moesaic.Lora(), "x"]), TypeError, r"lora\[1\] is a str"),
    ("more slots than int32", lambda a: a.update(
        hidden=torch.zeros(1, 96).expand(2**30, 96), ids=torch.zeros(1, 2, dtype=torch.int32).expand(2**30, 2),
        weights=torch.zeros(1, 2).expand(2**30, 2)), ValueError, r"T \* k"),
]  # fmt: skip


def _arguments(problem: Problem, layer: moesaic.ExpertsLayer) -> dict[str, Any]:
    ids = problem.ids.clone()
    return {"hidden": problem.hidden, "ids": ids, "weights": problem.weights, "layer": layer, "lora": problem.loras()}


@pytest.mark.parametrize(
    ("change", "error", "message"), [row[1:] for row in BAD_ARGUMENTS], ids=[row[0] for row in BAD_ARGUMENTS]
)
def test_bad_arguments(change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected = as_bytes(results(problem, layer))
    arguments = _arguments(problem, layer)
    change(arguments)
    for with_gradient in (True, False):
        with pytest.raises(error, match=message), torch.set_grad_enabled(with_gradient):
            moesaic.moe_experts(*arguments.values())
        assert as_bytes(results(problem, layer)) == expected, "the next call works"


E, H, I = CASE.experts, CASE.hidden, CASE.intermediate  # noqa: E741
# The pair, its tensors, and what the message says.
BAD_LORA: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, str]] = [
    (
        "gate_up",
        (E, 4, H),
        (E, 2 * I, 5),
        torch.float32,
        r"lora\[1\].gate_up.b has shape \[5, 128, 5\]; expected .*r = 4",
    ),
    ("gate_up", (E, 4, H + 1), (E, 2 * I, 4), torch.float32, r"lora\[1\].gate_up.a has shape"),
    ("gate_up", (E, 4, H), (E, I, 4), torch.float32, r"lora\[1\].gate_up.b has shape"),
    ("gate", (E, 4, H), (E, 2 * I, 4), torch.float32, r"lora\[1\].gate.b has shape"),
    ("up", (E + 1, 4, H), (E, I, 4), torch.float32, r"lora\[1\].up.a has shape"),
    ("down", (E, 4, H), (E, I, 4), torch.float32, r"lora\[1\].down.a has shape"),
    ("down", (E * 4, I), (E, H, 4), torch.float32, r"lora\[1\].down.a has shape \[20, 64\]"),
    ("down", (E, 0, I), (E, H, 0), torch.float32, r"lora\[1\].down.a has rank 0"),
    ("down", (E, 4, I), (E, H, 4), torch.float16, r"lora\[1\].down.a is .*float16; expected bfloat16 or float32"),
    (
        "gate_up",
        (E, 4, H),
        (E, 2 * I, 4),
        torch.float64,
        r"lora\[1\].gate_up.a is torch.float64; expected bfloat16 or float32",
    ),
    ("gate_up", (1, E, 4, H), (E, 2 * I, 4), torch.float32, r"lora\[1\].gate_up.a has shape \[1, 5, 4, 96\]"),
]


@pytest.mark.parametrize(("name", "a", "b", "dtype", "message"), BAD_LORA)
def test_bad_adapters(name: str, a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    expected = as_bytes(results(problem, layer))
    pair = moesaic.LoraPair(torch.zeros(a, dtype=dtype), torch.zeros(b, dtype=dtype), 1.0)
    with pytest.raises(ValueError, match=message):
        layer.forward(problem.hidden, problem.ids, problem.weights, [*problem.loras(), moesaic.Lora(**{name: pair})])
    assert as_bytes(results(problem, layer)) == expected


@pytest.mark.parametrize(
    ("a", "b", "experts", "message"),
    [
        (
            (E * 4 + 1, H),
            (2 * I, E * 4),
            E,
            r"lora\[0\].gate_up.a has shape \[21, 96\]; expected \[E \* r, in\] with E = 5",
        ),
        ((E * 4, H), (2 * I, E * 4 + 1), E, r"lora\[0\].gate_up.b has shape \[128, 21\]; expected \[out, r \* E\]"),
        ((E, 4, H), (E, 2 * I, 4), E, r"lora\[0\].gate_up.a has shape \[5, 4, 96\]; expected \[E \* r, in\]"),
        ((E * 4, H), (2 * I, E * 4), 2 * E, r"lora\[0\].gate_up.a has shape \[10, 2, 96\]; expected \[E = 5"),
        ((E * 4, H), (2 * I, E * 5), E, r"lora\[0\].gate_up.b has shape \[5, 128, 5\]; expected .*r = 4"),
    ],
)
def test_bad_adapters_in_two_matrices(a: tuple[int, ...], b: tuple[int, ...], experts: int, message: str) -> None:
    problem = make_problem(CASE)
    pair = moesaic.LoraPair(torch.zeros(a), torch.zeros(b), 1.0, experts)
    with pytest.raises(ValueError, match=message):
        moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, problem.layer(), moesaic.Lora(gate_up=pair))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            (E * 4, H),
            (2 * I, E * 4),
            r"lora\[0\].gate_up.a has shape \[20, 96\] and its pair has no experts=; expected \[E, r, in\], or "
            r"\[E \* r, in\] with experts=E",
        ),
        (
            (E, 4, H),
            (2 * I, E * 4),
            r"lora\[0\].gate_up.b has shape \[128, 20\] and its pair has no experts=; expected \[E",
        ),
    ],
)
def test_two_matrices_without_their_experts(a: tuple[int, ...], b: tuple[int, ...], message: str) -> None:
    problem = make_problem(CASE)
    pair = moesaic.LoraPair(torch.zeros(a), torch.zeros(b), 1.0)
    with pytest.raises(ValueError, match=message):
        moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, problem.layer(), moesaic.Lora(gate_up=pair))


def test_bad_adapter_types() -> None:
    tensor = torch.zeros(2, 2, 2)
    with pytest.raises(TypeError, match="experts is a str; expected an int or None"):
        moesaic.LoraPair(tensor, tensor, 1.0, "3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="experts is 0; expected at least 1"):
        moesaic.LoraPair(tensor, tensor, 1.0, 0)
    with pytest.raises(TypeError, match=r"a is a list; expected a torch\.Tensor"):
        moesaic.LoraPair([1.0], tensor, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="b is a NoneType"):
        moesaic.LoraPair(tensor, None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale is a str; expected a float"):
        moesaic.LoraPair(tensor, tensor, "2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"down is a tuple; expected a moesaic\.LoraPair or None"):
        moesaic.Lora(down=(tensor, tensor, 1.0))  # type: ignore[arg-type]
    problem = make_problem(CASE)
    pair = problem.loras()[0].down
    assert pair is not None
    infinite = moesaic.Lora(down=moesaic.LoraPair(pair.a, pair.b, float("inf")))
    with pytest.raises(ValueError, match=r"lora\[0\].down.scale is inf"):
        moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, problem.layer(), infinite)


def test_bad_weights() -> None:
    gate_up, down = torch.zeros(2, 32, 32), torch.zeros(2, 32, 16)
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((gate_up.requires_grad_(True), down), ValueError, "gate_up_proj requires a gradient.*freeze"),
        ((gate_up.detach(), torch.nn.Parameter(down)), ValueError, "down_proj requires a gradient"),
        ((None, down), TypeError, "gate_up_proj is a NoneType"),
        ((gate_up.detach(), down.numpy()), TypeError, "down_proj is a ndarray"),
        (
            (gate_up.detach().double(), down),
            ValueError,
            "gate_up_proj is torch.float64; expected bfloat16, float16 or float32",
        ),
        ((gate_up.detach()[0], down), ValueError, "gate_up_proj and down_proj have 2 and 3 dimensions"),
        ((gate_up.detach(), down[:1]), ValueError, "down_proj has shape"),
        ((gate_up.detach()[:, 1:], down), ValueError, "gate_up_proj has shape"),
        ((gate_up.detach(), down.transpose(1, 2)), ValueError, "has shape"),
        ((gate_up.detach()[:0], down[:0]), ValueError, "num_experts"),
        ((gate_up.detach(), down.to("meta")), ValueError, "down_proj is on the meta device"),
        ((gate_up.detach(), down, "int3"), ValueError, 'weight_format is "int3"; expected "bf16"'),
        ((gate_up.detach(), down, 4), TypeError, "weight_format is a int"),
        ((gate_up.detach(), down, "bf16", None), TypeError, "activation is a NoneType"),
        (
            (gate_up.detach(), down, "bf16", "gelu"),
            ValueError,
            'activation is "gelu"; expected "silu" or "gelu_tanh"',
        ),
    ]
    for arguments, error, message in bad:
        with pytest.raises(error, match=message):
            moesaic.ExpertsLayer(*arguments)
    assert moesaic.ExpertsLayer(gate_up.detach(), down).num_experts == 2


def test_bad_saved_and_d_out() -> None:
    problem = make_problem(CASE)
    layer, other = problem.layer(), make_problem(LayerCase(9, 40, 5, 2, 96, 32)).layer()
    expected = as_bytes(results(problem, layer))
    _, saved = layer.forward(problem.hidden, problem.ids, problem.weights, problem.loras())
    assert saved is not None
    with pytest.raises(ValueError, match=r"d_out has shape \[39, 96\]"):
        layer.backward(saved, problem.d_out[:-1])
    with pytest.raises(ValueError, match=r"d_out is torch\.float64"):
        layer.backward(saved, problem.d_out.double())
    with pytest.raises(TypeError, match="d_out is a float"):
        layer.backward(saved, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="saved is a NoneType"):
        layer.backward(None, problem.d_out)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"saved\.state is"):
        other.backward(saved, problem.d_out)
    assert as_bytes(results(problem, layer)) == expected


def test_bad_number_of_threads() -> None:
    for bad in (0, -1, 5000):
        with pytest.raises(ValueError, match=str(bad)):
            moesaic.set_num_threads(bad)
    with pytest.raises(TypeError, match="n is '2', expected a whole number"):
        moesaic.set_num_threads("2")  # type: ignore[arg-type]


def test_memory_that_cannot_be_had(run_python: RunPython) -> None:
    result = run_python(
        """
import resource, torch, moesaic
layer = moesaic.ExpertsLayer(torch.randn(2, 4096, 64), torch.randn(2, 64, 2048))
def call(tokens):
    return layer.forward(torch.randn(tokens, 64), torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1))
torch.manual_seed(0)
expected = call(16)[0]
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
for _ in range(3):
    try:
        call(100_000)  # a state of 800 MB
    except MemoryError:
        pass
    else:
        raise SystemExit("no MemoryError")
torch.manual_seed(0)
assert torch.equal(call(16)[0], expected)
assert moesaic.memory_stats()["peak_in_use_bytes"] < 200 << 20
print("good")
"""
    )
    assert result.stdout == "good\n", result.stdout + result.stderr


def test_the_python_lock_is_released() -> None:
    problem = make_problem(LayerCase(40, 3000, 2, 2, 512, 512))
    layer = problem.layer()
    moesaic.set_num_threads(1)
    calls: list[tuple[float, float]] = []
    ticks: list[float] = []

    def inside() -> int:
        """Ticks in the middle half of the call that had most of them: its ends are Python's."""
        most = 0
        for began, ended in calls:
            quarter = (ended - began) / 4
            most = max(most, sum(began + quarter < tick < ended - quarter for tick in ticks))
        return most

    def compute() -> None:
        # A busy machine may not let the other thread run during one call.
        while inside() < 3 and len(calls) < 100:
            began = time.perf_counter()
            layer.forward(problem.hidden, problem.ids, problem.weights)
            calls.append((began, time.perf_counter()))

    thread = threading.Thread(target=compute)
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    assert inside() >= 3, f"{len(calls)} calls, at most {inside()} ticks in the middle of one"


def test_keyboard_interrupt_is_not_lost() -> None:
    problem = make_problem(LayerCase(41, 64, 2, 2, 256, 256))
    layer = problem.layer()
    expected = as_bytes(results(problem, layer))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            while time.perf_counter() - began < 60:
                layer.forward(problem.hidden, problem.ids, problem.weights, problem.loras())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert as_bytes(results(problem, layer)) == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_after_use() -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    moesaic.set_num_threads(2)
    expected = as_bytes(results(problem, layer))
    for source in ("openmp", "own"):
        _core.set_thread_source(source)
        results(problem, layer)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            verdict = b"raised"
            try:
                signal.alarm(60)  # a child that hangs is ended
                same = as_bytes(results(problem, layer)) == expected
                verdict = b"same" if same else b"other"
            finally:
                os.write(write, verdict)
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            verdict = pipe.read()
        os.waitpid(child, 0)
        assert verdict == b"same", (source, verdict)
        assert as_bytes(results(problem, layer)) == expected, "the parent goes on"


def test_a_forced_isa_that_is_not_there(run_python: RunPython) -> None:
    names = ["no_such_isa", *(t["name"] for t in _core.isa_tiers() if not (t["supported"] and t["permitted"]))]
    for name in names:
        result = run_python(
            """
import torch, moesaic
for call in (moesaic.isa, lambda: moesaic.ExpertsLayer(torch.zeros(1, 64, 32), torch.zeros(1, 32, 32))):
    try:
        call()
    except moesaic.UnsupportedHostError as error:
        print(isinstance(error, RuntimeError), error)
""",
            MOESAIC_ISA=name,
        )
        lines = result.stdout.splitlines()
        assert len(lines) == 2 and all(line.startswith("True") and name in line for line in lines), (
            result.stdout + result.stderr
        )
        if name == "no_such_isa":
            known = dict.fromkeys(t["name"] for t in _core.isa_tiers() if t["compiled"])
            assert sorted(lines[0].partition("this build has ")[2].split(", ")) == sorted(known)


def test_thread_source_from_the_environment(run_python: RunPython) -> None:
    program = "import moesaic; from moesaic import _core; print(_core.get_thread_source())"
    assert run_python(program, MOESAIC_THREAD_SOURCE="own").stdout == "own\n"
    assert run_python(program, MOESAIC_THREAD_SOURCE="openmp").stdout == "openmp\n"
    result = run_python(program, MOESAIC_THREAD_SOURCE="pool")
    assert result.returncode != 0 and 'MOESAIC_THREAD_SOURCE is "pool"' in result.stderr


def test_clock_from_the_environment(run_python: RunPython) -> None:
    result = run_python("import moesaic", MOESAIC_CLOCK="sytem")
    assert result.returncode != 0 and 'MOESAIC_CLOCK is "sytem"; expected "system", or nothing' in result.stderr
    for known in ("system", ""):
        program = "from moesaic import _core; _core.set_timers_enabled(True); print(_core.clock_ns() > 0)"
        assert run_python(program, MOESAIC_CLOCK=known).stdout == "True\n"


def test_number_of_threads_from_the_environment(run_python: RunPython) -> None:
    assert run_python("import moesaic; print(moesaic.get_num_threads())", MOESAIC_NUM_THREADS="3").stdout == "3\n"


def test_profile(tmp_path: Path) -> None:
    problem = make_problem(CASE)
    layer = problem.layer()
    with moesaic.profile() as profile:
        results(problem, layer)
        with moesaic.profile() as inner:
            results(problem, layer)
        results(problem, layer)
    rows = {row["name"]: row for row in profile.phases()}
    assert {"gate_up_gemm", "down_gemm", "activation", "D3_gemm", "A1_silu_backward", "GU1_base_pass_gate"} <= set(rows)
    for row in rows.values():
        assert row["calls"] > 0 and row["thread_ms"] >= 0
        assert row["max_thread_ms"] is not None and row["min_thread_ms"] is not None and row["threads"] is not None
        assert 0 <= row["min_thread_ms"] <= row["max_thread_ms"] <= row["thread_ms"] * (1 + 1e-9)
    inner_rows = {row["name"]: row for row in inner.phases()}
    assert inner_rows["gate_up_gemm"]["calls"] * 3 == rows["gate_up_gemm"]["calls"]
    assert inner_rows["gate_up_gemm"]["span_ms"] is None
    kept = profile.phases()
    results(problem, layer)
    assert profile.phases() == kept, "nothing counts after the context"
    profile.save(tmp_path / "run.json")
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["phases"] == kept and document["isa"] == moesaic.isa() and document["wall_ms"] > 0
    with pytest.raises(ValueError, match=r"run\.txt.*\.json"):
        profile.save(tmp_path / "run.txt")


def test_profile_of_a_process(run_python: RunPython, tmp_path: Path) -> None:
    program = """
import torch, moesaic
layer = moesaic.ExpertsLayer(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
layer.forward(torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
"""
    result = run_python(program, MOESAIC_PROFILE="whole.json")
    assert result.returncode == 0, result.stderr
    names = {row["name"] for row in json.loads((tmp_path / "whole.json").read_text())["phases"]}
    assert "gate_up_gemm" in names
    for wrong, message in (
        ("whole.bin", "expected a name that ends in .json"),
        ("none/a.json", "a folder that exists"),
    ):
        result = run_python(program, MOESAIC_PROFILE=wrong)
        assert result.returncode != 0 and "ValueError: MOESAIC_PROFILE: path is " in result.stderr
        assert message in result.stderr
