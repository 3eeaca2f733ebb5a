// The tile interface of amx_cell.h by AMX instructions (Intel SDM vol. 2, LDTILECFG, TDPBF16PS). Inline assembler, because the
// intrinsics of GCC take the register number as a literal and cannot be used in templates.
#pragma once

#include <cstdint>

namespace {

struct AmxTiles {
  /// Palette 1, all eight registers 16 rows of 64 bytes. Released at the end, so that the operating system has no tile state to
  /// save while the thread does something else.
  struct Scope {
    Scope() {
      struct alignas(64) Config {
        std::uint8_t palette = 1, start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      static const Config config;
      asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Scope() { asm volatile("tilerelease"); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  template <int kTile>
  [[gnu::always_inline]] inline void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] inline void Load(const void* rows, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  /// TILELOADDT1: such tiles drive nothing else out of L1 (measured, docs/PERFORMANCE.md).
  template <int kTile>
  [[gnu::always_inline]] inline void LoadPassing(const void* rows, std::int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] inline void Store(void* rows, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] inline void MultiplyAdd() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
