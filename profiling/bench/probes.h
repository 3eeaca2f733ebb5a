// The inner loops of the probes, one instruction set a translation unit. Nothing here may be called unless the host has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::bench {

/// Runs `steps` rounds of independent multiply-adds and stores something that depends on them in *sink.
using ComputeLoop = void (*)(std::int64_t steps, float* sink);

/// One way of streaming through memory. `share` is divided into `streams` equal parts that are read side by side; turn t reads
/// bytes [t, t + 1) * kReadTurnBytes / streams of each. Returns something that depends on all bytes read. share is a multiple
/// of 64, share_bytes one of kReadTurnBytes, and turn lies in [0, share_bytes / kReadTurnBytes).
struct ReadLoop {
  const char* name;
  std::uint64_t (*read)(const std::byte* share, std::int64_t share_bytes, std::int64_t turn);
};

/// Reads `bytes`, a multiple of 512, `times` times from the front to the end. Returns something that depends on them.
using ReadBlock = std::uint64_t (*)(const std::byte* block, std::int64_t bytes, std::int64_t times);

constexpr std::int64_t kReadTurnBytes = 512 << 10;
constexpr int kReadLoops = 4;

/// FLOP of one step of each ComputeLoop: 4 tile products of 16x16x32; 12 vector products.
constexpr double kAmxStepFlops = 4.0 * 2 * 16 * 16 * 32;
constexpr double kAvx512Bf16StepFlops = 12.0 * 2 * 2 * 16;
constexpr double kAvx512StepFlops = 12.0 * 2 * 16;
constexpr double kAvx2StepFlops = 12.0 * 2 * 8;
constexpr double kSse2StepFlops = 12.0 * 2 * 4;

void ComputeAmxBf16(std::int64_t steps, float* sink);
void ComputeAvx512Bf16(std::int64_t steps, float* sink);
void ComputeAvx512(std::int64_t steps, float* sink);
void ComputeAvx2(std::int64_t steps, float* sink);
void ComputeSse2(std::int64_t steps, float* sink);

std::uint64_t ReadBlockAvx512(const std::byte* block, std::int64_t bytes, std::int64_t times);
std::uint64_t ReadBlockAvx2(const std::byte* block, std::int64_t bytes, std::int64_t times);
std::uint64_t ReadBlockSse2(const std::byte* block, std::int64_t bytes, std::int64_t times);

extern const ReadLoop kReadAvx512[kReadLoops];
extern const ReadLoop kReadAvx2[kReadLoops];
extern const ReadLoop kReadSse2[kReadLoops];

}  // namespace moesaic::bench
