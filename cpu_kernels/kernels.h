// The table of kernels that each instruction-set tier fills, and the list of tiers.
//
// Matrices are tiles of bf16 (gemm/tiles.h), results fp32. Every output element has one accumulator that adds the products in
// ascending order of the contraction index, segment after segment: no blocking, splitting or thread count changes a bit. (The
// onednn tier adds up parts of 256 products each, cut in one way, contract_along_features interleaved parts, as many as a
// vector has lanes, the direct form for few rows 8 on AVX2, elsewhere 16, 8, 4 or 2, as their number and a row's place say.) No
// function here throws, but onednn's where oneDNN fails, or takes a lock; all may run on any number of threads at once.
#pragma once

#include <cstdint>
#include <span>

#include "cpu_kernels/fused/fused_kernels.h"
#include "cpu_kernels/gate.h"
#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/sampling/sampling_kernels.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic {

/// One product of a sum of products, of which a GEMM has at least one. No matrix is empty.
struct GemmSegment {
  TileMatrix weights;
  TileMatrix activations;
};

/// What a GEMM brings to the L2 cache while it computes: the weights that the next call begins with, a cell's panels of them at
/// its end, and `lines` cache lines from each of `others` on. Nothing where the pointers are null.
struct PrefetchRange {
  TileMatrix weights;
  std::int64_t first_panel = 0;
  std::int64_t panels = 0;
  std::int64_t first_column = 0;
  std::int64_t columns = 0;
  const BFloat16* others[2] = {};
  std::int64_t lines = 0;
};

/// What a direct GEMM multiplies, and where its sums go.
struct DirectProduct {
  std::span<const GemmSegment> segments;  ///< weights stored, activations pairs; equal numbers of columns
  float* c = nullptr;                     ///< [16 panels][ldc], 64-byte aligned rows
  bool accumulate = false;                ///< start from C instead of 0
};

/// Direct form: the contraction runs along the columns of the weights.
///   C[i][t] (+)= sum over segments, k:  weights[16 first_panel + i][k] * activations[t][k]
struct DirectGemmArgs : DirectProduct {
  /// Other weights for the same activations, as up has those of gate: as many segments, each of as many columns, and the same
  /// panels of them. A matrix unit then brings each slice of the activations near once for both. No segments: none.
  DirectProduct twin;
  std::int64_t first_panel = 0;
  std::int64_t panels = 0;             ///< rows of C / 16
  std::int64_t activation_panels = 0;  ///< columns of C / 16
  std::int64_t ldc = 0;                ///< elements, a multiple of 16
  std::int64_t row_count = 0;          ///< 1 to KernelTier::most_stored_rows: activations are stored tiles, of which so many
                                       ///< rows count; columns of C beyond, up to a multiple of 16, are given 0
  BFloat16* scratch = nullptr;         ///< DirectScratchElements(...), 64-byte aligned: decoded weights; null for bf16
  PrefetchRange prefetch;
};

/// Elements of DirectGemmArgs::scratch: 0 unless a segment's weights have a codec.
std::int64_t DirectScratchElements(std::span<const GemmSegment> segments);

/// Unpack form: the contraction runs along the rows of the weights.
///   C[t][n] (+)= sum over segments, k:  activations[16 first_panel + t][k] * weights[k][32 first_column + n]
struct UnpackGemmArgs {
  std::span<const GemmSegment>
      segments;  ///< weights stored (panels = rows / 16); activations operand, columns = panels / 2 rounded up
  std::int64_t first_panel = 0;
  std::int64_t panels = 0;  ///< rows of C / 16
  std::int64_t first_column = 0;
  std::int64_t columns = 0;  ///< columns of C / 32
  float* c = nullptr;        ///< [16 panels][ldc] fp32. With `rows`: null, or memory for sums, overwritten, with ldc of at
                             ///< least 256
  std::int64_t ldc = 0;
  bool accumulate = false;     ///< start from C instead of 0 (only without rows)
  std::int64_t depth = 0;      ///< right tiles (32 rows of weights) of the contraction that are taken at a time, so that their
                               ///< activations stay in cache: a multiple of 8; 0, or no C: all. No effect on
                               ///< a matrix unit whose cell takes all rows at once, or in registers
  std::int64_t row_count = 0;  ///< so many rows of C count, and the others may be left alone; 0: all
  BFloat16* const* rows = nullptr;  ///< one pointer for each row of C, rounded to bf16; null: the row is dropped
  BFloat16* scratch = nullptr;      ///< UnpackScratchElements(...), 64-byte aligned
};

/// Elements of UnpackGemmArgs::scratch: two tile columns of all segments, unpacked.
std::int64_t UnpackScratchElements(std::span<const GemmSegment> segments);

/// One product of the gradient form: operand tiles with row pairs or, permuted alike, stored tiles with pairs.
struct GradientSegment {
  TileMatrix left;   ///< operand, or stored [rows of C][t]
  TileMatrix right;  ///< row pairs [t][columns of C], or pairs of its transpose: panels are columns of C / 16, columns t / 32
};

/// Gradient form: both factors are activations. Of a gradient the contraction runs along their rows t, of attention's scores
/// along the numbers of a head.
///   C[i][n] (+)= sum over segments, t:  left[16 first_panel + i][t] * right[t][n]
struct GradientGemmArgs {
  std::span<const GradientSegment> segments;
  std::int64_t first_panel = 0;
  std::int64_t panels = 0;    ///< rows of C / 16
  float* c = nullptr;         ///< [16 panels][ldc], 64-byte aligned rows; 16 * right.panels columns are written
  std::int64_t ldc = 0;       ///< elements, a multiple of 16
  bool accumulate = false;    ///< start from C instead of 0
  std::int64_t few_rows = 0;  ///< 1 to KernelTier::most_few_gradient_rows: so many t of row pairs count, no others are read but
                              ///< the last one's partner in its pair, which is zero
};

/// Rounds rows to bf16 and lays them out as tiles: value = row[c] * row_scale[r], in fp32, rounded once.
/// What lies beyond `count` and `columns` is filled with zeros. Each output may be left out (data null).
struct PackRowsArgs {
  const void* const* rows = nullptr;  ///< `count` pointers to `columns` contiguous values; null pointer: a row of zeros
  DType dtype = DType::kFloat32;      ///< fp32 or bf16
  std::int64_t count = 0;
  const void* next = nullptr;  ///< the row that a next call begins with: weights fetch it meanwhile
  std::int64_t columns = 0;
  bool repeat = false;               ///< columns 16 to 31 are columns 0 to 15 again; `columns` is at most 16 then
  const float* row_scale = nullptr;  ///< [count]; null: 1
  TileMatrix stored;
  TileMatrix operand;
  TileMatrix pairs;
  TileMatrix row_pairs;           ///< panels: columns / 16; columns: rows / 32, so `panels` is even
  std::int64_t first_panel = 0;   ///< where the rows go: row r to panel first_panel + r / 16
  std::int64_t panels = 0;        ///< panels to fill, the last ones with zeros
  std::int64_t first_column = 0;  ///< the range of tile columns to fill
  std::int64_t tile_columns = 0;
};

/// A tile column of pairs, or of stored tiles, of a matrix [rows][columns], as operand tiles of its transpose [32][rows], in
/// which a gradient contracts over the rows. Rows beyond its panels become zeros.
struct TransposePairsArgs {
  TileMatrix pairs;
  bool stored = false;      ///< `pairs` holds stored tiles
  std::int64_t column = 0;  ///< of tiles
  TileMatrix transposed;    ///< two panels; columns: rows / 32
};

/// Where forward keeps G and U of a block of `rows` <= 32 rows of I for backward: tokens in groups of 16, each group [rows][16]
/// (the last one [rows][what is left]). Element (i, t) of `tokens`:
MOESAIC_INLINE std::int64_t SavedPosition(std::int64_t i, std::int64_t t, std::int64_t rows, std::int64_t tokens) {
  const std::int64_t first = t / 16 * 16;
  return first * rows + i * (tokens - first < 16 ? tokens - first : 16) + t - first;
}

/// Z = f(G) * U for 32 rows of I (a block), with f of the gate, from the transposed results of the direct form. Tiles have
/// zeros beyond the rows and tokens that there are; panels without any are left alone.
struct SwigluForwardArgs {
  Gate activation = Gate::kSilu;
  const float* gate = nullptr;  ///< [32][ld] G^T
  const float* up = nullptr;    ///< [32][ld] U^T
  std::int64_t ld = 0;
  std::int64_t tokens = 0;         ///< valid columns
  std::int64_t rows = 32;          ///< valid rows (fewer at the end of I)
  BFloat16* saved_gate = nullptr;  ///< rows * tokens elements (SavedPosition), or null
  BFloat16* saved_up = nullptr;
  TileMatrix z;  ///< operand tiles [tokens][I]: column `block` is written
  std::int64_t block = 0;
};

/// For 32 rows of I, with g, u from the saved state and w the routing weight of a token:
///   Z = f(g) u    dw[t] += sum over i dZ0 Z    dZ = w dZ0    dU = dZ f(g)    dG = dZ u sigma(y) (1 + g (1 - sigma(y)) y')
/// Tiles as in forward; of transposes all tile columns with tokens are filled.
struct SwigluBackwardArgs {
  Gate activation = Gate::kSilu;
  const float* d_z = nullptr;  ///< [32][ld] dZ0^T
  std::int64_t ld = 0;
  std::int64_t tokens = 0;
  std::int64_t rows = 32;
  const BFloat16* saved_gate = nullptr;  ///< rows * tokens elements (SavedPosition)
  const BFloat16* saved_up = nullptr;
  const float* routing_weight = nullptr;  ///< [tokens]
  float* d_weight = nullptr;              ///< [tokens rounded up to 16], added to
  std::int64_t block = 0;                 ///< which 32 rows of I
  TileMatrix d_gate;                      ///< operand tiles [tokens][I]: column `block` is written
  TileMatrix d_up;
  TileMatrix z;         ///< the same; data null: left out
  TileMatrix d_gate_t;  ///< operand tiles [32][tokens] of the block; data null: left out
  TileMatrix d_up_t;
  TileMatrix z_t;
};

/// out[c] = sum over j of weight[j] * rows[j][c], in this order, fp32, rounded once.
struct MergeRowsArgs {
  const BFloat16* const* rows = nullptr;  ///< `count` pointers
  const float* weights = nullptr;         ///< [count]
  std::int64_t count = 0;
  std::int64_t columns = 0;
  void* out = nullptr;
  DType dtype = DType::kFloat32;  ///< fp32 or bf16
  std::int64_t out_stride = 1;
};

/// Vectors of up to 16 neighbours become columns of stored tiles: a matrix whose rows lie side by side, or matrices whose
/// elements do. In each step s, for x < 16 and columns j < 32, rounded once:
///   out[x][s * out_step + StoredPosition(j)] = columns[j][s * step[j] + x]     zero where x >= width or columns[j] is null
/// With `repeat`, columns 16 to 31 are columns 0 to 15 again.
struct PackColumnsArgs {
  const void* columns[kTileColumns] = {};
  std::int64_t step[kTileColumns] = {};  ///< elements
  DType dtype = DType::kFloat32;         ///< fp32 or bf16
  std::int64_t width = 16;               ///< values in a vector; no more are read
  std::int64_t steps = 1;
  bool repeat = false;
  std::int64_t ahead = 0;          ///< elements from a vector to the one that is prefetched when it is read
  BFloat16* out[kPanelRows] = {};  ///< tile rows, 64-byte aligned; null: dropped
  std::int64_t out_step = 0;       ///< elements, a multiple of 32
};

/// The way back, out of up to 16 rows of fp32. In each step s, for x < width and j < count:
///   out[s * out_step + j * column_stride + x] = rows[x][s * row_step + j]     zero where rows[x] is null
/// Whole cache lines of fp32 are written past the caches: FinishStores() comes before another thread may read them.
struct StoreColumnsArgs {
  const float* rows[16] = {};
  std::int64_t row_step = 0;
  std::int64_t count = 0;
  std::int64_t width = 16;
  std::int64_t steps = 1;
  void* out = nullptr;
  DType dtype = DType::kFloat32;   ///< fp32 or bf16 (rounded)
  std::int64_t column_stride = 0;  ///< elements
  std::int64_t out_step = 0;
};

/// out[i * out_stride + j] = in[i * ld + j], with zeros where `in` is null; past the caches as in StoreColumnsArgs.
struct StoreRowsArgs {
  const float* in = nullptr;
  std::int64_t ld = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  void* out = nullptr;
  DType dtype = DType::kFloat32;  ///< fp32 or bf16 (rounded)
  std::int64_t out_stride = 0;    ///< elements
};

/// One parameter of an adapter as it lies in memory, fp32, or a range of its features. It is rounded to bf16 where it is
/// multiplied, and so are rows of activations: products with packed adapters are the same.
struct LowRankPiece {
  const float* parameter = nullptr;
  float* gradient = nullptr;                         ///< null: not wanted
  std::int64_t feature_stride = 1, rank_stride = 0;  ///< elements
  std::int64_t gradient_feature_stride = 1, gradient_rank_stride = 0;
  std::int64_t first_rank = 0, ranks = 0;  ///< its place among those of all pieces
};

/// Most rows of an expert in the forms below.
inline constexpr std::int64_t kMostLowRankRows = 64;

/// The rows of one expert.
struct LowRankRows {
  std::int64_t count = 0;             ///< at most kMostLowRankRows
  const void* const* rows = nullptr;  ///< [count] activations
  void* const* out = nullptr;         ///< [count] results
  const float* low = nullptr;         ///< [count][ranks]
  float* sums = nullptr;              ///< [count][ranks]; null: not wanted
};

/// With L = low, P(f, j) the parameter of rank j and feature f at f * feature_stride + j * rank_stride + expert:
///   expand_across_experts    out[i][first_feature + f] = sum over j of L[i][j] P(f, j)
///   contract_across_experts  sums[i][j] += sum over f of rows[i][first_feature + f] P(f, j)
///                            gradient(f, j) = sum over i of rows[i][first_feature + f] L[i][j]; zeros where count is 0
/// Sums of ranks that no piece has are left as they are. Features are contracted in pairs: ranges that add up to the same bits
/// as the whole begin at even ones.
struct AcrossExpertsArgs {
  std::span<const LowRankPiece> pieces;  ///< at least one, each of at least one rank
  std::span<const LowRankRows> experts;  ///< parameters side by side, at most 1,024; sums: of each with rows, or of none
  std::int64_t ranks = 0;                ///< of all pieces
  std::int64_t first_feature = 0, features = 0;
  DType dtype = DType::kFloat32;  ///< of rows, or of out: fp32 or bf16
  float* scratch = nullptr;       ///< AcrossExpertsScratch(...), 64-byte aligned
};

/// What is transposed at a time, and elements between the blocks that come of it: a line more than they have, for other sets of
/// L1.
inline constexpr std::int64_t kLowRankSide = 16, kLowRankBlockPitch = kLowRankSide * (kLowRankSide + 1);

/// Elements of AcrossExpertsArgs::scratch for so many experts, ranks and pieces: a block for each expert and sixteen ranks of a
/// piece, or for sixteen experts all pairs of ranks, as many as ranks at most, of 32 features.
MOESAIC_INLINE std::int64_t AcrossExpertsScratch(std::int64_t experts, std::int64_t ranks, std::int64_t pieces) {
  return RoundUp(experts, kLowRankSide) * ((ranks + (kLowRankSide - 1) * pieces) / kLowRankSide) * kLowRankBlockPitch +
         kLowRankSide * (2 * kLowRankSide * ranks + kLowRankSide);
}

/// For one expert, with P(j, f) at j * rank_stride + f:
///   contract_along_features  sums[i][j] = sum over f of rows[i][f] P(j, f), in as many parts as a vector has lanes
///   expand_along_features    out[i][f] = sum over j of low[i][j] P(j, f)
///   outer_along_features     gradient(j, f) = sum over i of rows[i][f] low[i][j]; zeros where count is 0
/// Sums of ranks that no piece has are left as they are.
struct AlongFeaturesArgs {
  std::span<const LowRankPiece> pieces;
  LowRankRows expert;
  std::int64_t ranks = 0;  ///< of all pieces
  std::int64_t features = 0;
  DType dtype = DType::kFloat32;  ///< of rows, or of out: fp32 or bf16
};

/// out[j * out_stride + i] = rows[i][j] for 16 x 16 floats; a null row reads as zeros.
using TransposeFunction = void (*)(const float* const* rows, float* out, std::int64_t out_stride);

/// One tier of kernels.
struct KernelTier {
  const char* name;
  std::int64_t left_panels;             ///< of one cell (gemm/cell.h): what its edges are a multiple of
  std::int64_t right_panels;            ///<
  std::int64_t most_few_rows;           ///< rows in parts of lines, at most (gemm/few_rows.h); 0: there is no such form
  std::int64_t most_stored_rows;        ///< see DirectGemmArgs::row_count; from most_few_rows on
  std::int64_t most_few_gradient_rows;  ///< see GradientGemmArgs::few_rows
  bool unpack_overlaps;  ///< the unpack form interleaves weights beside its products instead of before them: a matrix
                         ///< unit, which takes contractions in slices in both forms
  bool (*runs_here)();   ///< supported by the CPU and permitted by the operating system
  void (*direct_gemm)(const DirectGemmArgs&);
  void (*unpack_gemm)(const UnpackGemmArgs&);
  void (*gradient_gemm)(const GradientGemmArgs&);
  void (*pack_rows)(const PackRowsArgs&);
  void (*transpose_pairs)(const TransposePairsArgs&);
  void (*swiglu_forward)(const SwigluForwardArgs&);
  void (*swiglu_backward)(const SwigluBackwardArgs&);
  void (*merge_rows)(const MergeRowsArgs&);
  TransposeFunction transpose;
  void (*pack_columns)(const PackColumnsArgs&);
  void (*store_columns)(const StoreColumnsArgs&);
  void (*store_rows)(const StoreRowsArgs&);
  void (*expand_across_experts)(const AcrossExpertsArgs&);
  void (*contract_across_experts)(const AcrossExpertsArgs&);
  void (*contract_along_features)(const AlongFeaturesArgs&);
  void (*expand_along_features)(const AlongFeaturesArgs&);
  void (*outer_along_features)(const AlongFeaturesArgs&);
  FusedKernels fused;
  const SamplingKernels* sampling;

  /// The row_count with which direct_gemm is the fastest: rows, or 0.
  std::int64_t StoredRows(std::int64_t rows) const { return AreStoredRows(rows, most_few_rows, most_stored_rows) ? rows : 0; }
};

/// Makes what this thread wrote past the caches visible before all that it writes next.
void FinishStores();

/// Every tier of this build, best first; the last runs everywhere. Selection, tests and benchmarks all walk this list.
std::span<const KernelTier* const> KernelTiers();

/// The tier in use (isa.h says how it is chosen).
const KernelTier& ChosenKernels();

}  // namespace moesaic
