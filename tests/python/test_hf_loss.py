"""The loss of transformers' causal language models, stock and by the engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("transformers")

from transformers.loss.loss_utils import ForCausalLMLoss

import moesaic.hf
from fused_models import bert, qwen3_moe
from moesaic.hf.loss import causal_lm_loss


def case(dtype: torch.dtype, vocabulary: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(2, 9, vocabulary, generator=generator)).to(dtype)
    labels = torch.randint(vocabulary, (2, 9), generator=generator)
    labels[0, :4] = -100
    return logits, labels


def calls(run: Any) -> tuple[Any, int]:
    """The result, and how often the engine took statistics of logits."""
    with moesaic.profile() as profile:
        out = run()
    return out, sum(row["calls"] for row in profile.phases() if row["name"] == "softmax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": -1}, {"shifted": 1}],
)
def test_same_as_that_of_transformers(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits, labels = case(dtype)
    options = dict(options)
    if "ignore_index" in options:
        labels[labels == -100] = -1
    if options.pop("shifted", None):
        options["shift_labels"] = labels
    found = []
    for loss in (ForCausalLMLoss, causal_lm_loss):
        leaf = logits.clone().requires_grad_()
        value, count = calls(lambda loss=loss, leaf=leaf: loss(leaf, labels, 700, **options))
        assert (count > 0) == (loss is causal_lm_loss)
        assert value.dtype == torch.float32
        (2 * value).backward()
        found.append((value.detach(), leaf.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)


def test_no_label_counts() -> None:
    logits, labels = case(torch.float32)
    labels[:] = -100
    assert causal_lm_loss(logits, labels, 700).isnan() and ForCausalLMLoss(logits, labels, 700).isnan()
    assert causal_lm_loss(logits, labels, 700, num_items_in_batch=3) == 0.0


def test_what_is_left_to_transformers() -> None:
    logits, labels = case(torch.float32)
    for arguments in (
        (logits.half(), labels, 700),
        (logits.double(), labels, 700),
        (
            logits.transpose(0, 1).contiguous().transpose(0, 1).flatten(0, 1).t().contiguous().t(),
            labels.view(1, -1),
            700,
        ),
    ):
        assert calls(lambda a=arguments: causal_lm_loss(*a))[1] == 0
    assert calls(lambda: causal_lm_loss(logits, labels.clamp(min=0), 700, ignore_index=0))[1] == 0
    assert calls(lambda: causal_lm_loss(torch._neg_view(logits), labels, 700))[1] == 0
    assert calls(lambda: torch.func.grad(lambda x: causal_lm_loss(x, labels, 700))(logits))[1] == 0
    assert calls(lambda: torch.compile(causal_lm_loss, backend="eager")(logits, labels, 700))[1] == 0
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        value, count = calls(lambda: causal_lm_loss(dual, labels, 700))
        assert count == 0
        assert forward_ad.unpack_dual(value).tangent is not None
    for wrong in (700, -3):
        labels[1, 5] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            causal_lm_loss(logits, labels, 700)


def test_logits_that_are_written_to_before_backward() -> None:
    logits, labels = case(torch.float32)
    logits.requires_grad_()
    own = logits * 1.0
    loss = causal_lm_loss(own, labels, 700)
    own.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_loss_of_a_model() -> None:
    model = qwen3_moe()
    ids = torch.arange(18).view(2, 9)
    stock, count = calls(lambda: model(input_ids=ids, labels=ids))
    assert count == 0
    report = moesaic.hf.fuse(model, attention=False)
    assert "1 x Qwen3MoeForCausalLM: log_probs, as its loss" in str(report)
    out, count = calls(lambda: model(input_ids=ids, labels=ids))
    assert count > 0
    with moesaic.profile() as profile:
        out.loss.backward()
    assert [row for row in profile.phases() if row["name"] == "backward_softmax"]
    torch.testing.assert_close(out.loss, stock.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.logits, stock.logits, rtol=1e-4, atol=1e-5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.loss_function is causal_lm_loss
    moesaic.hf.unfuse(model)
    assert model.loss_function is ForCausalLMLoss
    model.loss_function = mine = lambda **_: torch.zeros(())
    moesaic.hf.fuse(model)
    assert model.loss_function is mine
    assert "as its loss" not in str(moesaic.hf.fuse(bert()))
    assert "as its loss" not in str(moesaic.hf.fuse(qwen3_moe().half()))
