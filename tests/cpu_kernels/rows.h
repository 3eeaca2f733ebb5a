// Rows of numbers for the tests of fused layers and attention.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {

/// Rows of bf16 or fp32 with a gap behind each, and NaN in the gaps.
class Rows {
 public:
  Rows(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride)
      : dtype_(dtype), rows_(rows), columns_(columns), stride_(stride), memory_(rows * stride * SizeOf(dtype)) {}
  Rows(DType dtype, const Dense& values, std::int64_t stride) : Rows(dtype, values.rows, values.cols, stride) {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < columns_; ++c) {
        if (dtype_ == DType::kFloat32) {
          memory_.As<float>()[r * stride_ + c] = values(r, c);
        } else {
          memory_.As<BFloat16>()[r * stride_ + c] = ToBFloat16(values(r, c));
        }
      }
    }
  }

  void* data() const { return memory_.As<void>(); }
  std::int64_t stride() const { return stride_; }
  TensorView view() const { return {data(), dtype_, 2, {rows_, columns_, 0}, {stride_, 1, 0}}; }
  float operator()(std::int64_t r, std::int64_t c) const {
    if (dtype_ == DType::kFloat32) return memory_.As<float>()[r * stride_ + c];
    return ToFloat(memory_.As<BFloat16>()[r * stride_ + c]);
  }
  /// What lies behind the rows was not touched.
  void ExpectGapsUntouched() const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = columns_; c < stride_; ++c)
        ASSERT_TRUE(std::isnan((*this)(r, c))) << "row " << r << " column " << c;
    }
  }

 private:
  DType dtype_;
  std::int64_t rows_, columns_, stride_;
  PoisonedBuffer memory_;
};

}  // namespace moesaic
