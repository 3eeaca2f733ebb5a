// Weights, ExactSums, Race, Exponentials: what is computed in double precision (sampling_kernels.h has the contracts). Plain
// loops of fixed length: the compiler turns them into vectors of each instruction set.
#pragma once

#include "cpu_kernels/sampling/logits.h"

namespace {

using namespace moesaic;

/// e^x for x <= 709, relative error below 1e-15; 0 below -708. 2^n times the exponential series to degree 13 on
/// [-log(2) / 2, log(2) / 2], whose remainder is 4e-18.
MOESAIC_INLINE double ExpPrecise(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
  const double y = x < -708.0 ? -708.0 : x;
  const double shifted = y * kLog2E + kShift;
  const std::uint64_t power = (__builtin_bit_cast(std::uint64_t, shifted) + 1023u) << 52;
  const double n = shifted - kShift;
  const double r = (y - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;  // log(2) in two parts
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const double value = p * __builtin_bit_cast(double, power);
  return x < -708.0 ? 0.0 : value;
}

/// log(x) for x in (0, 1], relative error below 1e-13: with x = 2^e m and s = (m - 1) / (m + 1), log(m) = 2 (s + s^3 / 3 +
/// ...).
MOESAIC_INLINE double LogPrecise(double x) {
  const std::uint64_t bits = __builtin_bit_cast(std::uint64_t, x);
  const double m1 = __builtin_bit_cast(double, (bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  const bool large = m1 > 1.4142135623730951;
  const double m = large ? 0.5 * m1 : m1;
  const double e = static_cast<double>(static_cast<std::int32_t>(bits >> 52) - 1023) + (large ? 1.0 : 0.0);
  const double s = (m - 1.0) / (m + 1.0);
  const double q = s * s;
  double p = 1.0 / 17.0;
  p = p * q + 1.0 / 15.0;
  p = p * q + 1.0 / 13.0;
  p = p * q + 1.0 / 11.0;
  p = p * q + 1.0 / 9.0;
  p = p * q + 1.0 / 7.0;
  p = p * q + 1.0 / 5.0;
  p = p * q + 1.0 / 3.0;
  p = p * q + 1.0;
  return e * 0.69314718055994530942 + 2.0 * s * p;
}

inline void Weights(const WeightsArgs& args) {
  for (std::int64_t i = 0; i < args.count; ++i) {
    args.weights[i] = ExpPrecise((static_cast<double>(args.values[i]) - args.reference) / args.temperature);
  }
}

template <typename T>
inline ExactSums ExactSumsOf(const T* logits, const ExactSumsArgs& args) {
  // Sixteen partial sums of each: one order of addition on every instruction set.
  double all[16] = {}, above[16] = {};
  for (std::int64_t i = 0; i < args.row.size; i += 16) {
    float x[16];
    StoreF32(x, LoadLogitsAt(logits, i / 16, args.row.size));
    for (int lane = 0; lane < 16; ++lane) {
      const double weight = ExpPrecise((static_cast<double>(x[lane]) - args.reference) / args.temperature);
      all[lane] += weight;
      above[lane] += x[lane] > args.high ? weight : 0.0;
    }
  }
  ExactSums sums;
  for (int lane = 0; lane < 16; ++lane) {
    sums.all += all[lane];
    sums.above += above[lane];
  }
  return sums;
}

inline ExactSums ExactSumsOfRow(const ExactSumsArgs& args) {
  return WithType(args.row, [&](const auto* logits) { return ExactSumsOf(logits, args); });
}

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011) for 16 counters that differ
/// in their first word.
MOESAIC_INLINE void Philox(const std::uint32_t (&first)[16], const PhiloxStream& stream, std::uint32_t (&words)[4][16]) {
  for (int i = 0; i < 16; ++i) {
    std::uint32_t c0 = first[i] | stream.domain, c1 = stream.row;
    std::uint32_t c2 = static_cast<std::uint32_t>(stream.offset), c3 = static_cast<std::uint32_t>(stream.offset >> 32);
    std::uint32_t k0 = static_cast<std::uint32_t>(stream.seed), k1 = static_cast<std::uint32_t>(stream.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(p1);
      c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0][i] = c0;
    words[1][i] = c1;
    words[2][i] = c2;
    words[3][i] = c3;
  }
}

/// E of a word: an exponential number.
MOESAIC_INLINE double Exponential(std::uint32_t word) { return -LogPrecise((static_cast<double>(word) + 0.5) * 0x1p-32); }

/// The best runner of each of 16 lanes so far.
struct Racers {
  double least[16];
  std::int64_t index[16];

  MOESAIC_INLINE Racers() {
    for (int i = 0; i < 16; ++i) {
      least[i] = __builtin_inf();
      index[i] = -1;
    }
  }
  MOESAIC_INLINE void Run(const std::uint32_t (&words)[16], const double (&weights)[16], std::int64_t first) {
    for (int i = 0; i < 16; ++i) {
      const double time = Exponential(words[i]) / weights[i];
      const bool better = time < least[i];
      least[i] = better ? time : least[i];
      index[i] = better ? first + i : index[i];
    }
  }
  MOESAIC_INLINE std::int64_t Winner() const {
    std::int64_t winner = -1;
    double best = __builtin_inf();
    for (int i = 0; i < 16; ++i) {
      if (least[i] < best || (least[i] == best && index[i] >= 0 && index[i] < winner)) {
        best = least[i];
        winner = index[i];
      }
    }
    return winner;
  }
};

MOESAIC_INLINE void LoadWeights(const RaceArgs& args, std::int64_t first, double (&weights)[16]) {
  const std::int64_t n = args.count - first < 16 ? args.count - first : 16;
  if (n == 16) return (void)std::memcpy(weights, args.weights + first, sizeof(weights));
  for (int i = 0; i < 16; ++i) weights[i] = i < n ? args.weights[first + i] : 0.0;
}

inline std::int64_t Race(const RaceArgs& args) {
  Racers racers;
  std::uint32_t first[16], words[4][16];
  double weights[16];
  for (std::int64_t i = 0; i < args.count; i += 16) {
    std::uint32_t column[16] = {}, chosen[16];
    const std::int64_t n = args.count - i < 16 ? args.count - i : 16;
    std::memcpy(column, args.columns + i, static_cast<std::size_t>(n) * sizeof(std::int32_t));
    for (int lane = 0; lane < 16; ++lane) first[lane] = column[lane] / 64 * 16 + column[lane] % 16;
    Philox(first, args.stream, words);
    for (int lane = 0; lane < 16; ++lane) {
      const std::uint32_t word = column[lane] / 16 % 4;
      const std::uint32_t low = word % 2 != 0 ? words[1][lane] : words[0][lane];
      const std::uint32_t high = word % 2 != 0 ? words[3][lane] : words[2][lane];
      chosen[lane] = word >= 2 ? high : low;
    }
    LoadWeights(args, i, weights);
    racers.Run(chosen, weights, i);
  }
  return racers.Winner();
}

inline void Exponentials(const ExponentialsArgs& args) {
  std::uint32_t first[16], words[4][16];
  for (std::int64_t i = 0; i < args.count; i += 64) {
    for (int lane = 0; lane < 16; ++lane) first[lane] = static_cast<std::uint32_t>(i / 4 + lane);
    Philox(first, args.stream, words);
    for (int word = 0; word < 4; ++word) {
      for (int lane = 0; lane < 16; ++lane) args.numbers[i + 16 * word + lane] = Exponential(words[word][lane]);
    }
  }
}

}  // namespace
