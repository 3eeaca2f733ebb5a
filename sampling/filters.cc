// Row's filters: top_k, top_p, min_p, typical_p (sampler.h says what they keep).
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "cpu_kernels/tensor_access.h"
#include "sampling/retain.h"
#include "sampling/row.h"

namespace moesaic::sampling {
namespace {

/// Sums of the fast passes are off by less than kDoubt times the root of the sum of squares of the blocks' masses (rounding
/// errors of different blocks are independent) and kBias times the whole: four times the most that rows of many shapes and
/// sizes showed.
constexpr double kDoubt = 6e-7;
constexpr double kBias = 5e-9;
/// So many blocks may hold the nucleus of a peaked distribution.
constexpr std::int64_t kPeakedBlocks = 64;
constexpr std::int64_t kSampled = 4096;
constexpr int kMostMoves = 4;

/// Of blocks' maxima: the n-th largest.
float NthLargest(const float* max, std::int64_t blocks, std::int64_t n) {
  std::vector<float> copy(max, max + blocks);
  std::nth_element(copy.begin(), copy.begin() + (n - 1), copy.end(), std::greater<>());
  return copy[static_cast<std::size_t>(n - 1)];
}

/// Some 4,096 logits in runs of 16 that are spread evenly over a long row, finite ones alone.
struct RowSample {
  std::vector<float> values;
  std::vector<std::int32_t> columns;

  explicit RowSample(const LogitRow& row) {
    const TensorView view{const_cast<void*>(row.data), row.dtype, 2, {1, row.size, 0}, {0, 1, 0}};
    constexpr std::int64_t kRun = 16;
    constexpr std::int64_t kRuns = kSampled / kRun;
    for (std::int64_t run = 0; run < kRuns; ++run) {
      const std::int64_t first = run * (row.size - kRun) / (kRuns - 1);
      for (std::int64_t i = first; i < first + kRun; ++i) {
        const float x = LoadFloat(view, 0, i);
        if (x == -std::numeric_limits<float>::infinity()) continue;
        values.push_back(x);
        columns.push_back(static_cast<std::int32_t>(i));
      }
    }
  }
  std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
};

}  // namespace

/// A value that at least k elements reach, and few more.
float Row::BoundOfTopK() const {
  const std::int64_t k = options_.top_k, blocks = logits_.blocks();
  // The k-th largest of the blocks' maxima: k blocks have an element that reaches it.
  if (4 * k <= blocks) return std::max(kLowest, NthLargest(scratch_->max, blocks, k));
  if (IsSmall()) return kLowest;
  const RowSample sample(logits_);
  const double expected = static_cast<double>(k) * kSampled / static_cast<double>(logits_.size);
  const double rank = std::ceil(expected + 4 * std::sqrt(expected) + 4);
  if (rank >= static_cast<double>(sample.size())) return kLowest;
  return scratch_->finder.Find({sample.values.data(), sample.columns.data(), nullptr, sample.size()}, rank).cut.value;
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
  // A peaked distribution has its nucleus in the blocks with the largest maxima. Their whole mass tells first whether that may
  // be.
  const std::int64_t blocks = logits_.blocks();
  const double target = options_.top_p * total_;
  const float bound = std::max(kLowest, NthLargest(scratch_->max, blocks, std::min(kPeakedBlocks, blocks / 4)));
  double most = 0, squares = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    most += scratch_->max[b] >= bound ? scratch_->mass[b] : 0.0;
    squares += scratch_->mass[b] * scratch_->mass[b];
  }
  doubt_ = kDoubt * std::sqrt(squares) + kBias * total_;
  if (most > target) {
    Collect(bound, kInfinity, nullptr);
    WeighList();
    if (ListWeight() > target + doubt_) {
      low_ = bound;
      high_ = kInfinity;
      FinishTopP();
      return false;
    }
  }
  BracketTopP();
  return true;
}

/// Three standard deviations around where a sample has the boundary. The share of the mass above it, estimated from n of V
/// elements, has the variance of sum w_i (I_i - p) / sum w_i, where I_i says whether element i is above.
void Row::BracketTopP() {
  const double p = options_.top_p;
  // Elements this far below the maximum add up to less than the mass that is left out, so the boundary is above them.
  const double depth = temperature_ * std::log((1 - p) * total_ / static_cast<double>(logits_.size));
  low_ = std::max(kLowest, static_cast<float>(std::max(static_cast<double>(kLowest), static_cast<double>(max_) + depth)));
  high_ = kInfinity;
  const RowSample sample(logits_);
  if (sample.size() < kSampled / 4) return;
  std::vector<double> weights(sample.values.size());
  kernels_.weights({sample.values.data(), sample.size(), max_, temperature_, weights.data()});

  // By bins of the value: weights, and their squares.
  constexpr std::size_t kBins = 1024;
  struct Bin {
    double weight = 0, square = 0;
  };
  std::array<Bin, kBins> bins;
  const auto [least, most] = std::minmax_element(sample.values.begin(), sample.values.end());
  const double top = *most, range = top - static_cast<double>(*least);
  if (range == 0) return;
  const double scale = (kBins - 0.5) / range;
  Bin all;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double w = weights[i];
    Bin& bin = bins[static_cast<std::size_t>(static_cast<std::int32_t>((top - static_cast<double>(sample.values[i])) * scale))];
    bin.weight += w;
    bin.square += w * w;
    all.weight += w;
    all.square += w * w;
  }
  /// The first bin up to whose end the weights reach `target`, and the squares before that end.
  const auto find = [&](double target) {
    Bin before;
    std::size_t i = 0;
    for (; i < kBins; ++i) {
      before.square += bins[i].square;
      before.weight += bins[i].weight;
      if (before.weight >= target) break;
    }
    return std::pair(i, before.square);
  };
  const double above = find(p * all.weight).second;
  const double variance = above * (1 - p) * (1 - p) + (all.square - above) * p * p;
  const double spread = 3 * std::sqrt(variance) + std::sqrt(all.square / static_cast<double>(weights.size()));
  const double from = p * all.weight - spread, to = p * all.weight + spread;
  const auto end_of = [&](std::size_t bin) { return static_cast<float>(top - static_cast<double>(bin + 1) / scale); };
  if (to < all.weight) low_ = std::max(low_, end_of(find(to).first));
  if (from > 0) high_ = end_of(find(from).first) + static_cast<float>(1 / scale);
  if (high_ <= low_) high_ = kInfinity;
}

/// The bracket has been collected: `list` holds it and the masses what is above. Finds the boundary, in double precision where
/// the fast sums do not decide, in another bracket where it is not in this one.
void Row::FinishTopP() {
  double* mass = scratch_->mass;
  const std::int64_t blocks = logits_.blocks();
  const auto sum_above = [&] { return high_ == kInfinity ? 0.0 : std::accumulate(mass, mass + blocks, 0.0); };
  double above = sum_above();
  bool exact = false;
  int moves = 0;
  for (;;) {
    WeighList();
    const double inside = ListWeight();
    if (moves > kMostMoves) {  // rounding sends it to and fro: all elements at once
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
      break;
    }
    if (++moves > kMostMoves) {
      low_ = kLowest;
      high_ = kInfinity;
    } else if (above >= target) {
      low_ = std::nextafter(high_, kInfinity);
      high_ = kInfinity;
    } else {
      high_ = std::nextafter(low_, -kInfinity);
      low_ = kLowest;
    }
    Collect(low_, high_, mass);
    above = sum_above();
    exact = false;
  }
  if (high_ == kInfinity) {
    Retain([this](std::int64_t i) { return cut_.Keeps(scratch_->values[i], scratch_->columns[i]); });
    listed_ = true;
  } else {
    AddListToMasses();
  }
}

/// Of the list what cut_ keeps. Adds 0 for the others instead of asking: that could not be predicted.
void Row::AddListToMasses() {
  for (std::int64_t i = 0; i < count_;) {
    const std::int64_t b = scratch_->columns[i] / kSamplingBlock;
    double sum = 0;
    for (; i < count_ && scratch_->columns[i] / kSamplingBlock == b; ++i) {
      sum += scratch_->weights[i] * (cut_.Keeps(scratch_->values[i], scratch_->columns[i]) ? 1.0 : 0.0);
    }
    scratch_->mass[b] += sum;
  }
}

/// The least logit whose probability is min_p of the largest one's: rounding aside, max + T log(min_p).
float Row::BoundOfMinP() const {
  const auto passes = [this](float x) { return std::exp((static_cast<double>(x) - max_) / temperature_) >= options_.min_p; };
  const double estimate = static_cast<double>(max_) + temperature_ * std::log(options_.min_p);
  if (estimate <= static_cast<double>(kLowest)) return kLowest;
  float bound = std::min(max_, static_cast<float>(estimate));
  while (!passes(bound)) bound = std::nextafter(bound, kInfinity);
  while (bound > kLowest && passes(std::nextafter(bound, -kInfinity))) bound = std::nextafter(bound, -kInfinity);
  return bound;
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
  AddListToMasses();
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
