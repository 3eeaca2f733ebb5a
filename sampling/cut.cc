#include "sampling/cut.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace moesaic::sampling {
namespace {

constexpr std::size_t kFew = 24;
constexpr std::size_t kMostBins = 1024;

}  // namespace

/// Eight lanes, so that one comparison need not wait for the other.
ValueRange RangeOf(const float* values, std::size_t count) {
  std::array<float, 8> least, most;
  least.fill(values[0]);
  most.fill(values[0]);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) {
      const float x = values[i + lane];
      least[lane] = x < least[lane] ? x : least[lane];
      most[lane] = x > most[lane] ? x : most[lane];
    }
  }
  for (; i < count; ++i) {
    least[0] = std::min(least[0], values[i]);
    most[0] = std::max(most[0], values[i]);
  }
  return {*std::min_element(least.begin(), least.end()), *std::max_element(most.begin(), most.end())};
}

/// Leaves those elements in which the sum reaches the target, and adds what comes before them. The largest value is in the
/// first bin and the least in the last, so that something always goes.
void CutFinder::Narrow(const ElementList& list, ValueRange range, double target, double* before) {
  const auto count = static_cast<std::size_t>(list.count);
  const std::size_t bins = std::min(kMostBins, count);
  const double top = range.most;
  const double scale = (static_cast<double>(bins) - 0.5) / (top - static_cast<double>(range.least));
  const auto bin_of = [&](float value) {
    return static_cast<std::size_t>(static_cast<std::int32_t>((top - static_cast<double>(value)) * scale));
  };
  const auto weight_of = [&](std::size_t i) { return list.weights != nullptr ? list.weights[i] : 1.0; };
  bins_.assign(bins, 0.0);
  places_.resize(std::max(places_.size(), count));
  for (std::size_t i = 0; i < count; ++i) {
    places_[i] = static_cast<std::uint16_t>(bin_of(list.values[i]));
    bins_[places_[i]] += weight_of(i);
  }
  std::size_t boundary = 0;
  while (boundary + 1 < bins && *before + bins_[boundary] < target) *before += bins_[boundary++];

  // In place where the list is our own: what is written lies before what is read.
  values_.resize(std::max(values_.size(), count));
  columns_.resize(values_.size());
  weights_.resize(values_.size());
  std::size_t left = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (places_[i] != boundary) continue;
    const double weight = weight_of(i);
    values_[left] = list.values[i];
    columns_[left] = list.columns[i];
    weights_[left++] = weight;
  }
  values_.resize(left);
  columns_.resize(left);
  weights_.resize(left);
}

WeightedCut CutFinder::Find(const ElementList& list, double target) {
  ElementList active = list;
  double before = 0;
  ValueRange range = RangeOf(active.values, static_cast<std::size_t>(active.count));
  while (static_cast<std::size_t>(active.count) > kFew && range.least < range.most) {
    Narrow(active, range, target, &before);
    active = {values_.data(), columns_.data(), weights_.data(), static_cast<std::int64_t>(values_.size())};
    range = RangeOf(active.values, values_.size());
  }
  // Few, or equal, which are in order as they lie.
  const auto count = static_cast<std::size_t>(active.count);
  std::array<std::size_t, kFew> order{};
  if (range.least < range.most) {
    std::iota(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), std::size_t{0});
    std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), [&](std::size_t a, std::size_t b) {
      return active.values[a] != active.values[b] ? active.values[a] > active.values[b] : a < b;
    });
  }
  for (std::size_t n = 0;; ++n) {
    const std::size_t i = range.least < range.most ? order[n] : n;
    const double weight = active.weights != nullptr ? active.weights[i] : 1.0;
    if (n + 1 == count || before + weight >= target) return {{active.values[i], active.columns[i]}, before, weight};
    before += weight;
  }
}

}  // namespace moesaic::sampling
