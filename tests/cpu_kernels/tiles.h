// Matrices of tiles for the kernel tests, laid out from the definition in gemm/tiles.h and not by the code under test.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/bfloat16.h"
#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/kernels.h"

namespace moesaic {

/// A row-major matrix of floats that bf16 represents exactly.
struct Dense {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> values;

  Dense() = default;
  Dense(std::int64_t rows, std::int64_t cols) : rows(rows), cols(cols), values(static_cast<std::size_t>(rows * cols)) {}
  float& operator()(std::int64_t i, std::int64_t j) { return values[static_cast<std::size_t>(i * cols + j)]; }
  float operator()(std::int64_t i, std::int64_t j) const { return values[static_cast<std::size_t>(i * cols + j)]; }
};

/// Integers in [-4, 4]: sums of up to 2^20 products are exact in fp32, whatever the order.
Dense RandomIntegers(std::int64_t rows, std::int64_t cols, std::mt19937_64& random);
/// Roughly normal values, rounded to bf16.
Dense RandomValues(std::int64_t rows, std::int64_t cols, std::mt19937_64& random);

enum class Order { kStored, kOperand, kPairs, kRowPairs };

/// Where element (row, column) of a tile lies in it; kRowPairs: of 32 rows and 16 columns.
std::int64_t PositionInTile(Order order, std::int64_t row, std::int64_t column);

/// Memory with the value of every float and bf16 in it NaN, 64-byte aligned.
class PoisonedBuffer {
 public:
  explicit PoisonedBuffer(std::int64_t bytes);
  template <typename T>
  T* As() const {
    return static_cast<T*>(buffer_.data());
  }

 private:
  AlignedBuffer buffer_;
};

/// A matrix of tiles and its memory. Starts as zeros.
class Tiles {
 public:
  /// @param superblocks  as weights are laid out; else as activations are
  Tiles(Order order, std::int64_t rows, std::int64_t cols, bool superblocks);
  Tiles(Order order, const Dense& values, bool superblocks);

  void Set(std::int64_t row, std::int64_t col, float value);
  float Get(std::int64_t row, std::int64_t col) const;
  const TileMatrix& matrix() const { return matrix_; }

 private:
  BFloat16& At(std::int64_t row, std::int64_t col) const;

  Order order_;
  AlignedBuffer buffer_;
  TileMatrix matrix_;
};

/// KernelTiers(), and the avx512 tier's cell compiled for the baseline.
std::span<const KernelTier* const> TestedTiers();

/// For gtest's parameter names: "portable_2" for the third entry of TestedTiers().
std::string TierLabel(std::size_t index);

/// A test that runs on each entry of TestedTiers(), by index, and is skipped visibly where the host cannot run it.
class TierTest : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    tier_ = TestedTiers()[GetParam()];
    if (!tier_->runs_here()) GTEST_SKIP() << tier_->name << " does not run on this host";
  }
  const KernelTier* tier_ = nullptr;
};

/// The same for code that asks for the tier in use; entries that cannot be it on this host are skipped.
class ForcedTierTest : public TierTest {
 protected:
  void SetUp() override;
  void TearDown() override;
};

/// Instantiates a TierTest for every entry.
#define MOESAIC_TEST_ON_EVERY_TIER(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(Tiers, suite, testing::Range<std::size_t>(0, TestedTiers().size()), \
                           [](const auto& info) { return TierLabel(info.param); })

}  // namespace moesaic
