// What refusals of fused layers say of a tensor.
#pragma once

#include <stdexcept>
#include <string>

#include "cpu_kernels/tensor_text.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic::fused {

/// [rows, columns] of `dtype`, which `like` has, with contiguous columns.
inline void Check(const TensorView& view, const char* name, std::int64_t rows, std::int64_t columns, DType dtype,
                  const char* like = "x") {
  if (view.rank != 2 || view.shape[0] != rows || view.shape[1] != columns) {
    const std::string came = view.rank == 2 ? ShapeText(view) : std::to_string(view.rank) + " dimensions";
    throw std::invalid_argument(std::string(name) + " has shape " + came + "; expected [" + std::to_string(rows) + ", " +
                                std::to_string(columns) + "]");
  }
  if (view.dtype != dtype) {
    throw std::invalid_argument(std::string(name) + " is " + NameOf(view.dtype) + "; expected " + NameOf(dtype) + ", as " +
                                like);
  }
  if (columns > 1 && view.stride[1] != 1) {
    throw std::invalid_argument(std::string(name) + " has gaps between its columns; expected contiguous rows");
  }
}

/// Two dimensions, fp32 or bf16.
inline void CheckMatrix(const TensorView& view, const char* name) {
  if (view.rank != 2) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.rank) + " dimensions; expected two");
  }
  if (view.dtype != DType::kBFloat16 && view.dtype != DType::kFloat32) {
    throw std::invalid_argument(std::string(name) + " is " + NameOf(view.dtype) + "; expected bfloat16 or float32");
  }
}

/// bf16 [heads or sequences, rows, columns] with contiguous columns.
inline void CheckRows(const TensorView& view, const char* name, std::int64_t first, std::int64_t rows, std::int64_t columns) {
  if (view.rank != 3 || view.shape[0] != first || view.shape[1] != rows || view.shape[2] != columns) {
    throw std::invalid_argument(std::string(name) + " has shape " + ShapeText(view) + "; expected [" + std::to_string(first) +
                                ", " + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  }
  if (view.dtype != DType::kBFloat16) {
    throw std::invalid_argument(std::string(name) + " is " + NameOf(view.dtype) + "; expected bfloat16");
  }
  if (columns > 1 && view.stride[2] != 1) {
    throw std::invalid_argument(std::string(name) + " has gaps between its columns; expected contiguous rows");
  }
}

inline void CheckThreeDimensions(const TensorView& view, const char* name) {
  if (view.rank == 3) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.rank) + " dimensions; expected three");
}

inline void CheckCausal(std::int64_t queries, std::int64_t keys) {
  if (queries <= keys) return;
  throw std::invalid_argument("q has " + std::to_string(queries) + " rows; expected at most k's " + std::to_string(keys) +
                              ": the last query sees the last key");
}

}  // namespace moesaic::fused
