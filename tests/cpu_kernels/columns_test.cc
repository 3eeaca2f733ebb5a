// PackColumns, StoreColumns and StoreRows on every tier, bit by bit against their formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

constexpr BFloat16 kPoison{0xffff};

class ColumnsTest : public TierTest {
 protected:
  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  /// Any normal number, zero, infinity or a quiet NaN; often halfway between two of bf16.
  float AnyFloat() {
    constexpr float kSpecial[] = {0.0f, -0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
    if (Below(10) == 0) return kSpecial[Below(4)];
    std::uint32_t bits = static_cast<std::uint32_t>(random_());
    if (Below(3) == 0) bits = (bits & 0xffff0000u) | 0x8000u;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return std::isnormal(value) ? value : 1.5f;
  }
  std::mt19937_64 random_{11};
};

TEST_P(ColumnsTest, PackColumns) {
  for (int trial = 0; trial < 300; ++trial) {
    PackColumnsArgs args;
    args.dtype = trial % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
    args.width = trial % 2 == 0 ? 16 : 1 + Below(16);
    args.steps = 1 + Below(5);
    args.out_step = kTileColumns * (1 + Below(3));
    args.repeat = trial % 5 == 0;
    args.ahead = Below(1000);
    const std::int64_t count = 1 + Below(args.repeat ? 16 : kTileColumns);
    // Exactly the memory that the vectors cover: a sanitizer sees a read beyond it.
    std::vector<std::vector<float>> values(kTileColumns);
    std::vector<std::vector<BFloat16>> rounded(kTileColumns);
    for (std::int64_t j = 0; j < count; ++j) {
      if (Below(8) == 0) continue;
      args.step[j] = args.width + Below(3);
      const std::int64_t size = (args.steps - 1) * args.step[j] + args.width;
      for (std::int64_t k = 0; k < size; ++k) {
        values[j].push_back(AnyFloat());
        rounded[j].push_back(ToBFloat16(values[j].back()));
      }
      args.columns[j] = args.dtype == DType::kFloat32 ? static_cast<void*>(values[j].data()) : rounded[j].data();
    }
    const std::int64_t pitch = args.steps * args.out_step;
    const PoisonedBuffer out(16 * pitch * 2);
    for (int x = 0; x < 16; ++x) args.out[x] = Below(5) == 0 ? nullptr : out.As<BFloat16>() + x * pitch;
    tier_->pack_columns(args);
    for (std::int64_t x = 0; x < 16; ++x) {
      for (std::int64_t k = 0; k < pitch; ++k) {
        const std::int64_t s = k / args.out_step;
        BFloat16 expected = kPoison;
        if (args.out[x] != nullptr && k % args.out_step < kTileColumns) {
          expected = {0};
          for (std::int64_t j = 0; j < kTileColumns; ++j) {
            const std::int64_t from = args.repeat ? j % 16 : j;
            if (StoredPosition(j) != k % args.out_step || args.columns[from] == nullptr || x >= args.width) continue;
            expected = rounded[from][s * args.step[from] + x];
          }
        }
        ASSERT_EQ(out.As<BFloat16>()[x * pitch + k].bits, expected.bits) << "trial " << trial << " row " << x << " at " << k;
      }
    }
  }
}

/// Memory for results as fp32 or bf16, some elements off the grid of cache lines.
struct Output {
  PoisonedBuffer memory;
  DType dtype;
  std::int64_t size;
  std::vector<float> expected;  ///< NaN with all bits set where nothing is written
  std::vector<bool> written;
  std::int64_t first;

  Output(DType dtype, std::int64_t size, std::int64_t first)
      : memory((first + size) * 4 + 64), dtype(dtype), size(size), expected(size), written(size), first(first) {}
  void* data() const { return memory.As<char>() + first * SizeOf(dtype); }
  void Expect(std::int64_t at, float value) {
    expected[at] = value;
    written[at] = true;
  }
  void Check() const {
    for (std::int64_t k = 0; k < size; ++k) {
      if (dtype == DType::kFloat32) {
        std::uint32_t bits = 0xffffffffu, wanted = 0xffffffffu;
        std::memcpy(&bits, static_cast<const float*>(data()) + k, 4);
        if (written[k]) std::memcpy(&wanted, &expected[k], 4);
        ASSERT_EQ(bits, wanted) << "at " << k;
      } else {
        ASSERT_EQ(static_cast<const BFloat16*>(data())[k].bits, written[k] ? ToBFloat16(expected[k]).bits : 0xffff)
            << "at " << k;
      }
    }
  }
};

TEST_P(ColumnsTest, StoreColumns) {
  for (int trial = 0; trial < 300; ++trial) {
    StoreColumnsArgs args;
    args.dtype = trial % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
    args.width = trial % 2 == 0 ? 16 : 1 + Below(16);
    args.count = 1 + Below(40);
    args.steps = 1 + Below(4);
    args.row_step = args.count + Below(3);
    args.column_stride = trial % 4 == 0 ? 16 : args.width + Below(4);
    args.out_step = args.column_stride * args.count + (trial % 4 == 0 ? 0 : Below(20));
    std::vector<std::vector<float>> rows(16);
    for (std::int64_t x = 0; x < args.width; ++x) {
      if (Below(6) == 0) continue;
      for (std::int64_t k = 0; k < (args.steps - 1) * args.row_step + args.count; ++k) rows[x].push_back(AnyFloat());
      args.rows[x] = rows[x].data();
    }
    Output out(args.dtype, args.steps * args.out_step + 32, trial % 4 == 0 ? 0 : Below(16));
    args.out = out.data();
    tier_->store_columns(args);
    for (std::int64_t s = 0; s < args.steps; ++s) {
      for (std::int64_t j = 0; j < args.count; ++j) {
        for (std::int64_t x = 0; x < args.width; ++x) {
          out.Expect(s * args.out_step + j * args.column_stride + x,
                     args.rows[x] != nullptr ? args.rows[x][s * args.row_step + j] : 0.0f);
        }
      }
    }
    SCOPED_TRACE(testing::Message() << "trial " << trial << " width " << args.width << " count " << args.count);
    out.Check();
    if (HasFatalFailure()) return;
  }
}

TEST_P(ColumnsTest, StoreRows) {
  for (int trial = 0; trial < 200; ++trial) {
    StoreRowsArgs args;
    args.dtype = trial % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
    args.rows = 1 + Below(4);
    args.columns = trial % 2 == 0 ? 16 * (1 + Below(8)) : 1 + Below(100);
    args.ld = args.columns + Below(3);
    args.out_stride = args.columns + (trial % 4 == 0 ? 0 : Below(20));
    std::vector<float> in;
    for (std::int64_t k = 0; k < (args.rows - 1) * args.ld + args.columns; ++k) in.push_back(AnyFloat());
    if (Below(6) != 0) args.in = in.data();
    Output out(args.dtype, args.rows * args.out_stride + 32, trial % 4 == 0 ? 0 : Below(16));
    args.out = out.data();
    tier_->store_rows(args);
    for (std::int64_t i = 0; i < args.rows; ++i) {
      for (std::int64_t j = 0; j < args.columns; ++j) {
        out.Expect(i * args.out_stride + j, args.in != nullptr ? in[i * args.ld + j] : 0.0f);
      }
    }
    SCOPED_TRACE(testing::Message() << "trial " << trial << " " << args.rows << " x " << args.columns);
    out.Check();
    if (HasFatalFailure()) return;
  }
}

MOESAIC_TEST_ON_EVERY_TIER(ColumnsTest);

}  // namespace
}  // namespace moesaic
