// The forward of a layer (layer.h has the formulas, phases.h the steps).
#pragma once

#include "moe/layer.h"
#include "moe/packed_weights.h"

namespace moesaic::moe {

/// Arguments are validated. May throw std::bad_alloc; then `out` and `saved` are undefined.
void RunForward(const LayerConfig& config, const PackedWeights& weights, const ForwardArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::moe
