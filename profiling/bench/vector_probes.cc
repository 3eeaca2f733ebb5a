// fp32 multiply-adds and streaming reads in plain vector types. Compiled once for each width, with the flags of that width:
// MOESAIC_VECTOR_BYTES is the width; MOESAIC_COMPUTE, MOESAIC_READ and MOESAIC_READ_BLOCK name what comes out.
#include "profiling/bench/probes.h"

namespace moesaic::bench {
namespace {

#define MOESAIC_TEXT_OF(x) #x
#define MOESAIC_TEXT(x) MOESAIC_TEXT_OF(x)
#define MOESAIC_READ_NAME MOESAIC_TEXT(MOESAIC_VECTOR_BYTES) "-byte loads, "

using Floats __attribute__((vector_size(MOESAIC_VECTOR_BYTES))) = float;
using Words __attribute__((vector_size(MOESAIC_VECTOR_BYTES))) = std::uint64_t;

enum Prefetch { kNoPrefetch, kPrefetchL2, kPrefetchOnce };

// Which number of streams and which prefetch reach the limit differs between hosts; the probe tries them and keeps the best.
template <int kStreams, Prefetch kPrefetch>
std::uint64_t Read(const std::byte* share, std::int64_t share_bytes, std::int64_t turn) {
  constexpr std::int64_t kBytes = kReadTurnBytes / kStreams;
  constexpr int kLine = 64;
  constexpr int kLinesTogether = 4;
  constexpr int kLinesAhead = 16;
  const std::int64_t part = share_bytes / kStreams;
  Words acc[kStreams] = {};
  for (std::int64_t offset = turn * kBytes; offset < (turn + 1) * kBytes; offset += kLinesTogether * kLine) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const std::byte* from = share + stream * part + offset;
      for (int line = 0; line < kLinesTogether; ++line) {
        // A prefetch past the end of the buffer is harmless.
        if constexpr (kPrefetch == kPrefetchL2) __builtin_prefetch(from + (line + kLinesAhead) * kLine, 0, 2);
        if constexpr (kPrefetch == kPrefetchOnce) __builtin_prefetch(from + (line + kLinesAhead) * kLine, 0, 0);
        for (int i = 0; i < kLine; i += static_cast<int>(sizeof(Words))) {
          acc[stream] ^= *reinterpret_cast<const Words*>(from + line * kLine + i);
        }
      }
    }
  }
  Words all = acc[0];
  for (int stream = 1; stream < kStreams; ++stream) all ^= acc[stream];
  return all[0] ^ all[1];
}

}  // namespace

// Twelve chains: enough for two multiply-adds a cycle at a latency of four, and they fit sixteen registers.
void MOESAIC_COMPUTE(std::int64_t steps, float* sink) {
  constexpr int kChains = 12;
  Floats factor, addend;
  for (int lane = 0; lane < static_cast<int>(sizeof(Floats) / sizeof(float)); ++lane) {
    factor[lane] = 0.75f + 0.01f * static_cast<float>(lane);
    addend[lane] = 0.3f;
  }
  Floats acc[kChains];  // different starts, or the compiler would keep one chain for all
  for (int i = 0; i < kChains; ++i) acc[i] = addend * static_cast<float>(i);
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = acc[i] * factor + addend;
  }
  float sum = 0.0f;
  for (int i = 0; i < kChains; ++i) sum += acc[i][0];
  *sink = sum;
}

std::uint64_t MOESAIC_READ_BLOCK(const std::byte* block, std::int64_t bytes, std::int64_t times) {
  constexpr int kLoads = 8;
  Words acc[kLoads] = {};
  for (std::int64_t t = 0; t < times; ++t) {
    for (std::int64_t offset = 0; offset < bytes; offset += kLoads * static_cast<std::int64_t>(sizeof(Words))) {
#pragma GCC unroll 8
      for (int i = 0; i < kLoads; ++i) {
        acc[i] ^= reinterpret_cast<const Words*>(block + offset)[i];
      }
    }
    asm volatile("" ::: "memory");  // each time anew
  }
  Words all = acc[0];
  for (int i = 1; i < kLoads; ++i) all ^= acc[i];
  return all[0] ^ all[1];
}

extern const ReadLoop MOESAIC_READ[kReadLoops] = {
    {MOESAIC_READ_NAME "1 stream", Read<1, kNoPrefetch>},
    {MOESAIC_READ_NAME "4 streams", Read<4, kNoPrefetch>},
    {MOESAIC_READ_NAME "8 streams, prefetched to L2", Read<8, kPrefetchL2>},
    {MOESAIC_READ_NAME "8 streams, prefetched past L2", Read<8, kPrefetchOnce>},
};

}  // namespace moesaic::bench
