// Z = f(G) * U and its backward, on the transposed results of the direct form (kernels.h has the contract, gate.h what f is).
//
// Rows of I are taken two at a time: their values for 16 tokens, side by side in bf16, are one line of the saved state, and
// interleaved one row of a block that, transposed, is an operand tile [16 tokens][32 of I].
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// Two rows of I, 16 tokens each.
struct RowPair {
  F32x16 row[2];
};

/// Which of 2 x 16 numbers exist: rows of I end after `rows`, tokens after `tokens`.
struct Extent {
  std::int64_t rows;
  std::int64_t tokens;
  MOESAIC_INLINE bool full() const { return rows >= 2 && tokens >= 16; }
};

/// Zero beyond the extent: the product of a zero row with an infinite weight is NaN, and must not reach a sum over tokens.
MOESAIC_INLINE void KeepValid(RowPair& pair, Extent valid) {
  if (valid.full()) return;
  const I32x16 tokens = LanesBelow(valid.tokens);
  for (int h = 0; h < 2; ++h) pair.row[h] = h < valid.rows ? Select(tokens, pair.row[h], F32x16{}) : F32x16{};
}

/// From [32][ld] sums; what lies beyond the extent is whatever the sums' padding holds, or zero beyond the rows.
MOESAIC_INLINE RowPair LoadSums(const float* sums, std::int64_t ld, Extent valid) {
  return {{LoadF32(sums), valid.rows > 1 ? LoadF32(sums + ld) : F32x16{}}};
}

MOESAIC_INLINE RowPair LoadSaved(const BFloat16* saved, Extent valid) {
  if (valid.full()) return {{LoadBf16(saved), LoadBf16(saved + 16)}};
  const std::int64_t width = valid.tokens < 16 ? valid.tokens : 16;
  return {{LoadBf16Part(saved, width), valid.rows > 1 ? LoadBf16Part(saved + width, width) : F32x16{}}};
}

/// Nobody reads it before the backward.
MOESAIC_INLINE void StoreSaved(BFloat16* saved, const RowPair& pair, Extent valid) {
  if (valid.full()) {
    const U16x32 both = NarrowBoth(pair.row[0], pair.row[1]);
    if (IsAligned(saved)) return StreamLine(saved, both);
    return StoreVector(saved, both);
  }
  const std::int64_t width = valid.tokens < 16 ? valid.tokens : 16;
  StoreBf16Part(saved, pair.row[0], width);
  if (valid.rows > 1) StoreBf16Part(saved + width, pair.row[1], width);
}

MOESAIC_INLINE void StorePairs(BFloat16* out, const RowPair& pair) { StoreVector(out, NarrowPairs(pair.row[0], pair.row[1])); }

/// Rows i and i + 1 of a block, from token t on: what exists of them, and where they are in the saved state.
struct PairAt {
  Extent valid;
  std::int64_t saved;

  MOESAIC_INLINE PairAt(std::int64_t i, std::int64_t rows, std::int64_t t, std::int64_t tokens)
      : valid{rows - i, tokens - t}, saved(t * rows + i * (tokens - t < 16 ? tokens - t : 16)) {}
};

/// sigma(y(g)) of a gate.
template <Gate kGate>
MOESAIC_INLINE F32x16 GateFactor(F32x16 g) {
  return Sigmoid(kGate == Gate::kSilu ? g : TanhArgument(g));
}

/// f'(g) / sigma(y) = 1 + g (1 - sigma(y)) y'(g). Where sigma is 1 but for its last bit, g must not multiply that; nor may g^2
/// overflow where sigma is 0.
template <Gate kGate>
MOESAIC_INLINE F32x16 SlopeOverFactor(F32x16 g, F32x16 sigma) {
  if constexpr (kGate == Gate::kSilu) {
    const F32x16 z = Smaller(Broadcast(88.0f), g);
    return 1.0f + (z - z * sigma);
  }
  const F32x16 z = Clamp(g, 13.0f);
  return 1.0f + (z - z * sigma) * TanhSlope(z);
}

template <Gate kGate>
inline void SwigluForwardOf(const SwigluForwardArgs& args) {
  for (std::int64_t t = 0; t < args.tokens; t += kPanelRows) {
    alignas(64) BFloat16 pairs[kTileElements];
    for (std::int64_t i = 0; i < 32; i += 2) {
      RowPair z{};
      if (i < args.rows) {
        const PairAt at(i, args.rows, t, args.tokens);
        const RowPair gate = LoadSums(args.gate + i * args.ld + t, args.ld, at.valid);
        const RowPair up = LoadSums(args.up + i * args.ld + t, args.ld, at.valid);
        for (int h = 0; h < 2; ++h) z.row[h] = gate.row[h] * GateFactor<kGate>(gate.row[h]) * up.row[h];
        KeepValid(z, at.valid);
        if (args.saved_gate != nullptr) {
          StoreSaved(args.saved_gate + at.saved, gate, at.valid);
          StoreSaved(args.saved_up + at.saved, up, at.valid);
        }
      }
      StorePairs(pairs + 16 * i, z);
    }
    Transpose16x16(pairs, args.z.Tile(t / kPanelRows, args.block));
  }
  if (args.saved_gate != nullptr) StreamFence();
}

inline void SwigluForward(const SwigluForwardArgs& args) {
  if (args.activation == Gate::kGeluTanh) return SwigluForwardOf<Gate::kGeluTanh>(args);
  SwigluForwardOf<Gate::kSilu>(args);
}

/// Columns t to t + 15 of an operand matrix [32][tokens].
class TransposedColumns {
 public:
  TransposedColumns(const TileMatrix& out, std::int64_t t) {
    if (out.data == nullptr) return;
    for (int p = 0; p < 2; ++p) panels_[p] = out.Tile(p, t / kTileColumns) + t % kTileColumns;
  }

  MOESAIC_INLINE bool wanted() const { return panels_[0] != nullptr; }
  MOESAIC_INLINE BFloat16* Row(std::int64_t i) const { return panels_[i / kPanelRows] + i % kPanelRows * kTileColumns; }

 private:
  BFloat16* panels_[2] = {};
};

/// A result of 32 rows of I for 16 tokens, on its way to a tile and, transposed, to another.
class SwigluResult {
 public:
  SwigluResult(const TileMatrix& tiles, std::int64_t block, const TileMatrix& transposed, std::int64_t t)
      : transposed_(transposed, t) {
    if (tiles.data != nullptr) tile_ = tiles.Tile(t / kPanelRows, block);
  }

  /// Rows i and i + 1.
  MOESAIC_INLINE void Keep(std::int64_t i, const RowPair& pair) {
    const U16x32 both = NarrowBoth(pair.row[0], pair.row[1]);
    if (tile_ != nullptr) StoreVector(pairs_ + 16 * i, InterleaveHalves(both));
    if (!transposed_.wanted()) return;
    std::uint16_t rows[32];
    StoreVector(rows, both);
    for (int h = 0; h < 2; ++h) std::memcpy(transposed_.Row(i + h), rows + 16 * h, 32);
  }

  MOESAIC_INLINE void Store() {
    if (tile_ != nullptr) Transpose16x16(pairs_, tile_);
  }

 private:
  alignas(64) BFloat16 pairs_[kTileElements];
  BFloat16* tile_ = nullptr;
  TransposedColumns transposed_;
};

/// Sixteen tokens that there are none of, beside some in a tile that gradients contract over.
inline void ZeroTokens(const SwigluBackwardArgs& args, std::int64_t t) {
  for (const TileMatrix* out : {&args.d_gate_t, &args.d_up_t, &args.z_t}) {
    const TransposedColumns columns(*out, t);
    for (std::int64_t i = 0; columns.wanted() && i < kTileColumns; ++i) {
      std::memset(columns.Row(i), 0, kPanelRows * sizeof(BFloat16));
    }
  }
}

template <Gate kGate>
inline void SwigluBackwardOf(const SwigluBackwardArgs& args) {
  std::int64_t t = 0;
  for (; t < args.tokens; t += kPanelRows) {
    SwigluResult z(args.z, args.block, args.z_t, t);
    SwigluResult d_gate(args.d_gate, args.block, args.d_gate_t, t);
    SwigluResult d_up(args.d_up, args.block, args.d_up_t, t);
    F32x16 d_weight{};
    float weights[16] = {};
    const std::int64_t valid = args.tokens - t < 16 ? args.tokens - t : 16;
    std::memcpy(weights, args.routing_weight + t, static_cast<std::size_t>(valid) * sizeof(float));
    const F32x16 weight = LoadF32(weights);
    std::int64_t i = 0;
    for (; i < args.rows; i += 2) {
      const PairAt at(i, args.rows, t, args.tokens);
      const RowPair sums = LoadSums(args.d_z + i * args.ld + t, args.ld, at.valid);
      const RowPair gate = LoadSaved(args.saved_gate + at.saved, at.valid);
      const RowPair up = LoadSaved(args.saved_up + at.saved, at.valid);
      RowPair of_z, of_gate, of_up, of_weight;
      for (int h = 0; h < 2; ++h) {
        const F32x16 sigma = GateFactor<kGate>(gate.row[h]);
        const F32x16 activated = gate.row[h] * sigma;
        const F32x16 scaled = weight * sums.row[h];
        of_z.row[h] = activated * up.row[h];
        of_gate.row[h] = scaled * up.row[h] * sigma * SlopeOverFactor<kGate>(gate.row[h], sigma);
        of_up.row[h] = scaled * activated;
        of_weight.row[h] = sums.row[h] * of_z.row[h];
      }
      KeepValid(of_z, at.valid);
      KeepValid(of_gate, at.valid);
      KeepValid(of_up, at.valid);
      KeepValid(of_weight, at.valid);
      z.Keep(i, of_z);
      d_gate.Keep(i, of_gate);
      d_up.Keep(i, of_up);
      d_weight += of_weight.row[0];
      d_weight += of_weight.row[1];
    }
    for (; i < kTileColumns; i += 2) {
      z.Keep(i, {});
      d_gate.Keep(i, {});
      d_up.Keep(i, {});
    }
    z.Store();
    d_gate.Store();
    d_up.Store();
    StoreF32(args.d_weight + t, LoadF32(args.d_weight + t) + d_weight);
  }
  if (t % kTileColumns != 0) ZeroTokens(args, t);
}

inline void SwigluBackward(const SwigluBackwardArgs& args) {
  if (args.activation == Gate::kGeluTanh) return SwigluBackwardOf<Gate::kGeluTanh>(args);
  SwigluBackwardOf<Gate::kSilu>(args);
}

}  // namespace
