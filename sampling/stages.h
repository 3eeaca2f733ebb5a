// The stages of sampling, as timers and NVTX ranges: the whole call in the category "layer", its steps in "sample".
#pragma once

#include <cstdint>

#include "profiling/range.h"

namespace moesaic::sampling {

enum class Stage : std::int8_t {
  kSample,      ///< the whole call; the others are its steps
  kPack,        ///< logits that do not lie side by side, or that change, to scratch memory
  kScale,       ///< penalties
  kSelect,      ///< what is kept: maxima of blocks, candidates, thresholds
  kSoftmax,     ///< maxima and sums of blocks; the temperature is part of it
  kDraw,        ///< random numbers
  kConfidence,  ///< probability, margin, entropy
  kUnpack,      ///< masks and scores
};

/// Registers all of them, in this order, on the first call.
profiling::RangeId RangeOf(Stage stage);

/// Opens the range of a stage on the calling thread until the end of the scope.
class StageRange {
 public:
  explicit StageRange(Stage stage, std::int64_t bytes = 0) : range_(RangeOf(stage), {0, static_cast<double>(bytes)}) {}

 private:
  profiling::Range range_;
};

}  // namespace moesaic::sampling
