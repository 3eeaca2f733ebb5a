"""Trains the expert layers of mixture-of-experts models on CPUs: frozen packed weights, LoRA adapters.

``layer = ExpertsLayer(gate_up_proj, down_proj)`` packs one block of experts,
``moe_experts(hidden, ids, weights, layer, lora)`` is the differentiable function, and ``moesaic.hf`` connects both to
transformers and PEFT.

Importing it raises ValueError, naming the variable, where one of MOESAIC_NUM_THREADS, MOESAIC_THREAD_SOURCE,
MOESAIC_CLOCK, MOESAIC_HWLOC_XML and MOESAIC_PROFILE cannot be followed.
"""

import os as _os

# Before PyTorch, which says nothing of use in another interpreter.
from moesaic import main_interpreter as _main_interpreter  # noqa: F401

# isort: split
# Before the rest, so that the engine's OpenMP is the one that PyTorch brought, and both share one team of threads.
import torch as _torch  # noqa: F401

from moesaic import _core, nn, perf, sampling
from moesaic._core import UnsupportedHostError
from moesaic.autograd import moe_experts
from moesaic.layer import ExpertsLayer, Grads, Saved
from moesaic.lora import Lora, LoraGrad, LoraPair, LoraPairGrad
from moesaic.profiler import Phase, Profile, profile, profile_process
from moesaic.runtime import MemoryStats, get_num_threads, isa, memory_stats, set_num_threads, trim_memory

__version__ = "0.1.0"

__all__ = [
    "ExpertsLayer",
    "Grads",
    "Lora",
    "LoraGrad",
    "LoraPair",
    "LoraPairGrad",
    "MemoryStats",
    "Phase",
    "Profile",
    "Saved",
    "UnsupportedHostError",
    "get_num_threads",
    "isa",
    "memory_stats",
    "moe_experts",
    "nn",
    "perf",
    "profile",
    "sampling",
    "set_num_threads",
    "trim_memory",
]

_core.apply_environment()
if _os.environ.get("MOESAIC_PROFILE"):
    try:
        profile_process(_os.environ["MOESAIC_PROFILE"])
    except ValueError as error:
        raise ValueError(f"MOESAIC_PROFILE: {error}") from None
