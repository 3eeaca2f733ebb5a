#include "cpu_kernels/gemm/pack.h"

#include <algorithm>
#include <cstdlib>

#include "cpu_kernels/float16.h"
#include "cpu_kernels/kernels.h"

namespace moesaic {
namespace {

float AsFloat(float value) { return value; }
float AsFloat(BFloat16 value) { return ToFloat(value); }
float AsFloat(Float16 value) { return ToFloat(value); }

/// The loop over the smaller stride is the inner one: each cache line is read once.
template <typename T>
void LoadTyped(const MatrixView& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
               float* out, std::int64_t ld) {
  const T* from = static_cast<const T*>(view.data) + row * view.row_stride + column * view.column_stride;
  if (std::abs(view.column_stride) <= std::abs(view.row_stride)) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) out[i * ld + j] = AsFloat(from[i * view.row_stride + j * view.column_stride]);
    }
  } else {
    for (std::int64_t j = 0; j < columns; ++j) {
      for (std::int64_t i = 0; i < rows; ++i) out[i * ld + j] = AsFloat(from[i * view.row_stride + j * view.column_stride]);
    }
  }
}

}  // namespace

MatrixView MatrixAt(const TensorView& view, std::int64_t index, std::int64_t first_row, std::int64_t rows) {
  char* data = static_cast<char*>(view.data) + (index * view.stride[0] + first_row * view.stride[1]) * SizeOf(view.dtype);
  return {data, view.dtype, rows, view.shape[2], view.stride[1], view.stride[2]};
}

void LoadBlock(const MatrixView& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
               float* out, std::int64_t ld) {
  if (view.dtype == DType::kFloat32) return LoadTyped<float>(view, row, rows, column, columns, out, ld);
  if (view.dtype == DType::kFloat16) return LoadTyped<Float16>(view, row, rows, column, columns, out, ld);
  LoadTyped<BFloat16>(view, row, rows, column, columns, out, ld);
}

void PackPanel(const MatrixView& view, std::int64_t panel, const TileMatrix& tiles, float* scratch) {
  const std::int64_t row = panel * kPanelRows;
  const std::int64_t rows = std::clamp<std::int64_t>(view.rows - row, 0, kPanelRows);
  PackRowsArgs args;
  const void* pointers[kPanelRows];
  args.rows = pointers;
  args.count = rows;
  args.columns = view.columns;
  args.stored = tiles;
  args.first_panel = panel;
  args.panels = 1;
  args.tile_columns = tiles.columns;
  if (view.column_stride == 1 && view.dtype != DType::kFloat16) {
    args.dtype = view.dtype;
    for (std::int64_t i = 0; i < rows; ++i) {
      pointers[i] = static_cast<const char*>(view.data) + (row + i) * view.row_stride * SizeOf(view.dtype);
    }
  } else {
    LoadBlock(view, row, rows, 0, view.columns, scratch, view.columns);
    for (std::int64_t i = 0; i < rows; ++i) pointers[i] = scratch + i * view.columns;
  }
  ChosenKernels().pack_rows(args);
}

void UnpackPanel(const TileMatrix& tiles, std::int64_t panel, const MatrixView& view) {
  for (std::int64_t i = 0; i < kPanelRows; ++i) {
    const std::int64_t row = panel * kPanelRows + i;
    if (row >= view.rows) return;
    for (std::int64_t j = 0; j < view.columns; ++j) {
      const BFloat16 value = tiles.Tile(panel, j / kTileColumns)[i * kTileColumns + StoredPosition(j % kTileColumns)];
      const std::int64_t offset = row * view.row_stride + j * view.column_stride;
      if (view.dtype == DType::kBFloat16) {
        static_cast<BFloat16*>(view.data)[offset] = value;
      } else if (view.dtype == DType::kFloat16) {
        static_cast<Float16*>(view.data)[offset] = ToFloat16(ToFloat(value));
      } else {
        static_cast<float*>(view.data)[offset] = ToFloat(value);
      }
    }
  }
}

}  // namespace moesaic
