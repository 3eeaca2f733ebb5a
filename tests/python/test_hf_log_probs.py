"""Log-probabilities inside the losses of TRL's trainers, stock and by the engine."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moesaic.hf
from fused_models import qwen3_moe
from hf_models import build, needs_peft_20
from test_hf_training import adapted, losses_of, sft_trainer

pytest.importorskip("trl.kernels.chunked_logprob")  # of older ones the trainers have no log-probabilities of their own
pytest.importorskip("trl.trainer.utils")


def trl_model(dtype: torch.dtype) -> Any:
    """A causal language model with TRL's fused head, whose backbone is the identity."""
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(5)
    model = qwen3_moe().to(dtype)
    add_fused_lm_head(
        model,
        temperature=0.7,
        outputs=("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"),
    )
    model.requires_grad_(False)
    return model


def trl_loss(model: Any, calls: list[int] | None = None) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    labels = torch.randint(50, (2, 9), generator=generator)
    labels[:, :3] = -100
    hidden = torch.randn(2, 9, 64, generator=generator).to(model.dtype).requires_grad_()
    with moesaic.profile() as profile:
        out = model(inputs_embeds=hidden, labels=labels, fused_lm_head=True)
        (out.loss + 0.1 * out.entropy.sum()).backward()
    if calls is not None:
        calls[:] = [row["calls"] for row in profile.phases() if row["name"] == "backward_softmax"]
    assert hidden.grad is not None
    return out, hidden.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_losses_of_trl(dtype: torch.dtype) -> None:
    model = trl_model(dtype)
    calls: list[int] = []
    stock, expected = trl_loss(model, calls)
    assert not calls
    report = moesaic.hf.fuse(model, attention=False)
    assert "1 x Linear: gemm_bias, gemm_log_probs" in str(report)
    out, gradient = trl_loss(model, calls)
    assert calls
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name in ("loss", "log_probs", "entropy", "mean_logits", "log_sum_sq_probs"):
        torch.testing.assert_close(getattr(out, name), getattr(stock, name), rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:  # TRL's logits are rounded to bf16
        assert torch.equal(out.is_top1, stock.is_top1)
    assert float((gradient - expected).norm() / expected.norm()) < tolerance
    # What trains, and what is undone, is not served.
    model.lm_head.weight.requires_grad_()
    trl_loss(model, calls)
    assert not calls
    model.lm_head.weight.requires_grad_(False)
    trl_loss(model, calls)
    assert calls
    moesaic.hf.unfuse(model)
    trl_loss(model, calls)
    assert not calls


def apply(*arguments: Any) -> tuple[Any, int]:
    """What TRL's function gives, and how often the engine took part."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    with moesaic.profile() as profile:
        out = ChunkedLogProbFunction.apply(*arguments)
    return out, sum(row["calls"] for row in profile.phases() if row["category"] == "fused")


@pytest.mark.parametrize("biased", [False, True])
def test_the_function_itself(biased: bool) -> None:
    model = trl_model(torch.float32)
    if biased:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(50), requires_grad=False)
    x, targets = torch.randn(6, 64), torch.arange(6)
    outputs = ("log_sum_sq_probs", "is_top1")
    arguments = (targets, 0.7, 32, None, 3.0, outputs)  # temperature, a chunk, a scale of the logits
    stock, count = apply(x, model.lm_head.weight, model.lm_head.bias, *arguments)
    assert count == 0
    moesaic.hf.fuse(model)
    for head in (model.lm_head, copy.deepcopy(model.lm_head), pickle.loads(pickle.dumps(model.lm_head))):
        found, count = apply(x, head.weight, head.bias, *arguments)
        assert count > 0
        for got, expected in zip(found, stock, strict=True):
            if expected is None:
                assert got is None
            else:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_of_trl_is_left_alone() -> None:
    model = trl_model(torch.float32)
    moesaic.hf.fuse(model)
    from torch.autograd import forward_ad
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    x, targets, rest = torch.randn(6, 64), torch.arange(6), (1.0, 32, None, 1.0, ("entropy",))
    weight = model.lm_head.weight
    assert apply(x, weight, None, targets, *rest)[1] > 0
    for arguments in (
        (x, weight, None, targets, 1.0, 32, 30.0, 1.0, ("entropy",)),  # logits are capped
        (x, weight, torch.zeros(50), targets, *rest),
        (x, weight.clone(), None, targets, *rest),
        (x, weight, None, targets, 1.0, 32),
        (x, weight, None, targets + 45, *rest),  # beyond the vocabulary
    ):
        assert apply(*arguments)[1] == 0
    with torch.autocast("cpu", dtype=torch.float16):
        assert apply(x, weight, None, targets, *rest)[1] == 0
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        apply(forward_ad.make_dual(x, torch.ones_like(x)), weight, None, targets, *rest)

    class Mine(ChunkedLogProbFunction):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *_: Any) -> torch.Tensor:
            return torch.ones(3)

    assert Mine.apply(x, weight, None, targets, *rest).tolist() == [1.0, 1.0, 1.0]


def test_heads_of_other_threads() -> None:
    """One thread makes and drops heads while others look theirs up."""
    model = trl_model(torch.float32)
    moesaic.hf.fuse(model)
    x, targets, end = torch.randn(2, 64), torch.arange(2), threading.Event()

    kept = [copy.deepcopy(model.lm_head) for _ in range(300)]  # to look one up takes long enough to be disturbed

    def copies() -> None:
        # So many at most: copies are garbage that lives until it is collected, and each one that does slows the others.
        for _ in range(1500):
            if end.is_set():
                return
            copy.deepcopy(model.lm_head)

    threads = [threading.Thread(target=copies) for _ in range(2)]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for _ in range(200):
            apply(x, model.lm_head.weight, None, targets, 1.0, 32, None, 1.0, ())
    finally:
        end.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert len(kept) == 300


@needs_peft_20
def test_a_trainer_of_trl(tmp_path: Path) -> None:
    """Fused before the trainer wraps the model: its losses come from the engine, and are the same."""

    def losses(fuse: bool) -> tuple[list[float], int]:
        model = build().bfloat16()
        moesaic.hf.prepare(model, progress=False)
        if fuse:
            moesaic.hf.fuse(model, attention=False)  # which has the same phases
        trainer = sft_trainer(adapted(model), tmp_path)
        with moesaic.profile() as profile:
            trainer.train()
        calls = sum(row["calls"] for row in profile.phases() if row["name"] == "backward_softmax")
        return losses_of(trainer), calls

    stock, no_calls = losses(False)
    engine, calls = losses(True)
    assert no_calls == 0
    assert calls >= 4
    assert engine == [pytest.approx(loss, rel=0.01) for loss in stock]
