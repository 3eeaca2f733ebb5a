"""moe_experts inside autograd: saved tensors, checkpoints, hooks, graphs used twice, threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moesaic
from layer_cases import AdapterCase, LayerCase, Problem, make_problem

PEFT = AdapterCase({"gate_up": 5, "down": 3}, {"gate_up": 2.0, "down": 0.5}, peft=True, dtype=torch.float32)
CLASSIC = AdapterCase(
    {"gate": 2, "up": 7, "down": 3}, {"gate": 1.0, "up": 2.0, "down": 0.5}, peft=False, dtype=torch.bfloat16
)
CASE = LayerCase(7, tokens=45, experts=6, top_k=3, hidden=64, intermediate=48, adapters=(PEFT, CLASSIC), skip=True)


class Model:
    """A problem with its layer."""

    def __init__(self, case: LayerCase = CASE) -> None:
        self.problem: Problem = make_problem(case)
        self.layer = self.problem.layer()

    def forward(self, hidden: torch.Tensor | None = None) -> torch.Tensor:
        p = self.problem
        return moesaic.moe_experts(p.hidden if hidden is None else hidden, p.ids, p.weights, self.layer, p.loras())

    def gradients(self, out: torch.Tensor, **options: bool) -> list[torch.Tensor]:
        return list(torch.autograd.grad(out, self.problem.leaves, self.problem.d_out, **options))


@pytest.fixture
def model() -> Model:
    return Model()


def assert_same(values: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bitwise."""
    for n, (value, other) in enumerate(zip(values, expected, strict=True)):
        assert value.dtype == other.dtype
        assert torch.equal(value, other), f"tensor {n} differs"


def saved_bytes() -> int:
    return moesaic.memory_stats()["in_use_bytes"]


def test_autograd_equals_the_calls_without_it(model: Model) -> None:
    problem = model.problem
    out = model.forward()
    grads = model.gradients(out)
    plain_out, saved = model.layer.forward(problem.hidden, problem.ids, problem.weights, problem.loras())
    assert saved is not None and saved.nbytes > 0
    assert not plain_out.requires_grad
    assert torch.equal(out, plain_out)
    for _ in range(2):  # saved may be used again
        plain = model.layer.backward(saved, problem.d_out)
        assert torch.equal(plain.hidden, grads[0]) and torch.equal(plain.top_k_weights, grads[1])
        classic = plain.lora[1]
        assert plain.lora[0].gate is None and classic.gate_up is None
        assert classic.gate is not None and classic.up is not None and classic.down is not None
        flat = [classic.gate.a, classic.gate.b, classic.up.a, classic.up.b, classic.down.a, classic.down.b]
        assert_same(flat, grads[6:])  # type: ignore[arg-type]


def test_gradients_have_the_strides_of_their_tensors(model: Model) -> None:
    p = model.problem
    views, pairs = [], {}
    for name, a, b, scale in p.adapters[0].pairs(p.adapters[0].leaves):
        views += [a, b]
        pairs[name] = moesaic.LoraPair(a, b, scale)
    assert not views[1].is_contiguous()
    out = moesaic.moe_experts(p.hidden, p.ids, p.weights, model.layer, moesaic.Lora(**pairs))
    for view, grad in zip(views, torch.autograd.grad(out, views, p.d_out), strict=True):
        assert grad.dtype == view.dtype and grad.stride() == view.stride()
    for leaf, grad in zip(p.leaves, model.gradients(model.forward()), strict=True):
        assert grad.dtype == leaf.dtype and grad.stride() == leaf.stride()


def test_adapters_of_all_experts_in_two_matrices(model: Model) -> None:
    p = model.problem
    e, (adapter, other) = CASE.experts, p.adapters
    pairs = {
        name: moesaic.LoraPair(adapter.leaves[2 * n], adapter.leaves[2 * n + 1], adapter.case.scales[name], e)
        for n, name in enumerate(adapter.case.ranks)
    }
    loras = [moesaic.Lora(**pairs), other.lora()]
    out = moesaic.moe_experts(p.hidden, p.ids, p.weights, model.layer, loras)
    expected = model.forward()
    assert torch.equal(out, expected)
    grads = model.gradients(out)
    assert_same(grads, model.gradients(expected))
    for leaf, grad in zip(p.leaves, grads, strict=True):
        assert grad.shape == leaf.shape and grad.stride() == leaf.stride()
    _, saved = model.layer.forward(p.hidden, p.ids, p.weights, loras)
    assert saved is not None
    plain = model.layer.backward(saved, p.d_out).lora[0]
    assert plain.gate_up is not None and plain.down is not None
    assert_same([plain.gate_up.a, plain.gate_up.b, plain.down.a, plain.down.b], grads[2:6])  # type: ignore[list-item]
    # Strides of any kind, in and out.
    a, b = (leaf.detach() for leaf in adapter.leaves[:2])
    strided = [a.t().contiguous().t().requires_grad_(), torch.stack((b, b), 2)[:, :, 0].requires_grad_()]
    pairs["gate_up"] = moesaic.LoraPair(*strided, adapter.case.scales["gate_up"], e)  # type: ignore[arg-type]
    out = moesaic.moe_experts(p.hidden, p.ids, p.weights, model.layer, [moesaic.Lora(**pairs), other.lora()])
    assert torch.equal(out, expected)
    assert_same(list(torch.autograd.grad(out, strided, p.d_out)), grads[2:4])


def test_gradient_of_a_slice_or_an_expanded_tensor_is_right(model: Model) -> None:
    p = model.problem
    e, h, i = CASE.experts, CASE.hidden, CASE.intermediate
    a = (torch.randn(1, 4, h) * h**-0.5).requires_grad_()
    b = torch.randn(e, 2 * i + 8, 8).requires_grad_()

    def loss(a_view: torch.Tensor, b_view: torch.Tensor) -> torch.Tensor:
        pair = moesaic.LoraPair(a_view, b_view, 0.5)
        return (
            moesaic.moe_experts(p.hidden, p.ids, p.weights, model.layer, moesaic.Lora(gate_up=pair)) * p.d_out
        ).sum()

    strided = torch.autograd.grad(loss(a.expand(e, 4, h), b[:, 3 : 2 * i + 3, ::2]), [a, b])
    dense_a, dense_b = a.expand(e, 4, h).clone(), b[:, 3 : 2 * i + 3, ::2].clone()
    dense = torch.autograd.grad(loss(dense_a, dense_b), [dense_a, dense_b])
    assert torch.allclose(strided[0], dense[0].sum(0, keepdim=True), rtol=1e-5, atol=1e-6)
    assert torch.equal(strided[1][:, 3 : 2 * i + 3, ::2], dense[1])


@pytest.mark.parametrize("frozen", range(2 + 2 * 5))
def test_a_frozen_tensor_gets_no_gradient_and_changes_no_other(model: Model, frozen: int) -> None:
    expected = model.gradients(model.forward())
    model.problem.leaves[frozen].requires_grad_(False)
    others = [leaf for n, leaf in enumerate(model.problem.leaves) if n != frozen]
    model.forward().backward(model.problem.d_out)
    assert model.problem.leaves[frozen].grad is None
    assert_same([leaf.grad for leaf in others], [g for n, g in enumerate(expected) if n != frozen])  # type: ignore[misc]


def test_only_one_tensor_requires_a_gradient(model: Model) -> None:
    expected = model.gradients(model.forward())
    leaves = model.problem.leaves
    for leaf in leaves:
        leaf.requires_grad_(False)
    for leaf, grad in zip(leaves, expected, strict=True):
        leaf.requires_grad_(True)
        assert torch.equal(torch.autograd.grad(model.forward(), leaf, model.problem.d_out)[0], grad)
        leaf.requires_grad_(False)


def test_nothing_is_saved_where_nothing_needs_a_gradient(model: Model) -> None:
    expected = model.forward().detach().clone()
    before = saved_bytes()
    with torch.no_grad():
        out = model.forward()
    assert torch.equal(out, expected) and out.grad_fn is None
    for leaf in model.problem.leaves:
        leaf.requires_grad_(False)
    second = model.forward()
    with torch.inference_mode():
        third = model.forward()
    assert second.grad_fn is None and torch.equal(second, expected) and torch.equal(third, expected)
    assert saved_bytes() - before <= 3 * 1.25 * out.nbytes  # three outputs and the waste of size classes


def test_retain_graph_and_a_second_backward(model: Model) -> None:
    out = model.forward()
    first = model.gradients(out, retain_graph=True)
    assert_same(model.gradients(out), first)
    with pytest.raises(RuntimeError, match="second time"):
        model.gradients(out)


def test_forwards_before_backwards_in_reverse_order(model: Model) -> None:
    inputs = [torch.randn_like(model.problem.hidden).requires_grad_() for _ in range(4)]
    leaves = model.problem.leaves[1:]

    def gradients(out: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(out, [hidden, *leaves], model.problem.d_out))

    expected = [gradients(model.forward(hidden), hidden) for hidden in inputs]
    outs = [model.forward(hidden) for hidden in inputs]
    for n in (3, 1, 2, 0):
        assert_same(gradients(outs[n], inputs[n]), expected[n])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(model: Model, use_reentrant: bool) -> None:
    expected_out = model.forward()
    expected = model.gradients(expected_out)
    out = checkpoint(model.forward, model.problem.hidden, use_reentrant=use_reentrant)
    assert torch.equal(out, expected_out)
    out.backward(model.problem.d_out)
    assert_same([leaf.grad for leaf in model.problem.leaves], expected)  # type: ignore[misc]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_stack_keeps_no_state_alive(use_reentrant: bool) -> None:
    case = LayerCase(3, tokens=256, experts=4, top_k=2, hidden=64, intermediate=256, adapters=(PEFT,))
    models = [Model(case) for _ in range(4)]
    state = models[0].layer.forward(models[0].problem.hidden, models[0].problem.ids, models[0].problem.weights)[1]
    assert state is not None and state.nbytes > 256 * 2 * 256 * 2 * 2  # more than G and U
    one_state = state.nbytes
    del state
    before = saved_bytes()
    hidden = models[0].problem.hidden.float()
    plain = hidden
    for model in models:
        plain = plain + model.forward(plain)
    assert saved_bytes() - before > 4 * one_state
    expected = torch.autograd.grad(plain.sum(), [model.problem.adapters[0].leaves[0] for model in models])
    del plain, model
    hidden = hidden.detach().requires_grad_()
    before = saved_bytes()
    out = hidden
    for model in models:
        out = out + checkpoint(model.forward, out, use_reentrant=use_reentrant)
    assert saved_bytes() - before < one_state, "only outputs stay"
    out.sum().backward()
    assert_same([model.problem.adapters[0].leaves[0].grad for model in models], list(expected))  # type: ignore[misc]
    del out
    grads = sum(leaf.nbytes for model in models for leaf in model.problem.leaves) + hidden.nbytes
    assert saved_bytes() - before < one_state + grads


def test_saved_tensors_die_with_the_graph(model: Model) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        seen.append(weakref.ref(copy))
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.forward()
    assert len(seen) == 1 + len(model.problem.leaves) and all(ref() is not None for ref in seen)
    model.gradients(out)
    assert all(ref() is None for ref in seen), "backward frees what forward saved"


Packed = tuple[bytes, torch.Size, torch.dtype]


def _to_bytes(tensor: torch.Tensor) -> Packed:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), tensor.shape, tensor.dtype


def _from_bytes(packed: Packed) -> torch.Tensor:
    data, shape, dtype = packed
    if dtype == torch.uint8:
        return torch.frombuffer(bytearray(3) + data, dtype=dtype, offset=3)  # on purpose at an odd address
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda t: t, lambda t: t.clone()), (_to_bytes, _from_bytes), (lambda t: t.detach().clone(), lambda t: t)],
    ids=["clone", "bytes at an odd address", "copy"],
)
def test_saved_tensors_may_come_back_as_others(
    model: Model, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> None:
    expected = model.gradients(model.forward())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = model.forward()
    assert_same(model.gradients(out), expected)


def test_save_on_cpu(model: Model) -> None:
    expected = model.gradients(model.forward())
    with torch.autograd.graph.save_on_cpu():
        out = model.forward()
    assert_same(model.gradients(out), expected)


def test_the_order_of_engine_and_bookkeeping_changes_no_bit(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that cannot be asked for hooks has the engine compute inside the autograd function."""
    out = model.forward()
    grads = model.gradients(out)
    monkeypatch.setattr(moesaic.autograd, "_top_hooks", lambda ignore_is_tracing: True)
    other = model.forward()
    assert torch.equal(other, out)
    assert_same(model.gradients(other), grads)


def test_a_profiler_sees_the_engine_inside_the_function(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = moesaic.autograd.staging.forward

    def marked(*args: Any) -> Any:
        with torch.profiler.record_function("engine"):
            return plain(*args)

    monkeypatch.setattr(moesaic.autograd.staging, "forward", marked)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.gradients(model.forward())
    (event,) = [event for event in profile.events() if event.name == "engine"]
    assert event.cpu_parent.name == "_MoeExperts"


def test_functorch_is_refused_but_not_what_it_leaves(model: Model) -> None:
    left: list[torch.Tensor] = []

    def differentiated(hidden: torch.Tensor) -> torch.Tensor:
        left.append(hidden)
        return model.forward(hidden).sum()

    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(differentiated)(model.problem.hidden.detach())
    assert torch.equal(model.forward(left[0]), model.forward())


def test_a_refused_call_leaves_nothing_behind(model: Model) -> None:
    """The ids are read by the engine, when autograd has made its node already."""
    expected = model.forward()
    before = saved_bytes()
    model.problem.ids[3, 1] = 99
    with pytest.raises(ValueError, match=r"top_k_ids\[3, 1\] is 99"):
        model.forward()
    assert saved_bytes() == before
    model.problem.ids[3, 1] = -1
    assert model.forward().shape == expected.shape


def test_a_saved_state_that_was_changed_is_an_error(model: Model) -> None:
    expected = model.gradients(model.forward())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: torch.full_like(t, 255) if t.dtype == torch.uint8 else t
    ):
        out = model.forward()
    with pytest.raises(ValueError, match="saved"):
        model.gradients(out)
    assert_same(model.gradients(model.forward()), expected)


def test_changing_an_input_in_place_is_noticed(model: Model) -> None:
    hidden = torch.randn_like(model.problem.hidden)
    out = model.forward(hidden)
    hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, model.problem.weights, model.problem.d_out)


def test_an_adapter_changed_through_data_counts_in_the_next_call(model: Model) -> None:
    leaf = model.problem.adapters[0].leaves[1]
    before = model.forward().detach()
    leaf.data = leaf.data * -3.0  # other memory, same version
    leaf.data.mul_(0.5)
    changed = model.forward()
    assert not torch.equal(before, changed)
    fresh = Model()
    fresh.problem.adapters[0].leaves[1] = leaf.detach().clone().requires_grad_()
    assert torch.equal(changed, fresh.forward())
    assert_same(model.gradients(changed), fresh.gradients(fresh.forward()))


def test_second_derivatives_are_refused(model: Model) -> None:
    expected, x = model.gradients(model.forward()), model.problem.hidden
    (grad,) = torch.autograd.grad(model.forward().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        (grad.square().sum() + x.sum()).backward()
    assert_same(model.gradients(model.forward()), expected)


def test_expanded_and_strided_gradients_of_the_output(model: Model) -> None:
    ones = torch.ones_like(model.problem.d_out)
    expected = torch.autograd.grad(model.forward(), model.problem.leaves, ones)
    model.forward().sum().backward()  # d_out is one element, expanded
    assert_same([leaf.grad for leaf in model.problem.leaves], list(expected))  # type: ignore[misc]
    transposed = ones.t().contiguous().t()
    assert_same(list(torch.autograd.grad(model.forward(), model.problem.leaves, transposed)), list(expected))


def test_strided_inputs(model: Model) -> None:
    p = model.problem
    expected, grads = model.forward(), model.gradients(model.forward())
    hidden = p.hidden.detach().t().contiguous().t().requires_grad_()
    ids = torch.stack([p.ids, p.ids], -1)[..., 0]
    weights = torch.stack([p.weights.detach()] * 2, 1)[:, 1].requires_grad_()
    out = moesaic.moe_experts(hidden, ids, weights, model.layer, p.loras())
    assert torch.equal(out, expected)
    assert_same(list(torch.autograd.grad(out, [hidden, weights], p.d_out)), grads[:2])


class OtherTensor(torch.Tensor):
    """Says of itself what a tensor says, in its own way."""


def test_tensors_of_other_types_are_read_through_their_attributes(model: Model) -> None:
    p = model.problem
    expected = model.forward()
    hidden = p.hidden.detach().as_subclass(OtherTensor).requires_grad_()
    out = model.forward(hidden)
    assert torch.equal(out, expected)
    (d_hidden,) = torch.autograd.grad(out, hidden, p.d_out)
    assert torch.equal(d_hidden, model.gradients(expected)[0])
    parameter = torch.nn.Parameter(p.hidden.detach())
    assert torch.equal(model.forward(parameter), expected)


def test_a_lazily_negated_tensor_is_refused(model: Model) -> None:
    negated = torch._neg_view(model.problem.hidden.detach())
    with pytest.raises(ValueError, match="hidden is a lazily negated view"):
        model.forward(negated)
    assert torch.equal(model.forward(negated.resolve_neg()), model.forward(-model.problem.hidden.detach()))


_PROGRAM = """
import torch, moesaic
torch.manual_seed(0)
layer = moesaic.ExpertsLayer(torch.randn(3, 64, 32), torch.randn(3, 32, 32))
a, b = torch.randn(6, 32, requires_grad=True), torch.randn(64, 6, requires_grad=True)
x, w = torch.randn(7, 32, requires_grad=True), torch.rand(7, 2)
out = moesaic.moe_experts(x, torch.randint(0, 3, (7, 2)), w, layer, moesaic.Lora(moesaic.LoraPair(a, b, 1.0, 3)))
out.sum().backward()
found = "".join(t.detach().numpy().tobytes().hex() for t in (out, x.grad, a.grad, b.grad))
"""


def test_before_pytorch_exchanged_tensors_in_c(run_python: Callable[..., Any]) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} has only the one way that all other tests take")
    names: dict[str, Any] = {}
    exec(_PROGRAM, names)
    change = "import torch\ndel torch.Tensor.__dlpack_c_exchange_api__\n"
    result = run_python(change + _PROGRAM + "print(found)")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == names["found"]


def test_threads_share_a_layer(model: Model) -> None:
    inputs = [torch.randn_like(model.problem.hidden).requires_grad_() for _ in range(4)]

    def gradients(hidden: torch.Tensor) -> list[torch.Tensor]:
        return list(
            torch.autograd.grad(model.forward(hidden), [hidden, *model.problem.leaves[1:]], model.problem.d_out)
        )

    expected = [gradients(hidden) for hidden in inputs]
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(10):
                assert_same(gradients(inputs[n]), expected[n])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads)


def test_autocast_changes_nothing(model: Model) -> None:
    expected = model.forward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.forward()
    assert out.dtype == expected.dtype and torch.equal(out, expected)


def test_a_compiled_model_steps_around_it(model: Model) -> None:
    expected = model.forward() * 2
    compiled = torch.compile(lambda hidden: model.forward(hidden) * 2, backend="eager")
    out = compiled(model.problem.hidden)
    assert torch.equal(out, expected)
    assert_same(model.gradients(out), model.gradients(expected))


def test_training_lowers_the_loss() -> None:
    model = Model(
        LayerCase(
            5, tokens=64, experts=4, top_k=2, hidden=64, intermediate=64, adapters=(PEFT,), hidden_dtype=torch.float32
        )
    )
    leaves = model.problem.adapters[0].leaves
    target = model.forward().detach() + 0.3 * torch.randn(64, 64)
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, fused=True)
    losses = []
    for _ in range(30):
        loss = (model.forward() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
