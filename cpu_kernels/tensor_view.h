// A strided view of somebody else's memory: how tensors enter the engine.
#pragma once

#include <array>
#include <cstdint>

namespace moesaic {

enum class DType : std::int8_t { kFloat32, kBFloat16, kFloat16, kInt32, kInt64 };

/// Bytes of one element.
inline int SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    default:
      return 2;
  }
}

/// Non-owning view of a tensor with up to three dimensions. Strides count elements, may be zero or negative, and need no
/// order. Element (i, j, k) lies at data + (i*stride[0] + j*stride[1] + k*stride[2]) * SizeOf(dtype).
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> stride{};

  bool defined() const { return rank != 0; }
};

}  // namespace moesaic
