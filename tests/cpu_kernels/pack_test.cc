// Matrices to tiles and back: by PackPanel and UnpackPanel for weights, by each tier's PackRows for activations.
#include "cpu_kernels/gemm/pack.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "cpu_kernels/float16.h"
#include "cpu_kernels/tensor_access.h"
#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

/// A strided matrix that owns its memory; gaps hold NaN.
struct Strided {
  std::vector<std::byte> bytes;
  MatrixView view;

  Strided(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t row_stride, std::int64_t column_stride)
      : bytes(static_cast<std::size_t>(((rows - 1) * row_stride + (columns - 1) * column_stride + 1) * SizeOf(dtype)),
              std::byte{0xff}),
        view{bytes.data(), dtype, rows, columns, row_stride, column_stride} {}

  TensorView tensor() const {
    return {view.data, view.dtype, 2, {view.rows, view.columns, 0}, {view.row_stride, view.column_stride, 0}};
  }
};

struct PackCase {
  std::int64_t rows;
  std::int64_t columns;
  bool column_major;
  std::int64_t gap;
};

TEST(Pack, PanelsHoldTheMatrixAndZerosAround) {
  std::mt19937_64 random(1);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const PackCase& c : {PackCase{1, 1, false, 0}, PackCase{16, 32, false, 0}, PackCase{37, 300, false, 5},
                              PackCase{150, 70, true, 0}, PackCase{33, 33, true, 3}}) {
      SCOPED_TRACE(testing::Message() << c.rows << " x " << c.columns << " type " << static_cast<int>(dtype));
      const std::int64_t ld = (c.column_major ? c.rows : c.columns) + c.gap;
      Strided source(dtype, c.rows, c.columns, c.column_major ? 1 : ld, c.column_major ? ld : 1);
      const Dense values = RandomValues(c.rows, c.columns, random);
      for (std::int64_t i = 0; i < c.rows; ++i) {
        // A value in fp32 or fp16 that bf16 must round: ties go to even, by ToBFloat16.
        for (std::int64_t j = 0; j < c.columns; ++j) StoreFloat(source.tensor(), i, j, 0, values(i, j) * 1.0078125f);
      }
      Tiles tiles(Order::kStored, c.rows, c.columns, true);
      std::memset(tiles.matrix().data, 0xff, static_cast<std::size_t>(tiles.matrix().size()) * sizeof(BFloat16));
      std::vector<float> scratch(static_cast<std::size_t>(16 * tiles.matrix().columns * 32));
      for (std::int64_t p = 0; p < tiles.matrix().panels; ++p) PackPanel(source.view, p, tiles.matrix(), scratch.data());
      for (std::int64_t i = 0; i < tiles.matrix().panels * 16; ++i) {
        for (std::int64_t j = 0; j < tiles.matrix().columns * 32; ++j) {
          const bool inside = i < c.rows && j < c.columns;
          const float expected = inside ? ToFloat(ToBFloat16(LoadFloat(source.tensor(), i, j))) : 0.0f;
          ASSERT_EQ(tiles.Get(i, j), expected) << i << ", " << j;
        }
      }

      Strided back(dtype, c.rows, c.columns, source.view.row_stride, source.view.column_stride);
      Strided expected_back = back;
      expected_back.view.data = expected_back.bytes.data();
      for (std::int64_t i = 0; i < c.rows; ++i) {
        for (std::int64_t j = 0; j < c.columns; ++j) StoreFloat(expected_back.tensor(), i, j, 0, tiles.Get(i, j));
      }
      for (std::int64_t p = 0; p < tiles.matrix().panels; ++p) UnpackPanel(tiles.matrix(), p, back.view);
      EXPECT_EQ(back.bytes, expected_back.bytes);
    }
  }
}

TEST(Pack, TransposedViewSwapsRowsAndColumns) {
  float values[6] = {0, 1, 2, 3, 4, 5};
  const MatrixView view{values, DType::kFloat32, 2, 3, 3, 1};
  float block[6];
  LoadBlock(view.Transposed(), 0, 3, 0, 2, block, 2);
  EXPECT_EQ(std::vector<float>(block, block + 6), (std::vector<float>{0, 3, 1, 4, 2, 5}));
}

// Every fp16 number survives the way through fp32 and back, and numbers between two of them go to the nearest, ties to even.
TEST(Float16, AllValues) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const float value = ToFloat(half);
    const std::uint32_t exponent = bits >> 10 & 0x1f;
    const std::uint32_t fraction = bits & 0x3ff;
    if (exponent == 0x1f && fraction != 0) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(std::isnan(ToFloat(ToFloat16(value))));
      continue;
    }
    double expected = exponent == 0x1f ? std::numeric_limits<double>::infinity()
                                       : std::ldexp(exponent == 0 ? fraction : 1024 + fraction,
                                                    static_cast<int>(std::max(exponent, 1u)) - 25);
    if (bits & 0x8000) expected = -expected;
    ASSERT_EQ(value, expected);
    ASSERT_EQ(ToFloat16(value).bits, half.bits);
    if ((bits & 0x7fff) >= 0x7bff) continue;  // beyond the largest number there is no next one to be halfway to
    const float next = ToFloat(Float16{static_cast<std::uint16_t>(bits + 1)});
    const float middle = (value + next) / 2.0f;
    const std::uint16_t even = static_cast<std::uint16_t>(bits + (bits & 1));
    ASSERT_EQ(ToFloat16(middle).bits, even) << bits;
    ASSERT_EQ(ToFloat16(std::nextafter(middle, value)).bits, bits);
    ASSERT_EQ(ToFloat16(std::nextafter(middle, next)).bits, bits + 1);
  }
  EXPECT_EQ(ToFloat16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(ToFloat16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(ToFloat16(-1e30f).bits, 0xfc00);
}

class PackRowsTest : public TierTest {};

TEST_P(PackRowsTest, AllOrdersAndScales) {
  std::mt19937_64 random(2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [count, columns] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {16, 32}, {17, 31}, {40, 100}, {5, 257}, {20, 12}}) {
      for (const bool scaled : {false, true}) {
        SCOPED_TRACE(testing::Message() << count << " x " << columns << " type " << static_cast<int>(dtype)
                                        << (scaled ? " scaled" : ""));
        const bool repeat = columns == 12;
        Strided source(dtype, count, columns, columns + 3, 1);
        std::vector<const void*> rows;
        Dense expected(RoundUp(count, 32), RoundUp(columns, 32));
        std::vector<float> row_scale;
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < count; ++i) row_scale.push_back(normal(random));
        for (std::int64_t i = 0; i < count; ++i) {
          const bool missing = i % 7 == 3;
          const char* row = static_cast<const char*>(source.view.data) + i * source.view.row_stride * SizeOf(dtype);
          rows.push_back(missing ? nullptr : row);
          for (std::int64_t j = 0; j < columns; ++j) {
            StoreFloat(source.tensor(), i, j, 0, normal(random));
            float value = missing ? 0.0f : LoadFloat(source.tensor(), i, j);
            const float scale = scaled ? row_scale[static_cast<std::size_t>(i)] : 1.0f;
            expected(i, j) = ToFloat(ToBFloat16(value * scale));
            if (repeat) expected(i, 16 + j) = expected(i, j);
          }
        }
        Tiles stored(Order::kStored, expected.rows, columns, false);
        Tiles operand(Order::kOperand, expected.rows, columns, false);
        Tiles pairs(Order::kPairs, expected.rows, columns, false);
        Tiles row_pairs(Order::kRowPairs, count, columns, false);
        for (const Tiles* tiles : {&stored, &operand, &pairs, &row_pairs}) {
          std::memset(tiles->matrix().data, 0xff, static_cast<std::size_t>(tiles->matrix().size()) * sizeof(BFloat16));
        }
        PackRowsArgs args;
        args.dtype = dtype;
        args.columns = columns;
        args.repeat = repeat;
        args.panels = RoundUp(count, 32) / 16;
        args.stored = stored.matrix();
        args.operand = operand.matrix();
        args.pairs = pairs.matrix();
        args.row_pairs = row_pairs.matrix();
        // Two ranges of columns and two of panels, as four tasks would do them.
        const std::int64_t all_columns = stored.matrix().columns, all_panels = args.panels;
        for (const std::int64_t panel : {0, 1}) {
          args.rows = rows.data() + std::min(panel * kPanelRows, count);
          args.row_scale = scaled ? row_scale.data() + std::min(panel * kPanelRows, count) : nullptr;
          args.count = std::max<std::int64_t>(count - panel * kPanelRows, 0);
          if (panel == 0) args.count = std::min(count, kPanelRows);
          args.first_panel = panel;
          args.panels = panel == 0 ? 1 : all_panels - 1;
          args.first_column = 0;
          args.tile_columns = all_columns / 2;
          tier_->pack_rows(args);
          args.first_column = args.tile_columns;
          args.tile_columns = all_columns - args.first_column;
          tier_->pack_rows(args);
        }
        for (std::int64_t i = 0; i < expected.rows; ++i) {
          for (std::int64_t j = 0; j < expected.cols; ++j) {
            ASSERT_EQ(stored.Get(i, j), expected(i, j)) << i << ", " << j;
            ASSERT_EQ(operand.Get(i, j), stored.Get(i, j)) << i << ", " << j;
            ASSERT_EQ(pairs.Get(i, j), stored.Get(i, j)) << i << ", " << j;
            ASSERT_EQ(row_pairs.Get(i, j), stored.Get(i, j)) << i << ", " << j;
          }
        }
      }
    }
  }
}

// Of weights, panel by panel, on rows that are there, missing or `next`: as beside another order, which takes another way.
TEST_P(PackRowsTest, WeightsRowByRow) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::int64_t count = 40, columns = 420;
    Strided source(dtype, 48, columns, columns + 1, 1);
    std::vector<const void*> rows;
    for (std::int64_t i = 0; i < 48; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) StoreFloat(source.tensor(), i, j, 0, normal(random));
      const char* row = static_cast<const char*>(source.view.data) + i * source.view.row_stride * SizeOf(dtype);
      rows.push_back(i % 7 == 3 ? nullptr : row);
    }
    Tiles weights(Order::kStored, 160, columns, true), again(Order::kStored, 160, columns, true);
    Tiles operand(Order::kOperand, 160, columns, false);
    for (const Tiles* tiles : {&weights, &again}) {
      std::memset(tiles->matrix().data, 0xff, static_cast<std::size_t>(tiles->matrix().size()) * sizeof(BFloat16));
    }
    for (const bool alone : {true, false}) {
      PackRowsArgs args;
      args.rows = rows.data();
      args.dtype = dtype;
      args.count = count;
      args.next = alone ? rows[static_cast<std::size_t>(count)] : nullptr;
      args.columns = columns;
      args.stored = (alone ? weights : again).matrix();
      if (!alone) args.operand = operand.matrix();
      args.first_panel = 6;  // the last panels of a superblock, and the first ones of the next
      args.panels = 4;
      for (const auto& [first, end] : {std::pair{0, 5}, std::pair{5, 14}}) {
        args.first_column = first;
        args.tile_columns = end - first;
        tier_->pack_rows(args);
      }
    }
    for (std::int64_t i = 0; i < 64; ++i) {
      const bool there = i < count && rows[static_cast<std::size_t>(i)] != nullptr;
      for (std::int64_t j = 0; j < RoundUp(columns, 32); ++j) {
        const float expected = there && j < columns ? ToFloat(ToBFloat16(LoadFloat(source.tensor(), i, j))) : 0.0f;
        ASSERT_EQ(weights.Get(96 + i, j), expected) << i << ", " << j;
      }
    }
    ASSERT_EQ(std::memcmp(weights.matrix().data, again.matrix().data,
                          static_cast<std::size_t>(weights.matrix().size()) * sizeof(BFloat16)),
              0);
  }
}

MOESAIC_TEST_ON_EVERY_TIER(PackRowsTest);

class TransposePairsTest : public TierTest {};

TEST_P(TransposePairsTest, RowsBecomeColumnsAndZeros) {
  for (const auto& [order, rows] : std::to_array<std::pair<Order, std::int64_t>>(
           {{Order::kPairs, 1}, {Order::kPairs, 16}, {Order::kPairs, 17}, {Order::kPairs, 48}, {Order::kStored, 48}})) {
    Tiles pairs(order, rows, 96, false);
    for (std::int64_t i = 0; i < pairs.matrix().panels * kPanelRows; ++i) {
      for (std::int64_t j = 0; j < 96; ++j) pairs.Set(i, j, ToFloat(ToBFloat16(static_cast<float>(i * 96 + j))));
    }
    Tiles transposed(Order::kOperand, 32, rows, false);
    for (std::int64_t column = 0; column < 3; ++column) {
      std::memset(transposed.matrix().data, 0xff, static_cast<std::size_t>(transposed.matrix().size()) * sizeof(BFloat16));
      tier_->transpose_pairs({pairs.matrix(), order == Order::kStored, column, transposed.matrix()});
      for (std::int64_t j = 0; j < 32; ++j) {
        for (std::int64_t i = 0; i < RoundUp(rows, 32); ++i) {
          const bool there = i < pairs.matrix().panels * kPanelRows;
          const float expected = there ? ToFloat(ToBFloat16(static_cast<float>(i * 96 + column * 32 + j))) : 0.0f;
          ASSERT_EQ(transposed.Get(j, i), expected) << rows << " rows, column " << column << ": " << j << ", " << i;
        }
      }
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(TransposePairsTest);

}  // namespace
}  // namespace moesaic
