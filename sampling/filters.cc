// Row's filters: top_k, top_p, min_p, typical_p (sampler.h says what they keep).
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpu_kernels/tensor_access.h"
#include "sampling/retain.h"
#include "sampling/row.h"
#include "sampling/stages.h"

namespace moesaic::sampling {
namespace {

/// Sums of the fast passes are off by less than kDoubt times the root of the sum of squares of the blocks' masses (rounding
/// errors of different blocks are independent) and kBias times the whole: four times the most that rows of many shapes and
/// sizes showed.
constexpr double kDoubt = 6e-7;
constexpr double kBias = 5e-9;
/// So many blocks may hold the nucleus of a peaked distribution.
constexpr std::int64_t kPeakedBlocks = 64;
/// Coarse sums are off by less than this much of the whole: 2.7e-6 in each term and 5e-7 in adding them up; the rounding of c
/// to fp32 turns terms by 2^-24 times how far their exponents are below the largest, on average at most log2(V) <= 28; and
/// without fused multiply-adds products are rounded, kCoarseProduct times the largest exponent.
constexpr double kCoarse = 6e-6;
constexpr double kCoarseProduct = 5e-8;
constexpr int kMostMoves = 4;
/// How much wider the bracket is that follows one which was too narrow.
constexpr float kWider = 8;
/// Within which the coarse sums split an exponent into a whole number and the rest.
constexpr double kMostExponent = 1 << 20;

/// In the order of the numbers.
std::int32_t OrderOf(float x) {
  const auto bits = std::bit_cast<std::int32_t>(x);
  return bits < 0 ? std::numeric_limits<std::int32_t>::min() - bits : bits;
}
float WithOrder(std::int32_t order) {
  return std::bit_cast<float>(order < 0 ? std::numeric_limits<std::int32_t>::min() - order : order);
}

/// A value that at least n of the blocks' maxima reach, and hardly more than n. By bisection: counting runs in vectors, which
/// a selection with its unpredictable branches does not; it took 7 us of a row's 90.
float ReachedBy(const float* max, std::int64_t blocks, std::int64_t n) {
  const ValueRange range = RangeOf(max, static_cast<std::size_t>(blocks));
  std::int32_t low = OrderOf(range.least), high = OrderOf(range.most);
  while (low < high) {
    const auto middle = static_cast<std::int32_t>((static_cast<std::int64_t>(low) + high + 1) >> 1);
    const float bound = WithOrder(middle);
    std::int32_t reached = 0;
    for (std::int64_t b = 0; b < blocks; ++b) reached += max[b] >= bound ? 1 : 0;
    (reached >= n ? low : high) = reached >= n ? middle : middle - 1;
    if (reached >= n && reached <= n + n / 8) break;
  }
  return WithOrder(low);
}

}  // namespace

/// A value that at least k elements reach, and few more.
float Row::BoundOfTopK() const {
  const std::int64_t k = options_.top_k, blocks = logits_.blocks();
  // k blocks have an element that reaches it.
  if (4 * k <= blocks) return std::max(kLowest, ReachedBy(scratch_->max, blocks, k));
  if (IsSmall()) return kLowest;
  std::array<float, kSamplingSample> sample;
  std::array<std::int32_t, kSamplingSample> columns{};
  kernels_.sample(logits_, sample.data());
  const double expected = static_cast<double>(k) * kSamplingSample / static_cast<double>(logits_.size);
  const double rank = std::ceil(expected + 4 * std::sqrt(expected) + 4);
  const auto finite = std::remove(sample.begin(), sample.end(), -kInfinity) - sample.begin();
  if (rank >= static_cast<double>(finite)) return kLowest;
  return scratch_->finder.Find({sample.data(), columns.data(), nullptr, finite}, rank).cut.value;
}

void Row::TakeTopK() {
  const float bound = BoundOfTopK();
  Collect(bound, kInfinity, nullptr);
  if (count_ < options_.top_k && bound > kLowest) Collect(kLowest, kInfinity, nullptr);
  if (count_ > options_.top_k) {
    const ElementList list{scratch_->values, scratch_->columns, nullptr, count_};
    const Cut cut = scratch_->finder.Find(list, static_cast<double>(options_.top_k)).cut;
    Retain([&](std::int64_t i) { return cut.Keeps(scratch_->values[i], scratch_->columns[i]); });
  }
  WeighList();
  listed_ = true;
}

/// True: the boundary is somewhere in [low_, high_], and a pass over the row must collect that.
bool Row::PlanTopP() {
  if (!listed_ && IsSmall()) {
    Collect(kLowest, kInfinity, nullptr);
    WeighList();
    listed_ = true;
  }
  if (listed_) {
    const Cut cut = scratch_->finder.Find(List(), options_.top_p * ListWeight()).cut;
    Retain([&](std::int64_t i) { return cut.Keeps(scratch_->values[i], scratch_->columns[i]); });
    return false;
  }
  if (is_coarse_) {
    const double exponent = static_cast<double>(CoarseScale(1 / temperature_)) * max_;
    doubt_ = (kCoarse + kCoarseProduct * std::abs(exponent)) * total_;
    if (TakePeak(options_.top_p * total_)) return false;
    Estimate({logits_, 1 / temperature_, options_.top_p, total_, max_});
    ScanExactly();
  }
  const std::int64_t blocks = logits_.blocks();
  double squares = 0;
  for (std::int64_t b = 0; b < blocks; ++b) squares += scratch_->mass[b] * scratch_->mass[b];
  doubt_ = kDoubt * std::sqrt(squares) + kBias * total_;
  if (is_estimated_) {
    kernels_.block_mass({scratch_->max, scratch_->above, blocks, max_, 1 / temperature_, scratch_->mass});
    ChooseBracket();
    return true;
  }
  // Elements this far below the maximum add up to less than the mass that is left out, so the boundary is above them.
  const double depth = temperature_ * std::log((1 - options_.top_p) * total_ / static_cast<double>(logits_.size));
  low_ = static_cast<float>(std::max(static_cast<double>(kLowest), static_cast<double>(max_) + depth));
  high_ = kInfinity;
  return true;
}

/// The mass above the estimated boundary is known by now, so the true one is above or below it, by a distance of which the
/// sample has an idea: a quarter more than that is listed, and a little for the gaps between elements.
void Row::ChooseBracket() {
  above_ = std::accumulate(scratch_->mass, scratch_->mass + logits_.blocks(), 0.0);
  const double distance = (options_.top_p - above_ / total_) / density_;
  const double depth = 1.25 * std::abs(distance) + 0.002 * temperature_;
  if (distance >= 0) {
    low_ = static_cast<float>(std::max(static_cast<double>(kLowest), static_cast<double>(high_) - depth));
    return;
  }
  low_ = std::nextafter(high_, kInfinity);
  high_ = std::max(low_, static_cast<float>(static_cast<double>(high_) + depth));
  is_above_ = true;
}

/// A peaked distribution has its nucleus in the blocks with the largest maxima. Their whole mass tells first whether that may
/// be.
bool Row::TakePeak(double target) {
  const std::int64_t blocks = logits_.blocks();
  for (std::int64_t n = std::min(kPeakedBlocks, blocks / 4); n <= blocks / 2; n *= 2) {
    const float bound = std::max(kLowest, ReachedBy(scratch_->max, blocks, n));
    double most = 0;
    for (std::int64_t b = 0; b < blocks; ++b) most += scratch_->max[b] >= bound ? scratch_->mass[b] : 0.0;
    if (most <= target) continue;
    Collect(bound, kInfinity, nullptr);
    WeighList();
    if (ListWeight() <= target + doubt_) continue;
    low_ = bound;
    high_ = kInfinity;
    FinishTopP();
    return true;
  }
  return false;
}

/// What the sample says: high_ and density_, if anything.
TopPEstimate Row::Estimate(const TopPEstimateArgs& args) {
  const TopPEstimate estimate = kernels_.estimate_top_p(args);
  high_ = estimate.boundary;
  density_ = estimate.density;
  is_estimated_ = density_ > 0;
  return estimate;
}

/// Before the first pass, which then adds up what is above the estimate. Where a sample says nothing the nucleus is likely to
/// be small and its last token to weigh much, so coarse sums should do.
void Row::EstimateTopP() {
  StageRange range(Stage::kSelect);
  const TopPEstimate estimate = Estimate({logits_, 1 / temperature_, options_.top_p});
  const double exponent = static_cast<double>(CoarseScale(1 / temperature_)) * estimate.top;
  is_coarse_ = !is_estimated_ && std::abs(exponent) < kMostExponent;
  reference_ = is_coarse_ ? static_cast<float>(std::round(exponent)) : 0.0f;
}

/// The bracket has been collected: `list` holds it and the masses what is above. Finds the boundary, in double precision where
/// the fast sums do not decide, in another bracket where it is not in this one.
void Row::FinishTopP() {
  double* mass = scratch_->mass;
  const std::int64_t blocks = logits_.blocks();
  const auto sum_above = [&] { return high_ == kInfinity ? 0.0 : std::accumulate(mass, mass + blocks, 0.0); };
  double above = is_estimated_ ? above_ : sum_above();
  bool exact = false;
  int moves = 0;
  for (;;) {
    WeighList();
    const double inside = ListWeight();
    if (is_above_) above -= inside;  // that was above the estimate
    is_above_ = false;
    if (moves > kMostMoves) {  // rounding sends it to and fro, or the sample was far off: all elements at once
      total_ = inside;
      above = 0;
      exact = true;
    }
    const double target = options_.top_p * total_;
    const double doubt = exact ? 0.0 : doubt_;
    const bool here = count_ > 0 && above < target && (above + inside >= target || low_ == kLowest);
    WeightedCut found;
    bool sure = std::abs(target - above) > doubt && std::abs(above + inside - target) > doubt;
    if (here) {
      found = scratch_->finder.Find(List(), target - above);
      sure = target - (above + found.before) > doubt && above + found.before + found.weight - target > doubt;
    }
    if (!sure && !exact) {
      const ExactSums sums = kernels_.exact_sums({logits_, high_, max_, temperature_});
      total_ = sums.all;
      above = sums.above;
      exact = true;
      continue;
    }
    if (here) {
      cut_ = found.cut;
      total_ = above + found.before + found.weight;
      break;
    }
    if (++moves > kMostMoves) {
      low_ = kLowest;
      high_ = kInfinity;
    } else if (above >= target) {
      low_ = std::nextafter(high_, kInfinity);
      high_ = kInfinity;
    } else {  // what is below, some times as wide; all of it where that is nothing
      const float depth = kWider * (high_ - low_);
      high_ = std::nextafter(low_, -kInfinity);
      low_ = high_ - depth < high_ ? std::max(kLowest, high_ - depth) : kLowest;
    }
    Collect(low_, high_, mass);
    above = sum_above();
    exact = false;
  }
  if (high_ == kInfinity) {
    Retain([this](std::int64_t i) { return cut_.Keeps(scratch_->values[i], scratch_->columns[i]); });
    listed_ = true;
  } else {
    masses_ = Masses::kWhole;
  }
}

/// The least logit whose probability is min_p of the largest one's: rounding aside, max + T log(min_p).
float Row::BoundOfMinP() const {
  const auto passes = [this](float x) { return std::exp((static_cast<double>(x) - max_) / temperature_) >= options_.min_p; };
  const double estimate = static_cast<double>(max_) + temperature_ * std::log(options_.min_p);
  if (estimate <= static_cast<double>(kLowest)) return kLowest;
  // The estimate is nearly right, but near 0 hundreds of millions of floats have one probability: steps double.
  const std::int64_t least = OrderOf(kLowest), most = OrderOf(max_);
  const auto at = [&](std::int64_t order) { return WithOrder(static_cast<std::int32_t>(order)); };
  std::int64_t passing = OrderOf(std::min(max_, static_cast<float>(estimate))), failing = least - 1, step = 1;
  for (; passing < most && !passes(at(passing)); step *= 2) {
    failing = passing;
    passing = std::min(passing + step, most);
  }
  for (step = 1; passing - step > failing && passes(at(passing - step)); step *= 2) passing -= step;
  failing = std::max(failing, passing - step);
  while (passing - failing > 1) {
    const std::int64_t middle = failing + (passing - failing) / 2;
    (passes(at(middle)) ? passing : failing) = middle;
  }
  return at(passing);
}

void Row::TakeMinP() {
  const float bound = BoundOfMinP();
  if (listed_) return Retain([&](std::int64_t i) { return scratch_->values[i] >= bound; });
  if (options_.top_p == 1 || bound > cut_.value) KeepAbove(bound);
}

/// Keeps x >= bound: as a list where that is in few blocks, else as masses.
void Row::KeepAbove(float bound) {
  cut_ = {bound, std::numeric_limits<std::int32_t>::max()};
  const std::int64_t blocks = logits_.blocks();
  if (std::count_if(scratch_->max, scratch_->max + blocks, [&](float max) { return max >= bound; }) <= kPeakedBlocks) {
    return ListKept();
  }
  Collect(bound, bound, scratch_->mass);
  WeighList();
  for (std::int64_t i = 0; i < count_; ++i) scratch_->mass[scratch_->columns[i] / kSamplingBlock] += scratch_->weights[i];
  masses_ = Masses::kKept;
  total_ = std::accumulate(scratch_->mass, scratch_->mass + logits_.blocks(), 0.0);
}

void Row::TakeTypical() {
  ListKept();
  const double total = ListWeight();
  const double log_total = std::log(total);
  const auto count = static_cast<std::size_t>(count_);
  double entropy = 0;
  scratch_->distances.resize(count);
  scratch_->rounded.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double surprise = log_total - (static_cast<double>(scratch_->values[i]) - max_) / temperature_;
    scratch_->distances[i] = surprise;
    entropy += scratch_->weights[i] / total * surprise;
  }
  for (std::size_t i = 0; i < count; ++i) {
    scratch_->distances[i] = std::abs(scratch_->distances[i] - entropy);
    scratch_->rounded[i] = -static_cast<float>(std::min(scratch_->distances[i], 1e30));  // nearer is larger
  }
  // Rounded distances find the neighbourhood of the boundary, their unrounded ones the boundary itself.
  const double target = options_.typical_p * total;
  const ElementList list{scratch_->rounded.data(), scratch_->columns, scratch_->weights, count_};
  const float boundary = scratch_->finder.Find(list, target).cut.value;
  double before = 0;
  std::vector<std::size_t> ties;
  for (std::size_t i = 0; i < count; ++i) {
    if (scratch_->rounded[i] > boundary) before += scratch_->weights[i];
    if (scratch_->rounded[i] == boundary) ties.push_back(i);
  }
  std::stable_sort(ties.begin(), ties.end(),
                   [&](std::size_t a, std::size_t b) { return scratch_->distances[a] < scratch_->distances[b]; });
  for (const std::size_t i : ties) {
    if (before < target) scratch_->rounded[i] = kInfinity;  // kept
    before += scratch_->weights[i];
  }
  Retain([&](std::int64_t i) { return scratch_->rounded[static_cast<std::size_t>(i)] > boundary; });
}

}  // namespace moesaic::sampling
