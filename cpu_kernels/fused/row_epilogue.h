// RowEpilogue and its backward (fused_kernels.h has the contracts).
//
// A row is walked three times: v and its sum, the sum of squares around the mean (the difference of two large sums would lose
// what a mean far from zero leaves), and the result. Eight rows are walked side by side: bias, gamma and beta are loaded once
// for all of them, none waits alone for its sums to be added up, and their v stay in L1. It changes no bit.
#pragma once

#include "cpu_kernels/fused/activations.h"
#include "cpu_kernels/fused/rows.h"
#include "cpu_kernels/transpose.h"

namespace {

using namespace moesaic;

/// Rows side by side: as many as the registers hold.
inline constexpr int kRowsAtOnce = kNativeLanes == 16 ? kEpilogueRows : 1;

/// Values of a cache line.
template <typename T>
inline constexpr std::int64_t kLineValues = 64 / sizeof(T);

/// Some rows of RowEpilogueArgs, from one on.
template <typename T>
struct EpilogueRows {
  const float* transposed;  ///< null: sums
  const float* sums;
  const T* addend;
  const T* residual;
  T* out;
  T* pre;
  T* normalized;
  float* v;
  std::int64_t v_stride;
};

template <typename T>
MOESAIC_INLINE EpilogueRows<T> RowsFrom(const RowEpilogueArgs& args, std::int64_t r) {
  const auto at = [r](auto* base, std::int64_t stride) { return base == nullptr ? nullptr : base + r * stride; };
  return {at(args.transposed, 1),
          at(args.sums, args.ld),
          at(static_cast<const T*>(args.addend), args.addend_stride),
          at(static_cast<const T*>(args.residual), args.residual_stride),
          at(static_cast<T*>(args.out), args.out_stride),
          at(static_cast<T*>(args.pre), args.pre_stride),
          at(static_cast<T*>(args.normalized), args.columns),
          args.values,
          RoundUp(args.columns, 16) + 16};
}

/// x[r] = sums of row r in n <= 16 columns from c on; of all rows at once where these are transposed.
template <int kRows, bool kTransposed, typename T>
MOESAIC_INLINE void LoadSums(const RowEpilogueArgs& args, const EpilogueRows<T>& rows, std::int64_t c, std::int64_t n,
                             F32x16 (&x)[kRows]) {
  if constexpr (kTransposed) {
    LoadEightTransposed(rows.transposed + c * args.transposed_ld, args.transposed_ld, x);
    if (n < 16) {
      for (int r = 0; r < kRows; ++r) x[r] = FirstLanes(x[r], n);
    }
  } else {
    for (int r = 0; r < kRows; ++r) x[r] = Load(rows.sums + r * args.ld + c, n);
  }
}

/// Where a row comes from.
enum class Source { kResidual, kSums, kTransposed };

/// v of some rows, in n <= 16 columns from c on.
template <Source kSource, Activation kActivation, typename T, int kRows>
MOESAIC_INLINE void ValuesAt(const RowEpilogueArgs& args, const EpilogueRows<T>& rows, std::int64_t c, std::int64_t n,
                             F32x16 (&v)[kRows]) {
  constexpr bool kSums = kSource != Source::kResidual;
  if constexpr (kSums) {
    LoadSums<kRows, kSource == Source::kTransposed>(args, rows, c, n, v);
    const F32x16 bias = Load(args.bias + c, n);
    for (int r = 0; r < kRows; ++r) v[r] += bias;
    if (args.addend != nullptr) {
      for (int r = 0; r < kRows; ++r) v[r] += Load(rows.addend + r * args.addend_stride + c, n);
    }
    if (args.pre != nullptr) {
      for (int r = 0; r < kRows; ++r) Store(rows.pre + r * args.pre_stride + c, v[r], n);
    }
    if constexpr (kActivation != Activation::kNone) {
      for (int r = 0; r < kRows; ++r) v[r] = Done(Activate<kActivation>(v[r]));
    }
  }
  if (!kSums || args.residual != nullptr) {
    for (int r = 0; r < kRows; ++r) {
      const T* const at = rows.residual + r * args.residual_stride + c;
      // The next rows, as where out goes: rows are too short for the hardware to run ahead in.
      if (c % kLineValues<T> == 0) __builtin_prefetch(at + kRows * args.residual_stride);
      v[r] = kSums ? v[r] + Load(at, n) : Load(at, n);
    }
  }
}

/// Where v of each row lies: mean (0 for the RMS norm) and 1 / sqrt(variance + epsilon).
template <int kRows>
struct RowStatistics {
  float mean[kRows], inverse_std[kRows];
};

/// Fills the rows' v.
template <Source kSource, Activation kActivation, typename T, int kRows>
MOESAIC_INLINE void Statistics(const RowEpilogueArgs& args, const EpilogueRows<T>& rows, RowStatistics<kRows>& at) {
  const std::int64_t columns = args.columns, whole = columns / 16 * 16;
  const auto count = static_cast<float>(columns);
  const bool centred = args.norm == Norm::kLayerNorm;
  F32x16 sums[kRows] = {};
  const auto fill = [&](std::int64_t c, std::int64_t n) MOESAIC_INLINE_LAMBDA {
    F32x16 v[kRows];
    ValuesAt<kSource, kActivation>(args, rows, c, n, v);
    for (int r = 0; r < kRows; ++r) {
      StoreF32(rows.v + r * rows.v_stride + c, v[r]);
      // Beyond the row v is the activation of 0, and that is 0.
      sums[r] = centred ? sums[r] + v[r] : MultiplyAdd(v[r], v[r], sums[r]);
    }
  };
  for (std::int64_t c = 0; c < whole; c += 16) fill(c, 16);
  if (whole < columns) fill(whole, columns - whole);
  for (int r = 0; r < kRows; ++r) {
    const float total = SumOfLanes(sums[r]);
    at.mean[r] = centred ? total / count : 0.0f;
    at.inverse_std[r] = total;
    sums[r] = F32x16{};
  }
  if (centred) {
    const auto add = [&](std::int64_t c, std::int64_t n) MOESAIC_INLINE_LAMBDA {
      for (int r = 0; r < kRows; ++r) {
        const F32x16 d = FirstLanes(LoadF32(rows.v + r * rows.v_stride + c) - Broadcast(at.mean[r]), n);
        sums[r] = MultiplyAdd(d, d, sums[r]);
      }
    };
    for (std::int64_t c = 0; c < whole; c += 16) add(c, 16);
    if (whole < columns) add(whole, columns - whole);
    for (int r = 0; r < kRows; ++r) at.inverse_std[r] = SumOfLanes(sums[r]);
  }
  for (int r = 0; r < kRows; ++r) at.inverse_std[r] = 1.0f / __builtin_sqrtf(at.inverse_std[r] / count + args.epsilon);
}

MOESAIC_INLINE void StoreLine(float* to, const F32x16& line, bool stream) { stream ? StreamF32(to, line) : StoreF32(to, line); }
MOESAIC_INLINE void StoreLine(BFloat16* to, const U16x32& line, bool stream) {
  stream ? StreamLine(to, line) : StoreVector(to, line);
}

/// values(first column, how many <= 16, F32x16 v[kRows]), to rows from `out` on; streamed, to one.
template <int kRows, typename T, class Values>
MOESAIC_INLINE void StoreOut(const RowEpilogueArgs& args, T* out, Values values) {
  const std::int64_t stride = args.out_stride;
  const auto store = [&](std::int64_t c, std::int64_t n, bool stream) MOESAIC_INLINE_LAMBDA {
    F32x16 v[kRows];
    if (n < kLineValues<T>) {
      for (const std::int64_t end = c + n; c < end; c += 16) {
        const std::int64_t part = end - c < 16 ? end - c : 16;
        values(c, part, v);
        for (int r = 0; r < kRows; ++r) Store(out + r * stride + c, v[r], part);
      }
      return;
    }
    values(c, 16, v);
    if (!stream) {
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(out + (kRows + r) * stride + c, 1);
    }
    if constexpr (sizeof(T) == sizeof(float)) {
      for (int r = 0; r < kRows; ++r) StoreLine(out + r * stride + c, v[r], stream);
    } else {
      F32x16 next[kRows];
      values(c + 16, 16, next);
      for (int r = 0; r < kRows; ++r) StoreLine(out + r * stride + c, NarrowBoth(v[r], next[r]), stream);
    }
  };
  ForVectors<kLineValues<T>>(out, args.columns, args.stream, store);
}

/// Rows [first, first + kRows).
template <Source kSource, Activation kActivation, int kRows, typename T>
inline void FinishRows(const RowEpilogueArgs& args, std::int64_t first) {
  const EpilogueRows<T> rows = RowsFrom<T>(args, first);
  if (args.norm == Norm::kNone) {
    return StoreOut<kRows>(args, rows.out, [&](std::int64_t c, std::int64_t n, F32x16(&v)[kRows]) MOESAIC_INLINE_LAMBDA {
      ValuesAt<kSource, kActivation>(args, rows, c, n, v);
    });
  }
  RowStatistics<kRows> at;
  Statistics<kSource, kActivation>(args, rows, at);
  if (args.inverse_std != nullptr) {
    for (int r = 0; r < kRows; ++r) args.inverse_std[first + r] = at.inverse_std[r];
  }
  StoreOut<kRows>(args, rows.out, [&](std::int64_t c, std::int64_t n, F32x16(&v)[kRows]) MOESAIC_INLINE_LAMBDA {
    for (int r = 0; r < kRows; ++r) {
      v[r] = (Load(rows.v + r * rows.v_stride + c, n) - Broadcast(at.mean[r])) * Broadcast(at.inverse_std[r]);
    }
    if (args.normalized != nullptr) {
      for (int r = 0; r < kRows; ++r) Store(rows.normalized + r * args.columns + c, v[r], n);
    }
    const F32x16 gamma = Load(args.gamma + c, n);
    if (args.norm == Norm::kLayerNorm) {
      const F32x16 beta = Load(args.beta + c, n);
      for (int r = 0; r < kRows; ++r) v[r] = MultiplyAdd(v[r], gamma, beta);
    } else {
      for (int r = 0; r < kRows; ++r) v[r] *= gamma;
    }
  });
}

inline void TurnPanel(const TurnPanelArgs& args) {
  for (std::int64_t c = 0; c < args.columns; c += 16) {
    Transpose16x16(args.transposed + c * args.transposed_ld, args.transposed_ld, args.sums + c, args.ld);
  }
}

template <typename T, Source kSource, Activation kActivation>
inline void AllRows(const RowEpilogueArgs& args) {
  std::int64_t r = 0;
  if constexpr (kRowsAtOnce > 1) {
    // Streamed rows go one after the other, as memory likes it. (A norm alone, two Zen 4 cores: 0.7 to 0.8 of the time.)
    for (; !args.stream && r + kRowsAtOnce <= args.rows; r += kRowsAtOnce) {
      FinishRows<kSource, kActivation, kRowsAtOnce, T>(args, r);
    }
    if (r == args.rows) return;
  }
  constexpr Source kRest = kSource == Source::kTransposed ? Source::kSums : kSource;
  if constexpr (kSource == Source::kTransposed) {
    TurnPanel({args.transposed, args.transposed_ld, RoundUp(args.columns, 16), args.sums, args.ld});
  }
  for (; r < args.rows; ++r) FinishRows<kRest, kActivation, 1, T>(args, r);
}

template <typename T, Source kSource>
inline void RowsWithSums(const RowEpilogueArgs& args) {
  if (args.activation == Activation::kGelu) return AllRows<T, kSource, Activation::kGelu>(args);
  if (args.activation == Activation::kGeluTanh) return AllRows<T, kSource, Activation::kGeluTanh>(args);
  AllRows<T, kSource, Activation::kNone>(args);
}

template <typename T>
inline void RowEpilogueOf(const RowEpilogueArgs& args) {
  if (args.transposed != nullptr) return RowsWithSums<T, Source::kTransposed>(args);
  if (args.sums != nullptr) return RowsWithSums<T, Source::kSums>(args);
  AllRows<T, Source::kResidual, Activation::kNone>(args);
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
    const float mean = args.norm == Norm::kLayerNorm ? SumOfLanes(sum) / count : 0.0f;
    const float along = SumOfLanes(product) / count, inverse_std = args.inverse_std[r];
    ForVectors(d_in, columns, false, [&](std::int64_t c, std::int64_t n, bool) MOESAIC_INLINE_LAMBDA {
      const F32x16 g = Load(d_out + c, n) * Load(args.gamma + c, n);
      Store(d_in + c, (g - Broadcast(mean) - Load(normalized + c, n) * Broadcast(along)) * Broadcast(inverse_std), n);
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
