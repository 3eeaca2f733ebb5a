// What messages say of a tensor.
#pragma once

#include <cstddef>
#include <string>

#include "cpu_kernels/tensor_view.h"

namespace moesaic {

inline const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "an unknown type";
}

/// "[2, 3]"; of at most three dimensions.
inline std::string ShapeText(const TensorView& view) {
  std::string text = "[";
  for (int d = 0; d < view.rank; ++d) text += (d > 0 ? ", " : "") + std::to_string(view.shape[static_cast<std::size_t>(d)]);
  return text + "]";
}

}  // namespace moesaic
