// Single elements of a view, whatever its type, read, written and found in memory: for references, validation, routing and slow
// paths.
#pragma once

#include <cstdint>

#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/float16.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic {

inline std::int64_t ElementOffset(const TensorView& view, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  return i * view.stride[0] + j * view.stride[1] + k * view.stride[2];
}

/// Where element (i, j) of a view lies; null of one that is not defined.
inline void* AddressOf(const TensorView& view, std::int64_t i, std::int64_t j) {
  return view.defined() ? static_cast<char*>(view.data) + ElementOffset(view, i, j) * SizeOf(view.dtype) : nullptr;
}

/// Element (i, j, k) of a floating-point view as fp32 (exact).
inline float LoadFloat(const TensorView& view, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  const std::int64_t offset = ElementOffset(view, i, j, k);
  switch (view.dtype) {
    case DType::kBFloat16:
      return ToFloat(static_cast<const BFloat16*>(view.data)[offset]);
    case DType::kFloat16:
      return ToFloat(static_cast<const Float16*>(view.data)[offset]);
    default:
      return static_cast<const float*>(view.data)[offset];
  }
}

/// Writes element (i, j, k) of a floating-point view, rounded to its type.
inline void StoreFloat(const TensorView& view, std::int64_t i, std::int64_t j, std::int64_t k, float value) {
  const std::int64_t offset = ElementOffset(view, i, j, k);
  switch (view.dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(view.data)[offset] = ToBFloat16(value);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(view.data)[offset] = ToFloat16(value);
      break;
    default:
      static_cast<float*>(view.data)[offset] = value;
  }
}

/// Element (i, j) of an integer view.
inline std::int64_t LoadInt(const TensorView& view, std::int64_t i, std::int64_t j) {
  const std::int64_t offset = ElementOffset(view, i, j);
  return view.dtype == DType::kInt64 ? static_cast<const std::int64_t*>(view.data)[offset]
                                     : static_cast<const std::int32_t*>(view.data)[offset];
}

/// visit(i, j, value) for all elements of an integer view [n, m], in order. The type is asked once: all threads wait while
/// routing runs this.
template <typename Visit>
void ForEachInt(const TensorView& view, Visit visit) {
  const auto in_order = [&](const auto* row) {
    for (std::int64_t i = 0; i < view.shape[0]; ++i, row += view.stride[0]) {
      for (std::int64_t j = 0; j < view.shape[1]; ++j) visit(i, j, static_cast<std::int64_t>(row[j * view.stride[1]]));
    }
  };
  view.dtype == DType::kInt64 ? in_order(static_cast<const std::int64_t*>(view.data))
                              : in_order(static_cast<const std::int32_t*>(view.data));
}

}  // namespace moesaic
