// AttendFew and MergeAttended (fused_kernels.h has the contracts): attention of few queries, as decoding has it, whose limit is
// to read keys and values once. They are widened where they lie: laying them out in tiles would take longer than the products.
//
// Numbers are taken as LoadEvenOdd gives them, in blocks of 32: 16 even ones, then 16 odd ones. Queries and sums are kept in
// that order.
#pragma once

#include <cstring>

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"
#include "cpu_kernels/fused/softmax_rows.h"

namespace {

using namespace moesaic;

/// The sum of each of sixteen vectors, in their order.
MOESAIC_INLINE F32x16 SumsOf(const F32x16 (&v)[16]) {
#if defined(__AVX512F__)
  // Lanes of 128 bits are added up first, then what is in them; vectors come in such an order that sums come out in theirs.
  constexpr int kPlace[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
  __m512 all[16], half[8], quarter[4], eighth[2];
#pragma GCC unroll 16
  for (int n = 0; n < 16; ++n) all[kPlace[n]] = (__m512)v[n];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    half[i] = _mm512_shuffle_f32x4(all[i], all[i + 8], 0x44) + _mm512_shuffle_f32x4(all[i], all[i + 8], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    quarter[i] = _mm512_shuffle_f32x4(half[i], half[i + 4], 0x88) + _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    eighth[i] = _mm512_unpacklo_ps(quarter[i], quarter[i + 2]) + _mm512_unpackhi_ps(quarter[i], quarter[i + 2]);
  }
  return (F32x16)(_mm512_shuffle_ps(eighth[0], eighth[1], 0x44) + _mm512_shuffle_ps(eighth[0], eighth[1], 0xee));
#else
  float sums[16];
  for (int n = 0; n < 16; ++n) sums[n] = SumOfLanes(v[n]);
  return LoadF32(sums);
#endif
}

/// How many keys ahead of their products keys are fetched.
inline constexpr std::int64_t kKeysAhead = 16;

/// Scores of kRows queries, [row][kKeysTogether]: of all keys, and of the last one again up to a multiple of sixteen.
template <int kRows>
[[gnu::noinline]] void ScoresOf(const AttendFewArgs& args, const float* queries, float* scores) {
  constexpr int kKeys = 16 / kRows;
  for (std::int64_t s = 0; s < RoundUp(args.keys, 16); s += kKeys) {
    const BFloat16* keys[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      const std::int64_t key = s + j < args.keys ? s + j : args.keys - 1;
      keys[j] = args.k + key * args.k_stride;
      // Keys that follow, and the values of these, come meanwhile.
      for (std::int64_t d = 0; d < args.size; d += 32) {
        __builtin_prefetch(keys[j] + kKeysAhead * args.k_stride + d, 0, 3);
        __builtin_prefetch(args.v + key * args.v_stride + d, 0, 2);
      }
    }
    F32x16 sums[16] = {};
    for (std::int64_t d = 0; d < args.size; d += 32) {
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const EvenOdd key = LoadEvenOdd(keys[j] + d);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          F32x16& sum = sums[r * kKeys + j];
          sum = MultiplyAdd(LoadF32(queries + r * args.size + d), key.even, sum);
          sum = MultiplyAdd(LoadF32(queries + r * args.size + d + 16), key.odd, sum);
        }
      }
    }
    float of_rows[16];
    StoreF32(of_rows, SumsOf(sums));
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kKeysTogether + s, of_rows + r * kKeys, kKeys * sizeof(float));
  }
}

/// The scores of a row become powers; zeros where it sees no key.
inline void PowersOf(const AttendFewArgs& args, std::int64_t row, float* scores) {
  constexpr float kInfinity = __builtin_inff();
  const std::int64_t seen = args.seen != nullptr ? args.seen[row] : args.keys;
  F32x16 largest = Broadcast(-kInfinity);
  for (std::int64_t s = 0; s < args.keys; s += 16) {
    F32x16 score = LoadF32(scores + s);
    if (args.bias != nullptr) score += Load(args.bias + s, args.keys - s < 16 ? args.keys - s : 16);
    score = Select(LanesBelow(seen - s), score, Broadcast(-kInfinity));
    StoreF32(scores + s, score);
    largest = Larger(score, largest);
  }
  const float most = LargestOfLanes(largest), shift = most == -kInfinity ? 0.0f : most;
  F32x16 sum{};
  for (std::int64_t s = 0; s < args.keys; s += 16) {
    const F32x16 power = RoughExp2(LoadF32(scores + s) - Broadcast(shift));
    StoreF32(scores + s, power);
    sum += power;
  }
  args.most[row] = most;
  args.sums[row] = SumOfLanes(sum);
}

/// Powers times values, of kRows queries and kBlocks blocks of 32 numbers from d on.
template <int kRows, int kBlocks>
[[gnu::noinline]] void ValuesOf(const AttendFewArgs& args, const float* powers, std::int64_t d, float* out) {
  F32x16 sums[kRows][2 * kBlocks] = {};
  for (std::int64_t s = 0; s < args.keys; ++s) {
    EvenOdd value[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) value[b] = LoadEvenOdd(args.v + s * args.v_stride + d + 32 * b);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32x16 power = Broadcast(powers[r * kKeysTogether + s]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        sums[r][2 * b] = MultiplyAdd(power, value[b].even, sums[r][2 * b]);
        sums[r][2 * b + 1] = MultiplyAdd(power, value[b].odd, sums[r][2 * b + 1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int n = 0; n < 2 * kBlocks; ++n) StoreF32(out + r * args.size + d + 16 * n, sums[r][n]);
  }
}

template <int kRows>
void AttendRows(const AttendFewArgs& args, std::int64_t first) {
  constexpr int kBlocks = kRows >= 8 ? 1 : kRows >= 4 ? 2 : 4;
  float* const queries = args.scratch;
  float* const scores = queries + kQueriesTogether * args.size;
  for (int r = 0; r < kRows; ++r) {
    for (std::int64_t d = 0; d < args.size; d += 32) {
      const EvenOdd q = LoadEvenOdd(args.q[first + r] + d);
      StoreF32(queries + r * args.size + d, q.even * Broadcast(args.scale * kLog2OfE));
      StoreF32(queries + r * args.size + d + 16, q.odd * Broadcast(args.scale * kLog2OfE));
    }
  }
  ScoresOf<kRows>(args, queries, scores);
  for (int r = 0; r < kRows; ++r) PowersOf(args, first + r, scores + r * kKeysTogether);
  float* const out = args.out + first * args.size;
  std::int64_t d = 0;
  for (; d + 32 * kBlocks <= args.size; d += 32 * kBlocks) ValuesOf<kRows, kBlocks>(args, scores, d, out);
  for (; d < args.size; d += 32) ValuesOf<kRows, 1>(args, scores, d, out);
}

inline void AttendFew(const AttendFewArgs& args) {
  static_assert(kQueriesTogether == 8);
  std::int64_t row = 0;
  for (; row + 8 <= args.rows; row += 8) AttendRows<8>(args, row);
  for (; row + 4 <= args.rows; row += 4) AttendRows<4>(args, row);
  for (; row + 2 <= args.rows; row += 2) AttendRows<2>(args, row);
  if (row < args.rows) AttendRows<1>(args, row);
}

inline void MergeAttended(const MergeAttendedArgs& args) {
  constexpr float kInfinity = __builtin_inff();
  for (std::int64_t r = 0; r < args.rows; ++r) {
    float most = -kInfinity;
    for (std::int64_t p = 0; p < args.parts; ++p) {
      const float of_part = args.most[p * args.rows + r];
      if (of_part > most) most = of_part;
    }
    if (most == -kInfinity) most = 0.0f;
    float total = 0.0f;
    for (std::int64_t p = 0; p < args.parts; ++p) {
      float& of_part = args.most[p * args.rows + r];
      of_part = FirstLane(RoughExp2(Broadcast(of_part - most)));  // the part's weight from here on
      total += of_part * args.sums[p * args.rows + r];
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (std::int64_t d = 0; d < args.size; d += 32) {
      EvenOdd sum{};
      for (std::int64_t p = 0; p < args.parts; ++p) {
        const float* const part = args.out + (p * args.rows + r) * args.size + d;
        const F32x16 weight = Broadcast(args.most[p * args.rows + r]);
        sum.even = MultiplyAdd(LoadF32(part), weight, sum.even);
        sum.odd = MultiplyAdd(LoadF32(part + 16), weight, sum.odd);
      }
      StoreVector(args.to[r] + d, NarrowPairs(sum.even * inverse, sum.odd * inverse));
    }
  }
}

}  // namespace
