// Validation of everything that enters a layer, once, at its public boundary.
//
// Every function throws std::invalid_argument that names the argument, what came and what was expected, as in
// "top_k_ids[3, 1] is 99; expected -1 or 0..64", and reads nothing but shapes, types, ids and the saved routing. Arguments
// carry the names that Python callers know: hidden, top_k_ids, top_k_weights, lora[0].gate_up.a, gate_up_proj, down_proj. NaN
// and Inf in data are no error: they propagate.
#pragma once

#include "moe/config.h"
#include "moe/layer.h"

namespace moesaic::moe {

/// E, H, I >= 1.
void ValidateConfig(const LayerConfig& config);

/// gate_up_proj [E, 2I, H], down_proj [E, H, I]; bf16, fp16 or fp32, any strides.
void ValidateWeights(const LayerConfig& config, const TensorView& gate_up, const TensorView& down);

/// As ValidateWeights, for views that are written: no two elements may share memory.
void ValidateUnpack(const LayerConfig& config, const TensorView& gate_up, const TensorView& down);

/// T >= 0, k >= 1; T * k slots must fit 32 bits. In each pair of `lora` both a and b are there, with the same r >= 1.
void ValidateForward(const LayerConfig& config, const ForwardArgs& args);

/// The same for backward. The saved routing must be one that Forward writes for this T and k, so that a saved state of another
/// batch is an error and not a read out of bounds.
void ValidateBackward(const LayerConfig& config, const BackwardArgs& args);

}  // namespace moesaic::moe
