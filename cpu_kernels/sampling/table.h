// The sampler's kernels of the tier that includes this.
#pragma once

#include "cpu_kernels/sampling/estimate.h"
#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/scan.h"

namespace {

/// kStreams: places of a row that a scan reads from in turn. Two are faster on Zen 4, but for bf16 on two threads, and slower
/// on Intel's processors; Zen 5 was not measured (docs/experiments, "A row from two places").
template <int kStreams>
inline constexpr SamplingKernels kSamplingKernels = {
    Sample,         EstimateTopP, ScanBlocks<kStreams>, ScanCoarsely<kStreams>, BlockMass, Collect, Weights,
    ExactSumsOfRow, Race,         Exponentials};

}  // namespace
