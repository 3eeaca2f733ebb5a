// The kernels of attention's gradients on every tier against formulas in double, and the gradients on a pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/fused/attention_grad.h"
#include "tests/cpu_kernels/rows.h"
#include "tests/cpu_kernels/tiles.h"
#include "threadpool/pool.h"

namespace moesaic {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class AttentionGradKernelsTest : public TierTest {};

/// Memory for a matrix of tiles, all of it NaN.
class PoisonedTiles {
 public:
  explicit PoisonedTiles(TileMatrix matrix)
      : memory_(matrix.size() * static_cast<std::int64_t>(sizeof(BFloat16))), matrix_(matrix) {
    matrix_.data = memory_.As<BFloat16>();
  }
  const TileMatrix& matrix() const { return matrix_; }
  float Operand(std::int64_t row, std::int64_t column) const {
    return At(row / kPanelRows, column / kTileColumns,
              PositionInTile(Order::kOperand, row % kPanelRows, column % kTileColumns));
  }
  float RowPair(std::int64_t row, std::int64_t column) const {
    return At(column / kPanelRows, row / kTileColumns,
              PositionInTile(Order::kRowPairs, row % kTileColumns, column % kPanelRows));
  }

 private:
  float At(std::int64_t panel, std::int64_t column, std::int64_t place) const {
    return ToFloat(matrix_.Tile(panel, column)[place]);
  }

  PoisonedBuffer memory_;
  TileMatrix matrix_;
};

TEST_P(AttentionGradKernelsTest, SoftmaxGrad) {
  constexpr std::int64_t kColumns = 75;
  constexpr float kScale = 0.7f;
  std::mt19937_64 random(21);
  for (const std::int64_t rows : {1, 5, 16, 19, 40}) {
    for (const std::int64_t diagonal : {-rows, std::int64_t{0}, std::int64_t{7}, std::int64_t{31}, std::int64_t{64}}) {
      // Columns that see rows from the first on, and from others on, some none at all.
      for (const auto& [biased, later] : {std::array{false, false}, {true, false}, {false, true}, {true, true}}) {
        std::vector<std::int32_t> first_rows(static_cast<std::size_t>(RoundUp(kColumns, 16)));
        for (std::size_t c = 0; later && c < first_rows.size(); ++c) first_rows[c] = static_cast<std::int32_t>(c * 7 % 45);
        Dense x = RandomValues(rows, kColumns, random), d_probability = RandomValues(rows, kColumns, random);
        Dense bias = RandomValues(1, rows, random), most = RandomValues(1, kColumns, random);
        Dense inverse = RandomValues(1, kColumns, random), delta = RandomValues(1, kColumns, random);
        if (rows > 1) bias(0, 1) = -kInfinity;
        for (std::int64_t c = 0; c < kColumns; ++c) {
          inverse(0, c) = std::fabs(inverse(0, c));
          for (std::int64_t r = 0; r < rows; ++r) {
            // No score is larger than the largest one.
            most(0, c) = std::max(most(0, c), biased ? kScale * x(r, c) + bias(0, r) : kScale * x(r, c) * 1.442696f);
            if (c < diagonal + r || r < first_rows[static_cast<std::size_t>(c)])
              x(r, c) = d_probability(r, c) = std::numeric_limits<float>::quiet_NaN();
          }
        }
        const Rows x_rows(DType::kFloat32, x, kColumns + 3), d_probability_rows(DType::kFloat32, d_probability, kColumns + 3);
        const PoisonedTiles probability(TileMatrix::Activations(nullptr, rows, kColumns));
        const PoisonedTiles d_x(TileMatrix::Activations(nullptr, rows, kColumns));
        const PoisonedTiles d_x_pairs(TileMatrix::RowPairs(nullptr, rows, kColumns));
        SoftmaxGradArgs args;
        args.x = static_cast<const float*>(x_rows.data());
        args.d_probability = static_cast<const float*>(d_probability_rows.data());
        args.ld = x_rows.stride();
        args.rows = rows;
        args.columns = kColumns;
        args.scale = kScale;
        args.bias = biased ? bias.values.data() : nullptr;
        args.most = most.values.data();
        args.inverse_sums = inverse.values.data();
        args.delta = delta.values.data();
        args.diagonal = diagonal;
        args.first_rows = later ? first_rows.data() : nullptr;
        args.probability = probability.matrix();
        args.d_x = d_x.matrix();
        args.d_x_pairs = d_x_pairs.matrix();
        tier_->fused.softmax_grad(args);
        for (std::int64_t r = 0; r < RoundUp(rows, kTileColumns); ++r) {
          for (std::int64_t c = 0; c < RoundUp(kColumns, kTileColumns); ++c) {
            double p = 0, gradient = 0, magnitude = 0;
            if (r < rows && c < kColumns && c >= diagonal + r && r >= first_rows[static_cast<std::size_t>(c)]) {
              const double score = static_cast<double>(kScale) * x(r, c);
              p = biased ? std::exp(score + bias(0, r) - most(0, c)) : std::exp(score - most(0, c) * std::log(2.0));
              p *= inverse(0, c);
              gradient = p * (static_cast<double>(kScale) * d_probability(r, c) - delta(0, c));
              magnitude = p * (std::fabs(kScale * d_probability(r, c)) + std::fabs(delta(0, c)));
            }
            // Within 1e-4 before they were rounded, by half a step of bf16; 1e-36: what is as good as zero.
            const double allowed = 1e-36 + 1e-6 * magnitude + (1e-4 + 0x1p-8) * std::fabs(gradient);
            ASSERT_NEAR(d_x_pairs.RowPair(r, c), gradient, allowed)
                << rows << " rows from " << diagonal << ", " << r << ", " << c;
            if (r >= RoundUp(rows, kPanelRows)) continue;
            ASSERT_NEAR(probability.Operand(r, c), p, 1e-36 + (1e-4 + 0x1p-8) * p) << rows << " rows, " << r << ", " << c;
            ASSERT_EQ(d_x.Operand(r, c), d_x_pairs.RowPair(r, c)) << rows << " rows, " << r << ", " << c;
          }
        }
      }
    }
  }
}

TEST_P(AttentionGradKernelsTest, RowDots) {
  std::mt19937_64 random(22);
  for (const std::int64_t columns : {1, 16, 20, 130}) {
    const Dense a = RandomIntegers(3, columns, random), b = RandomIntegers(3, columns, random);
    const Rows a_rows(DType::kBFloat16, a, columns + 1), b_rows(DType::kBFloat16, b, columns + 5);
    float out[3];
    tier_->fused.row_dots({static_cast<const BFloat16*>(a_rows.data()), a_rows.stride(),
                           static_cast<const BFloat16*>(b_rows.data()), b_rows.stride(), 3, columns, 0.5f, out});
    for (std::int64_t r = 0; r < 3; ++r) {
      float sum = 0;
      for (std::int64_t c = 0; c < columns; ++c) sum += a(r, c) * b(r, c);
      ASSERT_EQ(out[r], 0.5f * sum) << columns << " columns, row " << r;
    }
  }
}

MOESAIC_TEST_ON_EVERY_TIER(AttentionGradKernelsTest);

/// Two sequences whose heads share keys two by two; more queries and keys than a block has.
class AttentionGradTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kQueries = 300, kKeys = 331, kSize = 40;
  static constexpr std::int64_t kColumns = kHeads * kSize, kKeyColumns = kKeyHeads * kSize;
  static constexpr double kScale = 0.2;

  static TensorView OfSequences(const Rows& rows, std::int64_t count, std::int64_t columns) {
    return {rows.data(), DType::kBFloat16, 3, {kBatch, count, columns}, {count * rows.stride(), rows.stride(), 1}};
  }

  /// The first key that query t of a sequence sees.
  using FirstKey = std::int64_t (*)(std::int64_t t);

  /// In double, with the sums that one head of queries adds.
  void Expect(bool causal, FirstKey first_key) {
    d_q_ = Dense(kBatch * kQueries, kColumns);
    d_k_ = Dense(kBatch * kKeys, kKeyColumns);
    d_v_ = Dense(kBatch * kKeys, kKeyColumns);
    for (std::int64_t row = 0; row < kBatch * kQueries; ++row) {
      const std::int64_t first = row / kQueries * kKeys;
      const std::int64_t seen = causal ? kKeys - kQueries + row % kQueries + 1 : kKeys;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::int64_t c0 = head * kSize, k0 = head / 2 * kSize;
        std::vector<double> p, d_p;
        double sum = 0, delta = 0;
        const std::int64_t from = first + (first_key == nullptr ? 0 : std::max<std::int64_t>(first_key(row % kQueries), 0));
        for (std::int64_t s = from; s < first + seen; ++s) {
          double score = 0, d = 0;
          for (std::int64_t c = 0; c < kSize; ++c) {
            score += static_cast<double>(q_(row, c0 + c)) * k_(s, k0 + c);
            d += static_cast<double>(d_out_(row, c0 + c)) * v_(s, k0 + c);
          }
          p.push_back(std::exp(kScale * score + bias_[static_cast<std::size_t>(s)]));
          d_p.push_back(d);
          sum += p.back();
        }
        if (sum == 0) continue;  // it sees none
        for (std::size_t s = 0; s < p.size(); ++s) delta += (p[s] /= sum) * d_p[s];
        for (std::size_t s = 0; s < p.size(); ++s) {
          const double d_score = kScale * p[s] * (d_p[s] - delta);
          const std::int64_t key = from + static_cast<std::int64_t>(s);
          for (std::int64_t c = 0; c < kSize; ++c) {
            d_q_(row, c0 + c) += static_cast<float>(d_score * k_(key, k0 + c));
            d_k_(key, k0 + c) += static_cast<float>(d_score * q_(row, c0 + c));
            d_v_(key, k0 + c) += static_cast<float>(p[s] * d_out_(row, c0 + c));
          }
        }
      }
    }
  }

  /// In the memory that calls leave for the next one.
  static void LeaveNaN(threadpool::Pool& pool) {
    const std::int64_t rows = kKeys + 100, columns = 4 * 64;
    const auto nan = [&] { return Rows(DType::kBFloat16, rows, columns, columns); };
    const Rows in = nan(), d_q = nan(), d_k = nan(), d_v = nan();
    const auto view = [&](const Rows& of) {
      return TensorView{of.data(), DType::kBFloat16, 3, {1, rows, columns}, {rows * columns, columns, 1}};
    };
    std::vector<float> saved(static_cast<std::size_t>(4 * rows), 1.0f);
    fused::AttentionGrad({{view(in), view(in), view(in), 4, 1.0f, nullptr, view(in)},
                          saved.data(),
                          saved.data(),
                          view(in),
                          view(d_q),
                          view(d_k),
                          view(d_v)},
                         pool);
  }

  static void ExpectNear(const Rows& got, const Dense& expected, const char* name) {
    double difference = 0, norm = 0;
    for (std::int64_t r = 0; r < expected.rows; ++r) {
      for (std::int64_t c = 0; c < expected.cols; ++c) {
        const double d = static_cast<double>(got(r, c)) - expected(r, c);
        difference += d * d;
        norm += static_cast<double>(expected(r, c)) * expected(r, c);
      }
    }
    // Of probabilities, gradients of scores, out and the result, each rounded by half a step of bf16: some 2e-3 in all.
    EXPECT_LT(std::sqrt(difference / norm), 5e-3) << name;
    got.ExpectGapsUntouched();
  }

  std::mt19937_64 random_{23};
  const Dense q_ = RandomValues(kBatch * kQueries, kColumns, random_), k_ = RandomValues(kBatch * kKeys, kKeyColumns, random_),
              v_ = RandomValues(kBatch * kKeys, kKeyColumns, random_),
              d_out_ = RandomValues(kBatch * kQueries, kColumns, random_);
  const Rows q_rows_{DType::kBFloat16, q_, kColumns + 1}, k_rows_{DType::kBFloat16, k_, kKeyColumns + 4},
      v_rows_{DType::kBFloat16, v_, kKeyColumns}, d_out_rows_{DType::kBFloat16, d_out_, kColumns + 2};
  std::vector<float> bias_ = std::vector<float>(kBatch * kKeys, 0.0f);
  Dense d_q_, d_k_, d_v_;
};

TEST_F(AttentionGradTest, OnAnyNumberOfThreads) {
  for (std::size_t s = 1; s < bias_.size(); s += 5) bias_[s] = -kInfinity;
  // Sequences side by side, short and longer than a block has keys; a window; no order at all, and queries that see nothing.
  constexpr FirstKey kFirstKeys[] = {nullptr, [](std::int64_t t) { return (t + 31) / 20 * 20; },
                                     [](std::int64_t t) { return (t + 31) / 170 * 170; }, [](std::int64_t t) { return t - 60; },
                                     [](std::int64_t t) { return t * 37 % 400 - 20; }};
  for (std::size_t i = 0; i < 2 * std::size(kFirstKeys); ++i) {
    const bool causal = i % 2 == 1;
    const FirstKey first_key_of = kFirstKeys[i / 2];
    SCOPED_TRACE(::testing::Message() << (causal ? "causal" : "not causal") << ", first keys " << i / 2);
    Expect(causal, first_key_of);
    std::vector<std::int32_t> first_keys;
    for (std::int64_t i = 0; first_key_of != nullptr && i < kBatch * kQueries; ++i) {
      first_keys.push_back(static_cast<std::int32_t>(first_key_of(i % kQueries)));
    }
    std::vector<Rows> results;
    for (const int threads : {1, 5, 11}) {
      threadpool::Pool pool(threads);
      LeaveNaN(pool);
      const Rows out(DType::kBFloat16, kBatch * kQueries, kColumns, kColumns + 3);
      std::vector<float> most(static_cast<std::size_t>(kBatch * kHeads * kQueries)), inverse_sums(most);
      fused::AttentionGradArgs args;
      args.forward = {OfSequences(q_rows_, kQueries, kColumns),
                      OfSequences(k_rows_, kKeys, kKeyColumns),
                      OfSequences(v_rows_, kKeys, kKeyColumns),
                      kHeads,
                      static_cast<float>(kScale),
                      bias_.data(),
                      OfSequences(out, kQueries, kColumns),
                      kKeyHeads,
                      causal,
                      most.data(),
                      inverse_sums.data(),
                      first_keys.empty() ? nullptr : first_keys.data()};
      args.most = most.data();
      args.inverse_sums = inverse_sums.data();
      fused::Attention(args.forward, pool);
      results.emplace_back(DType::kBFloat16, kBatch * kQueries, kColumns, kColumns + 7);
      results.emplace_back(DType::kBFloat16, kBatch * kKeys, kKeyColumns, kKeyColumns + 5);
      results.emplace_back(DType::kBFloat16, kBatch * kKeys, kKeyColumns, kKeyColumns);
      const std::size_t at = results.size() - 3;
      args.d_out = OfSequences(d_out_rows_, kQueries, kColumns);
      args.d_q = OfSequences(results[at], kQueries, kColumns);
      args.d_k = OfSequences(results[at + 1], kKeys, kKeyColumns);
      args.d_v = OfSequences(results[at + 2], kKeys, kKeyColumns);
      fused::AttentionGrad(args, pool);
    }
    const Dense* const expected[] = {&d_q_, &d_k_, &d_v_};
    const char* const names[] = {"d_q", "d_k", "d_v"};
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Dense& right = *expected[i % 3];
      if (i < 3) ExpectNear(results[i], right, names[i]);
      for (std::int64_t r = 0; r < right.rows; ++r) {
        for (std::int64_t c = 0; c < right.cols; ++c) ASSERT_EQ(results[i](r, c), results[i % 3](r, c)) << names[i % 3];
      }
    }
  }
}

TEST_F(AttentionGradTest, RefusesWhatDoesNotFit) {
  threadpool::Pool pool(1);
  const Rows d_q(DType::kBFloat16, kBatch * kQueries, kColumns, kColumns);
  const Rows d_k(DType::kBFloat16, kBatch * kKeys, kKeyColumns, kKeyColumns);
  const Rows d_v(DType::kBFloat16, kBatch * kKeys, kKeyColumns, kKeyColumns);
  const TensorView queries = OfSequences(q_rows_, kQueries, kColumns), keys = OfSequences(k_rows_, kKeys, kKeyColumns);
  std::vector<float> saved(static_cast<std::size_t>(kBatch * kHeads * kQueries));
  const auto refused = [&](const char* name, auto change) {
    fused::AttentionGradArgs args{{queries, keys, keys, kHeads, 1.0f, nullptr, queries, kKeyHeads},
                                  saved.data(),
                                  saved.data(),
                                  queries,
                                  OfSequences(d_q, kQueries, kColumns),
                                  OfSequences(d_k, kKeys, kKeyColumns),
                                  OfSequences(d_v, kKeys, kKeyColumns)};
    change(args);
    try {
      fused::AttentionGrad(args, pool);
      EXPECT_STREQ(name, "") << "was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(std::string(error.what()).find(name), 0) << error.what();
      EXPECT_STRNE(name, "") << error.what();
    }
  };
  refused("", [](auto&) {});
  refused("heads", [](auto& args) { args.forward.heads = 3; });
  refused("out", [](auto& args) { args.forward.out.shape[1] = 3; });
  refused("most or inverse_sums", [](auto& args) { args.most = nullptr; });
  refused("most or inverse_sums", [](auto& args) { args.inverse_sums = nullptr; });
  refused("d_out", [](auto& args) { args.d_out.shape[2] = 80; });
  refused("d_q", [](auto& args) { args.d_q.dtype = DType::kFloat32; });
  refused("d_k", [](auto& args) { args.d_k.shape[1] = kQueries; });
  refused("d_v", [](auto& args) { args.d_v.stride[2] = 2; });
  refused("q has no rows", [](auto& args) {
    for (TensorView* view : {&args.forward.q, &args.forward.out, &args.d_out, &args.d_q}) view->shape[1] = 0;
  });
}

}  // namespace
}  // namespace moesaic
