"""The tile evaluator and the performance model: how long GEMMs and whole models take on a machine.

evaluator = GemmEvaluator(Machine.here())
evaluator.evaluate(GemmShape(m=128, k=7168, n=2048)).milliseconds
"""

from moesaic.perf.cache import Cache, CacheStats
from moesaic.perf.gemm_evaluator import Configuration, GemmEstimate, GemmEvaluator
from moesaic.perf.machine import Kernels, Machine
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.prewarm import PrewarmReport, prewarm
from moesaic.perf.shapes import (
    GemmShape,
    expert_rows,
    experts_shapes,
    generate_transformer_gemm_shapes,
    layer_shapes,
)

__all__ = [
    "Cache",
    "CacheStats",
    "Configuration",
    "GemmEstimate",
    "GemmEvaluator",
    "GemmShape",
    "Kernels",
    "Machine",
    "PrewarmReport",
    "TransformerConfig",
    "expert_rows",
    "experts_shapes",
    "generate_transformer_gemm_shapes",
    "layer_shapes",
    "prewarm",
]
