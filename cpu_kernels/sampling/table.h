// The sampler's kernels of the tier that includes this.
#pragma once

#include "cpu_kernels/sampling/estimate.h"
#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/scan.h"

namespace {

inline constexpr SamplingKernels kSamplingKernels = {Sample,  EstimateTopP, ScanBlocks,     ScanCoarsely, BlockMass,
                                                     Collect, Weights,      ExactSumsOfRow, Race,         Exponentials};

}  // namespace
