"""Fused dense layers: a GEMM over packed weights, and what follows it while its result is in cache; attention.

``w = PackedLinear(weight, bias)`` packs the weights of a dense layer once; ``moesaic.nn.functional`` has the
differentiable functions.
"""

from moesaic.nn import functional
from moesaic.nn.linear import PackedLinear

__all__ = ["PackedLinear", "functional"]
