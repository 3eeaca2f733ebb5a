// VDPBF16PS on twelve accumulators: two a cycle with a latency of six on Zen 5.
#include <immintrin.h>

#include "profiling/bench/probes.h"

namespace moesaic::bench {

void ComputeAvx512Bf16(std::int64_t steps, float* sink) {
  constexpr int kChains = 12;
  // Pairs (1, 0.75) and (0.5, -0.5): every accumulator grows by 0.125 a step. Their different starts keep the compiler from
  // merging the chains.
  const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f40));
  const __m512bh b = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f00bf00));
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(static_cast<float>(i));
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
  }
  __m512 sum = acc[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, acc[i]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  *sink = lanes[0];
}

}  // namespace moesaic::bench
