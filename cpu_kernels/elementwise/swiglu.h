// Z = silu(G) * U and its backward, on the transposed results of the direct form (kernels.h has the contract).
#pragma once

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

/// 16 tokens of one row of I; the rest of a partial vector reads as zero.
MOESAIC_INLINE F32x16 LoadSaved(const BFloat16* row, std::int64_t token, std::int64_t tokens) {
  return tokens - token >= 16 ? LoadBf16(row + token) : LoadBf16Part(row + token, tokens - token);
}

MOESAIC_INLINE void StoreSaved(BFloat16* row, std::int64_t token, std::int64_t tokens, F32x16 v) {
  if (tokens - token >= 16) {
    StoreBf16(row + token, v);
  } else {
    StoreBf16Part(row + token, v, tokens - token);
  }
}

/// Zero beyond the valid tokens: the product of a zero row with an infinite weight is NaN, and must not reach a sum over
/// tokens.
MOESAIC_INLINE F32x16 KeepValid(F32x16 v, std::int64_t valid) {
  if (valid >= 16) return v;
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Select(lane < static_cast<std::int32_t>(valid), v, F32x16{});
}

/// Rows i and i + 1 of a [I][16 tokens] block as pairs; 16 of them transposed are an operand tile [16 tokens][32 of I].
MOESAIC_INLINE void StorePairs(BFloat16* out, F32x16 even, F32x16 odd) {
  const U32x16 low = __builtin_convertvector(NarrowToBf16(even), U32x16);
  const U32x16 high = __builtin_convertvector(NarrowToBf16(odd), U32x16);
  const U32x16 pairs = low | (high << 16);
  std::memcpy(out, &pairs, sizeof(pairs));
}

inline void SwigluForward(const SwigluForwardArgs& args) {
  for (std::int64_t t = 0; t < args.z.panels * kPanelRows; t += kPanelRows) {
    const std::int64_t valid = args.tokens - t;
    BFloat16* out = args.z.Tile(t / kPanelRows, args.block);
    if (valid <= 0) {
      std::memset(out, 0, kTileElements * sizeof(BFloat16));
      continue;
    }
    alignas(64) BFloat16 pairs[kTileElements];
    for (int i = 0; i < 32; i += 2) {
      F32x16 z[2] = {F32x16{}, F32x16{}};
      for (int h = 0; h < 2; ++h) {
        if (i + h >= args.rows) continue;
        const F32x16 gate = LoadF32(args.gate + (i + h) * args.ld + t);
        const F32x16 up = LoadF32(args.up + (i + h) * args.ld + t);
        z[h] = KeepValid(gate * Sigmoid(gate) * up, valid);
        if (args.saved_gate != nullptr) {
          StoreSaved(args.saved_gate + (i + h) * args.tokens, t, args.tokens, gate);
          StoreSaved(args.saved_up + (i + h) * args.tokens, t, args.tokens, up);
        }
      }
      StorePairs(pairs + 16 * i, z[0], z[1]);
    }
    Transpose16x16(pairs, out);
  }
}

/// One row of I and 16 tokens of the backward.
struct SwigluGrad {
  F32x16 z;
  F32x16 d_gate;
  F32x16 d_up;
};

MOESAIC_INLINE SwigluGrad SwigluRow(F32x16 d_z, F32x16 gate, F32x16 up, F32x16 weight) {
  const F32x16 sigma = Sigmoid(gate);
  const F32x16 silu = gate * sigma;
  const F32x16 scaled = weight * d_z;
  return {silu * up, scaled * up * sigma * (1.0f + gate * (1.0f - sigma)), scaled * silu};
}

inline void SwigluBackward(const SwigluBackwardArgs& args) {
  const bool transposed = args.d_gate_t.data != nullptr;
  const bool z_wanted = args.z_t.data != nullptr;
  for (std::int64_t t = 0; t < args.d_gate.panels * kPanelRows; t += kPanelRows) {
    const std::int64_t valid = args.tokens - t;
    alignas(64) BFloat16 gate_pairs[kTileElements] = {};
    alignas(64) BFloat16 up_pairs[kTileElements] = {};
    F32x16 d_weight{};
    float weights[16] = {};
    if (valid > 0) {
      std::memcpy(weights, args.routing_weight + t, static_cast<std::size_t>(valid < 16 ? valid : 16) * sizeof(float));
    }
    const F32x16 weight = LoadF32(weights);
    for (int i = 0; i < 32; i += 2) {
      SwigluGrad row[2] = {};
      for (int h = 0; h < 2; ++h) {
        if (i + h < args.rows && valid > 0) {
          const F32x16 d_z = LoadF32(args.d_z + (i + h) * args.ld + t);
          const F32x16 gate = LoadSaved(args.saved_gate + (i + h) * args.tokens, t, args.tokens);
          const F32x16 up = LoadSaved(args.saved_up + (i + h) * args.tokens, t, args.tokens);
          row[h] = SwigluRow(d_z, gate, up, weight);
          row[h].z = KeepValid(row[h].z, valid);
          row[h].d_gate = KeepValid(row[h].d_gate, valid);
          row[h].d_up = KeepValid(row[h].d_up, valid);
          d_weight += KeepValid(d_z * row[h].z, valid);
        }
        // Token t of row i of I lies in panel i / 16 and tile column t / 32.
        const std::int64_t panel = 2 * args.block + (i + h) / 16;
        const std::int64_t offset = (i + h) % 16 * kTileColumns + t % kTileColumns;
        if (transposed) {
          if (panel < args.d_gate_t.panels) StoreBf16(args.d_gate_t.Tile(panel, t / kTileColumns) + offset, row[h].d_gate);
          if (panel < args.d_up_t.panels) StoreBf16(args.d_up_t.Tile(panel, t / kTileColumns) + offset, row[h].d_up);
        }
        if (z_wanted && panel < args.z_t.panels) StoreBf16(args.z_t.Tile(panel, t / kTileColumns) + offset, row[h].z);
      }
      StorePairs(gate_pairs + 16 * i, row[0].d_gate, row[1].d_gate);
      StorePairs(up_pairs + 16 * i, row[0].d_up, row[1].d_up);
    }
    Transpose16x16(gate_pairs, args.d_gate.Tile(t / kPanelRows, args.block));
    Transpose16x16(up_pairs, args.d_up.Tile(t / kPanelRows, args.block));
    if (valid > 0) StoreF32(args.d_weight + t, LoadF32(args.d_weight + t) + d_weight);
  }
}

}  // namespace
