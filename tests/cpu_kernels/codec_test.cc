// Weights in another form than bf16 pass through the same GEMMs: with a codec, the result is bit for bit that of the decoded
// tiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <span>
#include <vector>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

/// One signed byte a weight, in the order of a stored tile, tile after tile along each panel.
struct ByteCodec {
  static void Decode(const TileMatrix& matrix, std::int64_t panel, std::int64_t column, std::int64_t count, BFloat16* tiles) {
    const auto* bytes = static_cast<const std::int8_t*>(matrix.compressed) + (panel * matrix.columns + column) * kTileElements;
    for (std::int64_t i = 0; i < count * kTileElements; ++i) tiles[i] = ToBFloat16(static_cast<float>(bytes[i]));
  }
  static constexpr TileCodec kCodec{Decode};
};

/// The same matrix as bytes and as bf16 tiles.
class CompressedWeights {
 public:
  explicit CompressedWeights(const Dense& values) : tiles_(Order::kStored, values, true), compressed_(tiles_.matrix()) {
    bytes_.resize(static_cast<std::size_t>(compressed_.size()));
    for (std::int64_t p = 0; p < compressed_.panels; ++p) {
      for (std::int64_t c = 0; c < compressed_.columns; ++c) {
        for (std::int64_t i = 0; i < kTileElements; ++i) {
          bytes_[static_cast<std::size_t>((p * compressed_.columns + c) * kTileElements + i)] =
              static_cast<std::int8_t>(ToFloat(tiles_.matrix().Tile(p, c)[i]));
        }
      }
    }
    compressed_.data = nullptr;
    compressed_.codec = &ByteCodec::kCodec;
    compressed_.compressed = bytes_.data();
  }

  const TileMatrix& plain() const { return tiles_.matrix(); }
  const TileMatrix& compressed() const { return compressed_; }

 private:
  Tiles tiles_;
  TileMatrix compressed_;
  std::vector<std::int8_t> bytes_;
};

class CodecTest : public TierTest {
 protected:
  std::mt19937_64 random_{7};
};

// Two segments, of which one is compressed, and sizes that leave partial panels and superblocks.
TEST_P(CodecTest, DirectForm) {
  const CompressedWeights weights(RandomIntegers(83, 301, random_));
  const Tiles extra(Order::kStored, RandomIntegers(83, 40, random_), true);
  const Tiles x(Order::kPairs, RandomIntegers(37, 301, random_), false);
  const Tiles low(Order::kPairs, RandomIntegers(37, 40, random_), false);
  constexpr std::int64_t kLd = 48, kPanels = 6;
  const auto run = [&](const TileMatrix& matrix) {
    const std::array segments{GemmSegment{matrix, x.matrix()}, GemmSegment{extra.matrix(), low.matrix()}};
    const PoisonedBuffer c(kPanels * 16 * kLd * 4), scratch(DirectScratchElements(segments) * 2);
    DirectGemmArgs args;
    args.segments = segments;
    args.panels = kPanels;
    args.activation_panels = 3;
    args.c = c.As<float>();
    args.ldc = kLd;
    args.scratch = scratch.As<BFloat16>();
    tier_->direct_gemm(args);
    return std::vector<float>(args.c, args.c + kPanels * 16 * kLd);
  };
  const std::vector<float> expected = run(weights.plain());
  EXPECT_NE(expected[0], 0.0f);
  EXPECT_EQ(run(weights.compressed()), expected);
}

TEST_P(CodecTest, FewRows) {
  if (tier_->most_few_rows == 0) GTEST_SKIP() << tier_->name << " has no form for few rows";
  const CompressedWeights direct(RandomIntegers(83, 601, random_)), unpack(RandomIntegers(301, 83, random_));
  const Tiles x(Order::kStored, RandomIntegers(384, 601, random_), false),
      z(Order::kOperand, RandomIntegers(16, 301, random_), false);
  const auto many = [&](const TileMatrix& along_columns) {
    const GemmSegment segment{along_columns, x.matrix()};
    const std::int64_t rows = tier_->most_stored_rows - 1, columns = RoundUp(rows, 16);
    const PoisonedBuffer c(96 * columns * 4), scratch(DirectScratchElements({&segment, 1}) * 2);
    DirectGemmArgs args;
    args.segments = {&segment, 1};
    args.panels = 6;
    args.activation_panels = columns / 16;
    args.c = c.As<float>();
    args.ldc = columns;
    args.row_count = rows;
    args.scratch = scratch.As<BFloat16>();
    tier_->direct_gemm(args);
    return std::vector<float>(args.c, args.c + 96 * columns);
  };
  EXPECT_EQ(many(direct.compressed()), many(direct.plain()));
  const auto run = [&](const TileMatrix& along_columns, const TileMatrix& along_rows) {
    const GemmSegment segment{along_columns, x.matrix()}, back{along_rows, z.matrix()};
    const PoisonedBuffer c(96 * 16 * 4), y(16 * 96 * 4), scratch(DirectScratchElements({&segment, 1}) * 2);
    DirectGemmArgs args;
    args.segments = {&segment, 1};
    args.panels = 6;
    args.activation_panels = 1;
    args.c = c.As<float>();
    args.ldc = 16;
    args.row_count = 5;
    args.scratch = scratch.As<BFloat16>();
    tier_->direct_gemm(args);
    UnpackGemmArgs to_rows;
    to_rows.segments = {&back, 1};
    to_rows.panels = 1;
    to_rows.columns = 3;
    to_rows.c = y.As<float>();
    to_rows.ldc = 96;
    to_rows.row_count = 5;
    tier_->unpack_gemm(to_rows);
    std::vector<float> both(args.c, args.c + 96 * 16);
    both.insert(both.end(), to_rows.c, to_rows.c + 5 * 96);
    return both;
  };
  const std::vector<float> expected = run(direct.plain(), unpack.plain());
  EXPECT_NE(expected[0], 0.0f);
  EXPECT_EQ(run(direct.compressed(), unpack.compressed()), expected);
}

/// C [16 panels][320] of the unpack form, and the same as rows.
std::vector<float> Unpacked(const KernelTier& tier, std::span<const GemmSegment> segments, std::int64_t depth,
                            std::int64_t panels = 3) {
  constexpr std::int64_t kColumns = 10, kLd = kColumns * 32;
  const PoisonedBuffer c(panels * 16 * kLd * 4), scratch(UnpackScratchElements(segments) * 2);
  UnpackGemmArgs args;
  args.segments = segments;
  args.panels = panels;
  args.columns = kColumns;
  args.c = c.As<float>();
  args.ldc = kLd;
  args.depth = depth;
  args.scratch = scratch.As<BFloat16>();
  tier.unpack_gemm(args);
  std::vector<float> both(args.c, args.c + panels * 16 * kLd);
  const PoisonedBuffer memory(panels * 16 * kLd * 2);
  std::vector<BFloat16*> rows;
  for (std::int64_t i = 0; i < panels * 16; ++i) rows.push_back(memory.As<BFloat16>() + i * kLd);
  args.rows = rows.data();
  args.depth = 0;
  tier.unpack_gemm(args);
  std::transform(rows[0], rows[0] + panels * 16 * kLd, std::back_inserter(both), ToFloat);
  return both;
}

// Two products, each of compressed or of plain weights, the contraction whole and in slices.
TEST_P(CodecTest, UnpackForm) {
  const CompressedWeights first(RandomIntegers(275, 301, random_)), second(RandomIntegers(83, 301, random_));
  const Tiles x(Order::kOperand, RandomIntegers(37, 275, random_), false),
      y(Order::kOperand, RandomIntegers(37, 83, random_), false);
  for (const std::int64_t panels : {1, 2, 3}) {  // up to two, weights stream through a matrix unit
    const auto run = [&](const TileMatrix& left, const TileMatrix& right, std::int64_t depth) {
      const GemmSegment segments[] = {{left, x.matrix()}, {right, y.matrix()}};
      return Unpacked(*tier_, segments, depth, panels);
    };
    const std::vector<float> expected = run(first.plain(), second.plain(), 0);
    EXPECT_NE(expected[0], 0.0f);
    for (const std::int64_t depth : {0, 8}) {
      EXPECT_EQ(run(first.compressed(), second.compressed(), depth), expected);
      EXPECT_EQ(run(first.plain(), second.compressed(), depth), expected);
      EXPECT_EQ(run(first.compressed(), second.plain(), depth), expected);
    }
  }
  // A panel that stands for several.
  const Dense once = RandomIntegers(16, 301, random_);
  Dense often(80, 301);
  for (std::int64_t i = 0; i < 80; ++i) {
    for (std::int64_t j = 0; j < 301; ++j) often(i, j) = once(i % 16, j);
  }
  const Tiles panel(Order::kStored, once, true), all(Order::kStored, often, true),
      z(Order::kOperand, RandomIntegers(37, 80, random_), false);
  for (const std::int64_t panels : {1, 2, 3}) {
    const GemmSegment repeated{TileMatrix::RepeatedPanel(panel.matrix().data, 5, 301), z.matrix()},
        whole{all.matrix(), z.matrix()};
    EXPECT_EQ(Unpacked(*tier_, {&repeated, 1}, 0, panels), Unpacked(*tier_, {&whole, 1}, 0, panels));
    const GemmSegment before{first.plain(), x.matrix()}, rest[] = {before, repeated}, full[] = {before, whole};
    EXPECT_EQ(Unpacked(*tier_, rest, 0, panels), Unpacked(*tier_, full, 0, panels));
  }
  // One product alone.
  const GemmSegment plain{second.plain(), y.matrix()}, compressed{second.compressed(), y.matrix()};
  EXPECT_EQ(Unpacked(*tier_, {&compressed, 1}, 0), Unpacked(*tier_, {&plain, 1}, 0));
}

INSTANTIATE_TEST_SUITE_P(Tiers, CodecTest, testing::Range<std::size_t>(0, TestedTiers().size()),
                         [](const auto& info) { return TierLabel(info.param); });

}  // namespace
}  // namespace moesaic
