// Strided matrices to stored tiles and back.
#pragma once

#include <cstdint>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic {

/// A two-dimensional view; strides count elements and may be anything.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;  ///< fp32, bf16 or fp16
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;

  MatrixView Transposed() const { return {data, dtype, columns, rows, column_stride, row_stride}; }
};

/// The matrix [rows, columns] at (index, first_row, 0) of a three-dimensional view.
MatrixView MatrixAt(const TensorView& view, std::int64_t index, std::int64_t first_row, std::int64_t rows);

/// out[i * ld + j] = view(i, j) as fp32, for a block of the view.
void LoadBlock(const MatrixView& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
               float* out, std::int64_t ld);

/// Rows 16 panel ... 16 panel + 15 of `view`, rounded to bf16 (fp16 and fp32), as stored tiles. Beyond the view: zeros.
/// @param scratch  16 * tiles.columns * 32 floats
void PackPanel(const MatrixView& view, std::int64_t panel, const TileMatrix& tiles, float* scratch);

/// Writes the rows of a panel back, in the type of `view`.
void UnpackPanel(const TileMatrix& tiles, std::int64_t panel, const MatrixView& view);

}  // namespace moesaic
