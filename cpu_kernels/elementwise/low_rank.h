// Products of a low rank with an adapter's parameters as they lie in memory, for few rows: nothing is packed, and each line of
// a parameter is read once (kernels.h has the contracts).
//
// Where features lie side by side, vectors run along them. Where experts do, 16 x 16 pairs of numbers at a time are rounded to
// bf16 and transposed, so that vectors run along the features or the ranks of one expert, and no work is done for rows that it
// has not.
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/native_vectors.h"
#include "cpu_kernels/transpose.h"

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

/// f.operator()<n>(first) for the n that are left, from 1 to kRest, if any are.
template <int kRest, typename Function>
MOESAIC_INLINE void InOneRun(std::int64_t count, Function f, std::int64_t first) {
  if (count - first == kRest) return f.template operator()<kRest>(first);
  if constexpr (kRest > 1) InOneRun<kRest - 1>(count, f, first);
}
/// f.operator()<n>(first) for n = kMost at a time, and once for what is left: seven rows read parameters once, as eight do, and
/// not as often as 4, 2 and 1.
template <int kMost, typename Function>
MOESAIC_INLINE void InFewestRuns(std::int64_t count, Function f) {
  std::int64_t first = 0;
  for (; first + kMost <= count; first += kMost) f.template operator()<kMost>(first);
  InOneRun<kMost - 1>(count, f, first);
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

/// Numbers that one instruction multiplies with as many others and adds up, in pairs where it can.
#if defined(__AVX512BF16__)
using Factors = U16x32;
inline constexpr std::int64_t kFactors = 32;
template <bool kPart>
MOESAIC_INLINE Factors LoadFactors(const float* p, std::int64_t n) {
  return NarrowBoth(Load<kPart>(p, n), Load<kPart>(p + kNativeLanes, n - kNativeLanes));
}
template <bool kPart>
MOESAIC_INLINE Factors LoadFactors(const BFloat16* p, std::int64_t n) {
  if constexpr (kPart) return (Factors)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
  return (Factors)_mm512_loadu_si512(p);
}
MOESAIC_INLINE NativeF32 AddProducts(NativeF32 sum, Factors a, Factors b) {
  return (NativeF32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
using Factors = NativeF32;
inline constexpr std::int64_t kFactors = kNativeLanes;
template <bool kPart, typename T>
MOESAIC_INLINE Factors LoadFactors(const T* p, std::int64_t n) {
  return LoadOperand<kPart>(p, n);
}
MOESAIC_INLINE NativeF32 AddProducts(NativeF32 sum, Factors a, Factors b) { return MultiplyAdd(a, b, sum); }
#endif

/// sums[row][rank] = sum over f of rows[row][f] * P(rank, f)
template <typename T, int kRows, int kRanks>
inline void ContractTile(const AlongFeaturesArgs& args, const LowRankPiece& piece, std::int64_t row, std::int64_t rank) {
  NativeF32 sum[kRows][kRanks] = {};
  const float* parameter = piece.parameter + rank * piece.rank_stride;
  const float* next = rank + kRanks < piece.ranks ? parameter + kRanks * piece.rank_stride : parameter;
  const T* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = static_cast<const T*>(args.expert.rows[row + i]);
  const auto add = [&]<bool kPart>(std::int64_t f, std::int64_t n) MOESAIC_INLINE_LAMBDA {
    Factors factor[kRanks];
#pragma GCC unroll 4
    for (int j = 0; j < kRanks; ++j) {
      factor[j] = LoadFactors<kPart>(parameter + j * piece.rank_stride + f, n);
      for (std::int64_t line = 0; line < kFactors; line += kNativeLanes) {
        __builtin_prefetch(next + j * piece.rank_stride + f + line, 0, 2);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Factors value = LoadFactors<kPart>(rows[i] + f, n);
#pragma GCC unroll 4
      for (int j = 0; j < kRanks; ++j) sum[i][j] = AddProducts(sum[i][j], value, factor[j]);
    }
  };
  std::int64_t f = 0;
  for (; f + kFactors <= args.features; f += kFactors) add.template operator()<false>(f, kFactors);
  if (f < args.features) add.template operator()<true>(f, args.features - f);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kRanks; ++j) {
      args.expert.sums[(row + i) * args.ranks + piece.first_rank + rank + j] = SumOfLanes(sum[i][j]);
    }
  }
}

template <typename T>
inline void ContractAlong(const AlongFeaturesArgs& args) {
  for (const LowRankPiece& piece : args.pieces) {
    InRuns<4>(piece.ranks, [&]<int kRanks>(std::int64_t rank) {
      InFewestRuns<kSquareTile>(args.expert.count,
                                [&]<int kRows>(std::int64_t row) { ContractTile<T, kRows, kRanks>(args, piece, row, rank); });
    });
  }
}

inline void ContractAlongFeatures(const AlongFeaturesArgs& args) {
  args.dtype == DType::kFloat32 ? ContractAlong<float>(args) : ContractAlong<BFloat16>(args);
}

/// Two parameters, rounded to bf16, in one number of 32 bits: vectors of them, and what they hold.
using NativePairs = NativeU32;
MOESAIC_INLINE NativeF32 FirstOf(NativePairs pairs) { return (NativeF32)(pairs << 16); }
MOESAIC_INLINE NativeF32 SecondOf(NativePairs pairs) { return (NativeF32)(pairs & 0xffff0000u); }

/// Parameters as they lie, features side by side; they come from memory, and are prefetched kFeaturesAhead before they are
/// needed.
struct AlongFeatures {
  static constexpr bool kPaired = false;
  static constexpr bool kReadSoon = true;  ///< fp32 rows, by the thread that has expanded them
  template <bool kPart>
  MOESAIC_INLINE NativeF32 Rank(const LowRankPiece& piece, std::int64_t j, std::int64_t, std::int64_t f, std::int64_t n) const {
    const float* at = piece.parameter + j * piece.rank_stride + f;
    __builtin_prefetch(at + kFeaturesAhead, 0, 2);
    return LoadOperand<kPart>(at, n);
  }
};

/// Features that are expanded across experts at a time.
inline constexpr std::int64_t kSpan = 2 * kLowRankSide;

/// The same transposed: pairs of ranks, kSpan features of each.
struct PairsOfRanks {
  static constexpr bool kPaired = true;
  static constexpr bool kReadSoon = false;
  const std::uint32_t* pairs;

  MOESAIC_INLINE NativePairs At(std::int64_t pair, std::int64_t f) const {
    NativePairs both;
    std::memcpy(&both, pairs + pair * kSpan + f, sizeof(both));
    return both;
  }
  /// The last one, of an odd number.
  template <bool kPart>
  MOESAIC_INLINE NativeF32 Rank(const LowRankPiece&, std::int64_t, std::int64_t pair, std::int64_t f, std::int64_t) const {
    return FirstOf(At(pair, f));
  }
};

/// What an expert's rows are expanded with: `features` of all pieces.
template <typename Parameters>
struct Expansion {
  std::span<const LowRankPiece> pieces;
  std::int64_t ranks;
  std::int64_t first_feature;
  std::int64_t features;
  Parameters parameters;
};

/// A part of a row of the result. fp32 rows for other threads go past the caches where the machine can, and with AVX-512 lines
/// of bf16, for each line would be read from memory first. (Zen 4, eight rows of each expert, of the time: 0.66 and 0.74.)
template <bool kReadSoon, bool kPart, typename T, int kVectors>
MOESAIC_INLINE void StoreRow(T* to, std::int64_t n, const NativeF32 (&values)[kVectors]) {
  if constexpr (std::is_same_v<T, float> && !kReadSoon && !kPart) {
    for (int v = 0; v < kVectors; ++v) Stream(to + v * kNativeLanes, values[v]);
    return;
  }
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, BFloat16> && kVectors == 2) {
    if (IsAligned(to)) return StreamLine(to, NarrowBoth(values[0], values[1]));
  }
#endif
  for (int v = 0; v < kVectors; ++v) Store<kPart>(to + v * kNativeLanes, n, values[v]);
}

/// out[row][first_feature + f ...] = sum over ranks of low[row][rank] * P(rank, f ...)
template <typename T, int kRows, int kVectors, bool kPart, typename Parameters>
inline void ExpandTile(const Expansion<Parameters>& by, const LowRankRows& expert, std::int64_t row, std::int64_t f,
                       std::int64_t n) {
  NativeF32 sum[kRows][kVectors] = {};
  std::int64_t pair = 0;
  for (const LowRankPiece& piece : by.pieces) {
    const float* low = expert.low + row * by.ranks + piece.first_rank;
    const auto add = [&](std::int64_t rank, const NativeF32(&factor)[kVectors]) MOESAIC_INLINE_LAMBDA {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const NativeF32 scale = InAllLanes(low[i * by.ranks + rank]);
        for (int v = 0; v < kVectors; ++v) sum[i][v] = MultiplyAdd(scale, factor[v], sum[i][v]);
      }
    };
    std::int64_t j = 0;
    NativeF32 factor[kVectors];
    if constexpr (Parameters::kPaired) {
      for (; j + 1 < piece.ranks; j += 2, ++pair) {
        NativePairs both[kVectors];
        for (int v = 0; v < kVectors; ++v) both[v] = by.parameters.At(pair, f + v * kNativeLanes);
        for (int v = 0; v < kVectors; ++v) factor[v] = FirstOf(both[v]);
        add(j, factor);
        for (int v = 0; v < kVectors; ++v) factor[v] = SecondOf(both[v]);
        add(j + 1, factor);
      }
    }
    for (; j < piece.ranks; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        factor[v] = by.parameters.template Rank<kPart>(piece, j, pair, f + v * kNativeLanes, n - v * kNativeLanes);
      }
      add(j, factor);
    }
    pair += piece.ranks % 2;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    StoreRow<Parameters::kReadSoon, kPart>(static_cast<T*>(expert.out[row + i]) + by.first_feature + f, n, sum[i]);
  }
}

template <typename T, typename Parameters>
inline void ExpandRows(const Expansion<Parameters>& by, const LowRankRows& expert) {
  InVectors(by.features, [&]<int kVectors, bool kPart>(std::int64_t f, std::int64_t n) {
    const auto tile = [&]<int kRows>(std::int64_t row) { ExpandTile<T, kRows, kVectors, kPart>(by, expert, row, f, n); };
    if constexpr (kPart) {
      InRuns<kTallTile>(expert.count, tile);  // an edge: not worth as many functions
    } else {
      InFewestRuns<kTallTile>(expert.count, tile);
    }
  });
}

inline void ExpandAlongFeatures(const AlongFeaturesArgs& args) {
  const Expansion<AlongFeatures> by{args.pieces, args.ranks, 0, args.features, {}};
  args.dtype == DType::kFloat32 ? ExpandRows<float>(by, args.expert) : ExpandRows<BFloat16>(by, args.expert);
  StreamFence();
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

/// Lines of two parameters as pairs: first[i] and second[i], rounded to bf16.
MOESAIC_INLINE void StorePairs(const float* first, const float* second, std::uint32_t* pairs) {
  StoreVector(pairs, NarrowPairs(LoadF32(first), LoadF32(second)));
}

/// out[column][row] = first[row][column] and second[row][column], rounded to bf16: 16 x 16 of them, zeros for what is not among
/// the `rows` x `columns`, which are alone read. @param second  null: zeros
MOESAIC_INLINE void TransposePairsInto(const float* first, const float* second, std::int64_t in_pitch, std::int64_t rows,
                                       std::int64_t columns, std::uint32_t* out, std::int64_t out_pitch) {
  alignas(64) static constexpr float kZeros[kSide] = {};
  alignas(64) std::uint32_t pairs[kSide * kSide];
  const std::int64_t second_pitch = second != nullptr ? in_pitch : 0;
  if (second == nullptr) second = kZeros;
#if defined(__AVX512BF16__)
  if (rows == kSide && columns == kSide) {  // without a way through memory
    __m512i r[kSide];
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < kSide; ++i) {
      r[i] = (__m512i)NarrowPairs(Load(first + i * in_pitch), Load(second + i * second_pitch));
    }
    return StoreTransposed(r, reinterpret_cast<float*>(out), out_pitch);
  }
#endif
  for (std::int64_t i = 0; i < kSide; ++i) {
    std::uint32_t* line = pairs + i * kSide;
    if (columns == kSide && i < rows) {
      StorePairs(first, second, line);
    } else {
      alignas(64) float parts[2][kSide] = {};
      for (std::int64_t k = 0; k < columns && i < rows; ++k) {
        parts[0][k] = first[k];
        parts[1][k] = second[k];
      }
      StorePairs(parts[0], parts[1], line);
    }
    first += in_pitch;
    second += second_pitch;
  }
  Transpose16x16(reinterpret_cast<const float*>(pairs), kSide, reinterpret_cast<float*>(out), out_pitch);
}

/// What a transposition takes, in rows that sixteen ranks expand to. (With 64 ranks it counts for too little, which costs
/// nothing.)
inline constexpr std::int64_t kTransposition = 4;

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
/// alone takes; all before pairs. Beside the stores of gradients, too, up to 11% slower.)
class FeatureLines {
 public:
  FeatureLines(const AcrossExpertsArgs& args, std::uint64_t groups, std::int64_t first, std::int64_t end)
      : args_(args),
        groups_(groups),
        first_(first),
        feature_(first),
        end_(groups == 0           ? first
             : end < args.features ? end
                                   : args.features) {}

  MOESAIC_INLINE void Read() {
    while (feature_ < end_) {
      OfRank([](const float* line) { asm volatile("" : : "x"(*line)); });
    }
  }
  /// The share of all lines that `work` is of `all`.
  MOESAIC_INLINE void AskFor(std::int64_t work, std::int64_t all) {
    for (credit_ += work * (end_ - first_) * args_.ranks; credit_ > 0 && feature_ < end_; credit_ -= all) {
      OfRank([](const float* line) { __builtin_prefetch(line, 0, 2); });
    }
  }
  /// As many as a transposition takes or some more, until there are no more.
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
  std::int64_t first_, feature_, end_, rank_ = 0, credit_ = 0;
  std::size_t piece_ = 0;
};

template <typename T>
inline void ExpandAcross(const AcrossExpertsArgs& args) {
  const auto experts = static_cast<std::int64_t>(args.experts.size());
  std::int64_t pairs = 0;
  for (const LowRankPiece& piece : args.pieces) pairs += CeilDiv(piece.ranks, 2);
  const std::int64_t pitch = pairs * kSpan + kSide;
  auto* const scratch = reinterpret_cast<std::uint32_t*>(args.scratch);
  const std::uint64_t groups = GroupsWithRows(args);
  FeatureLines(args, groups, 0, kSpan).Read();
  std::int64_t work = 2 * kTransposition * pairs * __builtin_popcountll(groups);
  for (const LowRankRows& expert : args.experts) work += expert.count;
  for (std::int64_t f = 0; f < args.features; f += kSpan) {
    const std::int64_t n = args.features - f < kSpan ? args.features - f : kSpan;
    FeatureLines next(args, groups, f + n, f + n + kSpan);
    for (std::int64_t x = 0; x < experts; x += kSide) {
      if (!Has(groups, x)) continue;
      const std::int64_t width = AtMostSide(experts - x);
      std::uint32_t* to = scratch;
      for (const LowRankPiece& piece : args.pieces) {
        for (std::int64_t j = 0; j < piece.ranks; j += 2, to += kSpan) {
          for (std::int64_t half = 0; half < n; half += kSide) {
            next.AskFor(kTransposition, work);
            const float* at = piece.parameter + (f + half) * piece.feature_stride + j * piece.rank_stride + x;
            TransposePairsInto(at, j + 1 < piece.ranks ? at + piece.rank_stride : nullptr, piece.feature_stride,
                               AtMostSide(n - half), width, to + half, pitch);
          }
        }
      }
      const std::uint32_t* expanded = scratch;
      for (std::int64_t i = 0; i < width; ++i, expanded += pitch) {
        next.AskFor(args.experts[x + i].count, work);
        ExpandRows<T>(Expansion<PairsOfRanks>{args.pieces, args.ranks, args.first_feature + f, n, {expanded}},
                      args.experts[x + i]);
      }
    }
  }
}

inline void ExpandAcrossExperts(const AcrossExpertsArgs& args) {
  args.dtype == DType::kFloat32 ? ExpandAcross<float>(args) : ExpandAcross<BFloat16>(args);
  StreamFence();
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

/// Sixteen features of an expert's rows, and where an instruction multiplies pairs of them, as those.
struct RowsBlock {
  float values[kMostLowRankRows][kSide];
#if defined(__AVX512BF16__)
  std::uint32_t pairs[kMostLowRankRows][kSide / 2];
#endif
};

template <typename T>
inline void LoadRows(const LowRankRows& expert, std::int64_t first, std::int64_t n, RowsBlock& block) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t i = 0; i < expert.count; ++i) {
    const T* row = static_cast<const T*>(expert.rows[i]) + first;
    __builtin_prefetch(row + kLine, 0, 3);  // every row is elsewhere
#pragma GCC unroll 4
    for (int k = 0; k < kSide; k += kNativeLanes) {
      const NativeF32 values = AsOperand(row, n == kSide ? Load(row + k) : Load<true>(row + k, n - k));
      Store(block.values[i] + k, values);
    }
#if defined(__AVX512BF16__)
    StoreBf16(reinterpret_cast<BFloat16*>(block.pairs[i]), Load(block.values[i]));
#endif
  }
}

/// sums[row][rank ...] += sum over n features of rows' values * parameters
/// @param pairs  [features / 2][16 ranks], two features each
template <int kRows>
MOESAIC_INLINE void AddSums(const RowsBlock& rows, std::int64_t row, const std::uint32_t* pairs, std::int64_t n, float* sums,
                            std::int64_t pitch, std::int64_t ranks) {
  Ranks sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i] = Ranks::From(sums + i * pitch, ranks);
#if defined(__AVX512BF16__)
  for (std::int64_t f = 0; f < n; f += 2, pairs += kSide) {
    Factors parameters;
    std::memcpy(&parameters, pairs, sizeof(parameters));
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const auto values = (Factors)_mm512_set1_epi32(static_cast<int>(rows.pairs[row + i][f / 2]));
      sum[i].v[0] = AddProducts(sum[i].v[0], values, parameters);
    }
  }
#else
  for (std::int64_t f = 0; f < n; f += 2, pairs += kSide) {
    Ranks first, second;
    for (int k = 0; k < Ranks::kVectors; ++k) {
      NativePairs both;
      std::memcpy(&both, pairs + k * kNativeLanes, sizeof(both));
      first.v[k] = FirstOf(both);
      second.v[k] = SecondOf(both);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      sum[i].Add(rows.values[row + i][f], first);
      sum[i].Add(rows.values[row + i][f + 1], second);  // zeros, both, behind the last one
    }
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i].To(sums + i * pitch, ranks);
}

/// block[f][rank ...] = sum over rows of values[row][f] * low[row][rank ...]
MOESAIC_INLINE void OuterBlock(const RowsBlock& rows, const LowRankRows& expert, std::int64_t first, std::int64_t ranks,
                               std::int64_t pitch, float* block) {
  for (std::int64_t f = 0; f < kSide; f += kRanksTile) {
    Ranks sum[kRanksTile] = {};
    for (std::int64_t i = 0; i < expert.count; ++i) {
      const Ranks factor = Ranks::From(expert.low + i * pitch + first, ranks);
#pragma GCC unroll 8
      for (int k = 0; k < kRanksTile; ++k) sum[k].Add(rows.values[i][f + k], factor);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kRanksTile; ++k) sum[k].To(block + (f + k) * kSide, kSide);
  }
}

/// Of gradients, so that lines follow each other in memory.
inline constexpr std::int64_t kExpertsWritten = 128;

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
          auto* pairs = reinterpret_cast<std::uint32_t*>(blocks + x * kBlockPitch);
          for (std::int64_t f = 0; f < n; f += 2, from += 2 * piece.feature_stride, pairs += kSide) {
            TransposePairsInto(from, f + 1 < n ? from + piece.feature_stride : nullptr, piece.rank_stride, ranks, width, pairs,
                               kBlockPitch);
          }
        });
      }
      for (std::int64_t i = 0; i < width; ++i) {
        const LowRankRows& expert = args.experts[x + i];
        alignas(64) RowsBlock rows;
        LoadRows<T>(expert, args.first_feature + first, n, rows);
        InBlocksOfRanks(args, [&](const LowRankPiece& piece, std::int64_t rank, std::int64_t ranks, float* blocks) {
          next.Ask();
          float* block = blocks + (x + i) * kBlockPitch;
          const std::int64_t column = piece.first_rank + rank;
          if (expert.sums != nullptr) {
            const auto* pairs = reinterpret_cast<const std::uint32_t*>(block);
            InFewestRuns<kRanksTile>(expert.count, [&]<int kRows>(std::int64_t row) {
              AddSums<kRows>(rows, row, pairs, n, expert.sums + row * args.ranks + column, args.ranks, ranks);
            });
          }
          if (piece.gradient != nullptr) OuterBlock(rows, expert, column, ranks, args.ranks, block);
        });
      }
    }
    for (std::int64_t f = 0; f < n; ++f) {
      InBlocksOfRanks(args, [&](const LowRankPiece& piece, std::int64_t rank, std::int64_t ranks, const float* block) {
        if (piece.gradient == nullptr) return;
        float* to = piece.gradient + (first + f) * piece.gradient_feature_stride + rank * piece.gradient_rank_stride;
        for (std::int64_t x = 0; x < experts; x += kExpertsWritten) {
          alignas(64) float lines[kSide][kExpertsWritten];
          const std::int64_t width = experts - x < kExpertsWritten ? experts - x : kExpertsWritten;
          for (std::int64_t k = 0; k < width; k += kSide) {
            Transpose16x16(block + (x + k) * kBlockPitch + f * kSide, kBlockPitch, lines[0] + k, kExpertsWritten);
          }
          for (std::int64_t j = 0; j < ranks; ++j) {
            float* line = to + j * piece.gradient_rank_stride + x;
            std::int64_t k = 0;
            for (; k + kNativeLanes <= width; k += kNativeLanes) Stream(line + k, Load(lines[j] + k));
            if (k < width) Store<true>(line + k, width - k, Load(lines[j] + k));
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
