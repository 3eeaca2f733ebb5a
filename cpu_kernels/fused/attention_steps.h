// Steps that attention of many queries and its gradients share. Not for others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/fused/attention.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/kernels.h"

namespace moesaic::fused {

/// Throws std::invalid_argument naming what does not fit, `out` included.
void CheckAttention(const AttentionArgs& args);

/// Heads of queries to one of keys.
inline std::int64_t HeadsTogether(const AttentionArgs& args) { return args.key_heads == 0 ? 1 : args.heads / args.key_heads; }

/// Rows that are fetched before they are packed: the kernel itself runs ahead from there.
inline constexpr std::int64_t kRowsAhead = 128;

/// The matrix with memory for its tiles.
inline TileMatrix TakeTiles(Carver& carver, TileMatrix matrix) {
  matrix.data = carver.Take<BFloat16>(matrix.size());
  return matrix;
}

/// Panels of a matrix of tiles from `panel` on.
inline TileMatrix FromPanel(TileMatrix tiles, std::int64_t panel, std::int64_t panels) {
  tiles.data = tiles.Tile(panel, 0);
  tiles.panels = panels;
  return tiles;
}

/// Its columns of tiles from `column` on.
inline TileMatrix FromColumn(TileMatrix tiles, std::int64_t column, std::int64_t columns) {
  tiles.data = tiles.Tile(0, column);
  tiles.columns = columns;
  return tiles;
}

/// Queries that see no keys but these, and keys that no other queries see: a whole row, or one or some of those that share it.
struct Segment {
  std::int64_t batch;
  std::int64_t query, queries;     ///< the first row, and how many
  std::int64_t key, keys;          ///< the same of keys; causal, the last query sees the last one
  const std::int32_t* first_keys;  ///< of its queries, among all keys of the row; null: they see them from `key` on

  /// The first of its keys that any of `count` queries sees, at most `last`, in whole tiles.
  std::int64_t FirstKey(std::int64_t first_query, std::int64_t count, std::int64_t last) const {
    if (first_keys == nullptr) return 0;
    const std::int64_t first = *std::min_element(first_keys + first_query, first_keys + first_query + count);
    return std::clamp<std::int64_t>(first - key, 0, last) / kTileColumns * kTileColumns;
  }
};

/// In their order. Causal rows are cut where sequences begin, but not into segments of a few queries.
std::vector<Segment> SegmentsOf(const AttentionArgs& args);

/// The rows of one head, as kernels take them.
struct HeadRows {
  const TensorView& view;
  std::int64_t batch, first_row, first_column, columns;

  BFloat16* Row(std::int64_t row) const {
    return static_cast<BFloat16*>(view.data) + batch * view.stride[0] + (first_row + row) * view.stride[1] + first_column;
  }

  /// Brings rows to L2: they lie too far apart for the hardware to run ahead.
  void Fetch(std::int64_t first, std::int64_t count) const {
    for (std::int64_t i = first; i < first + count; ++i) {
      for (std::int64_t c = 0; c < columns; c += kTileColumns) __builtin_prefetch(Row(i) + c, 0, 2);
    }
  }

  /// Rows [first, first + count) as tiles.
  /// @param pack      has the orders that are wanted; of row pairs whole tiles of 32 rows are filled, in all orders
  /// @param pointers  memory for `count`
  void Pack(const KernelTier& kernels, std::int64_t first, std::int64_t count, PackRowsArgs pack, const void** pointers) const {
    const FusedRange range(FusedStage::kPack, 0.0, 4.0 * static_cast<double>(count * columns));
    for (std::int64_t i = 0; i < count; ++i) pointers[i] = Row(first + i);
    pack.rows = pointers;
    pack.dtype = DType::kBFloat16;
    pack.count = count;
    pack.columns = columns;
    pack.panels = RoundUp(count, pack.row_pairs.data != nullptr ? kTileColumns : kPanelRows) / kPanelRows;
    pack.tile_columns = CeilDiv(columns, kTileColumns);
    kernels.pack_rows(pack);
  }

  /// in[i][c] to rows from `first` on, rounded.
  void Store(const KernelTier& kernels, const float* in, std::int64_t ld, std::int64_t first, std::int64_t count) const {
    StoreRowsArgs store;
    store.in = in;
    store.ld = ld;
    store.rows = count;
    store.columns = columns;
    store.out = Row(first);
    store.dtype = DType::kBFloat16;
    store.out_stride = view.stride[1];
    kernels.store_rows(store);
  }
};

/// c (+)= left right, of whole tiles: so many panels of left as it has.
/// @param flops  those of them that count
inline void Multiply(const KernelTier& kernels, FusedStage stage, const TileMatrix& left, const TileMatrix& right, double flops,
                     float* c, std::int64_t ldc, bool accumulate = false) {
  const FusedRange range(stage, flops, 0.0);
  const GradientSegment segment{left, right};
  GradientGemmArgs gemm;
  gemm.segments = {&segment, 1};
  gemm.panels = left.panels;
  gemm.c = c;
  gemm.ldc = ldc;
  gemm.accumulate = accumulate;
  kernels.gradient_gemm(gemm);
}

/// Of a product of [rows][depth] with [depth][columns].
inline double Flops(std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  return 2.0 * static_cast<double>(rows * columns * depth);
}

}  // namespace moesaic::fused
