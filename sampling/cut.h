// Selection without sorting: where a list, ordered by value, reaches a given weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace moesaic::sampling {

/// The last element that is kept: larger values come first, of equal ones the lower column.
struct Cut {
  float value = -std::numeric_limits<float>::max();
  std::int32_t column = std::numeric_limits<std::int32_t>::max();

  /// Without branches: they could not be predicted.
  bool Keeps(float x, std::int32_t at) const {
    return (static_cast<int>(x > value) | (static_cast<int>(x == value) & static_cast<int>(at <= column))) != 0;
  }
};

/// Where the weights, added up in the order of Cut, reach a target: the cut, the weight before its element, and that element's.
struct WeightedCut {
  Cut cut;
  double before = 0;
  double weight = 0;
};

/// The least and the largest of at least one value, none of them NaN.
struct ValueRange {
  float least, most;
};
ValueRange RangeOf(const float* values, std::size_t count);

/// Elements of a row. Values are finite, columns ascend.
struct ElementList {
  const float* values = nullptr;
  const std::int32_t* columns = nullptr;
  const double* weights = nullptr;  ///< >= 0; null: 1 each
  std::int64_t count = 0;
};

/// Finds cuts by partial histograms: up to 1,024 bins over the range of the values, then the same inside the bin with the
/// boundary, and so on; a handful is sorted. Exact, in O(n) for one pass: bins only narrow the search, so rounding in them
/// misplaces nothing.
class CutFinder {
 public:
  /// The first element in order at which the sum of weights is >= target > 0; the last of all where rounding keeps the sum
  /// below it. At least one element.
  WeightedCut Find(const ElementList& list, double target);

 private:
  void Narrow(const ElementList& list, ValueRange range, double target, double* before);

  // The elements left, their columns ascending.
  std::vector<float> values_;
  std::vector<std::int32_t> columns_;
  std::vector<double> weights_;
  std::vector<double> bins_;
  std::vector<std::uint16_t> places_;  // the bin of each element
};

}  // namespace moesaic::sampling
