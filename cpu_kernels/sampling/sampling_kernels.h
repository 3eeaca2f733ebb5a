// The kernels of the sampler: passes over one row of logits, blocks of 256 at a time. sampling/ decides with them what is kept
// and what is drawn.
//
// A row is V logits x side by side, none of them NaN or +infinity where a sum is asked for; T > 0 is the temperature. Block b
// holds columns [256 b, min(256 (b + 1), V)). What a kernel computes of a block depends on nothing else, so a row may be cut
// between blocks in any way: the results are bitwise the same, but for the sign of a maximum of zero.
//
// Threads: kernels keep no state. Errors: none; arguments are what sampling/ has validated.
#pragma once

#include <cstdint>
#include <limits>

#include "cpu_kernels/tensor_view.h"

namespace moesaic {

inline constexpr std::int64_t kSamplingBlock = 256;

/// V logits of bf16, fp16 or fp32 side by side, aligned as their type.
struct LogitRow {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t size = 0;

  std::int64_t blocks() const { return (size + kSamplingBlock - 1) / kSamplingBlock; }
};

/// How many logits of a row are taken as a sample, in runs of so many.
inline constexpr std::int64_t kSamplingSample = 4096, kSamplingRun = 32;

/// Where the sample of a row of at least kSamplingRun expects the logit down to which the probabilities sum up to top_p. Logits
/// may be of any kind; those that are not finite do not count. Where a few logits have most of the mass, so that a sample does
/// not know the whole, it still knows what is below the boundary, if it is told the whole.
struct TopPEstimateArgs {
  LogitRow row;
  double inverse_temperature = 1;
  double top_p = 1;
  double mass = 0;       ///< of the row: the sum of e^((x - reference) / T), to 1e-3 or so; 0: not known
  double reference = 0;  ///< at most 709 T above the sample's largest logit
};
struct TopPEstimate {
  float boundary = 0;
  double density = 0;  ///< of the mass below it: the share of the whole for each unit of x; 0: the sample cannot say
  float top = std::numeric_limits<float>::infinity();  ///< the largest finite logit of the sample; infinity: there is none
};

/// For blocks b in [first, last):
///   max[b] = max of x; NaN if there is a NaN
///   sum[b] = sum of e^((x - max[b]) / T), to 2e-7; 0 where the maximum is infinite; left out where `sum` is null
///   above[b] = the same over x > high; left out where `above` is null
///   bound[b] >= sum[b], to 2e-7: of sixteen interleaved parts of the block, 16 e^((the part's maximum - max[b]) / T) each; 0
///              where the maximum is infinite or NaN; left out where `bound` is null
struct ScanBlocksArgs {
  LogitRow row;
  std::int64_t first = 0;
  std::int64_t last = 0;
  double inverse_temperature = 1;
  float* max = nullptr;
  float* sum = nullptr;
  float* above = nullptr;  ///< with `sum`
  float high = 0;
  float* bound = nullptr;  ///< without `sum`
};

/// For blocks b in [first, last), with c = log2(e) / T rounded to fp32, as CoarseScale gives it:
///   max[b] as above
///   sum[b] = sum of 2^(x c - m), every term to 3e-6, where |x c| < 2^21 and x c < m + 120; terms below 2^(m - 126) count as
///   that
/// In one pass with a third fewer instructions than exact sums, for rows whose boundary is clear.
inline float CoarseScale(double inverse_temperature) { return static_cast<float>(1.4426950408889634 * inverse_temperature); }
struct ScanCoarselyArgs {
  LogitRow row;
  std::int64_t first = 0;
  std::int64_t last = 0;
  double inverse_temperature = 1;
  float m = 0;  ///< a whole number, |m| < 2^21
  float* max = nullptr;
  float* sum = nullptr;
};

/// mass[b] = sum[b] e^((max[b] - reference) / T) for b < count.
struct BlockMassArgs {
  const float* max = nullptr;
  const float* sum = nullptr;  ///< null: 1 each
  std::int64_t count = 0;
  double reference = 0;
  double inverse_temperature = 1;
  double* mass = nullptr;
};

/// The elements with low <= x <= high of blocks [first, last), in the order of their columns; a block with max[b] < low is not
/// read. Where `mass` is given, mass[b] = sum of e^((x - reference) / T) over x > high, to 2e-7 and, for x - reference is
/// rounded to fp32, 1.2e-7 |x - reference| / T of each.
struct CollectArgs {
  LogitRow row;
  std::int64_t first = 0;
  std::int64_t last = 0;
  const float* max = nullptr;
  float low = 0;
  float high = 0;
  double reference = 0;
  double inverse_temperature = 1;
  double* mass = nullptr;
  float* values = nullptr;  ///< room for every element of the blocks and 16 more
  std::int32_t* columns = nullptr;
};

/// weights[i] = e^((values[i] - reference) / T), relative error below 1e-15; 0 for a value of -infinity.
struct WeightsArgs {
  const float* values = nullptr;
  std::int64_t count = 0;
  double reference = 0;
  double temperature = 1;
  double* weights = nullptr;
};

/// Sums over the whole row of e^((x - reference) / T) with the precision of WeightsArgs: of all elements, and of those with
/// x > high.
struct ExactSumsArgs {
  LogitRow row;
  float high = 0;
  double reference = 0;
  double temperature = 1;
};
struct ExactSums {
  double all = 0;
  double above = 0;
};

/// Names a stream of random numbers: Philox4x32-10 with the seed as key and the counter (column or block and domain, row,
/// offset).
struct PhiloxStream {
  enum Domain : std::uint32_t { kColumns = 0, kBlocks = 0x80000000u };
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::uint32_t row = 0;
  Domain domain = kColumns;
};

/// Draws i in [0, count) with a probability in proportion to weights[i]: the i with the least E_i / weights[i], where the E_i
/// are independent exponential numbers, E_i = -log(u_i). This is the Gumbel-max trick without its second logarithm: -log(E_i /
/// w_i) = log(w_i) + Gumbel_i.
///   u_i = (W + 1/2) / 2^32, W the word (c / 16) mod 4 of the Philox block with the counter 16 (c / 64) + c mod 16,
///   c = columns[i]
/// The first of equal ones. -1 where all weights are 0.
struct RaceArgs {
  const double* weights = nullptr;
  const std::int32_t* columns = nullptr;
  std::int64_t count = 0;
  PhiloxStream stream;
};

/// numbers[i] = E_i of RaceArgs with c = i, for i < count.
struct ExponentialsArgs {
  std::int64_t count = 0;
  PhiloxStream stream;
  double* numbers = nullptr;  ///< room for `count` rounded up to 64
};

/// The kernels of one tier.
struct SamplingKernels {
  /// values[i], i < kSamplingSample: logits in runs that are spread evenly over a row of at least kSamplingRun.
  void (*sample)(const LogitRow& row, float* values);
  TopPEstimate (*estimate_top_p)(const TopPEstimateArgs&);
  void (*scan_blocks)(const ScanBlocksArgs&);
  void (*scan_coarsely)(const ScanCoarselyArgs&);
  void (*block_mass)(const BlockMassArgs&);
  std::int64_t (*collect)(const CollectArgs&);  ///< how many
  void (*weights)(const WeightsArgs&);
  ExactSums (*exact_sums)(const ExactSumsArgs&);
  std::int64_t (*race)(const RaceArgs&);
  void (*exponentials)(const ExponentialsArgs&);
};

}  // namespace moesaic
