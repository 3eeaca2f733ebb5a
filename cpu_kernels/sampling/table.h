// The sampler's kernels of the tier that includes this.
#pragma once

#include "cpu_kernels/sampling/estimate.h"
#include "cpu_kernels/sampling/exact.h"
#include "cpu_kernels/sampling/scan.h"

namespace {

/// @tparam kStreams  places of a row that a scan reads from in turn. Zen 4's memory serves two pages at a time faster than one,
/// but for bf16 on
///                   two threads; Intel's processors lose with more than one (docs/EXPERIMENTS.md, "A row from two places").
template <int kStreams>
inline constexpr SamplingKernels kSamplingKernels = {
    Sample,         EstimateTopP, ScanBlocks<kStreams>, ScanCoarsely<kStreams>, BlockMass, Collect, Weights,
    ExactSumsOfRow, Race,         Exponentials};

}  // namespace
