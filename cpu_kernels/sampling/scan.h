// ScanBlocks, ScanCoarsely, BlockMass, Collect: the passes in fp32 (sampling_kernels.h has the contracts).
#pragma once

#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/logits.h"

namespace {

using namespace moesaic;

/// Bytes that a scan in one stream fetches ahead of what it reads.
inline constexpr std::int64_t kAhead = 4096;

/// Block b of a row: where it lies, or the row's last part in `room`, filled up with -infinity.
template <typename T>
MOESAIC_INLINE const T* WholeBlock(const T* logits, std::int64_t b, std::int64_t size, T (&room)[kSamplingBlock]) {
  const T* p = logits + b * kSamplingBlock;
  const std::int64_t left = size - b * kSamplingBlock;
  if (left >= kSamplingBlock) return p;
  for (std::int64_t i = 0; i < kSamplingBlock; ++i) room[i] = i < left ? p[i] : LowestOf<T>();
  return room;
}

/// True where a lane of any of them is NaN.
struct NanWatch {
#if defined(__AVX512F__)
  __mmask16 found = 0;
  MOESAIC_INLINE void Look(const F32x16& v, const F32x16& w) {
    found |= _mm512_cmp_ps_mask((__m512)v, (__m512)w, _CMP_UNORD_Q);
  }
  MOESAIC_INLINE bool Found() const { return found != 0; }
#else
  I32x16 found{};
  MOESAIC_INLINE void Look(const F32x16& v, const F32x16& w) { found = found | IsNan(v) | IsNan(w); }
  MOESAIC_INLINE bool Found() const { return BitsOf(found) != 0; }
#endif
};

/// Bit i: low <= x[i] <= high.
MOESAIC_INLINE std::uint16_t Inside(const F32x16& x, const F32x16& low, const F32x16& high) {
#if defined(__AVX512F__)
  const __mmask16 reach = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(reach, (__m512)x, (__m512)high, _CMP_LE_OQ);
#else
  return static_cast<std::uint16_t>(BitsOf((low <= x) & (x <= high)));
#endif
}

MOESAIC_INLINE float Widened(float x) { return x; }
MOESAIC_INLINE float Widened(BFloat16 x) { return ToFloat(x); }
MOESAIC_INLINE float Widened(Float16 x) { return ToFloat(x); }

/// Appends the elements of a block whose bits are set, and returns how many they are. Bits first and elements after all of
/// them: asking of every vector whether there are any took 25 us a row of 152,000 instead of 16 with one in 100 inside, since
/// that cannot be predicted; compressing every vector took 26. Nor can whether a word has one or two, so it gets two without
/// being asked, which takes a tenth off a row with top_p.
template <typename T>
MOESAIC_INLINE std::int64_t Append(const T* p, const std::uint16_t (&inside)[kBlockVectors], std::int64_t column, float* values,
                                   std::int32_t* columns) {
  std::uint64_t words[kBlockVectors / 4];
  std::memcpy(words, inside, sizeof(words));
  std::int64_t count = 0;
  for (int word = 0; word < kBlockVectors / 4; ++word) {
    const auto append = [&](std::uint64_t bits) {  // the lowest one, and returns the others
      const int i = 64 * word + (__builtin_ctzll(bits | std::uint64_t{1} << 63) & 63);
      values[count] = Widened(p[i]);
      columns[count] = static_cast<std::int32_t>(column) + i;
      count += bits != 0 ? 1 : 0;
      return bits & (bits - 1);
    };
    std::uint64_t bits = append(append(words[word]));
    while (bits != 0) bits = append(bits);
  }
  return count;
}

/// The largest elements of a block's sixteen interleaved parts.
template <typename T>
MOESAIC_INLINE F32x16 PartMaxima(const T* p, NanWatch* nan) {
  F32x16 largest[4] = {Broadcast(-kInfinity), Broadcast(-kInfinity), Broadcast(-kInfinity), Broadcast(-kInfinity)};
#pragma GCC unroll 8
  for (int i = 0; i < kBlockVectors; i += 2) {
    const F32x16 x = LoadLogits(p + 16 * i), y = LoadLogits(p + 16 * i + 16);
    largest[i % 4] = Larger(largest[i % 4], x);
    largest[i % 4 + 1] = Larger(largest[i % 4 + 1], y);
    nan->Look(x, y);
  }
  return Larger(Larger(largest[0], largest[1]), Larger(largest[2], largest[3]));
}

/// The largest of all of them; NaN if there is a NaN.
MOESAIC_INLINE float MaxOf(F32x16 parts, const NanWatch& nan) {
  return nan.Found() ? __builtin_nanf("") : LargestOfLanes(parts);
}

template <typename T>
MOESAIC_INLINE float BlockMax(const T* p) {
  NanWatch nan;
  const F32x16 parts = PartMaxima(p, &nan);
  return MaxOf(parts, nan);
}

/// Called for every vector of a block: fetches into L2, line by line, what its stream reads later (with several streams their
/// next block), so that memory is read while sums are computed. All lines of a block at once kept the loads of the
/// block itself waiting: 5 us a row of 152,000.
template <int kStreams, typename T>
MOESAIC_INLINE void FetchAheadOf(const T* p, int i) {
  constexpr std::int64_t kDistance = kStreams > 1 ? kSamplingBlock : kAhead / static_cast<std::int64_t>(sizeof(T));
  constexpr int kVectorsALine = 4 / static_cast<int>(sizeof(T));
  if (i % kVectorsALine == 0) __builtin_prefetch(p + kDistance + 16 * i, 0, 2);
}

/// scan(b) for blocks [first, last), in turn from kStreams equal parts of them.
template <int kStreams, typename ScanBlock>
MOESAIC_INLINE void ForBlocks(std::int64_t first, std::int64_t last, ScanBlock scan) {
  const std::int64_t part = (last - first) / kStreams;
  for (std::int64_t i = 0; i < part; ++i) {
    for (std::int64_t stream = 0; stream < kStreams; ++stream) scan(first + stream * part + i);
  }
  for (std::int64_t b = first + kStreams * part; b < last; ++b) scan(b);
}

/// PartMaxima of kStreams blocks, line by line from one after the other.
template <int kStreams, typename T>
MOESAIC_INLINE void MaximaOfStreams(const T* const (&p)[kStreams], F32x16 (&largest)[kStreams], NanWatch (&nan)[kStreams]) {
  for (F32x16& of_stream : largest) of_stream = Broadcast(-kInfinity);
#pragma GCC unroll 8
  for (int i = 0; i < kBlockVectors; i += 2) {
#pragma GCC unroll 8
    for (int stream = 0; stream < kStreams; ++stream) {
      FetchAheadOf<kStreams>(p[stream], i);
      FetchAheadOf<kStreams>(p[stream], i + 1);
      const F32x16 x = LoadLogits(p[stream] + 16 * i), y = LoadLogits(p[stream] + 16 * i + 16);
      largest[stream] = Larger(largest[stream], Larger(x, y));
      nan[stream].Look(x, y);
    }
  }
}

template <int kStreams, bool kBound, typename T>
inline void ScanMaxima(const T* logits, const ScanBlocksArgs& args) {
  const Power power(args.inverse_temperature);
  const auto store = [&](std::int64_t b, F32x16 parts, const NanWatch& nan) MOESAIC_INLINE_LAMBDA {
    const float max = MaxOf(parts, nan);
    args.max[b] = max;
    if constexpr (kBound) args.bound[b] = max > -kInfinity && max < kInfinity ? 16 * SumOfLanes(power(parts - max)) : 0.0f;
  };
  const std::int64_t part = kStreams > 1 ? (args.last - args.first) / kStreams : 0;
  T room[kSamplingBlock];  // for the row's last block
  for (std::int64_t i = 0; i < part; ++i) {
    const T* p[kStreams];
    F32x16 parts[kStreams];
    NanWatch nan[kStreams];
    for (std::int64_t s = 0; s < kStreams; ++s) p[s] = WholeBlock(logits, args.first + s * part + i, args.row.size, room);
    MaximaOfStreams<kStreams>(p, parts, nan);
    for (std::int64_t s = 0; s < kStreams; ++s) store(args.first + s * part + i, parts[s], nan[s]);
  }
  for (std::int64_t b = args.first + kStreams * part; b < args.last; ++b) {
    const T* p = WholeBlock(logits, b, args.row.size, room);
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) FetchAheadOf<kStreams>(p, i);
    NanWatch nan;
    const F32x16 parts = PartMaxima(p, &nan);
    store(b, parts, nan);
  }
}

/// The sums come from the L1 cache, to which the maximum has brought the block.
template <int kStreams, bool kAbove, typename T>
inline void ScanSums(const T* logits, const ScanBlocksArgs& args) {
  const Power power(args.inverse_temperature);
  const F32x16 high = Broadcast(args.high);
  T room[kSamplingBlock];
  ForBlocks<kStreams>(args.first, args.last, [&](std::int64_t b) MOESAIC_INLINE_LAMBDA {
    const T* p = WholeBlock(logits, b, args.row.size, room);
    const float max = BlockMax(p);
    args.max[b] = max;
    args.sum[b] = 0;
    if constexpr (kAbove) args.above[b] = 0;
    if (!(max > -kInfinity && max < kInfinity)) return;
    F32x16 sums[4] = {}, sums_above[2] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      FetchAheadOf<kStreams>(p, i);
      const F32x16 x = LoadLogits(p + 16 * i), weight = power(x - max);
      sums[i % 4] += weight;
      if constexpr (kAbove) sums_above[i % 2] = AddAbove(sums_above[i % 2], x, high, weight);
    }
    args.sum[b] = SumOfLanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if constexpr (kAbove) args.above[b] = SumOfLanes(sums_above[0] + sums_above[1]);
  });
}

template <int kStreams>
inline void ScanBlocks(const ScanBlocksArgs& args) {
  WithType(args.row, [&](const auto* logits) {
    if (args.sum == nullptr) {
      return args.bound == nullptr ? ScanMaxima<kStreams, false>(logits, args) : ScanMaxima<kStreams, true>(logits, args);
    }
    return args.above == nullptr ? ScanSums<kStreams, false>(logits, args) : ScanSums<kStreams, true>(logits, args);
  });
}

template <int kStreams, typename T>
inline void ScanCoarselyOf(const T* logits, const ScanCoarselyArgs& args) {
  const CoarsePower power(args.inverse_temperature, args.m);
  T room[kSamplingBlock];
  ForBlocks<kStreams>(args.first, args.last, [&](std::int64_t b) MOESAIC_INLINE_LAMBDA {
    const T* p = WholeBlock(logits, b, args.row.size, room);
    F32x16 sums[4] = {}, largest[2] = {Broadcast(-kInfinity), Broadcast(-kInfinity)};
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      FetchAheadOf<kStreams>(p, i);
      const F32x16 x = LoadLogits(p + 16 * i);
      largest[i % 2] = Larger(largest[i % 2], x);
      sums[i % 4] += power(x);
    }
    args.sum[b] = SumOfLanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    // Of a NaN only the sum is sure to know; infinities leave one there too.
    args.max[b] = __builtin_isnan(args.sum[b]) ? BlockMax(p) : LargestOfLanes(Larger(largest[0], largest[1]));
  });
}

template <int kStreams>
inline void ScanCoarsely(const ScanCoarselyArgs& args) {
  WithType(args.row, [&](const auto* logits) { ScanCoarselyOf<kStreams>(logits, args); });
}

inline void BlockMass(const BlockMassArgs& args) {
  for (std::int64_t b = 0; b < args.count; ++b) {
    const double weight = ExpPrecise((static_cast<double>(args.max[b]) - args.reference) * args.inverse_temperature);
    args.mass[b] = weight;
  }
  if (args.sum == nullptr) return;
  for (std::int64_t b = 0; b < args.count; ++b) args.mass[b] *= static_cast<double>(args.sum[b]);
}

/// The blocks of [first, last) whose maximum is not below a bound, in their order. Found 64 at a time: whether the next one is
/// among them cannot be predicted.
class BlocksReaching {
 public:
  MOESAIC_INLINE BlocksReaching(const float* max, std::int64_t first, std::int64_t last, float low)
      : max_(max), end_(first), last_(last), low_(low) {}

  /// The next one; `last` behind the last one.
  MOESAIC_INLINE std::int64_t Next() {
    while (found_ == 0) {
      if (end_ == last_) return last_;
      begin_ = end_;
      end_ = last_ - begin_ < 64 ? last_ : begin_ + 64;
      for (std::int64_t b = begin_; b < end_; ++b) found_ |= std::uint64_t{max_[b] < low_ ? 0u : 1u} << (b - begin_);
    }
    const std::int64_t block = begin_ + __builtin_ctzll(found_);
    found_ &= found_ - 1;
    return block;
  }

 private:
  const float* max_;
  std::int64_t begin_ = 0, end_, last_;
  std::uint64_t found_ = 0;
  float low_;
};

/// Blocks that are fetched ahead where few are read, for the hardware does not know which. (Two Zen 4 cores, a row that both of
/// them have scanned, some 60 blocks of 594: 3.0 us for 3.8 and, where they have no cache in common, 7.5 for 10.4; two are as
/// good, of most blocks 10.7 for 10.1.)
inline constexpr int kBlocksFetched = 3;

template <bool kMass, typename T>
inline std::int64_t CollectOf(const T* logits, const CollectArgs& args) {
  const Power power(args.inverse_temperature);
  const F32x16 low = Broadcast(args.low), high = Broadcast(args.high);
  const auto reference = static_cast<float>(args.reference);
  T room[kSamplingBlock];
  std::int64_t count = 0;
  std::int64_t reaching = 0;
  for (std::int64_t b = args.first; b < args.last; ++b) {
    if constexpr (kMass) args.mass[b] = 0;
    reaching += args.max[b] < args.low ? 0 : 1;
  }
  const bool few = 4 * reaching < args.last - args.first;
  BlocksReaching blocks(args.max, args.first, args.last, args.low), ahead = blocks;
  const auto fetch = [&] {
    const std::int64_t b = ahead.Next();
    if (b == args.last) return;
    for (std::int64_t i = 0; i < kSamplingBlock * static_cast<std::int64_t>(sizeof(T)); i += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(logits + b * kSamplingBlock) + i);
    }
  };
  for (int i = 0; i < kBlocksFetched && few; ++i) fetch();
  for (std::int64_t b = blocks.Next(); b < args.last; b = blocks.Next()) {
    if (few) fetch();
    const T* p = WholeBlock(logits, b, args.row.size, room);
    F32x16 sums[2] = {};
    std::uint16_t inside[kBlockVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      const F32x16 x = LoadLogits(p + 16 * i);
      if constexpr (kMass) sums[i % 2] = AddAbove(sums[i % 2], x, high, power(x - reference));
      inside[i] = Inside(x, low, high);
    }
    count += Append(p, inside, b * kSamplingBlock, args.values + count, args.columns + count);
    if constexpr (kMass) args.mass[b] = static_cast<double>(SumOfLanes(sums[0] + sums[1]));
  }
  return count;
}

inline std::int64_t Collect(const CollectArgs& args) {
  return WithType(args.row, [&](const auto* logits) {
    return args.mass != nullptr ? CollectOf<true>(logits, args) : CollectOf<false>(logits, args);
  });
}

}  // namespace
