"""kt-kernel (KTransformers) as a peer: its CPU training classes for bf16 experts with LoRA, through its Python wrapper.

Written against kt-kernel 0.7.2. It has training classes for AMX and AVX512-BF16 hosts. Its LoRA factors are bf16 and
separate for gate and up, so a shared A stands there twice. Forward caches what backward needs inside the wrapper, so
each backward belongs to the forward just before. Its caller spins beside its workers: N threads keep N + 1 cores
busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.commands.layer_data import Adapter, Batch, Weights
from moesaic.commands.output import first_line
from moesaic.commands.variants import UnavailableError, Variant

_METHOD = "AMXBF16_SFT"

# kt-kernel makes its threads once a process, with the first layer, and keeps them whatever later layers ask for.
_threads: int | None = None


class KtKernel(Variant):
    """One layer of kt-kernel, with a second, transposed copy of the weights that stays in memory."""

    # Without a copy that stays, kt-kernel packs the weights again in each backward, into memory that layers share.
    repacks_in_backward = False

    def __init__(self, batch: Batch, weights: Weights, adapter: Adapter | None) -> None:
        """
        Raises:
            UnavailableError: kt-kernel is not installed, or cannot train this layer on this host.
        """
        super().__init__(batch, [] if adapter is None else [adapter])
        if adapter is None:
            raise UnavailableError("kt-kernel trains adapters only: it has no way with rank 0")
        experts, hidden, intermediate = weights.down.shape
        rank = adapter.gate_up.a.shape[0] // experts
        if adapter.gate_up.scale != adapter.down.scale:
            raise UnavailableError("kt-kernel has one scale for all adapters of a layer")
        make = _wrapper_class()
        _claim_threads(torch.get_num_threads())
        try:
            self._wrapper = make(
                layer_idx=0,
                num_experts=experts,
                num_experts_per_tok=batch.ids.shape[1],
                hidden_size=hidden,
                moe_intermediate_size=intermediate,
                gpu_experts_mask=None,
                num_gpu_experts=0,
                cpuinfer_threads=torch.get_num_threads(),
                threadpool_count=_numa_pools(intermediate),
                weight_path="",
                chunked_prefill_size=batch.tokens,
                method=_METHOD,
                mode="sft",
                lora_rank=rank,
                lora_alpha=adapter.gate_up.scale * rank,
            )
            self._wrapper.share_backward_bb = self.repacks_in_backward
            self._wrapper.load_weights_from_tensors(
                weights.gate_up[:, :intermediate].contiguous(),
                weights.gate_up[:, intermediate:].contiguous(),
                weights.down.contiguous(),
                torch.arange(experts, dtype=torch.int64),
            )
            self._lora = _factors(adapter, intermediate)
            self._d_lora = [torch.zeros_like(factor) for factor in self._lora]
            self._wrapper.init_lora_weights(*self._lora, *self._d_lora)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise UnavailableError(f"kt-kernel cannot train this layer here: {first_line(error)}") from error

    def forward(self) -> torch.Tensor:
        """The output [T, H], bf16."""
        batch, save = self.batch, torch.is_grad_enabled()
        with torch.no_grad():
            out: torch.Tensor = self._wrapper.forward(batch.hidden, batch.ids, batch.router, save_for_backward=save)
        return out

    def backward(self, out: torch.Tensor, d_out: torch.Tensor) -> Sequence[torch.Tensor]:
        """d_hidden and d_router; the adapter's gradients lie in the buffers given to the wrapper."""
        d_hidden, d_router = self._wrapper.backward(d_out)
        return d_hidden, d_router

    def gradients(self, raw: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """In PEFT's layout: one A for gate and up, B rank-major."""
        gate_a, gate_b, up_a, up_b, down_a, down_b = (d.float() for d in self._d_lora)
        return (
            *raw,
            _peft_a(gate_a + up_a),
            _peft_b(torch.cat([gate_b, up_b], dim=1)),
            _peft_a(down_a),
            _peft_b(down_b),
        )


class KtKernelRepack(KtKernel):
    """The same with one copy: packed again, transposed, in each backward."""

    repacks_in_backward = True


def _wrapper_class() -> Any:
    try:
        from kt_kernel import KTMoEWrapper
    except ModuleNotFoundError as error:
        # Its own name, or that of something that it needs and that pip install --no-deps leaves out.
        what = "kt-kernel is" if error.name == "kt_kernel" else f"kt-kernel needs {error.name}, which is"
        raise UnavailableError(f"{what} not installed (pip install 'kt-kernel>=0.7')") from None
    except Exception as error:  # whatever its search for a variant of this host ends in
        raise UnavailableError(f"kt-kernel does not load here: {first_line(error)}") from error
    return KTMoEWrapper


def _claim_threads(threads: int) -> None:
    global _threads
    if _threads not in (None, threads):
        raise UnavailableError(f"kt-kernel has {_threads} threads for the life of the process; {threads} are asked for")
    _threads = threads


def _numa_pools(intermediate: int) -> int:
    """Pools of threads, one a NUMA node, among which kt-kernel divides I."""
    from moesaic import _core

    nodes = len(_core.topology()["nodes"])
    return nodes if nodes <= torch.get_num_threads() and intermediate % nodes == 0 else 1


def _factors(adapter: Adapter, intermediate: int) -> list[torch.Tensor]:
    """A and B of gate, of up and of down, [E, r, in] and [E, out, r], contiguous bf16."""
    a, b = (t.detach() for t in adapter.gate_up.views())
    down_a, down_b = (t.detach() for t in adapter.down.views())
    factors = (a, b[:, :intermediate], a, b[:, intermediate:], down_a, down_b)
    return [factor.to(torch.bfloat16).contiguous() for factor in factors]


def _peft_a(a: torch.Tensor) -> torch.Tensor:
    return a.reshape(-1, a.shape[2])


def _peft_b(b: torch.Tensor) -> torch.Tensor:
    return b.permute(1, 2, 0).reshape(b.shape[1], -1)
