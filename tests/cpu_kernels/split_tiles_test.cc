// Rank-wide intermediates in two bf16 parts.
#include "cpu_kernels/gemm/split_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

class SplitTilesTest : public TierTest {};

TEST_P(SplitTilesTest, PartsAddUpAndTheRestIsZero) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  for (const TileKind kind : {TileKind::kOperand, TileKind::kPairs, TileKind::kStored, TileKind::kRowPairs}) {
    const bool row_pairs = kind == TileKind::kRowPairs;
    const Order order = row_pairs                   ? Order::kRowPairs
                        : kind == TileKind::kPairs  ? Order::kPairs
                        : kind == TileKind::kStored ? Order::kStored
                                                    : Order::kOperand;
    for (const std::int64_t rows : {1, 16, 37}) {
      for (const std::int64_t rank : {1, 15, 16, 17, 33, 64}) {
        SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << ", " << rows << " x " << rank);
        const bool both = IsRankTwice(rank) && !row_pairs;  // in one tile
        const std::int64_t ld = RoundUp(rank, kTileColumns);
        std::vector<float> values(static_cast<std::size_t>(rows * ld)), copy;
        for (float& value : values) value = normal(random);
        values.front() = -std::numeric_limits<float>::infinity();
        if (rank > 1) values[1] = std::numeric_limits<float>::max();  // infinite as bf16
        copy = values;
        const auto shape = [&] {
          return row_pairs ? TileMatrix::RowPairs(nullptr, rows, rank) : TileMatrix::Activations(nullptr, rows, rank);
        };
        SplitTiles tiles{shape(), both ? TileMatrix{} : shape()};
        const PoisonedBuffer hi(tiles.hi.size() * 2), lo(tiles.hi.size() * 2);
        tiles.hi.data = hi.As<BFloat16>();
        if (!both) tiles.lo.data = lo.As<BFloat16>();
        PackSplit(*tier_, copy.data(), rows, rank, ld, kind, tiles);
        // Of row pairs a tile is 32 rows by 16 columns.
        const std::int64_t height = row_pairs ? kTileColumns : kPanelRows, width = row_pairs ? kPanelRows : kTileColumns;
        const auto part = [&](const TileMatrix& matrix, std::int64_t i, std::int64_t j) {
          const std::int64_t panel = row_pairs ? j / width : i / height, column = row_pairs ? i / height : j / width;
          return ToFloat(matrix.Tile(panel, column)[PositionInTile(order, i % height, j % width)]);
        };
        for (std::int64_t i = 0; i < RoundUp(rows, height); ++i) {
          for (std::int64_t j = 0; j < (both ? kPanelRows : ld); ++j) {
            const float high = part(tiles.hi, i, j);
            const float low = both ? part(tiles.hi, i, kPanelRows + j) : part(tiles.lo, i, j);
            const float value = i < rows && j < rank ? values[static_cast<std::size_t>(i * ld + j)] : 0.0f;
            ASSERT_EQ(high, ToFloat(ToBFloat16(value))) << "row " << i << " rank " << j;
            if (std::isinf(high)) {
              ASSERT_EQ(low, 0.0f) << "row " << i << " rank " << j;
              continue;
            }
            ASSERT_EQ(low, ToFloat(ToBFloat16(value - high))) << "row " << i << " rank " << j;
            ASSERT_LE(std::fabs(value - high - low), std::ldexp(std::fabs(value), -16)) << "row " << i << " rank " << j;
          }
        }
      }
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(SplitTilesTest);

TEST(SplitTilesMemoryTest, TakesTwoPartsBeyondHalfATile) {
  PoisonedBuffer memory(1 << 16);
  Carver carver(memory.As<char>());
  EXPECT_EQ(SplitTiles::Take(carver, 20, 0).hi.data, nullptr);
  EXPECT_EQ(carver.used(), 0);
  const SplitTiles one = SplitTiles::Take(carver, 20, 16);
  EXPECT_NE(one.hi.data, nullptr);
  EXPECT_EQ(one.lo.data, nullptr);
  EXPECT_EQ(carver.used(), one.hi.size() * 2);
  const SplitTiles two = SplitTiles::Take(carver, 20, 17);
  EXPECT_EQ(two.lo.data, two.hi.data + two.hi.size());
}

}  // namespace
}  // namespace moesaic
