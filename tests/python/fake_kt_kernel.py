"""What `bench layer` needs of kt-kernel 0.7.2, for hosts on which its training classes do not run: the signatures and
the checks of its Python wrapper, with the arithmetic done by autograd."""

from typing import ClassVar

import torch
import torch.nn.functional as F


class KTMoEWrapper:
    made: ClassVar[list["KTMoEWrapper"]] = []

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | None,
        cpuinfer_threads: int,
        threadpool_count: int,
        weight_path: str,
        chunked_prefill_size: int,
        method: str = "AMXINT4",
        mode: str = "inference",
        num_gpu_experts: int = 0,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
    ):
        if mode != "sft" or method != "AMXBF16_SFT":
            raise ValueError(f"Method '{method}' not supported for {mode} mode")
        self.shape = (num_experts, moe_intermediate_size, hidden_size)
        self.top_k, self.rank, self.scale = num_experts_per_tok, lora_rank, lora_alpha / lora_rank
        self.chunk = chunked_prefill_size
        self.saved: tuple[torch.Tensor, ...] | None = None
        self.share_backward_bb = None
        KTMoEWrapper.made.append(self)

    def load_weights_from_tensors(self, gate_proj, up_proj, down_proj, physical_to_logical_map_cpu):
        e, i, h = self.shape
        assert gate_proj.shape == up_proj.shape == (e, i, h) and down_proj.shape == (e, h, i)
        assert all(w.dtype == torch.bfloat16 and w.is_contiguous() for w in (gate_proj, up_proj, down_proj))
        assert physical_to_logical_map_cpu.tolist() == list(range(e))
        self.weights = [w.float() for w in (gate_proj, up_proj, down_proj)]

    def init_lora_weights(self, *tensors):
        e, i, h = self.shape
        r = self.rank
        shapes = [(e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)]
        for tensor, expected in zip(tensors, 2 * shapes, strict=True):
            assert tensor.shape == expected and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
        assert len({t.data_ptr() for t in tensors}) == 12
        self.lora, self.d_lora = tensors[:6], tensors[6:]

    def forward(self, hidden_states, expert_ids, weights, save_for_backward=True, output_device=None):
        assert hidden_states.shape[0] <= self.chunk and expert_ids.shape == weights.shape
        with torch.set_grad_enabled(save_for_backward):
            x = hidden_states.detach().float().requires_grad_(save_for_backward)
            w = weights.detach().float().requires_grad_(save_for_backward)
            lora = [t.detach().float().requires_grad_(save_for_backward) for t in self.lora]
            out = self._compute(x, expert_ids, w, lora)
        if save_for_backward:
            self.saved = (out, x, w, *lora)
        return out.detach().bfloat16()

    def _compute(self, x, ids, w, lora):
        gate_w, up_w, down_w = self.weights
        rows = []
        for token in range(x.shape[0]):
            parts = []
            for slot, e in enumerate(ids[token].tolist()):
                ga, gb, ua, ub, da, db = (t[e] for t in lora)
                gate = x[token] @ gate_w[e].t() + self.scale * (x[token] @ ga.t()) @ gb.t()
                up = x[token] @ up_w[e].t() + self.scale * (x[token] @ ua.t()) @ ub.t()
                z = F.silu(gate) * up
                parts.append(w[token, slot] * (z @ down_w[e].t() + self.scale * (z @ da.t()) @ db.t()))
            rows.append(sum(parts))
        return torch.stack(rows)

    def backward(self, grad_output, output_device=None, optimizer_grad_scale=1.0):
        if self.saved is None:
            raise RuntimeError("No forward cache available. Call forward(save_for_backward=True) first.")
        out, x, w, *lora = self.saved
        self.saved = None
        d_x, d_w, *d_lora = torch.autograd.grad(out, [x, w, *lora], grad_output.float())
        for into, value in zip(self.d_lora, d_lora, strict=True):
            into.copy_(value)
        return d_x.bfloat16(), d_w
