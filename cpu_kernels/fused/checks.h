// What refusals of fused layers say of a tensor.
#pragma once

#include <string>

#include "cpu_kernels/tensor_view.h"

namespace moesaic::fused {

inline std::string ShapeText(const TensorView& view) {
  std::string text = "[";
  for (int d = 0; d < view.rank; ++d) text += (d > 0 ? ", " : "") + std::to_string(view.shape[static_cast<std::size_t>(d)]);
  return text += ']';
}

inline const char* NameOf(DType dtype) { return dtype == DType::kFloat32 ? "float32" : "bfloat16"; }

}  // namespace moesaic::fused
