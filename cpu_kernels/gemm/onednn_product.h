// oneDNN's matrix products, on the calling thread alone. Compiled for the baseline: oneDNN has its own detection.
#pragma once

#include <cstdint>

#include "cpu_kernels/bfloat16.h"

namespace moesaic {

/// Every product has this shape: how oneDNN sums an element depends on where the element lies in the shape.
inline constexpr int kOneDnnRows = 16;
inline constexpr int kOneDnnColumns = 32;

/// Whether oneDNN multiplies bf16 with instructions of this host; ONEDNN_MAX_CPU_ISA may forbid it.
bool OneDnnHasBf16();

/// While one lives, the OpenMP team that this thread would start has one member: oneDNN takes no other thread.
class OneDnnOnThisThread {
 public:
  OneDnnOnThisThread();
  ~OneDnnOnThisThread();
  OneDnnOnThisThread(const OneDnnOnThisThread&) = delete;
  OneDnnOnThisThread& operator=(const OneDnnOnThisThread&) = delete;

 private:
  int team_;
};

/// c[16][32] = sum over k: left[16][k] right[k][32], row-major without gaps, 64-byte aligned. Any thread, inside a
/// OneDnnOnThisThread. Throws std::bad_alloc where oneDNN has no memory, std::runtime_error where it fails otherwise.
void OneDnnProduct(const float* left, const float* right, float* c, int k);
/// The same; k is a multiple of 32 up to 256. What a thread's first call with each k makes is kept.
void OneDnnProduct(const BFloat16* left, const BFloat16* right, float* c, int k);

}  // namespace moesaic
