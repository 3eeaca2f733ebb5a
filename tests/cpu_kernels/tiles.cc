#include "tests/cpu_kernels/tiles.h"

#include "cpu_kernels/isa.h"

#include <cmath>
#include <cstring>

namespace moesaic {

extern const KernelTier kEmulatedAvx512;

Dense RandomIntegers(std::int64_t rows, std::int64_t cols, std::mt19937_64& random) {
  Dense result(rows, cols);
  for (float& value : result.values) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
  return result;
}

Dense RandomValues(std::int64_t rows, std::int64_t cols, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Dense result(rows, cols);
  for (float& value : result.values) value = ToFloat(ToBFloat16(normal(random)));
  return result;
}

std::int64_t PositionInTile(Order order, std::int64_t row, std::int64_t column) {
  if (order == Order::kOperand) return row * 32 + column;
  if (order == Order::kRowPairs) return row / 2 * 32 + column * 2 + row % 2;
  // Lane L of the four 128-bit lanes holds columns 4L..4L+3, then 16+4L..16+4L+3.
  const std::int64_t lane = column % 16 / 4;
  const std::int64_t half = column / 16;
  const std::int64_t position = lane * 8 + half * 4 + column % 4;
  if (order == Order::kStored) return row * 32 + position;
  // The pair p of row i, a dword, lies at row p and dword i of the transposed tile.
  return position / 2 * 32 + row * 2 + position % 2;
}

PoisonedBuffer::PoisonedBuffer(std::int64_t bytes) : buffer_(bytes) {
  if (bytes > 0) std::memset(buffer_.data(), 0xff, static_cast<std::size_t>(bytes));
}

Tiles::Tiles(Order order, std::int64_t rows, std::int64_t cols, bool superblocks) : order_(order) {
  const auto make = order == Order::kRowPairs ? &TileMatrix::RowPairs
                    : superblocks             ? &TileMatrix::Weights
                                              : &TileMatrix::Activations;
  buffer_ = AlignedBuffer(make(nullptr, rows, cols).size() * static_cast<std::int64_t>(sizeof(BFloat16)));
  matrix_ = make(static_cast<BFloat16*>(buffer_.data()), rows, cols);
  if (buffer_.bytes() > 0) std::memset(buffer_.data(), 0, static_cast<std::size_t>(buffer_.bytes()));
}

Tiles::Tiles(Order order, const Dense& values, bool superblocks) : Tiles(order, values.rows, values.cols, superblocks) {
  for (std::int64_t i = 0; i < values.rows; ++i) {
    for (std::int64_t j = 0; j < values.cols; ++j) Set(i, j, values(i, j));
  }
}

BFloat16& Tiles::At(std::int64_t row, std::int64_t col) const {
  if (order_ == Order::kRowPairs) return matrix_.Tile(col / 16, row / 32)[PositionInTile(order_, row % 32, col % 16)];
  return matrix_.Tile(row / 16, col / 32)[PositionInTile(order_, row % 16, col % 32)];
}

void Tiles::Set(std::int64_t row, std::int64_t col, float value) { At(row, col) = ToBFloat16(value); }

float Tiles::Get(std::int64_t row, std::int64_t col) const { return ToFloat(At(row, col)); }

std::span<const KernelTier* const> TestedTiers() {
  static const std::vector<const KernelTier*> tiers = [] {
    std::vector<const KernelTier*> list(KernelTiers().begin(), KernelTiers().end());
    list.push_back(&kEmulatedAvx512);
    return list;
  }();
  return tiers;
}

std::string TierLabel(std::size_t index) { return std::string(TestedTiers()[index]->name) + "_" + std::to_string(index); }

void ForcedTierTest::SetUp() {
  TierTest::SetUp();
  if (IsSkipped() || &ChosenKernels() == tier_) return;
  try {
    ForceIsa(tier_->name);
  } catch (const UnsupportedHostError&) {
    GTEST_SKIP() << tier_->name << " cannot be forced on this host";
  }
  if (&ChosenKernels() != tier_) GTEST_SKIP() << "another entry of the name " << tier_->name << " serves this host";
}

void ForcedTierTest::TearDown() { ForceIsa(""); }

}  // namespace moesaic
