// The sampler's kernels of the tier that includes this.
#pragma once

#include "cpu_kernels/sampling/bracket.h"
#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/scan.h"

namespace {

inline constexpr SamplingKernels kSamplingKernels = {Sample,  BracketTopP,    ScanBlocks, BlockMass,   Collect,
                                                     Weights, ExactSumsOfRow, Race,       Exponentials};

}  // namespace
