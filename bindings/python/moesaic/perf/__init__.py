"""The tile evaluator and the performance model: how long GEMMs and whole models take on a machine.

evaluator = GemmEvaluator(Machine.here())
evaluator.evaluate(GemmShape(m=128, k=7168, n=2048)).milliseconds
"""

import gc

from moesaic.perf.cache import Cache, CacheStats
from moesaic.perf.communication import Link, Topology, collective_ms
from moesaic.perf.gemm_evaluator import Configuration, GemmEstimate, GemmEvaluator
from moesaic.perf.inference import Inference
from moesaic.perf.layer_model import ExpertsShape, LayerModel, LayerPrediction
from moesaic.perf.machine import Kernels, Machine
from moesaic.perf.model_config import TransformerConfig
from moesaic.perf.prewarm import PrewarmReport, prewarm
from moesaic.perf.products import Products
from moesaic.perf.rates import LayerRates
from moesaic.perf.routing import RoutingLaw
from moesaic.perf.shapes import (
    GemmShape,
    expert_rows,
    experts_shapes,
    generate_transformer_gemm_shapes,
    layer_shapes,
)
from moesaic.perf.simulation import (
    Parallelism,
    SimulationConfig,
    SimulationResult,
    run_simulation,
)
from moesaic.perf.strategy import LinearPlan, plan_linear

__all__ = [
    "Cache",
    "CacheStats",
    "Configuration",
    "ExpertsShape",
    "GemmEstimate",
    "GemmEvaluator",
    "GemmShape",
    "Inference",
    "Kernels",
    "LayerModel",
    "LayerPrediction",
    "LayerRates",
    "LinearPlan",
    "Link",
    "Machine",
    "Parallelism",
    "PrewarmReport",
    "Products",
    "RoutingLaw",
    "SimulationConfig",
    "SimulationResult",
    "Topology",
    "TransformerConfig",
    "collective_ms",
    "expert_rows",
    "experts_shapes",
    "generate_transformer_gemm_shapes",
    "layer_shapes",
    "plan_linear",
    "prewarm",
    "run_simulation",
]

# Python's first full collection walks all that the imports made, 170,000 objects with torch, in 70 to 95 ms, and is due
# soon after them: better here, where a second has passed, than inside of the first simulation, which takes 30. (Without
# collections inside of simulations it came right before or behind one.)
if gc.isenabled():
    gc.collect()
