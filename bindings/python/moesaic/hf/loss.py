"""The loss of transformers' causal language models by the engine: the cross entropy of logits that are in memory.

transformers widens them to fp32 for it, and makes their gradient in fp32 as well; the engine reads them and writes it
as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moesaic import forward_mode
from moesaic.nn import functional

__all__ = ["causal_lm_loss", "restore", "serve"]


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' ``ForCausalLMLoss``, by the engine where it computes the same; else as it is there.

    Backward reads the logits again: they must not be written to before it (PyTorch refuses, but for writes through
    ``.data``). It may be differentiated once.

    Args:
        logits: ``[..., T, vocab_size]``.
        labels: ``[..., T]``, each of which the token before it is to tell; or None, with `shift_labels`.
        vocab_size: of the logits.
        num_items_in_batch: what the sum of all losses is divided by; None: how many there are.
        ignore_index: a label that does not count.
        shift_labels: labels that stand where they are to be told already.
    """
    targets = shift_labels
    if targets is None and isinstance(labels, torch.Tensor):
        targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if targets is not None and _may_run(logits, targets, vocab_size, ignore_index):
        rows, targets = logits.view(-1, vocab_size), targets.reshape(-1)
        total = -functional.log_probs(rows, targets).log_probs.sum()
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(
        logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
    )
    return loss


def _may_run(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, ignore_index: int) -> bool:
    return bool(
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not forward_mode.is_on()
        and not torch._C._are_functorch_transforms_active()
        and type(logits) is type(targets) is torch.Tensor
        and not logits.is_neg()
        and logits.is_cpu
        and targets.is_cpu
        and logits.dtype in (torch.bfloat16, torch.float32)
        and targets.dtype == torch.int64
        and logits.is_contiguous()
        and logits.shape[-1] == vocab_size > 0
        and logits.shape[:-1].numel() == targets.numel() > 0
        and ignore_index < 0
        # What PyTorch refuses it is to refuse itself.
        and ((targets >= 0) & (targets < vocab_size) | (targets == ignore_index)).all()
    )


def serve(module: nn.Module) -> bool:
    """Lets `causal_lm_loss` be the loss of `module`, if transformers' own is, and it computes in bf16 or fp32."""
    if "_loss_function" in module.__dict__:
        return False
    try:
        from transformers import PreTrainedModel
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:  # a version that keeps it elsewhere
        return False
    if not isinstance(module, PreTrainedModel) or getattr(module, "loss_type", None) != "ForCausalLM":
        return False
    if module.loss_function is not ForCausalLMLoss or module.dtype not in (torch.bfloat16, torch.float32):
        return False
    module.loss_function = causal_lm_loss
    return True


def restore(module: nn.Module) -> bool:
    """Undoes `serve`."""
    if module.__dict__.get("_loss_function") is not causal_lm_loss:
        return False
    del module.__dict__["_loss_function"]
    return True
