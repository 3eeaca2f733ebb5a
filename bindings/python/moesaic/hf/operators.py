"""Sub-graphs of transformers models that fused operators compute: what they look like, and when an operator may stand
in.

An operator takes the place of one module's ``forward``. The module, its parameters and its state_dict stay as they are.
In every call it looks whether it may compute what the module would (dropout, transforms of `torch.func`, hooks,
adapters); if not, the module's own forward does. Under autocast products are taken in its dtype, as PyTorch's are: the
weights are packed in that.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moesaic.lora import LoraPair
from moesaic.nn import PackedLinear, checked, functional
from moesaic.nn.autograd import Fusion
from moesaic.nn.linear import fingerprint

__all__ = ["OPERATORS", "Operator", "has_values_of", "is_plain", "product_dtype"]

_DTYPES = (torch.bfloat16, torch.float32)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype PyTorch takes a product of what comes in `dtype`: in autocast's, if it is on, but for fp64. Norms,
    gates and activations keep what they get."""
    converts = torch.is_autocast_enabled("cpu") and dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if converts else dtype


class Operator(ABC):
    """Stands as ``module.forward``; ``type(module).forward`` is what it replaces."""

    #: What it computes, for reports.
    name = ""
    #: Whether it looks in each call what its module does in training.
    looks_at_dropout = False

    def __init__(self, module: Any) -> None:
        self.module = module
        #: False: in training the module does something that the operator does not (dropout).
        self.in_training = True
        self._packed: dict[str, tuple[Any, PackedLinear]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if not kwargs and self._may_run(args):
            out = self.fused(*args)
            if out is not None:
                return out
        return self.stock(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "in_training": self.in_training, "_packed": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> Operator:
        from copy import deepcopy

        copy = type(self)(deepcopy(self.module, memo))
        copy.in_training = self.in_training
        return copy

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's class computes."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        """The same by the engine; None where it may not."""

    @classmethod
    @abstractmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether `module` is built like what this operator computes."""

    def refusal(self) -> str | None:
        """Why this module cannot be served, as far as its layers tell."""
        for layer in self.layers():
            base = getattr(layer, "base_layer", layer)
            weight = getattr(base, "weight", None)
            if weight is None:
                continue
            if weight.is_meta:
                return "its weights are on the meta device (offloaded, or not loaded yet)"
            if weight.dtype not in _DTYPES:
                return f"its weights are {_dtype(weight)}; expected bfloat16 or float32"
            if not weight.is_cpu:
                return f"its weights are on {weight.device}; expected the CPU"
        return None

    def layers(self) -> list[nn.Module]:
        """The layers that hold the weights of the GEMMs and norms."""
        return [child for child in self.module.children() if not isinstance(child, nn.Dropout)]

    @abstractmethod
    def probe(self) -> tuple[torch.Tensor, ...]:
        """Inputs on which both forwards are compared."""

    @property
    def packed_bytes(self) -> int:
        """Bytes that the packed weights take."""
        return sum(packed.weight_bytes for _, packed in self._packed.values())

    def _may_run(self, args: tuple[Any, ...]) -> bool:
        return (
            not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            and not torch._C._are_functorch_transforms_active()
            and len(args) > 0
            and (self.in_training or not self.module.training)
            and all(type(a) in (torch.Tensor, nn.Parameter) and a.is_cpu and a.dtype in _DTYPES for a in args)
            and product_dtype(args[0].dtype) in _DTYPES
            and all(not _hooked(layer) for layer in self.module.children())
        )

    def _linear(
        self,
        key: str,
        layers: list[Any],
        x: torch.Tensor,
        fusion: Fusion | None = None,
        residual: torch.Tensor | None = None,
        norm: Any = None,
    ) -> torch.Tensor | None:
        """The layers side by side, as one GEMM with their adapters, and what follows it."""
        dtypes = _DTYPES if torch.is_autocast_enabled("cpu") else (x.dtype,)
        x = x.to(product_dtype(x.dtype))
        bases: list[nn.Linear] = []
        adapters: list[_Adapters] = []
        for layer in layers:
            base = getattr(layer, "base_layer", layer)
            added = _adapters(layer, x)
            # Hooks of the module itself run around this call.
            if type(base) is not nn.Linear or base.weight.dtype not in dtypes or added is None:
                return None
            if base is not self.module and _hooked(base):
                return None
            bases.append(base)
            adapters.append(added)
        addend = None
        if any(added.delta is not None for added in adapters):
            rows = x.reshape(-1, x.shape[-1])
            parts = [
                rows.new_zeros(rows.shape[0], base.out_features) if added.delta is None else added.delta
                for base, added in zip(bases, adapters, strict=True)
            ]
            addend = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        lora = adapters[0].pairs if len(adapters) == 1 else _stacked(bases, adapters)
        gamma, beta = (None, None) if norm is None else (norm.weight, norm.bias)
        # PEFT merges through `.data`, of which nothing tells but the samples of a fingerprint.
        merged = tuple(tuple(getattr(layer, "merged_adapters", ())) for layer in layers)
        packed = self._pack(key, bases, merged, x.dtype)
        # Not kept with the weights: other threads use them meanwhile, and in other graphs.
        biases: list[torch.Tensor] = [base.bias for base in bases]
        bias = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
        return checked.linear(fusion or Fusion(), x, packed, residual, gamma, beta, addend, lora, bias)

    def _pack(
        self, key: str, bases: list[nn.Linear], merged: tuple[tuple[str, ...], ...], dtype: torch.dtype
    ) -> PackedLinear:
        """The weights in `dtype`. One copy is kept, that of the last call: whoever trains under autocast and generates
        without, in turn, has them packed anew each time."""
        weights: list[torch.Tensor] = [base.weight for base in bases]
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return PackedLinear(_one(weights).to(dtype))
        state = (merged, dtype, *(fingerprint(weight) for weight in weights))
        kept = self._packed.get(key)
        if kept is None or kept[0] != state:
            kept = (state, PackedLinear(_one(weights).detach().to(dtype)))
            self._packed[key] = kept
        return kept[1]


def _one(weights: list[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


class AddNorm(Operator):
    """BERT's and RoBERTa's attention output and second FFN layer: ``LayerNorm(dropout(dense(x)) + residual)``."""

    name = "gemm_bias_add_layernorm"
    looks_at_dropout = True

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        has = _has(module, dense=_is_linear, LayerNorm=_is_biased_layer_norm, dropout=_is_dropout)
        return has and _takes(module, 2)

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        x, residual = args
        module = self.module
        norm = module.LayerNorm
        if not _inactive(module.dropout) or residual.shape[:-1] != x.shape[:-1]:
            return None
        if residual.dtype == product_dtype(x.dtype):
            fusion = Fusion(norm="layernorm", eps=norm.eps)
            return self._linear("dense", [module.dense], x, fusion, residual, norm)
        if not torch.is_autocast_enabled("cpu") or residual.dtype != norm.weight.dtype:
            return None
        # Of a model in fp32 the sum is fp32 as well.
        dense = self._linear("dense", [module.dense], x)
        return None if dense is None else functional.layernorm(dense + residual, norm.weight, norm.bias, norm.eps)

    def probe(self) -> tuple[torch.Tensor, ...]:
        base = getattr(self.module.dense, "base_layer", self.module.dense)
        return _sample(base.weight, base.in_features), _sample(base.weight, base.out_features)


class DenseGelu(Operator):
    """BERT's and RoBERTa's first FFN layer: ``gelu(dense(x))``."""

    name = "gemm_bias_gelu"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _has(module, dense=_is_linear) and hasattr(module, "intermediate_act_fn") and _takes(module, 1)

    def refusal(self) -> str | None:
        return super().refusal() or _refused_gelu(self.module.intermediate_act_fn)

    def layers(self) -> list[nn.Module]:
        return [self.module.dense]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        kind = _kind(self.module.intermediate_act_fn)
        return None if kind is None else self._linear("dense", [self.module.dense], args[0], Fusion(_GELU[kind]))

    def probe(self) -> tuple[torch.Tensor, ...]:
        base = getattr(self.module.dense, "base_layer", self.module.dense)
        return (_sample(base.weight, base.in_features),)


class GeluMlp(Operator):
    """ViT's FFN: ``fc2(gelu(fc1(x)))``."""

    name = "gemm_bias_gelu, gemm_bias"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        has = _has(module, fc1=_is_linear, fc2=_is_linear) and _has_only(module, "fc1", "fc2", "activation_fn")
        return has and hasattr(module, "activation_fn") and _takes(module, 1)

    def refusal(self) -> str | None:
        return super().refusal() or _refused_gelu(self.module.activation_fn)

    def layers(self) -> list[nn.Module]:
        return [self.module.fc1, self.module.fc2]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        module = self.module
        kind = _kind(module.activation_fn)
        inner = None if kind is None else self._linear("fc1", [module.fc1], args[0], Fusion(_GELU[kind]))
        return None if inner is None else self._linear("fc2", [module.fc2], inner)

    def probe(self) -> tuple[torch.Tensor, ...]:
        base = getattr(self.module.fc1, "base_layer", self.module.fc1)
        return (_sample(base.weight, base.in_features),)


class GatedMlp(Operator):
    """The dense FFN of decoders: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, gate and up as one GEMM. Activations
    other than SiLU are the module's own."""

    #: The activation, and whether it is SiLU.
    _looked_at: tuple[Any, bool] | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        """What it computes."""
        return "gemm, silu_mul, gemm" if self._is_silu else "gemm, gemm"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        layers = {"gate_proj": _is_linear, "up_proj": _is_linear, "down_proj": _is_linear}
        has = _has(module, **layers) and _has_only(module, *layers, "act_fn")
        return has and hasattr(module, "act_fn") and _takes(module, 1)

    def refusal(self) -> str | None:
        module = self.module
        reason = super().refusal()
        gate, up = (getattr(layer, "base_layer", layer) for layer in (module.gate_proj, module.up_proj))
        if reason is None and (gate.bias is None) != (up.bias is None):
            reason = "one of gate_proj and up_proj has a bias; expected both or none"
        return reason

    def layers(self) -> list[nn.Module]:
        return [self.module.gate_proj, self.module.up_proj, self.module.down_proj]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        module = self.module
        both = self._linear("gate_up", [module.gate_proj, module.up_proj], args[0])
        if both is None:
            return None
        if self._is_silu:
            return self._linear("down", [module.down_proj], functional.silu_mul(both))
        gate, up = both.chunk(2, dim=-1)
        return self._linear("down", [module.down_proj], module.act_fn(gate) * up)

    @property
    def _is_silu(self) -> bool:
        function = self.module.act_fn
        if self._looked_at is None or self._looked_at[0] is not function:
            self._looked_at = (function, is_plain(function) and has_values_of(function, F.silu))
        return self._looked_at[1]

    def probe(self) -> tuple[torch.Tensor, ...]:
        base = getattr(self.module.gate_proj, "base_layer", self.module.gate_proj)
        return (_sample(base.weight, base.in_features),)


class LayerNorm(Operator):
    """A layer norm alone."""

    name = "layernorm"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return _is_layer_norm(module)

    def layers(self) -> list[nn.Module]:
        return [self.module]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        module = self.module
        return functional.layernorm(args[0], module.weight, module.bias, module.eps)

    def probe(self) -> tuple[torch.Tensor, ...]:
        return (_sample(self.module.weight, self.module.normalized_shape[0]),)


class RmsNorm(Operator):
    """An RMS norm alone; its class is known by its name and by what it computes."""

    name = "rmsnorm"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        leaf = not any(True for _ in module.children()) and len(module._parameters) == 1
        return leaf and type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1

    def layers(self) -> list[nn.Module]:
        return [self.module]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        (x,) = args
        dtypes = self.module.weight.dtype, x.dtype
        if dtypes == (torch.float32, torch.bfloat16):  # under autocast, of what a projection gives
            return None if self._of_bf16 is None else self._norm(x.to(self._of_bf16))
        return self._norm(x) if dtypes[0] == dtypes[1] else None

    def probe(self) -> tuple[torch.Tensor, ...]:
        """Rows so small that what is added to their squares counts, and one of zeros."""
        return (_sample(self.module.weight, self.module.weight.shape[0], (1.0, 1e-2, 1e-4, 0.0)),)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        eps = getattr(self.module, "variance_epsilon", getattr(self.module, "eps", None))
        # As torch.nn.RMSNorm takes None.
        return functional.rmsnorm(x, self.module.weight, torch.finfo(torch.float32).eps if eps is None else eps)

    @functools.cached_property
    def _of_bf16(self) -> torch.dtype | None:
        """What the module makes of bf16: most classes widen it, as their weights are, and some round; None if it is
        something else."""
        x = self.probe()[0].bfloat16()
        with torch.no_grad():
            stock = self.stock(x)
            close = torch.allclose(stock.float(), self._norm(x.float()), rtol=1e-2, atol=1e-6)
        return stock.dtype if close and stock.dtype in _DTYPES else None


class Dense(Operator):
    """A projection of an attention layer."""

    name = "gemm_bias"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        return type(module) is nn.Linear or (
            type(getattr(module, "base_layer", None)) is nn.Linear
            and isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
            and not getattr(module, "lora_variant", True)
        )

    def layers(self) -> list[nn.Module]:
        return [self.module]

    def fused(self, *args: torch.Tensor) -> torch.Tensor | None:
        return self._linear("weight", [self.module], args[0])

    def probe(self) -> tuple[torch.Tensor, ...]:
        base = getattr(self.module, "base_layer", self.module)
        return (_sample(base.weight, base.in_features),)


#: Whole sub-graphs first: what they hold is not looked at again.
OPERATORS: tuple[type[Operator], ...] = (AddNorm, DenseGelu, GeluMlp, GatedMlp, LayerNorm, RmsNorm)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", module), nn.Linear)


def _is_layer_norm(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.weight is not None


def _is_biased_layer_norm(module: nn.Module) -> bool:
    return _is_layer_norm(module) and module.bias is not None


def _is_dropout(module: nn.Module) -> bool:
    return type(module) is nn.Dropout


def _inactive(dropout: nn.Dropout) -> bool:
    return not dropout.training or dropout.p == 0


def _has(module: nn.Module, **children: Any) -> bool:
    return all(
        isinstance(getattr(module, n, None), nn.Module) and test(getattr(module, n)) for n, test in children.items()
    )


def _has_only(module: nn.Module, *names: str) -> bool:
    """Whether `module` has no other children than these and dropout, and no parameters or buffers of its own."""
    others = [child for name, child in module.named_children() if name not in names]
    return not (module._parameters or module._buffers) and all(
        _is_dropout(child) or type(child) is nn.Identity for child in others
    )


def _takes(module: nn.Module, count: int) -> bool:
    """Whether the class's forward takes so many positional arguments and nothing else."""
    import inspect

    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == count and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _hooked(module: nn.Module) -> bool:
    """Whether calling `module` does more than its class's forward, or something else."""
    return "forward" in module.__dict__ or bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@dataclass(frozen=True, slots=True)
class _Adapters:
    """What PEFT's adapters add to a linear layer: changes of its weight, and ``[rows, out]``; None: nothing."""

    pairs: tuple[LoraPair, ...] = ()
    delta: torch.Tensor | None = None


_NO_ADAPTERS = _Adapters()


def _adapters(layer: Any, x: torch.Tensor) -> _Adapters | None:
    """Those of `layer`; None where it is not known what they compute. In bf16 the engine takes them as they are, unless
    dropout stands before them."""
    if not hasattr(layer, "base_layer"):
        return _NO_ADAPTERS
    if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) or not hasattr(layer, "lora_variant"):
        return None
    if layer.disable_adapters:
        return None if layer.merged else _NO_ADAPTERS  # merged ones PEFT takes out first
    if layer.merged:
        return _NO_ADAPTERS
    pairs: list[LoraPair] = []
    delta = None
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        if name in layer.lora_variant:
            return None
        a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        scale = layer.scaling[name]  # a tensor after PEFT's prepare_model_for_compiled_hotswap
        trains = isinstance(scale, torch.Tensor) and scale.requires_grad
        if x.dtype == torch.bfloat16 and _is_plain(a) and _is_plain(b) and _passes(dropout) and not trains:
            pairs.append(LoraPair(a.weight, b.weight, float(scale)))
            continue
        part = b(a(dropout(x.reshape(-1, x.shape[-1]).to(a.weight.dtype)))) * scale
        delta = part if delta is None else delta + part
    return _Adapters(tuple(pairs), None if delta is None else delta.to(x.dtype))


def _is_plain(layer: Any) -> bool:
    """Whether a factor of an adapter is its weight and nothing else."""
    return (
        type(layer) is nn.Linear
        and getattr(layer, "bias", None) is None
        and layer.weight.dtype in _DTYPES
        and layer.weight.is_cpu
        and not _hooked(layer)
    )


def _passes(dropout: Any) -> bool:
    passes = type(dropout) is nn.Identity or (_is_dropout(dropout) and _inactive(dropout))
    return passes and not _hooked(dropout)


def _stacked(bases: list[nn.Linear], adapters: list[_Adapters]) -> tuple[LoraPair, ...]:
    """Changes of layers whose outputs follow each other, as changes of all these outputs."""
    total = sum(base.out_features for base in bases)
    before, pairs = 0, []
    for base, added in zip(bases, adapters, strict=True):
        behind = total - before - base.out_features
        pairs += [LoraPair(p.a, F.pad(p.b, (0, 0, before, behind)), p.scale) for p in added.pairs]
        before += base.out_features
    return tuple(pairs)


def is_plain(activation: Any) -> bool:
    """Whether an activation is a function of numbers and nothing else: no parameters, no dropout, no hooks inside."""
    if not isinstance(activation, nn.Module):
        return True
    parts = list(activation.modules())
    stateless = not any(part._parameters or part._buffers for part in parts)
    return stateless and not any(_hooked(part) or isinstance(part, nn.modules.dropout._DropoutNd) for part in parts)


def has_values_of(function: Any, reference: Any, rtol: float = 1e-5) -> bool:
    """Whether an activation is `reference`: its values say it, for the same one has several classes."""
    x = torch.linspace(-40.0, 40.0, 641, dtype=torch.float32, device="cpu")
    try:
        return torch.allclose(function(x), reference(x), rtol=rtol, atol=1e-6)
    except Exception:  # whatever it is, it is no activation of one tensor
        return False


#: Names of activations in a `Fusion`.
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}
_kinds: dict[str, str | None] = {}


def _kind(activation: Any) -> str | None:
    """ "none", "tanh" or None, by values; known by class from then on."""
    if not is_plain(activation):
        return None
    key = f"{type(activation).__module__}.{type(activation).__qualname__}.{_name_of(activation)}.{activation!r}"
    if key not in _kinds:
        exact = has_values_of(activation, F.gelu)
        tanh = has_values_of(activation, lambda x: F.gelu(x, approximate="tanh"))
        _kinds[key] = "none" if exact else "tanh" if tanh else None
    return _kinds[key]


def _refused_gelu(activation: Any) -> str | None:
    return None if _kind(activation) else f"its activation is {_name_of(activation)}; expected GELU, with erf or tanh"


def _name_of(activation: Any) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _sample(like: torch.Tensor, features: int, scales: tuple[float, ...] = (1.0, 8.0, 64.0, 512.0)) -> torch.Tensor:
    """Rows of these sizes: some classes limit what is large."""
    generator = torch.Generator("cpu").manual_seed(features)
    rows = torch.randn(len(scales), features, generator=generator, dtype=torch.float32, device="cpu")
    return (rows * torch.tensor(scales, dtype=torch.float32, device="cpu")[:, None]).to(like.dtype)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
