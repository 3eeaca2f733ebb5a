// Shapes and adapters of one experts layer.
#pragma once

#include <cstdint>

#include "cpu_kernels/gate.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic::moe {

struct LayerConfig {
  std::int64_t num_experts = 0;        ///< E
  std::int64_t hidden_size = 0;        ///< H
  std::int64_t intermediate_size = 0;  ///< I
  Gate activation = Gate::kSilu;       ///< f of the gate
};

/// delta_W[e] = scale * b[e] a[e]. fp32 or bf16, any strides, read anew in every call.
struct LoraPair {
  TensorView a;  ///< [E, r, in]
  TensorView b;  ///< [E, out, r]
  float scale = 1.0f;

  bool defined() const { return a.defined(); }
};

/// One adapter. A pair that is not there is left undefined. `gate_up` has one A for both and b = [E, 2I, r] (gate rows first);
/// it may stand beside `gate` and `up`: contributions add up.
struct LoraAdapter {
  LoraPair gate_up;
  LoraPair gate;
  LoraPair up;
  LoraPair down;
};

/// Where the gradients of a pair go: same shapes as the pair, own dtype and strides, overwritten. An undefined view is not
/// computed.
struct LoraPairGrad {
  TensorView a;
  TensorView b;
};

struct LoraAdapterGrad {
  LoraPairGrad gate_up;
  LoraPairGrad gate;
  LoraPairGrad up;
  LoraPairGrad down;
};

}  // namespace moesaic::moe
