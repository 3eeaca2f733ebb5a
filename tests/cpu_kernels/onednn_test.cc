// oneDNN as a second reference of both forms of GEMM, at sizes where the scalar loops would take too long.
#include <gtest/gtest.h>

#include <cmath>
#include <dnnl.hpp>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

using dnnl::memory;

/// a b, or a b^T. The operands are fp32 that hold bf16 numbers, because oneDNN has no bf16 product on hosts without AVX-512;
/// every product of two of them is exact in fp32.
Dense OneDnnProduct(const Dense& a, const Dense& b, bool transpose_b) {
  const std::int64_t columns = transpose_b ? b.rows : b.cols;
  Dense c(a.rows, columns);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const auto describe = [](std::int64_t rows, std::int64_t cols, const memory::dims& strides) {
    return memory::desc({rows, cols}, memory::data_type::f32, strides);
  };
  const memory::desc a_desc = describe(a.rows, a.cols, {a.cols, 1});
  const memory::desc b_desc = describe(a.cols, columns, transpose_b ? memory::dims{1, b.cols} : memory::dims{b.cols, 1});
  const memory::desc c_desc = describe(a.rows, columns, {columns, 1});
  const dnnl::matmul product(dnnl::matmul::primitive_desc(engine, a_desc, b_desc, c_desc));
  dnnl::stream stream(engine);
  product.execute(stream, {{DNNL_ARG_SRC, memory(a_desc, engine, const_cast<float*>(a.values.data()))},
                           {DNNL_ARG_WEIGHTS, memory(b_desc, engine, const_cast<float*>(b.values.data()))},
                           {DNNL_ARG_DST, memory(c_desc, engine, c.values.data())}});
  stream.wait();
  return c;
}

struct Shape {
  std::int64_t m, n, k;
};
const std::vector<Shape> kShapes = {{256, 300, 768}, {97, 129, 2048}, {768, 33, 515}, {16, 1000, 1000}};

/// Both sums err: by at most eps * sqrt(K) * |a| |b| each, with |a|, |b| the norms of the contracted rows, here sqrt(K) each
/// within a factor of two.
double Tolerance(const Shape& shape) {
  return 2.0 * 0x1p-23 * std::sqrt(static_cast<double>(shape.k)) * static_cast<double>(2 * shape.k);
}

class OneDnn : public TierTest {};

void ExpectEqual(const float* c, std::int64_t ldc, const Dense& expected, double tolerance) {
  for (std::int64_t i = 0; i < expected.rows; ++i) {
    for (std::int64_t j = 0; j < expected.cols; ++j) ASSERT_NEAR(c[i * ldc + j], expected(i, j), tolerance) << i << ", " << j;
  }
}

TEST_P(OneDnn, DirectForm) {
  std::mt19937_64 random(1);
  for (const Shape& shape : kShapes) {
    for (const bool integers : {true, false}) {
      SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k
                                      << (integers ? " integers" : " random"));
      const auto make = integers ? RandomIntegers : RandomValues;
      const Dense a = make(shape.m, shape.k, random);
      const Dense b = make(shape.n, shape.k, random);
      const Tiles weights(Order::kStored, a, true);
      const Tiles activations(Order::kPairs, b, false);
      const GemmSegment segment{weights.matrix(), activations.matrix()};
      DirectGemmArgs args;
      args.segments = {&segment, 1};
      args.panels = weights.matrix().panels;
      args.activation_panels = activations.matrix().panels;
      args.ldc = args.activation_panels * 16;
      const PoisonedBuffer c(args.panels * 16 * args.ldc * 4);
      args.c = c.As<float>();
      tier_->direct_gemm(args);
      ExpectEqual(args.c, args.ldc, OneDnnProduct(a, b, true), integers ? 0.0 : Tolerance(shape));
    }
  }
}

TEST_P(OneDnn, UnpackForm) {
  std::mt19937_64 random(2);
  for (const Shape& shape : kShapes) {
    for (const bool integers : {true, false}) {
      SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k
                                      << (integers ? " integers" : " random"));
      const auto make = integers ? RandomIntegers : RandomValues;
      const Dense a = make(shape.m, shape.k, random);
      const Dense b = make(shape.k, shape.n, random);
      const Tiles weights(Order::kStored, b, true);
      const Tiles activations(Order::kOperand, a, false);
      const GemmSegment segment{weights.matrix(), activations.matrix()};
      UnpackGemmArgs args;
      args.segments = {&segment, 1};
      args.panels = activations.matrix().panels;
      args.columns = weights.matrix().columns;
      args.ldc = args.columns * 32;
      const PoisonedBuffer scratch(UnpackScratchElements(args.segments) * 2);
      args.scratch = scratch.As<BFloat16>();
      const PoisonedBuffer c(args.panels * 16 * args.ldc * 4);
      args.c = c.As<float>();
      tier_->unpack_gemm(args);
      ExpectEqual(args.c, args.ldc, OneDnnProduct(a, b, false), integers ? 0.0 : Tolerance(shape));
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(OneDnn);

}  // namespace
}  // namespace moesaic
