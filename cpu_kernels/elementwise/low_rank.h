// Products of a low rank with an adapter's parameters as they lie in memory, for few rows: nothing is packed, and each line of
// a parameter is read once (kernels.h has the contracts).
//
// Where features lie side by side, vectors run along them. Where experts do, 16 x 16 numbers at a time are transposed, so that
// vectors run along the features or the ranks of one expert, and no work is done for rows that it has not.
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/native_vectors.h"

namespace {

using namespace moesaic;

/// Rows, or ranks, of two vectors each whose sums stay in registers; and rows of four ranks each.
inline constexpr int kTallTile = kNativeLanes == 16 ? 8 : 4;
inline constexpr int kSquareTile = kNativeLanes == 16 ? 4 : 2;
/// Of each rank, where all ranks are read side by side: more streams than the hardware follows.
inline constexpr std::int64_t kFeaturesAhead = 128;

/// f.operator()<n>(first) for n = kMost at a time, then for half of that, and so on, until [first, count) is covered.
template <int kMost, typename Function>
MOESAIC_INLINE void InRuns(std::int64_t count, Function f, std::int64_t first = 0) {
  for (; first + kMost <= count; first += kMost) f.template operator()<kMost>(first);
  if constexpr (kMost > 1) InRuns<kMost / 2>(count, f, first);
}

/// f.operator()<vectors, part>(first, n) for two vectors of features at a time, then for one, and for the part of one that is
/// left.
template <typename Function>
MOESAIC_INLINE void InVectors(std::int64_t features, Function f) {
  std::int64_t first = 0;
  for (; first + 2 * kNativeLanes <= features; first += 2 * kNativeLanes) f.template operator()<2, false>(first, 0);
  if (first + kNativeLanes <= features) {
    f.template operator()<1, false>(first, 0);
    first += kNativeLanes;
  }
  if (first < features) f.template operator()<1, true>(first, features - first);
}

/// sums[row][rank] = sum over f of rows[row][f] * P(rank, f)
template <typename T, int kRows, int kRanks>
inline void ContractTile(const AlongFeaturesArgs& args, const LowRankPiece& piece, std::int64_t row, std::int64_t rank) {
  NativeF32 sum[kRows][kRanks] = {};
  const float* parameter = piece.parameter + rank * piece.rank_stride;
  const float* next = rank + kRanks < piece.ranks ? parameter + kRanks * piece.rank_stride : parameter;
  const T* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = static_cast<const T*>(args.expert.rows[row + i]);
  const auto add = [&]<bool kPart>(std::int64_t f, std::int64_t n) MOESAIC_INLINE_LAMBDA {
    NativeF32 factor[kRanks];
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) {
      factor[j] = LoadOperand<kPart>(parameter + j * piece.rank_stride + f, n);
      __builtin_prefetch(next + j * piece.rank_stride + f, 0, 3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const NativeF32 value = LoadOperand<kPart>(rows[i] + f, n);
#pragma GCC unroll 4
      for (int j = 0; j < kRanks; ++j) sum[i][j] = MultiplyAdd(value, factor[j], sum[i][j]);
    }
  };
  std::int64_t f = 0;
  for (; f + kNativeLanes <= args.features; f += kNativeLanes) add.template operator()<false>(f, kNativeLanes);
  if (f < args.features) add.template operator()<true>(f, args.features - f);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kRanks; ++j) {
      args.expert.sums[(row + i) * args.ranks + piece.first_rank + rank + j] = Total(sum[i][j]);
    }
  }
}

template <typename T>
inline void ContractAlong(const AlongFeaturesArgs& args) {
  for (const LowRankPiece& piece : args.pieces) {
    InRuns<4>(piece.ranks, [&]<int kRanks>(std::int64_t rank) {
      InRuns<kSquareTile>(args.expert.count,
                          [&]<int kRows>(std::int64_t row) { ContractTile<T, kRows, kRanks>(args, piece, row, rank); });
    });
  }
}

inline void ContractAlongFeatures(const AlongFeaturesArgs& args) {
  args.dtype == DType::kFloat32 ? ContractAlong<float>(args) : ContractAlong<BFloat16>(args);
}

/// What an expert's rows are expanded with: `features` of all pieces, those of a rank at at(piece, rank).
template <typename At>
struct Expansion {
  std::span<const LowRankPiece> pieces;
  std::int64_t ranks;
  std::int64_t first_feature;
  std::int64_t features;
  At at;
};

/// out[row][first_feature + f ...] = sum over ranks of low[row][rank] * P(rank, f ...)
/// @tparam kAlong  parameters come from memory, and are prefetched kFeaturesAhead before they are needed
template <bool kAlong, typename T, int kRows, int kVectors, bool kPart, typename At>
inline void ExpandTile(const Expansion<At>& by, const LowRankRows& expert, std::int64_t row, std::int64_t f, std::int64_t n) {
  NativeF32 sum[kRows][kVectors] = {};
  for (const LowRankPiece& piece : by.pieces) {
    const float* low = expert.low + row * by.ranks + piece.first_rank;
    for (std::int64_t j = 0; j < piece.ranks; ++j) {
      const float* at = by.at(piece, j) + f;
      NativeF32 factor[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        factor[v] = LoadOperand<kPart>(at + v * kNativeLanes, n);
        if constexpr (kAlong) __builtin_prefetch(at + kFeaturesAhead + v * kNativeLanes, 0, 3);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const NativeF32 scale = InAllLanes(low[i * by.ranks + j]);
        for (int v = 0; v < kVectors; ++v) sum[i][v] = MultiplyAdd(scale, factor[v], sum[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    T* to = static_cast<T*>(expert.out[row + i]) + by.first_feature + f;
    for (int v = 0; v < kVectors; ++v) Store<kPart>(to + v * kNativeLanes, n, sum[i][v]);
  }
}

template <bool kAlong, typename T, typename At>
inline void ExpandRows(const Expansion<At>& by, const LowRankRows& expert) {
  InVectors(by.features, [&]<int kVectors, bool kPart>(std::int64_t f, std::int64_t n) {
    InRuns<kTallTile>(expert.count, [&]<int kRows>(std::int64_t row) {
      ExpandTile<kAlong, T, kRows, kVectors, kPart>(by, expert, row, f, n);
    });
  });
}

inline void ExpandAlongFeatures(const AlongFeaturesArgs& args) {
  const auto at = [](const LowRankPiece& piece, std::int64_t j) { return piece.parameter + j * piece.rank_stride; };
  const Expansion<decltype(at)> by{args.pieces, args.ranks, 0, args.features, at};
  args.dtype == DType::kFloat32 ? ExpandRows<true, float>(by, args.expert) : ExpandRows<true, BFloat16>(by, args.expert);
}

/// gradient[rank][f ...] = sum over rows of rows[row][f ...] * low[row][rank]
template <typename T, int kRanks, int kVectors, bool kPart>
inline void OuterTile(const AlongFeaturesArgs& args, const LowRankPiece& piece, std::int64_t rank, std::int64_t f,
                      std::int64_t n) {
  NativeF32 sum[kRanks][kVectors] = {};
  for (std::int64_t row = 0; row < args.expert.count; ++row) {
    const float* low = args.expert.low + row * args.ranks + piece.first_rank + rank;
    const T* from = static_cast<const T*>(args.expert.rows[row]) + f;
    NativeF32 value[kVectors];
    for (int v = 0; v < kVectors; ++v) value[v] = LoadOperand<kPart>(from + v * kNativeLanes, n);
#pragma GCC unroll 8
    for (int j = 0; j < kRanks; ++j) {
      const NativeF32 factor = InAllLanes(low[j]);
      for (int v = 0; v < kVectors; ++v) sum[j][v] = MultiplyAdd(factor, value[v], sum[j][v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kRanks; ++j) {
    float* to = piece.gradient + (rank + j) * piece.gradient_rank_stride + f;
    for (int v = 0; v < kVectors; ++v) kPart ? Store<true>(to, n, sum[j][v]) : Stream(to + v * kNativeLanes, sum[j][v]);
  }
}

template <typename T>
inline void OuterAlong(const AlongFeaturesArgs& args) {
  for (const LowRankPiece& piece : args.pieces) {
    if (piece.gradient == nullptr) continue;
    InRuns<kTallTile>(piece.ranks, [&]<int kRanks>(std::int64_t rank) {
      InVectors(args.features, [&]<int kVectors, bool kPart>(std::int64_t f, std::int64_t n) {
        OuterTile<T, kRanks, kVectors, kPart>(args, piece, rank, f, n);
      });
    });
  }
  StreamFence();
}

inline void OuterAlongFeatures(const AlongFeaturesArgs& args) {
  args.dtype == DType::kFloat32 ? OuterAlong<float>(args) : OuterAlong<BFloat16>(args);
}

/// Experts, features and ranks that are transposed at a time.
inline constexpr std::int64_t kSide = kLowRankSide;
/// Between the blocks [16 features][16 ranks] of experts.
inline constexpr std::int64_t kBlockPitch = kLowRankBlockPitch;

MOESAIC_INLINE std::int64_t AtMostSide(std::int64_t n) { return n < kSide ? n : kSide; }

/// out[column][row], 16 x 16; zeros for what is not among in's `rows` x `columns`, which are alone read.
MOESAIC_INLINE void TransposeInto(const float* in, std::int64_t in_pitch, std::int64_t rows, std::int64_t columns, float* out,
                                  std::int64_t out_pitch) {
  if (rows == kSide && columns == kSide) return Transpose16x16(in, in_pitch, out, out_pitch);
  alignas(64) float block[kSide * kSide] = {};
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto bytes = static_cast<std::size_t>(columns) * sizeof(float);
    std::memcpy(block + i * kSide, in + i * in_pitch, columns == kSide ? kSide * sizeof(float) : bytes);
  }
  Transpose16x16(block, kSide, out, out_pitch);
}

/// A bit for each group of sixteen experts: one of them has rows.
MOESAIC_INLINE std::uint64_t GroupsWithRows(const AcrossExpertsArgs& args) {
  std::uint64_t groups = 0;
  for (std::size_t x = 0; x < args.experts.size(); ++x) {
    groups |= static_cast<std::uint64_t>(args.experts[x].count > 0 ? 1 : 0) << x / kSide;
  }
  return groups;
}
MOESAIC_INLINE bool Has(std::uint64_t groups, std::int64_t expert) { return (groups >> expert / kSide & 1) != 0; }

/// Brings lines of features [first, end) of such groups to L2, or nearer, in the order of memory: transpositions take lines far
/// from each other, and would wait for every one. The first features are read; the next are asked for while these are computed
/// with, a few lines at a time, for many prefetches at once get lost. (Zen 4, one core, ns for a kilobyte of parameters: 92 by
/// transpositions alone, 52 after reading, 41 beside prefetches, and 83 after as many of these at once; 32 is what reading
/// alone takes.)
class FeatureLines {
 public:
  FeatureLines(const AcrossExpertsArgs& args, std::uint64_t groups, std::int64_t first, std::int64_t end)
      : args_(args),
        groups_(groups),
        feature_(first),
        end_(groups == 0           ? first
             : end < args.features ? end
                                   : args.features) {}

  MOESAIC_INLINE void Read() {
    while (feature_ < end_) {
      OfRank([](const float* line) { asm volatile("" : : "x"(*line)); });
    }
  }
  /// At least as many as a transposition takes, until there are no more.
  MOESAIC_INLINE void Ask() {
    for (std::int64_t lines = 0; lines < kSide && feature_ < end_;) {
      OfRank([&lines](const float* line) {
        __builtin_prefetch(line, 0, 2);
        ++lines;
      });
    }
  }

 private:
  template <typename Visit>
  MOESAIC_INLINE void OfRank(Visit visit) {
    const LowRankPiece& piece = args_.pieces[piece_];
    const float* at = piece.parameter + feature_ * piece.feature_stride + rank_ * piece.rank_stride;
    const auto experts = static_cast<std::int64_t>(args_.experts.size());
    for (std::int64_t x = 0; x < experts; x += kSide) {
      if (Has(groups_, x)) visit(at + x);
    }
    if (++rank_ < piece.ranks) return;
    rank_ = 0;
    if (++piece_ < args_.pieces.size()) return;
    piece_ = 0;
    ++feature_;
  }

  const AcrossExpertsArgs& args_;
  std::uint64_t groups_;
  std::int64_t feature_, end_, rank_ = 0;
  std::size_t piece_ = 0;
};

template <typename T>
inline void ExpandAcross(const AcrossExpertsArgs& args) {
  const auto experts = static_cast<std::int64_t>(args.experts.size());
  const std::int64_t pitch = args.ranks * 2 * kSide + kSide;
  const std::uint64_t groups = GroupsWithRows(args);
  FeatureLines(args, groups, 0, 2 * kSide).Read();
  for (std::int64_t f = 0; f < args.features; f += 2 * kSide) {
    const std::int64_t n = args.features - f < 2 * kSide ? args.features - f : 2 * kSide;
    FeatureLines next(args, groups, f + n, f + n + 2 * kSide);
    for (std::int64_t x = 0; x < experts; x += kSide) {
      if (!Has(groups, x)) continue;
      const std::int64_t width = AtMostSide(experts - x);
      for (const LowRankPiece& piece : args.pieces) {
        for (std::int64_t j = 0; j < piece.ranks; ++j) {
          for (std::int64_t half = 0; half < n; half += kSide) {
            next.Ask();
            TransposeInto(piece.parameter + (f + half) * piece.feature_stride + j * piece.rank_stride + x, piece.feature_stride,
                          AtMostSide(n - half), width, args.scratch + (piece.first_rank + j) * 2 * kSide + half, pitch);
          }
        }
      }
      const float* expanded = args.scratch;
      for (std::int64_t i = 0; i < width; ++i) {
        const auto at = [expanded](const LowRankPiece& piece, std::int64_t j) {
          return expanded + (piece.first_rank + j) * 2 * kSide;
        };
        ExpandRows<false, T>(Expansion<decltype(at)>{args.pieces, args.ranks, args.first_feature + f, n, at},
                             args.experts[x + i]);
        expanded += pitch;
      }
    }
  }
}

inline void ExpandAcrossExperts(const AcrossExpertsArgs& args) {
  args.dtype == DType::kFloat32 ? ExpandAcross<float>(args) : ExpandAcross<BFloat16>(args);
}

/// f(piece, first rank, ranks, block) for sixteen ranks at a time, with the block [experts][16][16] of scratch that they have.
template <typename Function>
MOESAIC_INLINE void InBlocksOfRanks(const AcrossExpertsArgs& args, Function f) {
  const std::int64_t block = RoundUp(static_cast<std::int64_t>(args.experts.size()), kSide) * kBlockPitch;
  float* at = args.scratch;
  for (const LowRankPiece& piece : args.pieces) {
    for (std::int64_t rank = 0; rank < piece.ranks; rank += kSide, at += block) {
      f(piece, rank, AtMostSide(piece.ranks - rank), at);
    }
  }
}

/// Sixteen ranks, or the fewer that there are and zeros.
struct Ranks {
  static constexpr int kVectors = kSide / kNativeLanes;
  NativeF32 v[kVectors];

  MOESAIC_INLINE static Ranks From(const float* p, std::int64_t n) {
    Ranks ranks;
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      ranks.v[k] = n == kSide ? Load(p + k * kNativeLanes) : Load<true>(p + k * kNativeLanes, n - k * kNativeLanes);
    }
    return ranks;
  }
  MOESAIC_INLINE void To(float* p, std::int64_t n) const {
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      n == kSide ? Store(p + k * kNativeLanes, v[k]) : Store<true>(p + k * kNativeLanes, n - k * kNativeLanes, v[k]);
    }
  }
  MOESAIC_INLINE void Add(float factor, const Ranks& from) {
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) v[k] = MultiplyAdd(InAllLanes(factor), from.v[k], v[k]);
  }
};
/// Of them, whose sums stay in registers.
inline constexpr int kRanksTile = 8 / Ranks::kVectors;

/// Sixteen features of an expert's rows.
using RowsBlock = float[kMostLowRankRows][kSide];

template <typename T>
inline void LoadRows(const LowRankRows& expert, std::int64_t first, std::int64_t n, RowsBlock& values) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t i = 0; i < expert.count; ++i) {
    const T* row = static_cast<const T*>(expert.rows[i]) + first;
    __builtin_prefetch(row + kLine, 0, 3);  // every row is elsewhere
#pragma GCC unroll 4
    for (int k = 0; k < kSide; k += kNativeLanes) {
      Store(values[i] + k, AsOperand(row, n == kSide ? Load(row + k) : Load<true>(row + k, n - k)));
    }
  }
}

/// sums[row][rank ...] += sum over n features of values[row][f] * block[f][rank ...]
template <int kRows>
MOESAIC_INLINE void AddSums(const float (*values)[kSide], const float* block, std::int64_t n, float* sums, std::int64_t pitch,
                            std::int64_t ranks) {
  Ranks sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i] = Ranks::From(sums + i * pitch, ranks);
  for (std::int64_t f = 0; f < n; ++f) {
    Ranks parameter = Ranks::From(block + f * kSide, kSide);
    for (NativeF32& v : parameter.v) v = Rounded(v);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) sum[i].Add(values[i][f], parameter);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i].To(sums + i * pitch, ranks);
}

/// block[f][rank ...] = sum over rows of values[row][f] * low[row][rank ...]
MOESAIC_INLINE void OuterBlock(const RowsBlock& values, const LowRankRows& expert, std::int64_t first, std::int64_t ranks,
                               std::int64_t pitch, float* block) {
  for (std::int64_t f = 0; f < kSide; f += kRanksTile) {
    Ranks sum[kRanksTile] = {};
    for (std::int64_t i = 0; i < expert.count; ++i) {
      const Ranks factor = Ranks::From(expert.low + i * pitch + first, ranks);
#pragma GCC unroll 8
      for (int k = 0; k < kRanksTile; ++k) sum[k].Add(values[i][f + k], factor);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kRanksTile; ++k) sum[k].To(block + (f + k) * kSide, kSide);
  }
}

/// Sixteen features at a time: parameters are transposed into the scratch memory, their gradients take their place there, and
/// are transposed out of it, both in the order of memory.
template <typename T>
inline void ContractAcross(const AcrossExpertsArgs& args) {
  const auto experts = static_cast<std::int64_t>(args.experts.size());
  bool wants_sums = false;
  for (const LowRankRows& expert : args.experts) wants_sums = wants_sums || expert.sums != nullptr;
  const std::uint64_t groups = wants_sums ? GroupsWithRows(args) : 0;
  FeatureLines(args, groups, 0, kSide).Read();
  for (std::int64_t first = 0; first < args.features; first += kSide) {
    const std::int64_t n = AtMostSide(args.features - first);
    FeatureLines next(args, groups, first + n, first + n + kSide);
    for (std::int64_t x = 0; x < experts; x += kSide) {
      const std::int64_t width = AtMostSide(experts - x);
      if (Has(groups, x)) {
        InBlocksOfRanks(args, [&](const LowRankPiece& piece, std::int64_t rank, std::int64_t ranks, float* blocks) {
          const float* from = piece.parameter + first * piece.feature_stride + rank * piece.rank_stride + x;
          for (std::int64_t f = 0; f < n; ++f, from += piece.feature_stride) {
            TransposeInto(from, piece.rank_stride, ranks, width, blocks + x * kBlockPitch + f * kSide, kBlockPitch);
          }
        });
      }
      for (std::int64_t i = 0; i < width; ++i) {
        const LowRankRows& expert = args.experts[x + i];
        alignas(64) RowsBlock values;
        LoadRows<T>(expert, args.first_feature + first, n, values);
        InBlocksOfRanks(args, [&](const LowRankPiece& piece, std::int64_t rank, std::int64_t ranks, float* blocks) {
          next.Ask();
          float* block = blocks + (x + i) * kBlockPitch;
          const std::int64_t column = piece.first_rank + rank;
          if (expert.sums != nullptr) {
            InRuns<kRanksTile>(expert.count, [&]<int kRows>(std::int64_t row) {
              AddSums<kRows>(values + row, block, n, expert.sums + row * args.ranks + column, args.ranks, ranks);
            });
          }
          if (piece.gradient != nullptr) OuterBlock(values, expert, column, ranks, args.ranks, block);
        });
      }
    }
    for (std::int64_t f = 0; f < n; ++f) {
      InBlocksOfRanks(args, [&](const LowRankPiece& piece, std::int64_t rank, std::int64_t ranks, const float* block) {
        if (piece.gradient == nullptr) return;
        float* to = piece.gradient + (first + f) * piece.gradient_feature_stride + rank * piece.gradient_rank_stride;
        for (std::int64_t x = 0; x < experts; x += kSide) {
          alignas(64) float lines[kSide][kSide];
          Transpose16x16(block + x * kBlockPitch + f * kSide, kBlockPitch, lines[0], kSide);
          for (std::int64_t j = 0; j < ranks; ++j) {
            float* line = to + j * piece.gradient_rank_stride + x;
            if (experts - x < kSide) {
              std::memcpy(line, lines[j], static_cast<std::size_t>(experts - x) * sizeof(float));
              continue;
            }
#pragma GCC unroll 4
            for (int k = 0; k < kSide; k += kNativeLanes) Stream(line + k, Load(lines[j] + k));
          }
        }
      });
    }
  }
  StreamFence();
}

inline void ContractAcrossExperts(const AcrossExpertsArgs& args) {
  args.dtype == DType::kFloat32 ? ContractAcross<float>(args) : ContractAcross<BFloat16>(args);
}

}  // namespace
