"""What `bench fused` computes: the cases, their inputs, and the same by others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import moesaic
from moesaic.commands import onednn
from moesaic.commands.compiled import compile_for
from moesaic.commands.variants import UnavailableError
from moesaic.nn import PackedLinear, functional

#: (batch, tokens, intermediate) of silu_mul.
SILU_SHAPES = ((1, 1024, 1024), (8, 2048, 4096), (16, 2048, 8192), (32, 4096, 8192))
_EPS = 1e-12
_VERIFIED_ROWS = 256
_HEAD_DIM = 64
"""Of attention."""
_DECODER = (32, 4, 128)
"""Heads, heads of keys and numbers of a head, of a decoder that trains and of one query to a cache."""
_RANK, _SCALE = 16, 2.0
"""Of an adapter."""
_VOCABULARY = 151_936
"""Of a loss."""
_TRL_CHUNK = 32_768
"""Of the vocabulary, in TRL's trainers (1.16)."""
_DRAWN_ROWS = 8192


@dataclass(frozen=True)
class Case:
    """One operator on one shape: `rows` x `k` to `rows` x `n`."""

    name: str
    kind: str  #: "add_layernorm", "gelu", "adapter", "loss", "loss_of_logits", "layernorm", "rmsnorm", "silu_mul",
    #: or of attention: "attention", "training", "packed", "rotary", "decoding"
    rows: int
    n: int
    k: int
    dtype: torch.dtype
    tokens: int = 0  #: of a sequence, for attention, whose x is queries, keys and values side by side; in a cache

    @property
    def has_gemm(self) -> bool:
        """Whether it multiplies."""
        return self.kind in ("add_layernorm", "gelu")

    @property
    def flops(self) -> int:
        """Of the GEMM, or of attention's products: two, and five of its gradients."""
        if self.kind == "attention":
            return 4 * self.rows * self.sequence * self.n
        if self.kind in ("training", "packed"):  # causal: half of each
            return 7 * self.rows * self.sequence * self.n
        if self.kind == "decoding":
            return 4 * self.rows * self.tokens * self.n
        if self.kind == "adapter":  # both ways, and the gradients of its factors
            return 4 * self.rows * self.n * self.k + 6 * self.rows * _RANK * (self.n + self.k)
        if self.kind == "loss":  # logits, again in backward, and the gradient of x
            return 6 * self.rows * self.n * self.k
        return 2 * self.rows * self.n * self.k if self.has_gemm else 0

    @property
    def sequence(self) -> int:
        """Tokens of a sequence, for attention. Rows that are no whole number of sequences are one."""
        return self.tokens if self.tokens and self.rows % self.tokens == 0 else self.rows

    @property
    def bytes(self) -> int:
        """Input, weights, cache, residual and result, and the gradients of input and result, each once; of an adapter
        the input and the weights both ways, as of a loss."""
        values = self.rows * (self.k + self.n)
        if self.kind == "loss":  # the logits need not be in memory
            values = 3 * self.rows * self.k + 2 * self.n * self.k
        if self.kind == "loss_of_logits":  # read both ways, and their gradient
            values = 3 * self.rows * self.n
        if self.has_gemm:
            values += self.n * self.k
        if self.kind == "add_layernorm":
            values += self.rows * self.n
        if self.kind == "adapter":
            values += self.rows * self.k + 2 * self.n * self.k + self.rows * (self.k + self.n)
        if self.kind in ("training", "packed", "rotary"):
            values *= 2
        if self.kind == "decoding":
            values += 2 * self.rows * self.tokens * _DECODER[1] * _DECODER[2]
        return values * self.dtype.itemsize

    def inputs(self) -> Inputs:
        """The same ones every time."""
        return Inputs(self)


def cases(
    batch: int, tokens: int, hidden: Sequence[int], silu_batches: Sequence[int], dtype: torch.dtype
) -> list[Case]:
    """The layers of an encoder of each size, attention of a decoder, losses, odd shapes, norms and gates."""
    rows = batch * tokens
    found = []
    for h in hidden:
        found += [
            Case(f"attention output {h}", "add_layernorm", rows, h, h, dtype),
            Case(f"FFN 1 {h}", "gelu", rows, 4 * h, h, dtype),
            Case(f"FFN 2 {h}", "add_layernorm", rows, h, 4 * h, dtype),
        ]
    if dtype == torch.bfloat16:  # of fp32 they are PyTorch's
        found += [Case(f"adapter in training {h}", "adapter", rows, h, h, dtype) for h in hidden]
        found += [
            Case(f"self-attention {h}", "attention", rows, h, 3 * h, dtype, tokens)
            for h in hidden
            if h % _HEAD_DIM == 0
        ]
        n, keys = _DECODER[0] * _DECODER[2], _DECODER[1] * _DECODER[2]
        found.append(Case(f"attention in training, {tokens} tokens", "training", rows, n, n + 2 * keys, dtype, tokens))
        packed = f"attention in training, 4 x {tokens} in a row"
        found.append(Case(packed, "packed", 4 * tokens, n, n + 2 * keys, dtype, tokens))
        found.append(Case(f"decoding, {4 * tokens} keys", "decoding", 1, n, n, dtype, 4 * tokens))
    turned = (_DECODER[0] + _DECODER[1]) * _DECODER[2]
    found.append(Case("rotary in training", "rotary", rows, turned, turned, dtype, tokens))
    found += [Case(f"loss {h}", "loss", 4 * tokens, _VOCABULARY, h, dtype) for h in hidden]
    found.append(Case("loss of logits", "loss_of_logits", 4 * tokens, _VOCABULARY, _VOCABULARY, dtype))
    odd = batch * max(1, tokens - 1)
    found += [
        Case("attention output 770", "add_layernorm", odd, 770, 770, dtype),
        Case("FFN 2 770", "add_layernorm", odd, 770, 4 * 770, dtype),
        Case(f"layernorm {hidden[0]}", "layernorm", rows, hidden[0], hidden[0], dtype),
        Case(f"rmsnorm {hidden[0]}", "rmsnorm", rows, hidden[0], hidden[0], dtype),
    ]
    for b, s, i in SILU_SHAPES:
        if b in silu_batches:
            found.append(Case(f"silu_mul ({b}, {s}, {i})", "silu_mul", b * s, i, 2 * i, dtype))
    return found


class Inputs:
    """Tensors of a case, the engine's call and the others'."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.empty(shape, dtype=case.dtype)
            for first in range(0, shape[0], _DRAWN_ROWS):  # not all in fp32 too: it may be a fifth of the memory
                part = values[first : first + _DRAWN_ROWS]
                part.copy_(torch.randn(part.shape, generator=generator))
            return values

        self.case = case
        self.x = normal(case.rows, case.k)
        if case.has_gemm:
            self.weight = (normal(case.n, case.k) / case.k**0.5).to(case.dtype)
            self.bias = normal(case.n)
            self.packed = PackedLinear(self.weight, self.bias)
        if case.kind == "add_layernorm":
            self.residual = normal(case.rows, case.n)
        if case.kind == "adapter":
            self.weight = (normal(case.n, case.k) / case.k**0.5).to(case.dtype)
            self.a, self.b = normal(_RANK, case.k).float() / case.k**0.5, normal(case.n, _RANK).float()
            lora = moesaic.LoraPair(self.a.requires_grad_(), self.b.requires_grad_(), _SCALE)
            self.packed = PackedLinear(self.weight, lora=lora)
        if case.kind == "loss":
            self.weight = (normal(case.n, case.k) / case.k**0.5).to(case.dtype)
            self.packed = PackedLinear(self.weight)
        if case.kind in ("loss", "loss_of_logits"):
            self.targets = torch.randint(case.n, (case.rows,), generator=generator)
        if case.kind == "rotary":
            angles = torch.arange(case.sequence)[:, None] / 10_000 ** (
                torch.arange(_DECODER[2]) % (_DECODER[2] // 2) / 64
            )
            self.cos, self.sin = angles.cos()[None].to(case.dtype), angles.sin()[None].to(case.dtype)
        if case.kind == "packed":  # sequences that share a row
            token = torch.arange(case.rows)
            self.first_keys = (token // case.sequence * case.sequence)[None]
            self.seen = (token[:, None] >= token) & (self.first_keys[0][:, None] <= token)
        if case.kind in ("adapter", "training", "packed", "rotary"):
            self.d_out = normal(case.rows, case.n)
        elif case.kind == "decoding":
            self.cache = normal(2 * case.rows * _DECODER[1], case.tokens, _DECODER[2])
        elif case.kind not in ("attention", "loss", "loss_of_logits"):
            self.gamma, self.beta = normal(case.n), normal(case.n)

    def engine(self) -> torch.Tensor:
        """The engine's result."""
        if self.case.kind == "add_layernorm":
            return functional.gemm_bias_add_layernorm(self.x, self.packed, self.residual, self.gamma, self.beta, _EPS)
        if self.case.kind == "gelu":
            return functional.gemm_bias_gelu(self.x, self.packed)
        if self.case.kind == "layernorm":
            return functional.layernorm(self.x, self.gamma, self.beta)
        if self.case.kind == "rmsnorm":
            return functional.rmsnorm(self.x, self.gamma)
        if self.case.kind == "attention":
            return _rows_of(functional.attention(*_heads_of(self.x, self.case.sequence)))
        if self.case.kind == "training":
            return _gradient(
                lambda q, k, v: functional.attention(q, k, v, causal=True), self.x, self.d_out, self.case.sequence
            )
        if self.case.kind == "packed":
            return _gradient(
                lambda q, k, v: functional.attention(q, k, v, causal=True, first_keys=self.first_keys),
                self.x,
                self.d_out,
                self.case.rows,
            )
        if self.case.kind == "rotary":
            return _turned(lambda x: functional.rotary(x, self.cos, self.sin), self.x, self.d_out, self.case.sequence)
        if self.case.kind == "decoding":
            return _rows_of(functional.attention(*_cached(self.x, self.cache)))
        if self.case.kind == "adapter":
            return self._adapter_gradients(self.case.rows)[0]
        if self.case.kind == "loss":
            return _loss_gradient(lambda x: -functional.gemm_log_probs(x, self.packed, self.targets).log_probs, self.x)
        if self.case.kind == "loss_of_logits":
            return _loss_gradient(lambda x: -functional.log_probs(x, self.targets).log_probs, self.x)
        return functional.silu_mul(self.x)

    def error(self) -> float:
        """Relative L2 of the first rows against double precision."""
        if self.case.kind == "adapter":
            return self._adapter_error()
        given = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        rows = self.case.sequence if self.case.kind in ("attention", "training", "rotary") else _VERIFIED_ROWS
        rows = self.case.rows if self.case.kind == "packed" else rows
        for name in {"x", "residual", "d_out", "targets"} & given.keys():
            given[name] = given[name][:rows]
        exact = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
        expected = self._reference(**exact)
        got = self.engine()[:rows].double()
        return float((got - expected).norm() / expected.norm())

    def _adapter_gradients(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Of so many rows: those of x and of both factors."""
        with torch.enable_grad():
            leaf = self.x[:rows].detach().requires_grad_()
            out = functional.gemm_bias(leaf, self.packed)
            return torch.autograd.grad(out, (leaf, self.a, self.b), self.d_out[:rows])

    def _adapter_error(self) -> float:
        """The largest of its gradients, of the first rows."""
        x, d_out = self.x[:_VERIFIED_ROWS].double(), self.d_out[:_VERIFIED_ROWS].double()
        exact = _peft_gradients(x, self.weight.double(), self.a.double(), self.b.double(), d_out)
        got = self._adapter_gradients(_VERIFIED_ROWS)
        return max(float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True))

    def peak_bytes(self) -> int:
        """The input, and the most that the engine's call takes beside it."""
        before = moesaic.memory_stats()["in_use_bytes"]
        out = self.engine()
        return self.x.nbytes + moesaic.memory_stats()["in_use_bytes"] - before + 0 * out.numel()

    def stream(self) -> Callable[[], object] | None:
        """For silu_mul a call that reads and writes the same bytes and computes next to nothing."""
        if self.case.kind != "silu_mul":
            return None
        words = self.x.view(torch.int16 if self.case.dtype.itemsize == 2 else torch.int32)
        gate, up = words[:, : self.case.n], words[:, self.case.n :]
        out = torch.empty(gate.shape, dtype=words.dtype)
        return lambda: torch.bitwise_xor(gate, up, out=out)

    def peer(self, name: str) -> Callable[[], object] | str:
        """A call that computes the same; or why there is none."""
        given = {key: value for key, value in vars(self).items() if isinstance(value, torch.Tensor)}
        if name == "torch":
            return lambda: self._reference(**given)
        if name == "trl":
            return self._trl()
        if name == "compile":
            return self._compiled(given)
        return self._onednn()

    def _reference(self, x: torch.Tensor, **t: torch.Tensor) -> torch.Tensor:
        return _compute(self.case.kind, self.case.n, x, t, self.case.sequence)

    def _compiled(self, given: dict[str, torch.Tensor]) -> Callable[[], object] | str:
        if self.case.kind in ("adapter", "loss", "loss_of_logits", "training", "rotary"):
            return "torch.compile is compared where no gradient is wanted"
        module = _Module(self.case.kind, self.case.n, given, self.case.sequence).eval()
        activations = [given[name] for name in ("x", "residual") if name in given]
        try:
            compiled = compile_for(module, *activations, options={"freezing": True})
        except UnavailableError as error:
            return str(error)
        return lambda: compiled(*activations)

    def _trl(self) -> Callable[[], object] | str:
        if self.case.kind != "loss":
            return "TRL is compared where a loss has a projection"
        try:
            from trl.kernels.chunked_logprob import ChunkedLogProbFunction
            from trl.trainer.utils import maybe_gather_lm_head_ctx  # noqa: F401  its backward does
        except ImportError as error:
            return f"TRL has no log-probabilities of its own: {error}"

        def losses(x: torch.Tensor) -> torch.Tensor:
            wanted = ("log_probs", "entropy", "is_top1")  # by SFTTrainer
            log_probs, *_ = ChunkedLogProbFunction.apply(
                x, self.weight, None, self.targets, 1.0, _TRL_CHUNK, None, 1.0, wanted
            )
            negative: torch.Tensor = -log_probs
            return negative

        return lambda: _loss_gradient(losses, self.x)

    def _onednn(self) -> Callable[[], object] | str:
        if not self.case.has_gemm:
            return "oneDNN is compared where there is a dense layer"
        reason = onednn.unavailable()
        if reason is not None:
            return reason
        dtype = onednn.dtype() if self.case.dtype == torch.bfloat16 else torch.float32
        x, bias = self.x.to(dtype), self.bias.to(dtype)
        gamma, beta = self.gamma.to(dtype), self.beta.to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.to(dtype).contiguous(), self.case.rows)
        if self.case.kind == "gelu":
            return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "gelu", [], "none")
        residual = self.residual.to(dtype)

        def add_layernorm() -> torch.Tensor:
            total = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
            return F.layer_norm(total, (self.case.n,), gamma, beta, _EPS)

        return add_layernorm


class _Module(torch.nn.Module):
    """The case as a module, whose weights torch.compile may freeze."""

    def __init__(self, kind: str, n: int, given: dict[str, torch.Tensor], tokens: int) -> None:
        super().__init__()
        self.kind, self.n, self.tokens = kind, n, tokens
        self.names = [name for name in given if name not in ("x", "residual")]
        for name in self.names:
            self.register_parameter(name, torch.nn.Parameter(given[name], requires_grad=False))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        tensors = {name: getattr(self, name) for name in self.names}
        if residual is not None:
            tensors["residual"] = residual
        return _compute(self.kind, self.n, x, tensors, self.tokens)


def _heads_of(x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of ``[rows, 3 n]``, each ``[sequences, heads, tokens, 64]``."""
    parts = x.view(-1, tokens, x.shape[1]).chunk(3, -1)
    q, k, v = (part.view(*part.shape[:2], -1, _HEAD_DIM).transpose(1, 2) for part in parts)
    return q, k, v


def _cached(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A query of each of the sequences ``[rows, n]``, and keys and values of all that came before."""
    heads, key_heads, size = _DECODER
    k, v = cache.view(2, -1, key_heads, *cache.shape[1:])
    return x.view(-1, heads, 1, size), k, v


def _gradient(
    attention: Callable[..., torch.Tensor], x: torch.Tensor, d_out: torch.Tensor, tokens: int
) -> torch.Tensor:
    """That of queries, keys and values of a decoder side by side, ``[rows, n + 2 keys]``."""
    heads, key_heads, size = _DECODER
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        columns = [heads * size, key_heads * size, key_heads * size]
        parts = torch.split(leaf.view(-1, tokens, x.shape[1]), columns, dim=-1)
        q, k, v = (part.view(*part.shape[:2], -1, size).transpose(1, 2) for part in parts)
        (gradient,) = torch.autograd.grad(_rows_of(attention(q, k, v)), leaf, d_out)
    return gradient


def _turned(
    rotary: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, d_out: torch.Tensor, tokens: int
) -> torch.Tensor:
    """The gradient of heads side by side, ``[rows, n]``, that `rotary` turns."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        heads = leaf.view(-1, tokens, x.shape[1] // _DECODER[2], _DECODER[2]).transpose(1, 2)
        (gradient,) = torch.autograd.grad(_rows_of(rotary(heads)), leaf, d_out)
    return gradient


def _peft_gradients(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, d_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Those of x, a and b, of a layer with an adapter as PEFT computes it."""
    with torch.enable_grad():
        x, a, b = (tensor.detach().requires_grad_() for tensor in (x, a, b))
        delta = F.linear(F.linear(x.to(a.dtype), a), b) * _SCALE
        out = (F.linear(x, weight) + delta).to(x.dtype)
        return torch.autograd.grad(out, (x, a, b), d_out)


def _loss_gradient(losses: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Of x, of the sum of all rows' losses."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(leaf).sum(), leaf)
    return gradient


def _rows_of(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(1, 2).reshape(-1, heads.shape[1] * heads.shape[3])


def _compute(kind: str, n: int, x: torch.Tensor, t: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
    """As PyTorch has it."""
    if kind == "attention":
        return _rows_of(F.scaled_dot_product_attention(*_heads_of(x, tokens)))
    if kind == "training":
        return _gradient(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            x,
            t["d_out"],
            tokens,
        )
    if kind == "packed":  # as transformers has it: with a mask each head has keys of its own

        def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (heads.repeat_interleave(_DECODER[0] // _DECODER[1], 1) for heads in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=t["seen"])

        return _gradient(masked, x, t["d_out"], len(x))
    if kind == "rotary":

        def rotary(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * t["cos"][:, None] + torch.cat((-second, first), -1) * t["sin"][:, None]

        return _turned(rotary, x, t["d_out"], tokens)
    if kind == "decoding":
        return _rows_of(F.scaled_dot_product_attention(*_cached(x, t["cache"]), enable_gqa=True))
    if kind == "adapter":
        return _peft_gradients(x, t["weight"], t["a"], t["b"], t["d_out"])[0]
    if kind in ("loss", "loss_of_logits"):  # in fp32, as transformers takes it
        wide = torch.promote_types(x.dtype, torch.float32)

        def losses(x: torch.Tensor) -> torch.Tensor:
            logits = F.linear(x, t["weight"]) if kind == "loss" else x
            return F.cross_entropy(logits.to(wide), t["targets"], reduction="none")

        return _loss_gradient(losses, x)
    if kind == "add_layernorm":
        total = F.linear(x, t["weight"], t["bias"]) + t["residual"]
        return F.layer_norm(total, (n,), t["gamma"], t["beta"], _EPS)
    if kind == "gelu":
        return F.gelu(F.linear(x, t["weight"], t["bias"]))
    if kind == "layernorm":
        return F.layer_norm(x, (n,), t["gamma"], t["beta"], 1e-5)
    if kind == "rmsnorm":
        return F.rms_norm(x, (n,), t["gamma"], 1e-6)
    return F.silu(x[:, :n]) * x[:, n:]
