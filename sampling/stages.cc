#include "sampling/stages.h"

#include <array>
#include <cstddef>

namespace moesaic::sampling {

profiling::RangeId RangeOf(Stage stage) {
  static const auto ids = [] {
    constexpr std::array kNames = {"sample", "pack", "scale", "select", "softmax", "draw", "confidence", "unpack"};
    std::array<profiling::RangeId, kNames.size()> all{};
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = profiling::RegisterRange(kNames[i], i == 0 ? "layer" : "sample");
    return all;
  }();
  return ids[static_cast<std::size_t>(stage)];
}

}  // namespace moesaic::sampling
