#include "cpu_kernels/kernels.h"

namespace moesaic {

std::int64_t DirectScratchElements(std::span<const GemmSegment> segments) {
  constexpr std::int64_t kMostPanels = 2;  // of a cell
  std::int64_t tiles = 0;
  for (const GemmSegment& segment : segments) tiles += segment.weights.codec != nullptr ? segment.weights.columns : 0;
  return kMostPanels * tiles * kTileElements;
}

std::int64_t UnpackScratchElements(std::span<const GemmSegment> segments) {
  std::int64_t depth = 0;
  for (const GemmSegment& segment : segments) depth += CeilDiv(segment.weights.panels, 2);
  return 4 * depth * kTileElements;
}

}  // namespace moesaic
