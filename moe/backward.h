// The backward of a layer (layer.h has the formulas, phases.h the phases).
#pragma once

#include "moe/layer.h"
#include "moe/packed_weights.h"

namespace moesaic::moe {

/// Arguments are validated. May throw std::bad_alloc; then the outputs are undefined.
void RunBackward(const LayerConfig& config, const PackedWeights& weights, const BackwardArgs& args, threadpool::Pool& pool);

}  // namespace moesaic::moe
