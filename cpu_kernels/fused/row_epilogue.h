// RowEpilogue and its backward (fused_kernels.h has the contracts).
//
// A row is walked three times: v and its sum, the sum of squares around the mean (the difference of two large sums would lose
// what a mean far from zero leaves), and the result. After the first time it lies in the L1 cache.
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"

namespace {

using namespace moesaic;

/// One row of RowEpilogueArgs, typed.
template <typename T>
struct EpilogueRow {
  const float* sums;
  const T* addend;
  const T* residual;
  T* out;
  T* pre;
  T* normalized;
};

template <typename T>
MOESAIC_INLINE EpilogueRow<T> RowOf(const RowEpilogueArgs& args, std::int64_t r) {
  const auto at = [r](auto* base, std::int64_t stride) { return base == nullptr ? nullptr : base + r * stride; };
  return {at(args.sums, args.ld),
          at(static_cast<const T*>(args.addend), args.addend_stride),
          at(static_cast<const T*>(args.residual), args.residual_stride),
          at(static_cast<T*>(args.out), args.out_stride),
          at(static_cast<T*>(args.pre), args.pre_stride),
          at(static_cast<T*>(args.normalized), args.columns)};
}

template <typename T, bool kSums, Activation kActivation>
MOESAIC_INLINE F32x16 ValueAt(const RowEpilogueArgs& args, const EpilogueRow<T>& row, std::int64_t c, std::int64_t n) {
  F32x16 v{};
  if constexpr (kSums) {
    v = Load(row.sums + c, n) + Load(args.bias + c, n);
    if (row.addend != nullptr) v += Load(row.addend + c, n);
    if (row.pre != nullptr) Store(row.pre + c, v, n);
    v = Activate<T, kActivation>(v);
  }
  if (row.residual != nullptr) v += Load(row.residual + c, n);
  return v;
}

/// Where v lies: mean (0 for the RMS norm) and 1 / sqrt(variance + epsilon).
struct RowStatistics {
  float mean;
  float inverse_std;
};

/// Fills args.row with v. Two accumulators: one addition would wait for the other.
template <typename T, bool kSums, Activation kActivation>
MOESAIC_INLINE RowStatistics Statistics(const RowEpilogueArgs& args, const EpilogueRow<T>& row) {
  const std::int64_t columns = args.columns, whole = columns / 32 * 32;
  const auto count = static_cast<float>(columns);
  F32x16 sum[2] = {};
  const auto fill = [&](std::int64_t c, std::int64_t n, F32x16& total) MOESAIC_INLINE_LAMBDA {
    const F32x16 v = ValueAt<T, kSums, kActivation>(args, row, c, n);
    Store(args.row + c, v, n);
    total += args.norm == Norm::kLayerNorm ? v : v * v;
  };
  for (std::int64_t c = 0; c < whole; c += 32) {
    fill(c, 16, sum[0]);
    fill(c + 16, 16, sum[1]);
  }
  for (std::int64_t c = whole; c < columns; c += 16) {
    // Beyond the row v is the activation of 0, and that is 0.
    fill(c, columns - c < 16 ? columns - c : 16, sum[0]);
  }
  float total = SumOf(sum[0] + sum[1]);
  if (args.norm == Norm::kRmsNorm) return {0.0f, 1.0f / __builtin_sqrtf(total / count + args.epsilon)};
  const float mean = total / count;
  F32x16 squares[2] = {};
  for (std::int64_t c = 0; c < whole; c += 32) {
    for (int i = 0; i < 2; ++i) {
      const F32x16 d = LoadF32(args.row + c + 16 * i) - mean;
      squares[i] += d * d;
    }
  }
  for (std::int64_t c = whole; c < columns; c += 16) {
    const std::int64_t n = columns - c < 16 ? columns - c : 16;
    const F32x16 d = FirstLanes(Load(args.row + c, n) - mean, n);
    squares[0] += d * d;
  }
  total = SumOf(squares[0] + squares[1]);
  return {mean, 1.0f / __builtin_sqrtf(total / count + args.epsilon)};
}

template <typename T>
MOESAIC_INLINE void StoreOut(T* out, F32x16 v, std::int64_t n, bool stream) {
  if (stream) return StreamVector(out, v);
  Store(out, v, n);
}

template <typename T, bool kSums, Activation kActivation>
inline void EpilogueRows(const RowEpilogueArgs& args) {
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const EpilogueRow<T> row = RowOf<T>(args, r);
    if (args.norm == Norm::kNone) {
      ForVectors(row.out, args.columns, args.stream, [&](std::int64_t c, std::int64_t n, bool stream) MOESAIC_INLINE_LAMBDA {
        StoreOut(row.out + c, ValueAt<T, kSums, kActivation>(args, row, c, n), n, stream);
      });
      continue;
    }
    const RowStatistics at = Statistics<T, kSums, kActivation>(args, row);
    if (args.inverse_std != nullptr) args.inverse_std[r] = at.inverse_std;
    ForVectors(row.out, args.columns, args.stream, [&](std::int64_t c, std::int64_t n, bool stream) MOESAIC_INLINE_LAMBDA {
      const F32x16 normal = (Load(args.row + c, n) - at.mean) * at.inverse_std;
      if (row.normalized != nullptr) Store(row.normalized + c, normal, n);
      F32x16 out = normal * Load(args.gamma + c, n);
      if (args.norm == Norm::kLayerNorm) out += Load(args.beta + c, n);
      StoreOut(row.out + c, out, n, stream);
    });
  }
}

template <typename T>
inline void RowEpilogueOf(const RowEpilogueArgs& args) {
  if (args.sums == nullptr) return EpilogueRows<T, false, Activation::kNone>(args);
  if (args.activation == Activation::kGelu) return EpilogueRows<T, true, Activation::kGelu>(args);
  if (args.activation == Activation::kGeluTanh) return EpilogueRows<T, true, Activation::kGeluTanh>(args);
  EpilogueRows<T, true, Activation::kNone>(args);
}

inline void RowEpilogue(const RowEpilogueArgs& args) {
  if (args.dtype == DType::kFloat32) {
    RowEpilogueOf<float>(args);
  } else {
    RowEpilogueOf<BFloat16>(args);
  }
}

template <typename T>
inline void NormBackwardOf(const NormBackwardArgs& args) {
  const std::int64_t columns = args.columns;
  for (std::int64_t r = 0; r < args.rows; ++r) {
    const T* d_out = static_cast<const T*>(args.d_out) + r * columns;
    const T* normalized = static_cast<const T*>(args.normalized) + r * columns;
    T* d_in = static_cast<T*>(args.d_in) + r * columns;
    F32x16 sum{}, product{};
    ForVectors(d_in, columns, false, [&](std::int64_t c, std::int64_t n, bool) MOESAIC_INLINE_LAMBDA {
      const F32x16 d = Load(d_out + c, n), normal = Load(normalized + c, n), g = d * Load(args.gamma + c, n);
      sum += g;
      product += g * normal;
      Store(args.d_gamma + c, Load(args.d_gamma + c, n) + d * normal, n);
      Store(args.d_beta + c, Load(args.d_beta + c, n) + d, n);
    });
    const auto count = static_cast<float>(columns);
    const float mean = args.norm == Norm::kLayerNorm ? SumOf(sum) / count : 0.0f;
    const float along = SumOf(product) / count, inverse_std = args.inverse_std[r];
    ForVectors(d_in, columns, false, [&](std::int64_t c, std::int64_t n, bool) MOESAIC_INLINE_LAMBDA {
      const F32x16 g = Load(d_out + c, n) * Load(args.gamma + c, n);
      Store(d_in + c, (g - mean - Load(normalized + c, n) * along) * inverse_std, n);
    });
  }
}

inline void NormBackward(const NormBackwardArgs& args) {
  if (args.dtype == DType::kFloat32) {
    NormBackwardOf<float>(args);
  } else {
    NormBackwardOf<BFloat16>(args);
  }
}

template <typename T, Activation kActivation>
inline void ActivationBackwardOf(const ActivationBackwardArgs& args) {
  const T* d_out = static_cast<const T*>(args.d_out);
  const T* pre = static_cast<const T*>(args.pre);
  T* d_pre = static_cast<T*>(args.d_pre);
  ForVectors(d_pre, args.count, false, [&](std::int64_t c, std::int64_t n, bool) MOESAIC_INLINE_LAMBDA {
    Store(d_pre + c, Load(d_out + c, n) * ActivateGrad<T, kActivation>(Load(pre + c, n)), n);
  });
}

inline void ActivationBackward(const ActivationBackwardArgs& args) {
  const bool tanh = args.activation == Activation::kGeluTanh;
  if (args.dtype == DType::kFloat32) {
    if (tanh) return ActivationBackwardOf<float, Activation::kGeluTanh>(args);
    return ActivationBackwardOf<float, Activation::kGelu>(args);
  }
  if (tanh) return ActivationBackwardOf<BFloat16, Activation::kGeluTanh>(args);
  ActivationBackwardOf<BFloat16, Activation::kGelu>(args);
}

}  // namespace
