// Rows of x and their products with a vocabulary: what log-probabilities and their gradients share. Not for others.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpu_kernels/fused/direct_rows.h"
#include "cpu_kernels/fused/log_probs.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {

/// Tokens of the vocabulary whose logits are made at a time.
inline constexpr std::int64_t kChunk = 512;
/// Rows of a block, which a task takes, at most: weights come from memory once for each block, and a matrix unit needs them the
/// faster. (128 rows there: 1.1 to 1.2 times as long on two cores, 1.04 to 1.14 times on 16 threads; 384 and 512 the same or
/// longer. docs/experiments)
inline constexpr std::int64_t kBlockRows = 128, kMatrixUnitBlockRows = 256;

/// Throws std::invalid_argument naming what does not fit.
void CheckLogProbs(const LogProbsArgs& args);

/// These rows, up to 2,048 at a time for memory's sake, and equally many: few rows are summed up in another order, and must not
/// be the last ones of many.
std::vector<std::vector<std::int64_t>> Pieces(const std::vector<std::int64_t>& rows);

/// Some rows of x and the products of them with the vocabulary, block by block; or these themselves, where there is no weight.
class Projection {
 public:
  Projection(const LogProbsArgs& args, std::vector<std::int64_t> rows)
      : args_(args),
        rows_(std::move(rows)),
        depth_(args.x.shape[1]),
        vocabulary_(args.weight == nullptr ? args.x.shape[1] : args.weight->rows()),
        is_bf16_(args.weight != nullptr && args.x.dtype == DType::kBFloat16),
        ld_x_(RoundUp(depth_, 16) + 16) {
    if (args.weight == nullptr) {
      block_rows_ = kPanelRows;
      return;
    }
    // Half of L2 for a block.
    const std::int64_t fitting = HostL2Bytes() / 2 / (SizeOf(args.x.dtype) * RoundUp(depth_, kTileColumns));
    const std::int64_t most = is_bf16_ && kernels_.unpack_overlaps ? kMatrixUnitBlockRows : kBlockRows;
    block_rows_ = std::clamp<std::int64_t>(fitting, kTileColumns, most) / kTileColumns * kTileColumns;
    block_rows_ = std::min(block_rows_, RoundUp(rows_count(), kTileColumns));
  }

  std::int64_t rows_count() const { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t depth() const { return depth_; }
  std::int64_t vocabulary() const { return vocabulary_; }
  bool is_bf16() const { return is_bf16_; }  ///< whether bf16 is multiplied
  std::int64_t block_rows() const { return block_rows_; }
  std::int64_t blocks() const { return CeilDiv(rows_count(), block_rows_); }
  /// Of all rows there are.
  std::int64_t Row(std::int64_t i) const { return rows_[static_cast<std::size_t>(i)]; }
  std::int64_t RowsOfBlock(std::int64_t block) const { return std::min(block_rows_, rows_count() - block * block_rows_); }
  const KernelTier& kernels() const { return kernels_; }

  /// Of one worker.
  struct Memory {
    TileMatrix tiles;  ///< bf16: a block
    float* rows;       ///< fp32: a block, [block_rows][ld_x]
    float* scratch;    ///< fp32: of the GEMM
    float* products;   ///< of a chunk, as LogitBlock has them
  };

  Memory Take(Carver& carver) const {
    Memory memory{};
    if (is_bf16_) {
      memory.tiles = TileMatrix::Activations(nullptr, block_rows_, depth_);
      memory.tiles.data = carver.Take<BFloat16>(memory.tiles.size());
      memory.products = carver.Take<float>(kChunk * SumsPitch(block_rows_));
    } else if (args_.weight == nullptr) {
      memory.products = carver.Take<float>(block_rows_ * SumsPitch(kChunk));
    } else {
      memory.rows = carver.Take<float>(block_rows_ * ld_x_);
      memory.scratch = carver.Take<float>(kFp32GemmScratch);
      memory.products = carver.Take<float>(block_rows_ * SumsPitch(kChunk));
    }
    return memory;
  }

  void Pack(std::int64_t block, Memory& memory) const {
    if (args_.weight == nullptr) return;
    const std::int64_t first = block * block_rows_, rows = RowsOfBlock(block);
    const FusedRange range(FusedStage::kPack, 0.0, 2.0 * static_cast<double>(rows * depth_ * SizeOf(args_.x.dtype)));
    const void* pointers[kMatrixUnitBlockRows];
    for (std::int64_t i = 0; i < rows; ++i) pointers[i] = AddressOf(args_.x, Row(first + i), 0);
    if (!is_bf16_) {
      const auto bytes = static_cast<std::size_t>(depth_) * sizeof(float);
      for (std::int64_t i = 0; i < rows; ++i) std::memcpy(memory.rows + i * ld_x_, pointers[i], bytes);
      return;
    }
    memory.tiles.panels = CeilDiv(rows, kPanelRows);
    PackRowsArgs pack;
    pack.rows = pointers;
    pack.dtype = DType::kBFloat16;
    pack.count = rows;
    pack.columns = depth_;
    (Stored(rows) > 0 ? pack.stored : pack.pairs) = memory.tiles;
    pack.panels = memory.tiles.panels;
    pack.tile_columns = memory.tiles.columns;
    kernels_.pack_rows(pack);
  }

  /// Products of a block that is packed with tokens [from, from + kChunk) of the vocabulary, or what is left of them.
  void Multiply(std::int64_t block, std::int64_t from, FusedStage stage, const Memory& memory) const {
    if (args_.weight == nullptr) return Load(block, from, memory);
    const std::int64_t rows = RowsOfBlock(block), to = End(from);
    const FusedRange range(stage, 2.0 * static_cast<double>(rows * (to - from) * depth_), 0.0);
    if (!is_bf16_) {
      Fp32GemmArgs gemm;
      gemm.a = memory.rows;
      gemm.lda = ld_x_;
      gemm.rows = rows;
      gemm.panels = args_.weight->panels();
      gemm.n = vocabulary_;
      gemm.k = depth_;
      gemm.first = from / kPanelRows;
      gemm.count = CeilDiv(to - from, kPanelRows);
      gemm.c = memory.products;
      gemm.ldc = SumsPitch(kChunk);
      gemm.scratch = memory.scratch;
      return kernels_.fused.fp32_gemm(gemm);
    }
    const TileMatrix& weights = args_.weight->tiles();
    const GemmSegment segment{weights, memory.tiles};
    DirectGemmArgs gemm;
    gemm.segments = {&segment, 1};
    gemm.first_panel = from / kPanelRows;
    gemm.panels = CeilDiv(to, kPanelRows) - gemm.first_panel;
    gemm.activation_panels = memory.tiles.panels;
    gemm.row_count = Stored(rows);
    gemm.c = memory.products;
    gemm.ldc = SumsPitch(block_rows_);
    const std::int64_t next = to < vocabulary_ ? to / kPanelRows : 0;
    gemm.prefetch = {weights, next, weights.panels - next, 0, weights.columns};
    kernels_.direct_gemm(gemm);
  }

  /// Products that are in memory, widened.
  void Load(std::int64_t block, std::int64_t from, const Memory& memory) const {
    const FusedRange range(FusedStage::kPack, 0.0, 0.0);
    for (std::int64_t i = 0; i < RowsOfBlock(block); ++i) {
      const void* const row = AddressOf(args_.x, Row(block * block_rows_ + i), from);
      float* const out = memory.products + i * SumsPitch(kChunk);
      const std::int64_t count = End(from) - from;
      if (args_.x.dtype == DType::kFloat32) {
        std::copy_n(static_cast<const float*>(row), count, out);
      } else {
        for (std::int64_t c = 0; c < count; ++c) out[c] = ToFloat(static_cast<const BFloat16*>(row)[c]);
      }
    }
  }

  /// The logits of sixteen rows in what was multiplied last.
  /// @param targets  [16] as LogitBlock has them
  LogitBlock Logits(std::int64_t panel, std::int64_t from, const std::int32_t* targets, const Memory& memory) const {
    LogitBlock logits;
    const std::int64_t row = panel * kPanelRows;
    logits.by_rows = !is_bf16_;
    logits.ld = is_bf16_ ? SumsPitch(block_rows_) : SumsPitch(kChunk);
    logits.products = memory.products + (is_bf16_ ? row : row * logits.ld);
    logits.columns = End(from) - from;
    logits.bias = args_.bias == nullptr ? nullptr : args_.bias + from;
    logits.scale = args_.scale;
    logits.targets = targets;
    return logits;
  }

  /// The last one of those of a chunk, plus one.
  std::int64_t End(std::int64_t from) const { return std::min(from + kChunk, vocabulary_); }

 private:
  std::int64_t Stored(std::int64_t rows) const { return StoredRows(kernels_, rows, rows_count(), depth_); }

  const LogProbsArgs& args_;
  const std::vector<std::int64_t> rows_;
  const std::int64_t depth_, vocabulary_;
  const bool is_bf16_;
  const std::int64_t ld_x_;
  std::int64_t block_rows_ = 0;
  const KernelTier& kernels_ = ChosenKernels();
};

/// Sixteen rows' values of an array [T]; zeros where there are no rows, or no array.
struct Sixteen {
  alignas(64) float values[16] = {};

  Sixteen(const Projection& projection, std::int64_t first, const float* array) {
    if (array == nullptr) return;
    for (std::int64_t i = 0; i < 16 && first + i < projection.rows_count(); ++i) values[i] = array[projection.Row(first + i)];
  }
};

/// Sixteen rows' targets, counted from the token `from`.
struct Targets {
  std::int32_t values[16];

  Targets(const Projection& projection, const LogProbsArgs& args, std::int64_t first, std::int64_t from) {
    for (std::int64_t i = 0; i < 16; ++i) {
      const bool is_row = first + i < projection.rows_count();
      values[i] = is_row ? static_cast<std::int32_t>(args.targets[projection.Row(first + i)] - from) : -1;
    }
  }
};

}  // namespace moesaic::fused
