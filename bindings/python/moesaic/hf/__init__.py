"""The engine inside transformers and PEFT.

Importing this module registers the experts implementation ``"moesaic"`` with transformers and lets PEFT hand its LoRA
adapters to the engine without materializing them::

    import moesaic.hf

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    print(moesaic.hf.prepare(model))                 # packs the experts, releases the originals
    model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], ...))

Without ``prepare``, ``experts_implementation="moesaic"`` (in ``from_pretrained``, ``from_config`` or
``model.set_experts_implementation``) is enough: the first forward of each block packs it.

Raises:
    ImportError: transformers is missing or older than 5.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError("moesaic.hf needs transformers 5.7 or newer: pip install 'transformers>=5.7'") from error

from moesaic.hf import adapters, attention, experts
from moesaic.hf.blocks import IMPLEMENTATION, find_blocks, refusal
from moesaic.hf.fuse import FusedModule, FuseReport, KeptModule, fuse, unfuse
from moesaic.hf.prepare import BlockReport, PrepareReport, prepare, restore

if TYPE_CHECKING:
    from moesaic.hf.profile_callback import ProfileCallback

__all__ = [
    "BlockReport",
    "FuseReport",
    "FusedModule",
    "KeptModule",
    "PrepareReport",
    "ProfileCallback",
    "find_blocks",
    "fuse",
    "prepare",
    "refusal",
    "restore",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    if name == "ProfileCallback":  # the Trainer's classes take a while to import, and need accelerate
        from moesaic.hf.profile_callback import ProfileCallback

        return ProfileCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts.experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:  # a version without FP8 experts of their own
        pass
    else:
        ALL_FP8_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts.refuse_fp8_experts)
    attention.register()
    adapters.install()


_register()
