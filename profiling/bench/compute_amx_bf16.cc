// TDPBF16PS on four accumulator tiles: a product takes 16 cycles and its result 52, so four chains keep the unit busy.
#include <immintrin.h>

#include "profiling/bench/probes.h"

namespace moesaic::bench {
namespace {

// The memory operand of LDTILECFG.
struct alignas(64) TileConfig {
  std::uint8_t palette = 0;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// bf16 numbers between 0.5 and 1 with changing bits: operands of zeros would draw less power and allow a higher clock.
void Fill(std::uint16_t* values, std::uint32_t seed) {
  for (int i = 0; i < 16 * 32; ++i) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = static_cast<std::uint16_t>(0x3f00u | (seed >> 25) | ((seed >> 9) & 0x8000u));
  }
}

}  // namespace

void ComputeAmxBf16(std::int64_t steps, float* sink) {
  // The thread's own configuration is put back at the end: a GEMM may keep one between its calls.
  TileConfig previous;
  _tile_storeconfig(&previous);
  TileConfig config;
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = 16;
  }
  _tile_loadconfig(&config);

  alignas(64) std::uint16_t operands[4][16 * 32];
  for (std::uint32_t i = 0; i < 4; ++i) Fill(operands[i], i + 1);
  _tile_loadd(4, operands[0], 64);
  _tile_loadd(5, operands[1], 64);
  _tile_loadd(6, operands[2], 64);
  _tile_loadd(7, operands[3], 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float result[16 * 16];
  float sum = 0.0f;
  _tile_stored(0, result, 64);
  sum += result[0];
  _tile_stored(1, result, 64);
  sum += result[1];
  _tile_stored(2, result, 64);
  sum += result[2];
  _tile_stored(3, result, 64);
  sum += result[3];
  *sink = sum;
  _tile_loadconfig(&previous);  // all zeros where there was none: releases the tiles
}

}  // namespace moesaic::bench
