#include "cpu_kernels/fused/rotary.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_kernels/fused/checks.h"
#include "cpu_kernels/fused/ranges.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::fused {
namespace {

void Validate(const RotaryArgs& args) {
  CheckMatrix(args.x, "x");
  const std::int64_t tokens = args.x.shape[0], columns = args.x.shape[1];
  Check(args.x, "x", tokens, columns, args.x.dtype);
  CheckMatrix(args.cos, "cos");
  const std::int64_t rows = args.cos.shape[0], size = args.cos.shape[1];
  if (size < 1 || size % 32 != 0 || columns % size != 0) {
    throw std::invalid_argument("cos has " + std::to_string(size) + " columns; expected a multiple of 32 that divides x's " +
                                std::to_string(columns));
  }
  if (tokens > 0 && (rows < 1 || tokens % rows != 0)) {
    throw std::invalid_argument("cos has " + std::to_string(rows) + " rows; expected a divisor of x's " +
                                std::to_string(tokens));
  }
  Check(args.cos, "cos", rows, size, args.x.dtype);
  Check(args.sin, "sin", rows, size, args.x.dtype);
  Check(args.out, "out", tokens, columns, args.x.dtype);
}

}  // namespace

void Rotary(const RotaryArgs& args, threadpool::Pool& pool) {
  Validate(args);
  const std::int64_t tokens = args.x.shape[0], columns = args.x.shape[1];
  if (tokens == 0 || columns == 0) return;
  const std::int64_t row_bytes = 2 * columns * SizeOf(args.x.dtype);
  const std::int64_t step = RowsPerTask(row_bytes);
  const KernelTier& kernels = ChosenKernels();
  pool.ParallelFor(CeilDiv(tokens, step), [&](std::int64_t i, int) {
    const std::int64_t first = i * step, end = std::min(first + step, tokens);
    const FusedRange range(args.back ? FusedStage::kBackwardRotary : FusedStage::kRotary, 0.0,
                           static_cast<double>((end - first) * row_bytes));
    RotateArgs rotate;
    rotate.dtype = args.x.dtype;
    rotate.size = args.cos.shape[1];
    rotate.count = columns / rotate.size;
    rotate.back = args.back;
    for (std::int64_t t = first; t < end; ++t) {
      rotate.x = AddressOf(args.x, t, 0);
      rotate.out = AddressOf(args.out, t, 0);
      rotate.cos = AddressOf(args.cos, t % args.cos.shape[0], 0);
      rotate.sin = AddressOf(args.sin, t % args.cos.shape[0], 0);
      kernels.fused.rotate(rotate);
    }
  });
}

}  // namespace moesaic::fused
