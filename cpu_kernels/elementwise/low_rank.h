// Products of a low rank with an adapter's parameters as they lie in memory, for few rows: nothing is packed, each line of a
// parameter is read once, and its neighbours at the same time (kernels.h has the contracts).
//
// Vectors run along whatever lies side by side: sixteen experts, one of whose rows each vector then holds an element of, or
// sixteen features of one expert.
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// Operands are bf16, as in the products of tiles.
MOESAIC_INLINE F32x16 Rounded(F32x16 v) { return Widen(NarrowToBf16(v)); }

/// Sixteen elements of a row, or the n < 16 that are left of it and zeros.
MOESAIC_INLINE F32x16 LoadElements(const void* row, DType dtype, std::int64_t first, std::int64_t n) {
  if (dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(row) + first;
    return Rounded(n < 16 ? LoadF32Part(from, n) : LoadF32(from));
  }
  const BFloat16* from = static_cast<const BFloat16*>(row) + first;
  return n < 16 ? LoadBf16Part(from, n) : LoadBf16(from);
}

MOESAIC_INLINE void StoreElements(void* row, DType dtype, std::int64_t first, std::int64_t n, F32x16 v) {
  if (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(row) + first;
    return n < 16 ? StoreF32Part(to, v, n) : StoreF32(to, v);
  }
  BFloat16* to = static_cast<BFloat16*>(row) + first;
  n < 16 ? StoreBf16Part(to, v, n) : StoreBf16(to, v);
}

MOESAIC_INLINE F32x16 LoadParameters(const float* p, std::int64_t n) {
  return Rounded(n < 16 ? LoadF32Part(p, n) : LoadF32(p));
}

MOESAIC_INLINE void StreamLanes(float* p, std::int64_t n, F32x16 v) {
  if (n < 16) return StoreF32Part(p, v, n);
  StreamF32(p, v);
}

/// Sixteen features of sixteen experts: [feature][expert], or the other way around.
using LanesBlock = float[16][16];

MOESAIC_INLINE void TransposeBlock(LanesBlock& block) {
  auto* dwords = reinterpret_cast<BFloat16*>(&block[0][0]);
  Transpose16x16(dwords, dwords);
}

/// Sixteen features of all ranks and experts of a call, read in the order of memory and laid out as [group][rank][feature][16],
/// with zeros for features that there are none of: where they lie, a group's lines are a power of two apart and share a few
/// sets of L1. (Prefetches of the next features beside this changed nothing.)
inline void GatherFeatures(const AcrossExpertsArgs& args, std::int64_t first, std::int64_t n) {
  const auto groups = static_cast<std::int64_t>(args.groups.size());
  const std::int64_t pitch = args.ranks * 256;
  for (const LowRankPiece& piece : args.pieces) {
    for (std::int64_t f = 0; f < 16; ++f) {
      const float* at = piece.parameter + (first + f) * piece.feature_stride;
      float* to = args.scratch + piece.first_rank * 256 + f * 16;
      for (std::int64_t j = 0; j < piece.ranks; ++j, at += piece.rank_stride, to += 256) {
        for (std::int64_t g = 0; g < groups; ++g) {
          if (args.groups[g].slots == 0) continue;
          const std::int64_t width = f < n ? args.groups[g].width : 0;
          StoreF32(to + g * pitch, LoadParameters(at + 16 * g, width));
        }
      }
    }
  }
}

/// block[f] = sum over the ranks of all pieces of low[rank] * gathered[rank][f]
MOESAIC_INLINE void ExpandBlock(std::span<const LowRankPiece> pieces, const float* gathered, const float* low,
                                LanesBlock& block) {
  F32x16 sum[16] = {};
  for (const LowRankPiece& piece : pieces) {
    for (std::int64_t j = piece.first_rank; j < piece.first_rank + piece.ranks; ++j) {
      const F32x16 factor = LoadF32(low + j * 16);
#pragma GCC unroll 16
      for (int f = 0; f < 16; ++f) sum[f] += factor * LoadF32(gathered + j * 256 + f * 16);
    }
  }
#pragma GCC unroll 16
  for (int f = 0; f < 16; ++f) StoreF32(block[f], sum[f]);
}

inline void ExpandAcrossExperts(const AcrossExpertsArgs& args) {
  const auto groups = static_cast<std::int64_t>(args.groups.size());
  for (std::int64_t f = 0; f < args.features; f += 16) {
    const std::int64_t n = args.features - f < 16 ? args.features - f : 16;
    GatherFeatures(args, f, n);
    for (std::int64_t g = 0; g < groups; ++g) {
      const LowRankGroup& group = args.groups[g];
      for (std::int64_t slot = 0; slot < group.slots; ++slot) {
        alignas(64) LanesBlock block;
        ExpandBlock(args.pieces, args.scratch + g * 256 * args.ranks, group.low + slot * args.ranks * 16, block);
        TransposeBlock(block);
        for (std::int64_t x = 0; x < group.width; ++x) {
          void* row = group.out[slot * 16 + x];
          if (row != nullptr) StoreElements(row, args.dtype, args.first_feature + f, n, LoadF32(block[x]));
        }
      }
    }
  }
}

/// sums[rank] += sum over f of block[f] * gathered[rank][f], for the ranks of all pieces
MOESAIC_INLINE void ContractBlock(std::span<const LowRankPiece> pieces, const float* gathered, const LanesBlock& block,
                                  float* sums) {
  F32x16 value[16];
#pragma GCC unroll 16
  for (int f = 0; f < 16; ++f) value[f] = LoadF32(block[f]);
  for (const LowRankPiece& piece : pieces) {
    for (std::int64_t j = piece.first_rank; j < piece.first_rank + piece.ranks; ++j) {
      const float* at = gathered + j * 256;
      F32x16 even = LoadF32(sums + j * 16), odd = {};
#pragma GCC unroll 8
      for (int f = 0; f < 16; f += 2) {
        even += value[f] * LoadF32(at + f * 16);
        odd += value[f + 1] * LoadF32(at + (f + 1) * 16);
      }
      StoreF32(sums + j * 16, even + odd);
    }
  }
}

/// gradient[f][rank] = sum over slots of blocks[slot][f] * low[slot][rank]
MOESAIC_INLINE void OuterBlock(const LowRankPiece& piece, float* gradient, const LanesBlock* blocks, const float* low,
                               std::int64_t low_pitch, const LowRankGroup& group, std::int64_t n) {
  for (std::int64_t j = 0; j < piece.ranks; ++j, gradient += piece.gradient_rank_stride) {
    F32x16 sum[16] = {};
    const float* factor = low + j * 16;
    for (std::int64_t slot = 0; slot < group.slots; ++slot, factor += low_pitch) {
      const F32x16 scale = LoadF32(factor);
#pragma GCC unroll 16
      for (int f = 0; f < 16; ++f) sum[f] += scale * LoadF32(blocks[slot][f]);
    }
#pragma GCC unroll 16
    for (int f = 0; f < 16; ++f) {
      if (f < n) StreamLanes(gradient + f * piece.gradient_feature_stride, group.width, sum[f]);
    }
  }
}

inline bool AnySums(const AcrossExpertsArgs& args) {
  for (const LowRankGroup& group : args.groups) {
    if (group.sums != nullptr) return true;
  }
  return false;
}

inline void ContractAcrossExperts(const AcrossExpertsArgs& args) {
  alignas(64) LanesBlock blocks[kMostLowRankSlots];
  const auto groups = static_cast<std::int64_t>(args.groups.size());
  const std::int64_t pitch = args.ranks * 16;
  const bool sums = AnySums(args);
  for (std::int64_t f = 0; f < args.features; f += 16) {
    const std::int64_t n = args.features - f < 16 ? args.features - f : 16;
    if (sums) GatherFeatures(args, f, n);
    for (std::int64_t g = 0; g < groups; ++g) {
      const LowRankGroup& group = args.groups[g];
      for (std::int64_t slot = 0; slot < group.slots; ++slot) {
        for (std::int64_t x = 0; x < 16; ++x) {
          const void* row = x < group.width ? group.rows[slot * 16 + x] : nullptr;
          StoreF32(blocks[slot][x], row != nullptr ? LoadElements(row, args.dtype, args.first_feature + f, n) : F32x16{});
        }
        TransposeBlock(blocks[slot]);
        if (group.sums == nullptr) continue;
        ContractBlock(args.pieces, args.scratch + g * 16 * pitch, blocks[slot], group.sums + slot * pitch);
      }
      for (const LowRankPiece& piece : args.pieces) {
        if (piece.gradient == nullptr) continue;
        OuterBlock(piece, piece.gradient + 16 * g + f * piece.gradient_feature_stride, blocks,
                   group.low + piece.first_rank * 16, pitch, group, n);
      }
    }
  }
  StreamFence();
}

/// Rows and ranks of a product that stay in registers.
inline constexpr int kLowRankTile = 4;

/// low[row][rank] = sum over f of rows[row][f] * parameter[rank][f], in sixteen parts.
template <int kRows, int kRanks>
inline void ContractFeatures(const AlongFeaturesArgs& args, const LowRankPiece& piece, std::int64_t row, std::int64_t rank) {
  F32x16 sum[kRows][kRanks] = {};
  const float* parameter = piece.parameter + rank * piece.rank_stride;
  for (std::int64_t f = 0; f < args.features; f += 16) {
    const std::int64_t n = args.features - f < 16 ? args.features - f : 16;
    F32x16 factor[kRanks];
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) factor[j] = LoadParameters(parameter + j * piece.rank_stride + f, n);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const F32x16 value = LoadElements(args.rows[row + i], args.dtype, f, n);
#pragma GCC unroll 4
      for (int j = 0; j < kRanks; ++j) sum[i][j] += value * factor[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kRanks; ++j) {
      float parts[16], total = 0.0f;
      StoreF32(parts, sum[i][j]);
      for (float part : parts) total += part;
      args.sums[(row + i) * args.ranks + piece.first_rank + rank + j] = total;
    }
  }
}

inline void ContractAlongFeatures(const AlongFeaturesArgs& args) {
  for (const LowRankPiece& piece : args.pieces) {
    std::int64_t rank = 0;
    for (; rank + kLowRankTile <= piece.ranks; rank += kLowRankTile) {
      std::int64_t row = 0;
      for (; row + kLowRankTile <= args.count; row += kLowRankTile) {
        ContractFeatures<kLowRankTile, kLowRankTile>(args, piece, row, rank);
      }
      for (; row < args.count; ++row) ContractFeatures<1, kLowRankTile>(args, piece, row, rank);
    }
    for (; rank < piece.ranks; ++rank) {
      for (std::int64_t row = 0; row < args.count; ++row) ContractFeatures<1, 1>(args, piece, row, rank);
    }
  }
}

/// Features whose sums stay in registers.
inline constexpr std::int64_t kLowRankFeatures = 64;

/// rows[row][f] = sum over ranks of low[row][rank] * parameter[rank][f], for four vectors of features from `first` on.
template <int kRows>
inline void ExpandFeatures(const AlongFeaturesArgs& args, std::int64_t row, std::int64_t first) {
  const std::int64_t left = args.features - first;
  const auto lanes = [left](std::int64_t v) { return left - 16 * v < 16 ? left - 16 * v : 16; };
  F32x16 sum[kRows][4] = {};
  for (const LowRankPiece& piece : args.pieces) {
    const float* low = args.low + row * args.ranks + piece.first_rank;
    const float* at = piece.parameter + first;
    for (std::int64_t j = 0; j < piece.ranks; ++j, at += piece.rank_stride) {
      F32x16 factor[4] = {};
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        if (lanes(v) > 0) factor[v] = LoadParameters(at + 16 * v, lanes(v));
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const F32x16 scale = Broadcast(low[i * args.ranks + j]);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) sum[i][v] += scale * factor[v];
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      if (lanes(v) > 0) StoreElements(args.out[row + i], args.dtype, first + 16 * v, lanes(v), sum[i][v]);
    }
  }
}

inline void ExpandAlongFeatures(const AlongFeaturesArgs& args) {
  for (std::int64_t first = 0; first < args.features; first += kLowRankFeatures) {
    std::int64_t row = 0;
    for (; row + kLowRankTile <= args.count; row += kLowRankTile) ExpandFeatures<kLowRankTile>(args, row, first);
    for (; row < args.count; ++row) ExpandFeatures<1>(args, row, first);
  }
}

/// gradient[rank][f] = sum over rows of rows[row][f] * low[row][rank], for some ranks and four vectors of features.
template <int kRanks>
inline void OuterFeatures(const AlongFeaturesArgs& args, const LowRankPiece& piece, std::int64_t rank, std::int64_t first) {
  const std::int64_t left = args.features - first;
  const auto lanes = [left](std::int64_t v) { return left - 16 * v < 16 ? left - 16 * v : 16; };
  F32x16 sum[kRanks][4] = {};
  for (std::int64_t row = 0; row < args.count; ++row) {
    const float* low = args.low + row * args.ranks + piece.first_rank + rank;
    F32x16 value[4] = {};
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      if (lanes(v) > 0) value[v] = LoadElements(args.rows[row], args.dtype, first + 16 * v, lanes(v));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) {
      const F32x16 factor = Broadcast(low[j]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sum[j][v] += factor * value[v];
    }
  }
  for (int j = 0; j < kRanks; ++j) {
    float* to = piece.gradient + (rank + j) * piece.gradient_rank_stride + first;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      if (lanes(v) > 0) StreamLanes(to + 16 * v, lanes(v), sum[j][v]);
    }
  }
}

inline void OuterAlongFeatures(const AlongFeaturesArgs& args) {
  for (std::int64_t first = 0; first < args.features; first += kLowRankFeatures) {
    for (const LowRankPiece& piece : args.pieces) {
      if (piece.gradient == nullptr) continue;
      std::int64_t rank = 0;
      for (; rank + kLowRankTile <= piece.ranks; rank += kLowRankTile) OuterFeatures<kLowRankTile>(args, piece, rank, first);
      for (; rank < piece.ranks; ++rank) OuterFeatures<1>(args, piece, rank, first);
    }
  }
  StreamFence();
}

}  // namespace
