"""Random calls, valid and not: the right numbers or a typed error, never a crash, and the next call works."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import moesaic
from layer_cases import make_problem, random_case, reference, relative_error

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
E, H, I = 3, 40, 24  # noqa: E741

FORMATS = st.sampled_from(["bf16", "fp5", "", None])
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool)


def layer() -> moesaic.ExpertsLayer:
    torch.manual_seed(0)
    return moesaic.ExpertsLayer(torch.randn(E, 2 * I, H), torch.randn(E, H, I))


LAYER = layer()


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0) -> Any:
    """Mostly a tensor of the shape, sometimes one with another size, rank, type, layout or device, or none at all."""
    dims = list(shape)
    oddity = draw(st.integers(0, 19))
    if oddity == 0:
        dims[draw(st.integers(0, len(dims) - 1))] = draw(st.integers(0, 5))
    elif oddity == 1:
        dims.insert(draw(st.integers(0, len(dims))), draw(st.integers(0, 2)))
    elif oddity == 2:
        dims.pop()
    elif oddity == 3:
        return draw(st.sampled_from([None, 1.5, "hidden", [[1.0]], torch.float32]))
    dtype = draw(st.sampled_from(DTYPES[:2] if oddity > 5 else DTYPES))
    tensor = (torch.rand(dims) * (high - low) + low).to(dtype)
    layout = draw(st.integers(0, 11))
    if layout == 0 and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == 1 and tensor.dim() > 0:
        tensor = torch.stack([tensor, tensor], -1)[..., 1]
    elif layout == 2 and tensor.dim() > 0 and tensor.shape[0] > 0:
        tensor = tensor[:1].expand(tensor.shape)
    elif layout == 3 and tensor.dim() > 1:
        tensor = tensor.to_sparse()
    elif layout == 4:
        tensor = tensor.to("meta")
    elif layout == 5 and tensor.is_floating_point() and tensor.numel() > 0:
        tensor = tensor.contiguous()
        tensor.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    return tensor


@st.composite
def loras(draw: Any) -> Any:
    """None, or up to two adapters whose pairs mostly fit."""
    made = []
    for _ in range(draw(st.integers(0, 2))):
        pairs = {}
        for name, (inputs, outputs) in {"gate_up": (H, 2 * I), "gate": (H, I), "up": (H, I), "down": (I, H)}.items():
            if draw(st.booleans()):
                rank = draw(st.integers(1, 40))
                a, b = draw(tensors((E, rank, inputs))), draw(tensors((E, outputs, rank)))
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                    pairs[name] = moesaic.LoraPair(a, b, draw(st.sampled_from([0.5, 2, float("inf"), float("nan")])))
        made.append(moesaic.Lora(**pairs))
    return made or None


@SETTINGS
@given(data=st.data())
def test_any_call_is_right_or_a_typed_error(data: st.DataObject) -> None:
    tokens, top_k = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 4))
    ids = data.draw(tensors((tokens, top_k), low=-1.0, high=E + 0.9))
    if isinstance(ids, torch.Tensor) and data.draw(st.integers(0, 9)) > 0 and not ids.is_meta:
        ids = ids.to_dense().nan_to_num().to(data.draw(st.sampled_from([torch.int64, torch.int32])))
    hidden, weights = data.draw(tensors((tokens, H))), data.draw(tensors((tokens, top_k)))
    lora = data.draw(loras())
    try:
        out, saved = LAYER.forward(hidden, ids, weights, lora)
        assert out.shape == hidden.shape and out.dtype == hidden.dtype
        assert saved is not None
        grads = LAYER.backward(saved, data.draw(tensors((tokens, H))))
        assert grads.hidden.shape == hidden.shape and grads.top_k_weights.shape == weights.shape
    except (TypeError, ValueError) as error:
        assert str(error), "an error without a word"


@SETTINGS
@given(
    gate_up=tensors((E, 2 * I, H)), down=tensors((E, H, I)), weight_format=st.sampled_from(["bf16", "fp5", "", None])
)
def test_any_weights_are_packed_or_a_typed_error(gate_up: Any, down: Any, weight_format: Any) -> None:
    try:
        packed = moesaic.ExpertsLayer(gate_up, down, weight_format)
    except (TypeError, ValueError) as error:
        assert str(error)
        return
    back = packed.unpack(torch.float32)
    for given_, unpacked in zip((gate_up, down), back, strict=True):
        assert torch.equal(given_.bfloat16().float().nan_to_num(7.0), unpacked.nan_to_num(7.0))


@settings(SETTINGS, max_examples=15)
@given(seed=st.integers(10_000, 2**31))
def test_valid_calls_are_right(seed: int) -> None:
    # With a few tokens a gradient may be a sum that all but cancels: test_layer_numerics.py adds up draws of those.
    case = random_case(seed)
    case = dataclasses.replace(case, tokens=max(case.tokens, 100))
    problem = make_problem(case)
    out = moesaic.moe_experts(problem.hidden, problem.ids, problem.weights, problem.layer(), problem.loras())
    grads = torch.autograd.grad(out, problem.leaves, problem.d_out)
    expected, expected_grads = reference(problem)
    assert relative_error(out, expected) <= 8e-3, case
    for name, grad, other in zip(problem.names, grads, expected_grads, strict=True):
        assert relative_error(grad, other) <= 8e-3, (name, case)
