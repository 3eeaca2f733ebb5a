#include "cpu_kernels/fused/packed_matrix.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_kernels/gemm/pack.h"
#include "cpu_kernels/tensor_text.h"

namespace moesaic::fused {
namespace {

MatrixView ViewOf(const TensorView& weight) {
  return {weight.data, weight.dtype, weight.shape[0], weight.shape[1], weight.stride[0], weight.stride[1]};
}

/// W^T as a view of W.
MatrixView Transposed(const TensorView& weight) {
  return {weight.data, weight.dtype, weight.shape[1], weight.shape[0], weight.stride[1], weight.stride[0]};
}

/// The type of a weight that can be packed.
DType CheckedType(const TensorView& weight) {
  if (weight.rank != 2 || weight.shape[0] == 0 || weight.shape[1] == 0) {
    throw std::invalid_argument("weight has shape " + ShapeText(weight) + "; expected [N, K], neither of them 0");
  }
  if (weight.dtype != DType::kBFloat16 && weight.dtype != DType::kFloat32) {
    throw std::invalid_argument(std::string("weight is ") + NameOf(weight.dtype) + "; expected bfloat16 or float32");
  }
  return weight.dtype;
}

}  // namespace

PackedMatrix::PackedMatrix(const TensorView& weight, threadpool::Pool& pool)
    : dtype_(CheckedType(weight)), rows_(weight.shape[0]), columns_(weight.shape[1]) {
  if (dtype_ == DType::kBFloat16) {
    tiles_ = TileMatrix::Weights(nullptr, rows_, columns_);
    data_ = AlignedBuffer(tiles_.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
    tiles_.data = static_cast<BFloat16*>(data_.data());
    const std::int64_t scratch_floats = kPanelRows * tiles_.columns * kTileColumns;
    const AlignedBuffer scratch(pool.num_threads() * scratch_floats * static_cast<std::int64_t>(sizeof(float)));
    const MatrixView view = ViewOf(weight);
    pool.ParallelFor(tiles_.panels, [&](std::int64_t panel, int worker) {
      PackPanel(view, panel, tiles_, static_cast<float*>(scratch.data()) + worker * scratch_floats);
    });
    return;
  }
  const std::int64_t panel_floats = 16 * RoundUp(columns_, 16), panels = CeilDiv(rows_, 16);
  data_ = AlignedBuffer(panels * panel_floats * static_cast<std::int64_t>(sizeof(float)));
  auto* const to = static_cast<float*>(data_.data());
  pool.ParallelFor(panels, [&](std::int64_t panel, int) {
    float* out = to + panel * panel_floats;
    std::fill(out, out + panel_floats, 0.0f);
    LoadBlock(Transposed(weight), 0, columns_, 16 * panel, std::min<std::int64_t>(16, rows_ - 16 * panel), out, 16);
  });
}

void PackedMatrix::Unpack(const TensorView& weight, threadpool::Pool& pool) const {
  if (weight.rank != 2 || weight.shape[0] != rows_ || weight.shape[1] != columns_ || weight.dtype != dtype_) {
    throw std::invalid_argument("weight has shape " + ShapeText(weight) + " of " + NameOf(weight.dtype) + "; expected [" +
                                std::to_string(rows_) + ", " + std::to_string(columns_) + "] of " + NameOf(dtype_) +
                                ", as was packed");
  }
  if (dtype_ == DType::kBFloat16) {
    const MatrixView view = ViewOf(weight);
    pool.ParallelFor(tiles_.panels, [&](std::int64_t panel, int) { UnpackPanel(tiles_, panel, view); });
    return;
  }
  const std::int64_t panel_floats = 16 * RoundUp(columns_, 16);
  pool.ParallelFor(rows_, [&](std::int64_t row, int) {
    const float* from = panels() + row / 16 * panel_floats + row % 16;
    auto* out = static_cast<float*>(weight.data) + row * weight.stride[0];
    for (std::int64_t k = 0; k < columns_; ++k) out[k * weight.stride[1]] = from[16 * k];
  });
}

}  // namespace moesaic::fused
