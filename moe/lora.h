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
// (On several NUMA nodes: of I, the node's shard; the other two once for each node.)
//
// Where all ranks of a side fit half a tile, it has them twice: rank k is k and 16 + k, along rows in the same memory. So a
// rank-wide intermediate in two parts (SplitTiles) takes one step of a contraction and not two.
//
// Scales are not part of them: they are folded into the rank-wide intermediates while those are fp32.
//
// The parameters are read anew in every call, in any strides. PEFT keeps B rank-major, with the experts innermost: neighbouring
// experts share cache lines. So adapters are packed, and gradients written, for a group of up to 16 experts at a time, along
// whatever lies side by side in memory (lora_copy.cc); where that belongs to one expert, expert by expert.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_kernels/gemm/split_tiles.h"
#include "cpu_kernels/kernels.h"
#include "moe/config.h"
#include "moe/shards.h"

namespace moesaic::moe {

enum LoraMatrix { kLoraA, kLoraBGate, kLoraBUp, kLoraADownT, kLoraBDownT };
inline constexpr int kNumLoraMatrices = 5;

/// Most experts that are packed together. (A group is smaller where the adapters of so many would not fit the scratch memory.)
inline constexpr std::int64_t kLoraGroup = 16;

/// One expert's adapters in tiles, for one shard of I, and where their gradients add up: fp32
/// [gradient_rows][gradient_columns]; null where no gradient is wanted.
struct ExpertLora {
  std::array<TileMatrix, kNumLoraMatrices> matrix;
  std::array<float*, kNumLoraMatrices> gradient{};

  /// The same in memory so many bytes further on.
  ExpertLora At(std::int64_t bytes) const;
};

class LoraCall {
 public:
  /// Views are borrowed for the life of the object. `gradients` is empty or as long as `adapters`. Of I, only the rows of the
  /// shard are there.
  LoraCall(const LayerConfig& config, const Shard& shard, std::span<const LoraAdapter> adapters,
           std::span<const LoraAdapterGrad> gradients);

  /// Sum of the ranks of gate_up, gate and up (R1) and of down (R2), as they are and rounded up to 32.
  std::int64_t input_rank() const { return input_rank_; }
  std::int64_t down_rank() const { return down_rank_; }
  std::int64_t padded_input_rank() const { return RoundUp(input_rank_, kTileColumns); }
  std::int64_t padded_down_rank() const { return RoundUp(down_rank_, kTileColumns); }
  bool any() const { return input_rank_ + down_rank_ > 0; }
  /// A matrix is of so many ranks (R1 or R2) and features (H or I).
  std::int64_t RankOf(LoraMatrix m) const { return m == kLoraADownT || m == kLoraBDownT ? down_rank_ : input_rank_; }
  std::int64_t FeaturesOf(LoraMatrix m) const { return m == kLoraA || m == kLoraBDownT ? config_.hidden_size : shard_.size; }

  /// Scale of each rank, zero in the padding: [padded_input_rank()] and [padded_down_rank()].
  const float* input_scale() const { return input_scale_.data(); }
  const float* down_scale() const { return down_scale_.data(); }

  bool wants(LoraMatrix m) const { return !pieces_[m].gradients.empty(); }
  bool wants_any() const;

  /// Rows and columns of a packed matrix; 0 rows where there is no such adapter.
  std::int64_t rows(LoraMatrix m) const { return pieces_[m].rows; }
  std::int64_t columns(LoraMatrix m) const { return pieces_[m].columns; }
  /// Of the sums of its gradient: whole panels of ranks, whole tiles of features. Those of b_down_t are [H, R2], as the
  /// parameter is.
  std::int64_t gradient_rows(LoraMatrix m) const { return GradientSide(m, m == kLoraA); }
  std::int64_t gradient_columns(LoraMatrix m) const { return GradientSide(m, m != kLoraA); }

  /// A parameter of the first expert where it lies, and elements to the next expert's.
  struct PieceInPlace {
    LowRankPiece piece;
    std::int64_t expert_stride = 0, gradient_expert_stride = 0;
  };
  /// Whether all parameters and gradients are fp32, and lie as PEFT keeps them: features side by side in A, experts in B.
  bool LiesInPlace() const;
  std::vector<PieceInPlace> InPlace(LoraMatrix m) const;

  /// Bytes of one expert's matrices, and of its gradients.
  std::int64_t expert_bytes() const;
  std::int64_t gradient_bytes() const;
  /// Carves an expert's matrices (and gradients) out of memory of that size.
  ExpertLora Bind(void* matrices, void* gradients) const;

  /// A matrix is packed, and its gradient written, in strips of four tiles along its longer side.
  static constexpr std::int64_t kStripTiles = 4;
  struct Strips {
    std::int64_t begin, end;
  };
  std::int64_t strips(LoraMatrix m) const;
  /// What a task packs or writes of a group.
  struct Share {
    std::int64_t experts, strips;
  };
  /// So many elements of it, or what comes nearest. Where each expert's numbers lie by themselves that is of as few experts as
  /// will do, for memory comes the faster the longer it is read in its order; else strips of all of them.
  Share ShareOf(LoraMatrix m, std::int64_t experts, std::int64_t elements) const;
  /// Elements of one expert's matrices, without padding.
  std::int64_t parameters() const;

  /// Packs strips of one matrix for experts first_expert .. first_expert + targets.size() - 1, at most kLoraGroup; an expert
  /// whose entry has no memory is passed over.
  void Pack(LoraMatrix m, const Strips& strips, std::int64_t first_expert, std::span<const ExpertLora> targets) const;

  /// Adds another shard's sums to this one's: strips of a matrix that is whole in every shard (kLoraA, kLoraBDownT).
  void AddGradients(LoraMatrix m, const Strips& strips, std::span<const ExpertLora> from, std::span<const ExpertLora> to) const;

  /// Writes strips of the gradients of one matrix for the same experts; where an entry has none, zeros.
  void WriteGradients(LoraMatrix m, const Strips& strips, std::int64_t first_expert, std::span<const ExpertLora> sources) const;

 private:
  /// Without memory.
  TileMatrix MatrixOf(LoraMatrix m) const;
  std::int64_t GradientSide(LoraMatrix m, bool ranks) const {
    return ranks ? RoundUp(RankOf(m), kPanelRows) : RoundUp(FeaturesOf(m), kTileColumns);
  }

  /// Part of a packed matrix that one parameter covers; strides in elements of (expert, row, column).
  struct Piece {
    void* data;
    DType dtype;
    std::int64_t expert_stride, row_stride, column_stride;
    std::int64_t row, column, rows, columns;

    /// Element (i, j) of the whole matrix, of one expert.
    void* At(std::int64_t expert, std::int64_t i, std::int64_t j) const {
      const std::int64_t offset = expert * expert_stride + (i - row) * row_stride + (j - column) * column_stride;
      return static_cast<char*>(data) + offset * SizeOf(dtype);
    }
  };
  struct Pieces {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    std::vector<Piece> parameters;
    std::vector<Piece> gradients;
  };

  /// What lies side by side in memory.
  enum class Axis { kColumns, kRows, kExperts, kNone };
  Axis AxisOf(const Piece& piece) const;
  /// The axis along which all parameters of a matrix can be packed.
  Axis PackingAxis(const Pieces& pieces) const;
  /// Whether features or ranks lie side by side in all parameters and gradients, not experts.
  bool LiesByExpert(const Pieces& pieces) const;

  /// Panels and tile columns of a matrix.
  struct Tiles {
    std::int64_t first_panel, end_panel, first_column, end_column;
  };
  Tiles TilesOf(LoraMatrix m, const Strips& strips) const;
  Tiles GradientTilesOf(LoraMatrix m, const Strips& strips) const;

  /// A tile of fp32, and the part of it that a piece covers (rows and columns of the whole matrix).
  using Tile = float[kPanelRows][kTileColumns];
  struct Block {
    std::int64_t row, column, rows, columns;
  };
  static Block Intersect(const Piece& piece, const Tiles& tiles);

  struct PackCall {
    LoraMatrix m;
    bool repeat;  ///< ranks along columns are written twice
    Tiles tiles;
    std::int64_t first_expert;
    std::span<const ExpertLora> targets;
  };
  void PackAlongRows(const PackCall& call) const;
  void PackAcrossRows(const PackCall& call) const;
  void PackAcrossExperts(const PackCall& call) const;
  /// Any strides: through dense tiles of fp32, element by element.
  void PackScattered(const PackCall& call) const;
  static void LoadScattered(const Piece& piece, const Block& block, const PackCall& call, Tile* dense);

  struct WriteCall {
    LoraMatrix m;
    Block block;
    std::int64_t ld;
    std::int64_t first_expert;
    std::span<const ExpertLora> sources;
  };
  static void WriteAlongRows(const Piece& piece, const WriteCall& call);
  static void WriteAcrossRows(const Piece& piece, const WriteCall& call);
  static void WriteAcrossExperts(const Piece& piece, const WriteCall& call);
  static void WriteScattered(const Piece& piece, const WriteCall& call);

  void AddPair(const LoraPair& pair, const LoraPairGrad* gradient, bool gate, bool up);
  void AddDown(const LoraPair& pair, const LoraPairGrad* gradient);
  /// Entries [first, first + count) of an axis of the view.
  struct Slice {
    int axis;
    std::int64_t first, count;
  };
  void AddPiece(LoraMatrix m, const TensorView& view, const TensorView* gradient, bool transposed, const Slice& slice,
                std::int64_t row, std::int64_t column);

  LayerConfig config_;
  Shard shard_;
  std::int64_t input_rank_ = 0;
  std::int64_t down_rank_ = 0;
  std::vector<float> input_scale_;
  std::vector<float> down_scale_;
  std::array<Pieces, kNumLoraMatrices> pieces_;
};

}  // namespace moesaic::moe
