// The kernels of fused dense layers on every tier against formulas in double, and the layers on a pool, however they divide
// their rows and columns.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/linear.h"
#include "cpu_kernels/isa.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

constexpr double kEpsilon = 1e-5;

double Gelu(double x) { return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0))); }
double GeluTanh(double x) { return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }
double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double Apply(Activation activation, double x) {
  if (activation == Activation::kGelu) return Gelu(x);
  return activation == Activation::kGeluTanh ? GeluTanh(x) : x;
}

double Derivative(Activation activation, double x) {
  const double h = 1e-5;
  return (Apply(activation, x + h) - Apply(activation, x - h)) / (2 * h);
}

/// fp32 operations on numbers of some units: 1e-5. bf16 besides: half a step of the result, and `sigmoid` of it, the relative
/// error of a sigmoid that is a factor.
void ExpectNear(DType dtype, float value, double expected, const char* what, std::int64_t r, std::int64_t c,
                double sigmoid = 0x1p-18) {
  const double margin = 1e-5 + (dtype == DType::kFloat32 ? 2e-6 : 0x1p-8 + sigmoid) * std::fabs(expected);
  ASSERT_NEAR(value, expected, margin) << what << " at row " << r << " column " << c;
}

class FusedKernelsTest : public TierTest {};

/// NaN where `values` ends: nothing there may count.
Dense Transposed(const Dense& values, std::int64_t rows, std::int64_t columns) {
  Dense result(rows, columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      result(i, j) = j < values.rows && i < values.cols ? values(j, i) : std::numeric_limits<float>::quiet_NaN();
    }
  }
  return result;
}

/// One row of the reference: v, and out of it.
struct Reference {
  std::vector<double> pre, normalized, out;
  double inverse_std = 0;
};

struct EpilogueCase {
  Activation activation;
  Norm norm;
  bool addend, residual;
  bool alone = false;  ///< no GEMM before it
};

Reference Expected(const EpilogueCase& c, const Dense& sums, const Dense& vectors, const Dense& addend, const Dense& residual,
                   std::int64_t r) {
  Reference reference;
  const std::int64_t n = sums.cols;
  std::vector<double> v;
  double mean = 0, square = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    reference.pre.push_back(static_cast<double>(sums(r, i)) + vectors(0, i) + (c.addend ? addend(r, i) : 0.0));
    v.push_back(Apply(c.activation, reference.pre.back()) + (c.residual ? residual(r, i) : 0.0));
    mean += v.back() / static_cast<double>(n);
  }
  if (c.norm == Norm::kRmsNorm) mean = 0;
  for (double x : v) square += (x - mean) * (x - mean) / static_cast<double>(n);
  reference.inverse_std = 1 / std::sqrt(square + kEpsilon);
  for (std::int64_t i = 0; i < n; ++i) {
    const double normalized = (v[static_cast<std::size_t>(i)] - mean) * reference.inverse_std;
    reference.normalized.push_back(normalized);
    const double scaled = normalized * vectors(1, i) + (c.norm == Norm::kLayerNorm ? vectors(2, i) : 0.0);
    reference.out.push_back(c.norm == Norm::kNone ? v[static_cast<std::size_t>(i)] : scaled);
  }
  return reference;
}

/// Each row alone, wherever it lies, has the bits that it has among others.
void ExpectSameBitsOfSingleRows(const KernelTier& tier, const RowEpilogueArgs& args, const Rows& out) {
  const std::int64_t size = SizeOf(args.dtype);
  const auto row_of = [size](const void* rows, std::int64_t r, std::int64_t stride) {
    return rows == nullptr ? nullptr : static_cast<const char*>(rows) + r * stride * size;
  };
  const Rows alone(args.dtype, 1, args.columns, out.stride());
  for (std::int64_t r = 0; r < args.rows; ++r) {
    RowEpilogueArgs one = args;
    one.rows = 1;
    if (one.transposed != nullptr) one.transposed += r;
    if (one.transposed == nullptr && one.sums != nullptr) one.sums += r * args.ld;
    one.addend = row_of(args.addend, r, args.addend_stride);
    one.residual = row_of(args.residual, r, args.residual_stride);
    one.out = alone.data();
    one.pre = nullptr;
    one.normalized = nullptr;
    one.inverse_std = nullptr;
    tier.fused.row_epilogue(one);
    FinishStores();
    ASSERT_EQ(std::memcmp(alone.data(), row_of(out.data(), r, out.stride()), static_cast<std::size_t>(args.columns * size)), 0)
        << "row " << r;
  }
}

/// @param transposed  whether the sums come as the direct form of GEMM gives them
void CheckEpilogue(const KernelTier& tier, DType dtype, std::int64_t columns, const EpilogueCase& c, bool stream,
                   bool transposed) {
  constexpr std::int64_t kRows = kEpilogueRows + 3;
  std::mt19937_64 random(static_cast<std::uint64_t>(columns));
  const std::int64_t ld = RoundUp(columns, 16) + 16;
  Dense sums = RandomValues(kRows, columns, random), vectors = RandomValues(3, columns, random);
  if (c.alone) {
    sums = Dense(kRows, columns);
    for (std::int64_t i = 0; i < columns; ++i) vectors(0, i) = 0;  // the bias
  }
  const Dense addend = RandomValues(kRows, columns, random), residual = RandomValues(kRows, columns, random);
  const Rows sum_rows(DType::kFloat32, sums, ld), vector_rows(DType::kFloat32, vectors, columns);
  const Rows addend_rows(dtype, addend, columns + 3), residual_rows(dtype, residual, columns + 5);
  const Rows out(dtype, kRows, columns, columns + 7), pre(dtype, kRows, columns, columns + 2);
  const Rows normalized(dtype, kRows, columns, columns);
  const PoisonedBuffer values(EpilogueScratch(columns) * 4), turned(16 * ld * 4);
  const Rows columns_of_sums(DType::kFloat32, Transposed(sums, RoundUp(columns, 16), 16), 32);
  float inverse_std[kRows];
  RowEpilogueArgs args;
  args.dtype = dtype;
  args.rows = kRows;
  args.columns = columns;
  args.sums = transposed ? turned.As<float>() : static_cast<float*>(sum_rows.data());
  if (c.alone) args.sums = nullptr;
  args.transposed = transposed ? static_cast<const float*>(columns_of_sums.data()) : nullptr;
  args.transposed_ld = columns_of_sums.stride();
  args.ld = ld;
  args.bias = static_cast<const float*>(vector_rows.data());
  args.gamma = args.bias + columns;
  args.beta = args.gamma + columns;
  args.addend = c.addend ? addend_rows.data() : nullptr;
  args.addend_stride = addend_rows.stride();
  args.residual = c.residual ? residual_rows.data() : nullptr;
  args.residual_stride = residual_rows.stride();
  args.activation = c.activation;
  args.norm = c.norm;
  args.epsilon = static_cast<float>(kEpsilon);
  args.values = values.As<float>();
  args.out = out.data();
  args.out_stride = out.stride();
  args.stream = stream;
  args.pre = c.alone ? nullptr : pre.data();
  args.pre_stride = pre.stride();
  if (c.norm != Norm::kNone) {
    args.normalized = normalized.data();
    args.inverse_std = inverse_std;
  }
  tier.fused.row_epilogue(args);
  FinishStores();
  ExpectSameBitsOfSingleRows(tier, args, out);
  out.ExpectGapsUntouched();
  pre.ExpectGapsUntouched();
  for (std::int64_t r = 0; r < kRows; ++r) {
    const Reference expected = Expected(c, sums, vectors, addend, residual, r);
    for (std::int64_t i = 0; i < columns; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ExpectNear(dtype, out(r, i), expected.out[at], "out", r, i);
      if (!c.alone) ExpectNear(dtype, pre(r, i), expected.pre[at], "pre", r, i);
      if (c.norm != Norm::kNone) ExpectNear(dtype, normalized(r, i), expected.normalized[at], "normalized", r, i);
    }
    if (c.norm != Norm::kNone) {
      ASSERT_NEAR(inverse_std[r], expected.inverse_std, 2e-6 * expected.inverse_std);
    }
  }
}

TEST_P(FusedKernelsTest, RowEpilogue) {
  const EpilogueCase cases[] = {
      {Activation::kNone, Norm::kLayerNorm, false, true},    {Activation::kGelu, Norm::kNone, false, false},
      {Activation::kGeluTanh, Norm::kRmsNorm, true, true},   {Activation::kGelu, Norm::kLayerNorm, true, false},
      {Activation::kGelu, Norm::kLayerNorm, false, true},    {Activation::kNone, Norm::kLayerNorm, false, true, true},
      {Activation::kNone, Norm::kRmsNorm, false, true, true}};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const EpilogueCase& c : cases) {
      for (const std::int64_t columns : {2, 7, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 770}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, dtype " << static_cast<int>(dtype));
        for (const bool stream : {false, true}) {
          CheckEpilogue(*tier_, dtype, columns, c, stream, false);
          if (!c.alone) CheckEpilogue(*tier_, dtype, columns, c, stream, true);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(FusedKernelsTest, NormBackward) {
  std::mt19937_64 random(2);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const Norm norm : {Norm::kLayerNorm, Norm::kRmsNorm}) {
      for (const std::int64_t columns : {3, 16, 45, 130}) {
        const Dense d_out = RandomValues(4, columns, random), normalized = RandomValues(4, columns, random);
        const Dense gamma = RandomValues(1, columns, random);
        const Rows d_out_rows(dtype, d_out, columns), normalized_rows(dtype, normalized, columns);
        const Rows gamma_row(DType::kFloat32, gamma, columns), d_in(dtype, 4, columns, columns);
        const float inverse_std[4] = {1.0f, 0.5f, 2.0f, 3.0f};
        std::vector<float> sums(static_cast<std::size_t>(2 * columns), 1.0f);  // added to
        NormBackwardArgs args;
        args.dtype = dtype;
        args.rows = 4;
        args.columns = columns;
        args.norm = norm;
        args.d_out = d_out_rows.data();
        args.normalized = normalized_rows.data();
        args.inverse_std = inverse_std;
        args.gamma = static_cast<const float*>(gamma_row.data());
        args.d_in = d_in.data();
        args.d_gamma = sums.data();
        args.d_beta = sums.data() + columns;
        tier_->fused.norm_backward(args);
        std::vector<double> d_gamma(static_cast<std::size_t>(columns), 1.0), d_beta(d_gamma);
        for (std::int64_t r = 0; r < 4; ++r) {
          double mean = 0, along = 0;
          for (std::int64_t c = 0; c < columns; ++c) {
            const double d = d_out(r, c), g = d * gamma(0, c);
            mean += norm == Norm::kLayerNorm ? g / static_cast<double>(columns) : 0.0;
            along += g * normalized(r, c) / static_cast<double>(columns);
            d_gamma[static_cast<std::size_t>(c)] += d * normalized(r, c);
            d_beta[static_cast<std::size_t>(c)] += d;
          }
          for (std::int64_t c = 0; c < columns; ++c) {
            const double expected = (static_cast<double>(d_out(r, c)) * gamma(0, c) - mean - normalized(r, c) * along);
            ExpectNear(dtype, d_in(r, c), expected * inverse_std[r], "d_in", r, c);
          }
        }
        for (std::int64_t c = 0; c < columns; ++c) {
          const auto at = static_cast<std::size_t>(c);
          ExpectNear(DType::kFloat32, sums[at], d_gamma[at], "d_gamma", 0, c);
          ExpectNear(DType::kFloat32, sums[at + static_cast<std::size_t>(columns)], d_beta[at], "d_beta", 0, c);
        }
      }
    }
  }
}

TEST_P(FusedKernelsTest, ActivationsAndTheirDerivatives) {
  Dense x(1, 1601);
  Dense ones(1, 1601);
  for (std::int64_t i = 0; i < x.cols; ++i) {
    x(0, i) = ToFloat(ToBFloat16(static_cast<float>(i - 800) / 80.0f));
    ones(0, i) = 1.0f;
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Rows x_row(dtype, x, x.cols), one_row(dtype, ones, x.cols), d_pre(dtype, 1, x.cols, x.cols);
    for (const Activation activation : {Activation::kGelu, Activation::kGeluTanh}) {
      ActivationBackwardArgs args;
      args.dtype = dtype;
      args.activation = activation;
      args.count = x.cols;
      args.d_out = one_row.data();
      args.pre = x_row.data();
      args.d_pre = d_pre.data();
      tier_->fused.activation_backward(args);
      for (std::int64_t i = 0; i < x.cols; ++i) {
        ExpectNear(dtype, d_pre(0, i), Derivative(activation, x(0, i)), "d_pre", 0, i);
      }
    }
  }
}

/// GELU as the header promises it, at all that is not 0 or x: the erf form within 2e-7 |x|, and the tanh form likewise.
TEST_P(FusedKernelsTest, GeluIsExact) {
  constexpr std::int64_t kZero = 7000, kColumns = 2 * kZero + 1;
  Dense x(1, kColumns);
  for (std::int64_t i = 0; i < kColumns; ++i) x(0, i) = static_cast<float>(i - kZero) / 1000.0f;
  const std::vector<float> bias(kColumns, 0.0f);
  const Rows sums(DType::kFloat32, x, kColumns);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Rows out(dtype, 1, kColumns, kColumns);
    for (const Activation activation : {Activation::kGelu, Activation::kGeluTanh}) {
      RowEpilogueArgs args;
      args.dtype = dtype;
      args.rows = 1;
      args.columns = kColumns;
      args.sums = static_cast<float*>(sums.data());
      args.ld = kColumns;
      args.bias = bias.data();
      args.activation = activation;
      args.out = out.data();
      args.out_stride = kColumns;
      tier_->fused.row_epilogue(args);
      for (std::int64_t i = 0; i < kColumns; ++i) {
        const double expected = Apply(activation, x(0, i));
        const double rounding = dtype == DType::kBFloat16 ? 0x1p-8 * std::fabs(expected) : 0.0;
        ASSERT_NEAR(out(0, i), expected, 2e-7 * std::fabs(x(0, i)) + rounding * (1 + 1e-3)) << "x " << x(0, i);
      }
    }
  }
}

TEST_P(FusedKernelsTest, SiluMulAndItsBackward) {
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int64_t columns : {1, 15, 16, 33, 128, 131}) {
      for (const bool in_place : {false, true}) {
        const Dense x = RandomValues(3, 2 * columns, random), d = RandomValues(3, columns, random);
        const Rows x_rows(dtype, x, 2 * columns + 3), fresh(dtype, 3, columns, columns + 1), d_rows(dtype, d, columns);
        const Rows d_x(dtype, 3, 2 * columns, 2 * columns);
        const std::int64_t size = SizeOf(dtype);
        SiluMulBackwardArgs backward;
        backward.dtype = dtype;
        backward.rows = 3;
        backward.columns = columns;
        backward.d_out = d_rows.data();
        backward.out_stride = columns;
        backward.gate = x_rows.data();
        backward.up = static_cast<const char*>(x_rows.data()) + columns * size;
        backward.in_stride = x_rows.stride();
        backward.d_gate = d_x.data();
        backward.d_up = static_cast<char*>(d_x.data()) + columns * size;
        backward.d_in_stride = d_x.stride();
        tier_->fused.silu_mul_backward(backward);
        SiluMulArgs args;
        args.dtype = dtype;
        args.rows = 3;
        args.columns = columns;
        args.gate = backward.gate;
        args.up = backward.up;
        args.in_stride = x_rows.stride();
        args.out = in_place ? x_rows.data() : fresh.data();
        args.out_stride = in_place ? x_rows.stride() : fresh.stride();
        args.stream = !in_place;
        tier_->fused.silu_mul(args);
        FinishStores();
        const Rows& out = in_place ? x_rows : fresh;
        out.ExpectGapsUntouched();
        for (std::int64_t r = 0; r < 3; ++r) {
          for (std::int64_t c = 0; c < columns; ++c) {
            const double g = x(r, c), u = x(r, columns + c), s = Sigmoid(g);
            ExpectNear(dtype, out(r, c), g * s * u, "out", r, c, 1.2e-4);
            ExpectNear(dtype, d_x(r, c), d(r, c) * u * s * (1 + g * (1 - s)), "d_gate", r, c);
            ExpectNear(dtype, d_x(r, columns + c), d(r, c) * g * s, "d_up", r, c);
          }
        }
      }
    }
  }
}

/// A layer of integers, whose sums are exact: [rows, k] x [n, k]^T, or [rows, n] x [n, k].
/// With a norm, what lies before it.
void CheckExactLinear(DType dtype, std::int64_t rows, std::int64_t n, std::int64_t k, bool transposed, Norm norm,
                      threadpool::Pool& pool) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rows + n + k));
  const Dense weight = RandomIntegers(n, k, random), x = RandomIntegers(rows, transposed ? n : k, random);
  const Rows weight_rows(dtype, weight, k), x_rows(dtype, x, x.cols + 3);
  const std::int64_t columns = transposed ? k : n;
  const fused::PackedMatrix packed(weight_rows.view(), pool);
  const bool has_norm = norm != Norm::kNone;
  const Rows result(dtype, rows, columns, has_norm ? columns : columns + 5), out(dtype, rows, columns, columns);
  fused::LinearArgs args;
  args.x = x_rows.view();
  args.weight = &packed;
  args.transposed = transposed;
  args.norm = norm;
  args.out = has_norm ? out.view() : result.view();
  if (has_norm) args.pre = result.view();
  fused::Linear(args, pool);
  result.ExpectGapsUntouched();
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::int64_t i = 0; i < x.cols; ++i)
        sum += static_cast<double>(x(r, i)) * (transposed ? weight(i, c) : weight(c, i));
      const auto exact = static_cast<float>(sum);
      ASSERT_EQ(result(r, c), dtype == DType::kFloat32 ? exact : ToFloat(ToBFloat16(exact))) << "row " << r << " column " << c;
    }
  }
}

TEST_P(FusedKernelsTest, Fp32Gemm) {
  threadpool::Pool pool(1);
  std::mt19937_64 random(4);
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {17, 33}, {64, 300}, {150, 70}}) {
    const Dense weight = RandomIntegers(n, k, random);
    const Rows weight_rows(DType::kFloat32, weight, k);
    const fused::PackedMatrix packed(weight_rows.view(), pool);
    for (const bool transposed : {false, true}) {
      for (const std::int64_t rows : {1, 5, 8, 19}) {
        const Dense x = RandomIntegers(rows, transposed ? n : k, random);
        const Rows x_rows(DType::kFloat32, x, x.cols + 1);
        const std::int64_t columns = transposed ? k : n, ldc = RoundUp(columns, 16) + 16;
        const Rows c(DType::kFloat32, rows, columns, ldc);
        const PoisonedBuffer scratch(kFp32GemmScratch * 4);
        Fp32GemmArgs args;
        args.a = static_cast<const float*>(x_rows.data());
        args.lda = x_rows.stride();
        args.rows = rows;
        args.panels = packed.panels();
        args.n = n;
        args.k = k;
        args.transposed = transposed;
        args.count = CeilDiv(columns, 16);
        args.c = static_cast<float*>(c.data());
        args.ldc = ldc;
        args.scratch = scratch.As<float>();
        tier_->fused.fp32_gemm(args);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t j = 0; j < columns; ++j) {
            double sum = 0;
            for (std::int64_t i = 0; i < x.cols; ++i) {
              sum += static_cast<double>(x(r, i)) * (transposed ? weight(i, j) : weight(j, i));
            }
            ASSERT_EQ(c(r, j), static_cast<float>(sum)) << "row " << r << " column " << j;
          }
          for (std::int64_t j = RoundUp(columns, 16); j < ldc; ++j) ASSERT_TRUE(std::isnan(c(r, j)));
        }
      }
    }
  }
}

class FusedProductsTest : public ForcedTierTest {};

TEST_P(FusedProductsTest, ExactOfEverySizeAndDivision) {
  threadpool::Pool one(1), many(5);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const bool transposed : {false, true}) {
      for (const std::int64_t rows : {1, 17, 70, 300}) {
        // The contractions of 768 and 1,300 are several slices on a matrix unit.
        for (const auto& [n, k] :
             {std::pair<std::int64_t, std::int64_t>{1, 1}, {33, 130}, {130, 47}, {600, 290}, {70, 768}, {33, 1300}}) {
          for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
            SCOPED_TRACE(testing::Message()
                         << "[" << n << ", " << k << "], " << rows << " rows" << (transposed ? ", transposed" : ""));
            CheckExactLinear(dtype, rows, n, k, transposed, norm, rows == 300 && n == 600 ? one : many);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
    // More than the caches hold, in rows that are no whole lines.
    CheckExactLinear(dtype, 3000, 770, 33, false, Norm::kNone, one);
  }
}

MOESAIC_TEST_ON_EVERY_TIER(FusedKernelsTest);
MOESAIC_TEST_ON_EVERY_TIER(FusedProductsTest);

TEST(FusedLayerTest, UnpacksWhatWasPacked) {
  threadpool::Pool pool(2);
  std::mt19937_64 random(5);
  const Dense weight = RandomValues(37, 75, random);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Rows rows(dtype, weight, 80), back(dtype, 37, 75, 76);
    fused::PackedMatrix(rows.view(), pool).Unpack(back.view(), pool);
    back.ExpectGapsUntouched();
    for (std::int64_t r = 0; r < 37; ++r) {
      for (std::int64_t c = 0; c < 75; ++c) ASSERT_EQ(back(r, c), weight(r, c));
    }
  }
}

TEST(FusedLayerTest, SameBitsForEveryDivision) {
  struct Case {
    std::int64_t rows, columns, depth;
    Norm norm;
    bool transposed;
  };
  std::mt19937_64 random(6);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    // Of the last two two threads divide the last blocks by columns: with a norm, which waits for these, and without.
    for (const auto& [rows, columns, depth, norm, transposed] : {Case{3, 290, 530, Norm::kLayerNorm, false},
                                                                 {45, 290, 530, Norm::kLayerNorm, false},
                                                                 {333, 290, 530, Norm::kLayerNorm, false},
                                                                 {700, 800, 3200, Norm::kLayerNorm, false},
                                                                 {700, 800, 3200, Norm::kNone, false},
                                                                 {1200, 800, 3200, Norm::kNone, true}}) {
      const Dense weight = transposed ? RandomValues(depth, columns, random) : RandomValues(columns, depth, random),
                  x = RandomValues(rows, depth, random), r = RandomValues(rows, columns, random);
      const Rows weight_rows(dtype, weight, weight.cols), x_rows(dtype, x, depth), residual(dtype, r, columns);
      std::vector<Rows> results;
      for (const int threads : {1, 2, 7, 40}) {
        threadpool::Pool pool(threads);
        const fused::PackedMatrix packed(weight_rows.view(), pool);
        results.emplace_back(dtype, rows, columns, columns);
        fused::LinearArgs args;
        args.x = x_rows.view();
        args.weight = &packed;
        args.residual = residual.view();
        args.norm = norm;
        args.transposed = transposed;
        args.activation = Activation::kGelu;
        args.epsilon = 1e-12f;
        args.out = results.back().view();
        fused::Linear(args, pool);
        const auto bytes = static_cast<std::size_t>(rows * columns * SizeOf(dtype));
        ASSERT_EQ(std::memcmp(results.back().data(), results.front().data(), bytes), 0)
            << rows << " rows, " << threads << " threads";
      }
    }
  }
}

TEST(FusedLayerTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(1);
  const Rows weight(DType::kFloat32, Dense(8, 16), 16), x(DType::kFloat32, Dense(4, 16), 16), out(DType::kFloat32, 4, 8, 8);
  const Rows low(DType::kBFloat16, Dense(4, 16), 16);
  const fused::PackedMatrix packed(weight.view(), pool);
  fused::LinearArgs args;
  args.weight = &packed;
  args.x = x.view();
  args.out = x.view();
  EXPECT_THROW(fused::Linear(args, pool), std::invalid_argument);
  args.out = out.view();
  args.residual = x.view();
  EXPECT_THROW(fused::Linear(args, pool), std::invalid_argument);
  args.residual = TensorView();
  args.x = low.view();
  EXPECT_THROW(fused::Linear(args, pool), std::invalid_argument);
  args.x = x.view();
  args.epsilon = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(fused::Linear(args, pool), std::invalid_argument);
  args.epsilon = 0;
  EXPECT_NO_THROW(fused::Linear(args, pool));
  TensorView vector = x.view();
  vector.rank = 1;
  EXPECT_THROW(fused::PackedMatrix(vector, pool), std::invalid_argument);
}

TEST(FusedLayerTest, RefusalsNameBothTypes) {
  threadpool::Pool pool(1);
  const Rows weight(DType::kFloat32, Dense(8, 16), 16), low(DType::kBFloat16, Dense(8, 16), 16);
  const fused::PackedMatrix packed(weight.view(), pool);
  const auto refusal = [](auto call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  TensorView half = low.view();
  half.dtype = DType::kFloat16;
  EXPECT_EQ(refusal([&] { const fused::PackedMatrix of_half(half, pool); }), "weight is float16; expected bfloat16 or float32");
  EXPECT_EQ(refusal([&] { packed.Unpack(low.view(), pool); }),
            "weight has shape [8, 16] of bfloat16; expected [8, 16] of float32, as was packed");
  fused::NormGradArgs grad;
  grad.d_out = weight.view();
  grad.normalized = low.view();
  EXPECT_EQ(refusal([&] { fused::NormGrad(grad, pool); }), "normalized is bfloat16; expected float32, as d_out");
}

}  // namespace
}  // namespace moesaic
