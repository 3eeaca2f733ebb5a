// The active adapters of one call, as matrices of tiles.
//
// Adapters add up, so their ranks are laid side by side: with R1 the ranks of everything that reads the layer's input (gate_up,
// gate, up) and R2 the ranks of down, each rounded up to a tile, an expert's adapters are five matrices in the layout of the
// base weights, and serve both directions as those do:
//
//   a              [R1, H]   A of gate and up, one under the other
//   b_gate, b_up   [I, R1]   B; zero where a rank does not feed that projection
//   a_down_t       [I, R2]   A of down, transposed
//   b_down_t       [R2, H]   B of down, transposed
//
// Scales are not part of them: they are folded into the rank-wide intermediates while those are fp32.
//
// The parameters are read anew in every call, in any strides. PEFT keeps B rank-major, with the experts innermost: neighbouring
// experts share cache lines. So adapters are packed, and gradients written, for a group of 16 experts at a time.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/gemm/tiles.h"
#include "moe/config.h"

namespace moesaic::moe {

enum LoraMatrix { kLoraA, kLoraBGate, kLoraBUp, kLoraADownT, kLoraBDownT };
inline constexpr int kNumLoraMatrices = 5;

/// Most experts that are packed together. (A group is smaller where the adapters of so many would not fit the scratch memory.)
inline constexpr std::int64_t kLoraGroup = 16;

/// One expert's adapters in tiles, and where their gradients add up: fp32 [rows][columns] of the same (padded) matrix, null
/// where no gradient is wanted.
struct ExpertLora {
  std::array<TileMatrix, kNumLoraMatrices> matrix;
  std::array<float*, kNumLoraMatrices> gradient{};
};

class LoraCall {
 public:
  /// Views are borrowed for the life of the object. `gradients` is empty or as long as `adapters`.
  LoraCall(const LayerConfig& config, std::span<const LoraAdapter> adapters, std::span<const LoraAdapterGrad> gradients);

  /// Sum of the ranks of gate_up, gate and up (R1) and of down (R2), as they are and rounded up to 32.
  std::int64_t input_rank() const { return input_rank_; }
  std::int64_t down_rank() const { return down_rank_; }
  std::int64_t padded_input_rank() const { return RoundUp(input_rank_, kTileColumns); }
  std::int64_t padded_down_rank() const { return RoundUp(down_rank_, kTileColumns); }
  bool any() const { return input_rank_ + down_rank_ > 0; }

  /// Scale of each rank, zero in the padding: [padded_input_rank()] and [padded_down_rank()].
  const float* input_scale() const { return input_scale_.data(); }
  const float* down_scale() const { return down_scale_.data(); }

  bool wants(LoraMatrix m) const { return !pieces_[m].gradients.empty(); }
  bool wants_any() const;

  /// Rows and columns of a packed matrix and of its gradient; 0 rows where there is no such adapter.
  std::int64_t rows(LoraMatrix m) const { return pieces_[m].rows; }
  std::int64_t columns(LoraMatrix m) const { return pieces_[m].columns; }

  /// Bytes of one expert's matrices, and of its gradients.
  std::int64_t expert_bytes() const;
  std::int64_t gradient_bytes() const;
  /// Carves an expert's matrices (and gradients) out of memory of that size.
  ExpertLora Bind(void* matrices, void* gradients) const;

  /// Packs one matrix of several experts of a group.
  void Pack(LoraMatrix m, std::span<const std::int64_t> experts, std::span<const ExpertLora> targets) const;

  /// Writes the gradients of one matrix for experts first .. first + sources.size() - 1; an entry without rows (its gradient
  /// pointer null) gets zeros.
  void WriteGradients(LoraMatrix m, std::int64_t first_expert, std::span<const ExpertLora> sources) const;

 private:
  /// Part of a packed matrix that one parameter covers; strides in elements of (expert, row, column).
  struct Piece {
    void* data;
    DType dtype;
    std::int64_t expert_stride, row_stride, column_stride;
    std::int64_t row, column, rows, columns;
  };
  struct Pieces {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::vector<Piece> parameters;
    std::vector<Piece> gradients;
  };

  /// A tile of fp32, and the part of it that a piece covers (rows and columns of the whole matrix).
  using Tile = float[kPanelRows][kTileColumns];
  struct Block {
    std::int64_t row, column, rows, columns;
  };

  /// Where all rows of the matrix lie contiguously in the parameters, they are packed from there. False: they do not.
  bool PackRowsInPlace(LoraMatrix m, std::span<const std::int64_t> experts, std::span<const ExpertLora> targets) const;
  /// One block of a piece for each expert into its dense tile.
  void LoadBlock(const Piece& piece, const Block& block, std::span<const std::int64_t> experts, Tile* dense) const;
  /// Gradients of a piece whose experts lie side by side. False: they do not.
  bool WriteTransposed(LoraMatrix m, const Piece& piece, std::int64_t first_expert, std::span<const ExpertLora> sources) const;

  void AddPair(const LoraPair& pair, const LoraPairGrad* gradient, bool gate, bool up);
  void AddDown(const LoraPair& pair, const LoraPairGrad* gradient);
  void AddPiece(LoraMatrix m, const TensorView& view, const TensorView* gradient, bool transposed, std::int64_t first,
                std::int64_t count, std::int64_t row, std::int64_t column);

  LayerConfig config_;
  std::int64_t input_rank_ = 0;
  std::int64_t down_rank_ = 0;
  std::vector<float> input_scale_;
  std::vector<float> down_scale_;
  std::array<Pieces, kNumLoraMatrices> pieces_;
};

}  // namespace moesaic::moe
