"""What `bench layer --peers` knows: what users would run instead of moesaic."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.commands.kt_peer import KtKernel, KtKernelRepack
from moesaic.commands.layer_case import LayerShape
from moesaic.commands.layer_data import Adapter, Batch, Weights
from moesaic.commands.torch_peers import OneDnn, TorchGroupedMm, TorchLoop
from moesaic.commands.variants import Variant

# Makes a peer ready for a batch; UnavailableError where it cannot be had.
MakePeer = Callable[[Batch, Weights, "Adapter | None"], Variant]

PEERS: dict[str, MakePeer] = {
    "torch_loop": TorchLoop,
    "torch_grouped_mm": TorchGroupedMm,
    "onednn": OneDnn,
    "kt_kernel": KtKernel,
    "kt_kernel_repack": KtKernelRepack,
}

# What --peers accepts besides the peers' own names.
PEER_GROUPS: dict[str, list[str]] = {
    "torch": ["torch_loop", "torch_grouped_mm"],
    "kt-kernel": ["kt_kernel", "kt_kernel_repack"],
    "all": list(PEERS),
}


def needs_full_copy(name: str) -> bool:
    """Whether a peer computes on the weights as they are given, so that each expert must have memory of its own."""
    return name.startswith("torch_")


def resident_bytes(name: str, shape: LayerShape) -> int:
    """An estimate of what a peer takes for the weights in forms of its own, at its most."""
    from moesaic.commands import onednn

    weights = 2 * shape.experts * shape.weights_per_expert
    if name == "onednn":  # both directions
        return weights * onednn.dtype().itemsize
    if name.startswith("kt_kernel"):  # both directions, and what they are packed from meanwhile
        return 3 * weights
    return 0
