// The AMX cell: up to 2 x 2 tiles of C (32 x 32), four products for four tile loads at each step. Written against a tile
// interface with two implementations, the instructions (amx_tiles.h) and an emulation in plain C++ (emulated_tiles.h), so that
// blocking and edges are the same code on every host.
//
//   struct Tiles {  // eight registers of 16 rows x 64 bytes
//     void Zero<t>();  void Load<t>(const void* rows, std::int64_t stride_bytes);  void Store<t>(void* rows, stride_bytes);
//     void LoadPassing<t>(rows, stride_bytes);  // Load, of what need not stay in L1
//     void MultiplyAdd<c, a, b>();   // c[i][j] += sum over p: a[i][2p] b[p][2j] + a[i][2p+1] b[p][2j+1], fp32
//   };
//   struct Tiles::Scope { ... };     // configures the registers of this thread, and releases them
#pragma once

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/simd.h"

namespace {

template <class Tiles>
struct AmxCell {
  static constexpr int kMaxA = 2;
  static constexpr int kMaxB = 2;
  /// The tile unit computes on its own: vector instructions beside it are free.
  static constexpr bool kVectorsIdle = true;
  using Product = void;
  using Scope = typename Tiles::Scope;

  /// Two panels of so many tiles, 32 KB, stay in L1 while the other factor passes.
  static constexpr std::int64_t kSliceTiles = 16;

  // Registers: C in 0..3, left factors in 4 and 5, the right one in 6. No more than a step needs: two hardware threads of a
  // core share its physical tile registers, and with all eight names of both in use next to none is left to load ahead into.
  // Not inlined, so that the loop has all general registers for itself.
  template <int NA, int NB, class Aside>
  [[gnu::noinline]] static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate,
                                        Aside& aside) {
    constexpr bool kLeftPasses = Aside::kPassing == Passing::kLeft, kRightPasses = Aside::kPassing == Passing::kRight;
    Tiles tiles;
    const std::int64_t c_stride = ldc * static_cast<std::int64_t>(sizeof(float));
    float* const c_low = c + kPanelRows * ldc;
    if (accumulate) {
      tiles.template Load<0>(c, c_stride);
      if constexpr (NB == 2) tiles.template Load<1>(c + kPanelRows, c_stride);
      if constexpr (NA == 2) tiles.template Load<2>(c_low, c_stride);
      if constexpr (NA == 2 && NB == 2) tiles.template Load<3>(c_low + kPanelRows, c_stride);
    } else {
      tiles.template Zero<0>();
      if constexpr (NB == 2) tiles.template Zero<1>();
      if constexpr (NA == 2) tiles.template Zero<2>();
      if constexpr (NA == 2 && NB == 2) tiles.template Zero<3>();
    }
    typename Aside::Steps steps(aside);
    for (int r = 0; r < count; ++r) {
      const CellRun& run = runs[r];
      steps.NextRun();
      // One counter to zero: with a pointer and a count for each factor some of them would be stored at each step.
      const std::int64_t a_stride = run.a_stride, b_stride = run.b_stride, b_size = run.length * b_stride;
      const BFloat16 *a0 = run.a[0], *a1 = run.a[1], *b0_end = run.b[0] + b_size;
      [[maybe_unused]] const BFloat16* b1_end = NB == 2 ? run.b[1] + b_size : nullptr;
      for (std::int64_t b = -b_size; b < 0; b += b_stride) {
        LoadFactor<4, kLeftPasses>(tiles, a0);
        if constexpr (NA == 2 && NB == 2) LoadFactor<5, kLeftPasses>(tiles, a1);
        LoadFactor<6, kRightPasses>(tiles, b0_end + b);
        tiles.template MultiplyAdd<0, 4, 6>();
        if constexpr (NA == 2 && NB == 1) {
          LoadFactor<4, kLeftPasses>(tiles, a1);
          tiles.template MultiplyAdd<2, 4, 6>();
        }
        if constexpr (NA == 2 && NB == 2) tiles.template MultiplyAdd<2, 5, 6>();
        if constexpr (NB == 2) {
          LoadFactor<6, kRightPasses>(tiles, b1_end + b);
          tiles.template MultiplyAdd<1, 4, 6>();
          if constexpr (NA == 2) tiles.template MultiplyAdd<3, 5, 6>();
        }
        a0 += a_stride;
        if constexpr (NA == 2) a1 += a_stride;
        steps.Next();
      }
    }
    tiles.template Store<0>(c, c_stride);
    if constexpr (NB == 2) tiles.template Store<1>(c + kPanelRows, c_stride);
    if constexpr (NA == 2) tiles.template Store<2>(c_low, c_stride);
    if constexpr (NA == 2 && NB == 2) tiles.template Store<3>(c_low + kPanelRows, c_stride);
  }

 private:
  template <int kTile, bool kPasses>
  [[gnu::always_inline]] static void LoadFactor(Tiles& tiles, const BFloat16* tile) {
    if constexpr (kPasses) {
      tiles.template LoadPassing<kTile>(tile, 64);
    } else {
      tiles.template Load<kTile>(tile, 64);
    }
  }
};

}  // namespace
