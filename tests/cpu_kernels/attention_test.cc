// The kernels of attention on every tier against formulas in double, and both forms of attention on a pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu_kernels/fused/attention.h"
#include "cpu_kernels/fused/few_queries_attention.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

class AttentionKernelsTest : public TierTest {};

/// Of operand tiles in activations' order.
float PowerAt(const TileMatrix& tiles, std::int64_t row, std::int64_t column) {
  return ToFloat(tiles.Tile(row / kPanelRows, column / kTileColumns)[row % kPanelRows * kTileColumns + column % kTileColumns]);
}

TEST_P(AttentionKernelsTest, SoftmaxRows) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::mt19937_64 random(7);
  for (const std::int64_t columns : {1, 15, 16, 33, 130}) {
    for (const bool biased : {false, true}) {
      const Dense x = RandomValues(3, columns, random);
      Dense bias = RandomValues(1, columns, random);
      if (columns > 1) bias(0, columns / 2) = -kInfinity;
      const Rows rows(DType::kFloat32, x, columns + 3);
      float inverse_sums[3];
      SoftmaxRowsArgs args;
      args.x = static_cast<const float*>(rows.data());
      args.ld = columns + 3;
      args.rows = 3;
      args.columns = columns;
      args.scale = 20.0f;
      args.bias = biased ? bias.values.data() : nullptr;
      TileMatrix tiles = TileMatrix::Activations(nullptr, 3, columns);
      const PoisonedBuffer memory(tiles.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
      tiles.data = memory.As<BFloat16>();
      float largest[3];
      args.powers = tiles;
      args.inverse_sums = inverse_sums;
      args.most = largest;
      tier_->fused.softmax_rows(args);
      for (std::int64_t r = 0; r < 3; ++r) {
        std::vector<double> scores;
        for (std::int64_t c = 0; c < columns; ++c) scores.push_back(20.0 * x(r, c) + (biased ? bias(0, c) : 0.0));
        const double most = *std::max_element(scores.begin(), scores.end());
        ASSERT_NEAR(largest[r], biased ? most : most / std::log(2.0), 1e-5 * std::fabs(most)) << columns << " columns";
        double sum = 0;
        for (const double score : scores) sum += std::exp(score - most);
        ASSERT_NEAR(inverse_sums[r] * sum, 1.0, 1e-4) << columns << " columns, row " << r;
        for (std::int64_t c = 0; c < columns; ++c) {
          const double power = std::exp(scores[static_cast<std::size_t>(c)] - most);
          // Within 1e-4 before it was rounded, by half a step of bf16; 1e-37: what is as good as zero.
          ASSERT_NEAR(PowerAt(tiles, r, c), power, 1e-37 + (1e-4 + 0x1p-8) * power)
              << columns << " columns, row " << r << " column " << c;
        }
      }
      for (std::int64_t r = 0; r < kPanelRows; ++r) {
        for (std::int64_t c = 0; c < tiles.columns * kTileColumns; ++c) {
          if (r < 3 && c < columns) continue;
          ASSERT_EQ(PowerAt(tiles, r, c), 0.0f) << "row " << r << " column " << c;
        }
      }
    }
  }
  // Rows of -infinity, with NaN, with infinity.
  Dense special(3, 20);
  for (std::int64_t c = 0; c < 20; ++c) special(0, c) = special(1, c) = -kInfinity;
  special(1, 18) = std::numeric_limits<float>::quiet_NaN();
  special(2, 3) = kInfinity;
  const Rows rows(DType::kFloat32, special, 20);
  float inverse_sums[3];
  SoftmaxRowsArgs args;
  args.x = static_cast<const float*>(rows.data());
  args.ld = 20;
  args.rows = 3;
  args.columns = 20;
  TileMatrix tiles = TileMatrix::Activations(nullptr, 3, 20);
  const PoisonedBuffer memory(tiles.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
  tiles.data = memory.As<BFloat16>();
  float most[3];
  args.powers = tiles;
  args.inverse_sums = inverse_sums;
  args.most = most;
  tier_->fused.softmax_rows(args);
  EXPECT_EQ(most[0], 0.0f);
  EXPECT_EQ(inverse_sums[0], 0.0f);
  EXPECT_TRUE(std::isfinite(PowerAt(tiles, 0, 0)));
  EXPECT_TRUE(std::isnan(inverse_sums[1]));
  EXPECT_TRUE(std::isnan(inverse_sums[2]));
}

/// Rows that see one column more each, from the first or from another one on, or none; what lies behind and before, and it is
/// NaN, counts for nothing.
TEST_P(AttentionKernelsTest, SoftmaxOfRowsThatSeeSomeColumns) {
  constexpr std::int64_t kRows = 19, kColumns = 70;
  std::mt19937_64 random(10);
  for (const std::int64_t first_sees : {0, 1, 15, 31, 32, 33, 60}) {
    for (const auto& [biased, later] : {std::array{false, false}, {true, false}, {false, true}, {true, true}}) {
      Dense x = RandomValues(kRows, kColumns, random);
      const Dense bias = RandomValues(1, kColumns, random);
      const auto seen = [&](std::int64_t r) { return first_sees == 0 ? kColumns : std::min(first_sees + r, kColumns); };
      std::vector<std::int32_t> first_columns;
      for (std::int64_t r = 0; r < kRows; ++r) {
        first_columns.push_back(later ? static_cast<std::int32_t>(r * 23 % (kColumns + 1)) : 0);
        for (std::int64_t c = 0; c < kColumns; ++c) {
          if (c < first_columns.back() || c >= seen(r)) x(r, c) = std::numeric_limits<float>::quiet_NaN();
        }
      }
      const Rows rows(DType::kFloat32, x, kColumns + 3);
      TileMatrix tiles = TileMatrix::Activations(nullptr, kRows, kColumns);
      const PoisonedBuffer memory(tiles.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
      tiles.data = memory.As<BFloat16>();
      float inverse_sums[kRows];
      SoftmaxRowsArgs args;
      args.x = static_cast<const float*>(rows.data());
      args.ld = rows.stride();
      args.rows = kRows;
      args.columns = kColumns;
      args.bias = biased ? bias.values.data() : nullptr;
      args.first_sees = first_sees;
      args.first_columns = later ? first_columns.data() : nullptr;
      args.powers = tiles;
      args.inverse_sums = inverse_sums;
      tier_->fused.softmax_rows(args);
      for (std::int64_t r = 0; r < RoundUp(kRows, kPanelRows); ++r) {
        const std::int64_t first = r < kRows ? first_columns[static_cast<std::size_t>(r)] : 0, end = r < kRows ? seen(r) : 0;
        const auto score = [&](std::int64_t c) { return static_cast<double>(x(r, c)) + (biased ? bias(0, c) : 0.0f); };
        double most = -std::numeric_limits<double>::infinity(), sum = 0;
        for (std::int64_t c = first; c < end; ++c) most = std::max(most, score(c));
        for (std::int64_t c = 0; c < tiles.columns * kTileColumns; ++c) {
          if (c < first || c >= end) {
            ASSERT_EQ(PowerAt(tiles, r, c), 0.0f) << "row " << r << " column " << c;
            continue;
          }
          const double power = std::exp(score(c) - most);
          sum += power;
          ASSERT_NEAR(PowerAt(tiles, r, c), power, (1e-4 + 0x1p-8) * power) << "row " << r << " column " << c;
        }
        if (first < end) {
          ASSERT_NEAR(inverse_sums[r] * sum, 1.0, 1e-4) << "row " << r;
        } else if (r < kRows) {
          ASSERT_EQ(inverse_sums[r], 0.0f) << "row " << r;
        }
      }
    }
  }
}

TEST_P(AttentionKernelsTest, FewQueries) {
  std::mt19937_64 random(11);
  for (const auto& [rows, keys, size] :
       {std::array<std::int64_t, 3>{1, 1, 32}, {2, 17, 64}, {3, 128, 96}, {8, 300, 128}, {15, 129, 32}, {29, 40, 64}}) {
    const Dense q = RandomValues(rows, size, random), k = RandomValues(keys, size, random),
                v = RandomValues(keys, size, random);
    const Rows q_rows(DType::kBFloat16, q, size + 1), k_rows(DType::kBFloat16, k, size + 5),
        v_rows(DType::kBFloat16, v, size + 3);
    const Rows result(DType::kBFloat16, rows, size, size + 2);
    std::vector<float> bias(static_cast<std::size_t>(keys), 0.0f);
    for (std::int64_t s = 1; s < keys; s += 3) bias[static_cast<std::size_t>(s)] = -std::numeric_limits<float>::infinity();
    const std::int64_t parts = CeilDiv(keys, kKeysTogether);
    const PoisonedBuffer out(parts * rows * size * 4), scratch(AttendFewScratch(size) * 4);
    std::vector<float> most(static_cast<std::size_t>(parts * rows)), sums(most);
    std::vector<const BFloat16*> queries;
    std::vector<BFloat16*> to;
    std::vector<std::int64_t> all_seen;
    for (std::int64_t r = 0; r < rows; ++r) {
      queries.push_back(static_cast<const BFloat16*>(q_rows.data()) + r * q_rows.stride());
      to.push_back(static_cast<BFloat16*>(result.data()) + r * result.stride());
      all_seen.push_back(r == 0 ? keys : std::max<std::int64_t>(1, keys - r));
    }
    AttendFewArgs attend;
    attend.q = queries.data();
    attend.rows = rows;
    attend.size = size;
    attend.scale = 0.7f;
    attend.k_stride = k_rows.stride();
    attend.v_stride = v_rows.stride();
    attend.scratch = scratch.As<float>();
    for (std::int64_t p = 0; p < parts; ++p) {
      const std::int64_t first = p * kKeysTogether;
      std::vector<std::int64_t> seen;
      for (const std::int64_t n : all_seen) seen.push_back(std::clamp<std::int64_t>(n - first, 0, kKeysTogether));
      attend.k = static_cast<const BFloat16*>(k_rows.data()) + first * k_rows.stride();
      attend.v = static_cast<const BFloat16*>(v_rows.data()) + first * v_rows.stride();
      attend.keys = std::min(kKeysTogether, keys - first);
      attend.bias = bias.data() + first;
      attend.seen = seen.data();
      attend.most = most.data() + p * rows;
      attend.sums = sums.data() + p * rows;
      attend.out = out.As<float>() + p * rows * size;
      tier_->fused.attend_few(attend);
    }
    MergeAttendedArgs merge;
    merge.parts = parts;
    merge.rows = rows;
    merge.size = size;
    merge.most = most.data();
    merge.sums = sums.data();
    merge.out = out.As<float>();
    merge.to = to.data();
    tier_->fused.merge_attended(merge);
    result.ExpectGapsUntouched();
    for (std::int64_t r = 0; r < rows; ++r) {
      std::vector<double> powers;
      double sum = 0;
      for (std::int64_t s = 0; s < all_seen[static_cast<std::size_t>(r)]; ++s) {
        double score = 0;
        for (std::int64_t d = 0; d < size; ++d) score += 0.7 * static_cast<double>(q(r, d)) * k(s, d);
        powers.push_back(bias[static_cast<std::size_t>(s)] == 0.0f ? std::exp(score) : 0.0);
        sum += powers.back();
      }
      for (std::int64_t d = 0; d < size; ++d) {
        double expected = 0, magnitude = 0;
        for (std::size_t s = 0; s < powers.size(); ++s) {
          expected += powers[s] / sum * v(static_cast<std::int64_t>(s), d);
          magnitude += powers[s] / sum * std::fabs(v(static_cast<std::int64_t>(s), d));
        }
        // Powers are within 1e-4, and so is their sum; the result is rounded.
        ASSERT_NEAR(result(r, d), expected, 3e-4 * magnitude + 0x1p-8 * std::fabs(expected))
            << rows << " rows, " << keys << " keys, row " << r << " column " << d;
      }
    }
  }
}

TEST_P(AttentionKernelsTest, ProductsOfAttention) {
  // Stored tiles with pairs contract along a head's numbers, operand tiles with row pairs along the keys.
  std::mt19937_64 random(8);
  for (const auto& [rows, columns, depth] : {std::array{5, 37, 20}, std::array{64, 130, 64}, std::array{48, 16, 100}}) {
    const Dense left = RandomIntegers(rows, depth, random), right = RandomIntegers(depth, columns, random);
    Dense turned(columns, depth);
    for (std::int64_t i = 0; i < columns; ++i) {
      for (std::int64_t k = 0; k < depth; ++k) turned(i, k) = right(k, i);
    }
    const Tiles stored(Order::kStored, left, false), pairs(Order::kPairs, turned, false);
    const Tiles operand(Order::kOperand, left, false), row_pairs(Order::kRowPairs, right, false);
    for (const GradientSegment& segment :
         {GradientSegment{stored.matrix(), pairs.matrix()}, GradientSegment{operand.matrix(), row_pairs.matrix()}}) {
      const std::int64_t ldc = RoundUp(columns, 32), panels = CeilDiv(rows, kPanelRows);
      const PoisonedBuffer c(panels * kPanelRows * ldc * 4);
      GradientGemmArgs args;
      args.segments = {&segment, 1};
      args.panels = panels;
      args.c = c.As<float>();
      args.ldc = ldc;
      tier_->gradient_gemm(args);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t n = 0; n < columns; ++n) {
          float sum = 0;
          for (std::int64_t k = 0; k < depth; ++k) sum += left(i, k) * right(k, n);
          ASSERT_EQ(c.As<float>()[i * ldc + n], sum) << "row " << i << " column " << n;
        }
      }
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(AttentionKernelsTest);

TEST(AttentionTest, ManyQueries) {
  constexpr std::int64_t kBatch = 2, kQueries = 70, kKeys = 53, kHeads = 3, kSize = 20, kColumns = kHeads * kSize;
  std::mt19937_64 random(9);
  const Dense q = RandomValues(kBatch * kQueries, kColumns, random), k = RandomValues(kBatch * kKeys, kColumns, random),
              v = RandomValues(kBatch * kKeys, kColumns, random);
  std::vector<float> bias(kBatch * kKeys, 0.0f);
  for (std::size_t s = 0; s < bias.size(); s += 3) bias[s] = -std::numeric_limits<float>::infinity();
  const Rows q_rows(DType::kBFloat16, q, 61), k_rows(DType::kBFloat16, k, 64), v_rows(DType::kBFloat16, v, 60);
  const auto of_batches = [](const Rows& rows, std::int64_t count) {
    TensorView view = rows.view();
    view.rank = 3;
    view.shape = {kBatch, count, kColumns};
    view.stride = {count * rows.stride(), rows.stride(), 1};
    return view;
  };
  std::vector<Rows> results;
  for (const int threads : {1, 5}) {
    threadpool::Pool pool(threads);
    results.emplace_back(DType::kBFloat16, kBatch * kQueries, kColumns, kColumns + 3);
    const fused::AttentionArgs args{
        of_batches(q_rows, kQueries),        of_batches(k_rows, kKeys), of_batches(v_rows, kKeys), kHeads, 0.3f, bias.data(),
        of_batches(results.back(), kQueries)};
    fused::Attention(args, pool);
    results.back().ExpectGapsUntouched();
    fused::AttentionArgs wrong = args;
    wrong.heads = 7;
    EXPECT_THROW(fused::Attention(wrong, pool), std::invalid_argument);
    wrong = args;
    wrong.v.shape[1] = kKeys - 1;
    EXPECT_THROW(fused::Attention(wrong, pool), std::invalid_argument);
    wrong = args;
    wrong.k.dtype = DType::kFloat32;
    EXPECT_THROW(fused::Attention(wrong, pool), std::invalid_argument);
  }
  for (std::int64_t row = 0; row < kBatch * kQueries; ++row) {
    const std::int64_t keys = row / kQueries * kKeys;
    for (std::int64_t head = 0; head < kHeads; ++head) {
      double sum = 0, out[kSize] = {};
      for (std::int64_t s = keys; s < keys + kKeys; ++s) {
        double score = 0;
        for (std::int64_t c = head * kSize; c < (head + 1) * kSize; ++c) score += static_cast<double>(q(row, c)) * k(s, c);
        const double power = std::exp(0.3 * score + bias[static_cast<std::size_t>(s)]);
        sum += power;
        for (std::int64_t c = 0; c < kSize; ++c) out[c] += power * v(s, head * kSize + c);
      }
      for (std::int64_t c = 0; c < kSize; ++c) {
        // Half a unit in the last place of bf16 for p, whose values are about 1, and for the result.
        ASSERT_NEAR(results[0](row, head * kSize + c), out[c] / sum, 0x1p-7) << "row " << row << " head " << head;
        ASSERT_EQ(results[1](row, head * kSize + c), results[0](row, head * kSize + c));
      }
    }
  }
}

/// Both forms with heads that share keys, causal, on any number of threads; a sequence, head, query and number:
/// [B][heads][T][D].
TEST(AttentionTest, HeadsThatShareKeys) {
  constexpr std::int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kKeys = 300, kSize = 32;
  std::mt19937_64 random(12);
  for (const std::int64_t queries : {3, 70}) {
    const Dense q = RandomValues(kBatch * kHeads * queries, kSize, random);
    const Dense k = RandomValues(kBatch * kKeyHeads * kKeys, kSize, random);
    const Dense v = RandomValues(kBatch * kKeyHeads * kKeys, kSize, random);
    std::vector<float> bias(kBatch * kKeys, 0.0f);
    for (std::size_t s = 1; s < bias.size(); s += 5) bias[s] = -std::numeric_limits<float>::infinity();
    const Rows q_rows(DType::kBFloat16, q, kSize), k_rows(DType::kBFloat16, k, kSize), v_rows(DType::kBFloat16, v, kSize);
    const auto of_heads = [](const Rows& rows, std::int64_t heads, std::int64_t count) {
      return TensorView{rows.data(), DType::kBFloat16, 3, {heads, count, kSize}, {count * kSize, kSize, 1}};
    };
    // Heads side by side, as the form for many takes them.
    const auto side_by_side = [](const Dense& from, std::int64_t heads, std::int64_t count) {
      Dense to(kBatch * count, heads * kSize);
      for (std::int64_t b = 0; b < kBatch; ++b) {
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t t = 0; t < count; ++t) {
            for (std::int64_t c = 0; c < kSize; ++c) to(b * count + t, h * kSize + c) = from((b * heads + h) * count + t, c);
          }
        }
      }
      return Rows(DType::kBFloat16, to, heads * kSize);
    };
    const auto of_batches = [](const Rows& rows, std::int64_t heads, std::int64_t count) {
      return TensorView{
          rows.data(), DType::kBFloat16, 3, {kBatch, count, heads * kSize}, {count * heads * kSize, heads * kSize, 1}};
    };
    const Rows q_flat = side_by_side(q, kHeads, queries), k_flat = side_by_side(k, kKeyHeads, kKeys),
               v_flat = side_by_side(v, kKeyHeads, kKeys);
    for (const bool few : {true, false}) {
      std::vector<Rows> results;
      for (const int threads : {1, 5}) {
        threadpool::Pool pool(threads);
        results.emplace_back(DType::kBFloat16, kBatch * queries, kHeads * kSize, kHeads * kSize);
        const TensorView out = of_batches(results.back(), kHeads, queries);
        if (few) {
          fused::FewQueriesAttention({of_heads(q_rows, kBatch * kHeads, queries), of_heads(k_rows, kBatch * kKeyHeads, kKeys),
                                      of_heads(v_rows, kBatch * kKeyHeads, kKeys), 0.2f, bias.data(), true, out},
                                     pool);
        } else {
          fused::Attention({of_batches(q_flat, kHeads, queries), of_batches(k_flat, kKeyHeads, kKeys),
                            of_batches(v_flat, kKeyHeads, kKeys), kHeads, 0.2f, bias.data(), out, kKeyHeads, true},
                           pool);
        }
      }
      for (std::int64_t row = 0; row < kBatch * queries; ++row) {
        const std::int64_t batch = row / queries, query = row % queries;
        for (std::int64_t head = 0; head < kHeads; ++head) {
          double sum = 0, right[kSize] = {};
          for (std::int64_t s = 0; s < kKeys - queries + query + 1; ++s) {
            const std::int64_t key = (batch * kKeyHeads + head / 2) * kKeys + s;
            double score = 0;
            for (std::int64_t c = 0; c < kSize; ++c) {
              score += static_cast<double>(q((batch * kHeads + head) * queries + query, c)) * k(key, c);
            }
            const double power = std::exp(0.2 * score + bias[static_cast<std::size_t>(batch * kKeys + s)]);
            sum += power;
            for (std::int64_t c = 0; c < kSize; ++c) right[c] += power * v(key, c);
          }
          for (std::int64_t c = 0; c < kSize; ++c) {
            const float value = results[0](row, head * kSize + c);
            ASSERT_NEAR(value, right[c] / sum, few ? 0x1p-8 * std::fabs(right[c] / sum) + 2e-3 : 0x1p-7)
                << "row " << row << " head " << head;
            ASSERT_EQ(results[1](row, head * kSize + c), value);
          }
        }
      }
    }
  }
}

TEST(AttentionTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(1);
  const Rows rows(DType::kBFloat16, Dense(4 * 5, 64), 64);
  const TensorView heads{rows.data(), DType::kBFloat16, 3, {4, 5, 64}, {5 * 64, 64, 1}};
  const TensorView out{rows.data(), DType::kBFloat16, 3, {1, 5, 256}, {5 * 256, 256, 1}};
  const auto refused = [&](auto change) {
    fused::FewQueriesAttentionArgs args{heads, heads, heads, 1.0f, nullptr, true, out};
    change(args);
    EXPECT_THROW(fused::FewQueriesAttention(args, pool), std::invalid_argument);
  };
  refused([](auto& args) { args.q.rank = 2; });
  refused([](auto& args) { args.out.shape[0] = 0; });
  refused([](auto& args) { args.k.shape[0] = 3; });
  refused([](auto& args) { args.k.shape[1] = 4; });
  refused([](auto& args) { args.v.shape[2] = 32; });
  refused([](auto& args) { args.q.shape[2] = args.k.shape[2] = args.v.shape[2] = 20; });
  refused([](auto& args) { args.q.dtype = DType::kFloat32; });
  refused([](auto& args) { args.v.stride[2] = 2; });
}

}  // namespace
}  // namespace moesaic
