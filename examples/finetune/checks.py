"""What must hold after both runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from report import Check, Result

#: Each logged loss of the two runs. Their arithmetic differs: stock adds B A to the weights and rounds the sum, the
#: engine keeps them apart and rounds its operands to bf16; and a token whose routing is nearly a tie may go elsewhere.
LOSS_BAR = 0.01
#: Relative L2 error of the logits of the stock model with the trained adapter, against the engine's, both in fp32.
LOGITS_BAR = 2e-2


def losses_agree(results: Mapping[str, Result]) -> Check:
    """The training losses of both runs, step by step."""
    stock, ours = results["stock"].losses, results["moesaic"].losses
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True)]
    worst = max(range(len(differences)), key=lambda n: differences[n])
    return Check(
        "the losses agree",
        differences[worst] <= LOSS_BAR,
        f"they differ by {differences[worst]:.4%} at most (step {worst + 1}); the bar is {LOSS_BAR:.0%} at every step",
    )


def loss_falls(result: Result) -> Check:
    """The mean of the last fifth of the losses against the first one."""
    tail = result.losses[-max(1, len(result.losses) // 5) :]
    last = sum(tail) / len(tail)
    return Check("the model learns", last < result.losses[0], f"loss {result.losses[0]:.3f} -> {last:.3f}")


def adapter_in_stock_model(run_file: Path) -> tuple[Check, str]:
    """Loads the adapter that the engine trained into the stock model, compares the logits, and lets that model speak.

    Returns:
        The check, and what the model wrote.
    """
    import torch
    import transformers
    from data import ANSWER, QUESTION
    from peft import PeftModel
    from training import Run, load, probe_ids

    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    run = Run.load(run_file)
    folder = Path(run.out) / "moesaic"
    model, tokenizer = load(run)
    model = PeftModel.from_pretrained(model.float(), str(folder / "adapter")).eval()
    ids = probe_ids(run, tokenizer)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    expected = torch.load(folder / "logits.pt")
    error = float((expected.double() - logits.double()).norm() / logits.double().norm())
    check = Check(
        "the adapter works in the stock model",
        error <= LOGITS_BAR,
        f"its logits differ from the engine's by {error:.1e} (relative L2); the bar is {LOGITS_BAR:.0e}",
    )
    model = model.merge_and_unload()  # stock would add the adapter to all weights again for every token
    prompt = tokenizer(f"{QUESTION}What does str.join do?{ANSWER}", return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(run.seed)
    with torch.no_grad():
        written = model.generate(
            input_ids=prompt.input_ids,
            attention_mask=torch.ones_like(prompt.input_ids),
            max_new_tokens=120,
            do_sample=True,
            temperature=0.7,
            pad_token_id=tokenizer.pad_token_id,
        )
    text: str = tokenizer.decode(written[0], skip_special_tokens=True)
    return check, text
