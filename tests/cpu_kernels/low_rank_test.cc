// The products of a low rank with parameters as they lie, on every tier, against their formulas in integers, which are exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/cpu_kernels/tiles.h"

namespace moesaic {
namespace {

/// Some parameters that stand for ranks of one matrix, and their gradients: elements (feature, rank, expert).
class Pieces {
 public:
  Pieces(std::int64_t features, std::int64_t experts, bool experts_innermost, std::mt19937_64& random)
      : features_(features), experts_(experts) {
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n)); };
    const std::int64_t count = 1 + below(2);
    values_.resize(static_cast<std::size_t>(count));
    gradients_.resize(values_.size());
    ranks_ = below(3);  // ranks that no piece has
    for (std::int64_t i = 0; i < count; ++i) {
      LowRankPiece piece;
      piece.first_rank = ranks_;
      piece.ranks = 1 + below(20);
      const auto place = [&](std::int64_t& feature_stride, std::int64_t& rank_stride) {
        if (experts_innermost && below(4) == 0) {  // features inside of ranks
          feature_stride = experts + below(2) * 3;
          rank_stride = features * feature_stride;
          return (features - 1) * feature_stride + (piece.ranks - 1) * rank_stride + experts;
        }
        if (experts_innermost) {
          rank_stride = experts + below(2) * 3;
          feature_stride = piece.ranks * rank_stride;
          return (features - 1) * feature_stride + (piece.ranks - 1) * rank_stride + experts;
        }
        feature_stride = 1;
        rank_stride = features + below(2) * 5;
        return (piece.ranks - 1) * rank_stride + features;
      };
      // Exactly the memory that the elements cover: a sanitizer sees a read beyond it.
      for (std::int64_t n = place(piece.feature_stride, piece.rank_stride); n > 0; --n) {
        values_[i].push_back(static_cast<float>(below(9) - 4));
      }
      if (below(5) != 0) {
        const std::int64_t size = place(piece.gradient_feature_stride, piece.gradient_rank_stride);
        gradients_[i].assign(static_cast<std::size_t>(size) + 32, std::numeric_limits<float>::quiet_NaN());
        // On the grid of cache lines, or off it.
        const auto offset = reinterpret_cast<std::uintptr_t>(gradients_[i].data()) % 64 / 4;
        piece.gradient = gradients_[i].data() + (16 - offset) % 16 + (below(2) == 0 ? 0 : below(16));
      }
      piece.parameter = values_[i].data();
      pieces.push_back(piece);
      ranks_ += piece.ranks;
    }
    ranks_ += below(2);
  }

  std::int64_t ranks() const { return ranks_; }
  /// 0 where no piece has the rank.
  double At(std::int64_t f, std::int64_t j, std::int64_t x) const {
    for (const LowRankPiece& piece : pieces) {
      if (j < piece.first_rank || j >= piece.first_rank + piece.ranks) continue;
      return static_cast<double>(piece.parameter[f * piece.feature_stride + (j - piece.first_rank) * piece.rank_stride + x]);
    }
    return 0;
  }
  /// Also that nothing else was written.
  void CheckGradients(const std::function<double(std::int64_t f, std::int64_t j, std::int64_t x)>& expected) {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const LowRankPiece& piece = pieces[i];
      for (std::int64_t f = 0; f < features_ && piece.gradient != nullptr; ++f) {
        for (std::int64_t j = 0; j < piece.ranks; ++j) {
          for (std::int64_t x = 0; x < experts_; ++x) {
            const float is = piece.gradient[f * piece.gradient_feature_stride + j * piece.gradient_rank_stride + x];
            ASSERT_EQ(static_cast<double>(is), expected(f, piece.first_rank + j, x)) << f << " " << j << " " << x;
            piece.gradient[f * piece.gradient_feature_stride + j * piece.gradient_rank_stride + x] =
                std::numeric_limits<float>::quiet_NaN();
          }
        }
      }
      for (const float rest : gradients_[i]) ASSERT_TRUE(std::isnan(rest));
    }
  }

  std::vector<LowRankPiece> pieces;

 private:
  std::int64_t features_, experts_, ranks_ = 0;
  std::vector<std::vector<float>> values_, gradients_;
};

/// Memory that begins with a cache line.
template <typename T>
struct OnLine {
  static constexpr std::align_val_t kLine{64};
  using value_type = T;
  OnLine() = default;
  template <typename U>
  explicit OnLine(const OnLine<U>& /*other*/) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, std::size_t /*n*/) { ::operator delete(p, kLine); }
  bool operator==(const OnLine&) const = default;
};

/// Rows of small integers as fp32 or bf16, exactly as long as they are; all begin with a cache line, or as far behind one.
struct Rows {
  DType dtype;
  std::int64_t columns, behind_line;
  std::vector<std::vector<float, OnLine<float>>> wide;
  std::vector<std::vector<BFloat16, OnLine<BFloat16>>> narrow;

  Rows(DType dtype, std::int64_t count, std::int64_t columns, std::mt19937_64& random)
      : dtype(dtype), columns(columns), behind_line(random() % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % 16)) {
    for (std::int64_t i = 0; i < count; ++i) {
      wide.emplace_back(static_cast<std::size_t>(behind_line + columns));
      narrow.emplace_back(wide[i].size());
      for (std::int64_t c = behind_line; c < behind_line + columns; ++c) {
        wide[i][c] = static_cast<float>(static_cast<int>(random() % 9) - 4);
        narrow[i][c] = ToBFloat16(wide[i][c]);
      }
    }
  }
  void* Row(std::int64_t i) {
    if (dtype == DType::kFloat32) return wide[i].data() + behind_line;
    return narrow[i].data() + behind_line;
  }
  float At(std::int64_t i, std::int64_t c) const {
    return dtype == DType::kFloat32 ? wide[i][behind_line + c] : ToFloat(narrow[i][behind_line + c]);
  }
  float Rounded(double value) const {
    const auto exact = static_cast<float>(value);
    return dtype == DType::kFloat32 ? exact : ToFloat(ToBFloat16(exact));
  }
};

class LowRankTest : public TierTest {
 protected:
  std::int64_t Below(std::int64_t n) { return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)); }
  DType AnyType() { return Below(2) == 0 ? DType::kFloat32 : DType::kBFloat16; }
  std::mt19937_64 random_{5};
};

TEST_P(LowRankTest, AcrossExperts) {
  for (int trial = 0; trial < 80; ++trial) {
    const std::int64_t experts = 1 + Below(trial % 16 == 5 ? 300 : 50), features = 1 + Below(70);
    Pieces parameters(features, experts, true, random_);
    AcrossExpertsArgs args;
    args.pieces = parameters.pieces;
    args.ranks = parameters.ranks();
    args.first_feature = Below(3) * 7;
    args.features = features;
    args.dtype = AnyType();
    const std::int64_t end = args.first_feature + features, width = end + Below(20);
    std::vector<std::int64_t> first(static_cast<std::size_t>(experts) + 1);
    for (std::int64_t x = 0; x < experts; ++x) {
      const std::int64_t most = trial % 10 == 3 ? kMostLowRankRows + 1 : 5;
      first[x + 1] = first[x] + (Below(3) == 0 ? 0 : Below(most));
    }
    if (trial % 5 == 0) {  // sixteen experts without rows
      std::fill(first.begin(), first.begin() + std::min<std::int64_t>(experts, 16) + 1, 0);
      for (std::int64_t x = 16; x < experts; ++x) first[x + 1] = first[x] + Below(4);
    }
    Rows rows(args.dtype, first.back(), width, random_), out(args.dtype, first.back(), width, random_);
    const Rows before = out;
    std::vector<const void*> in;
    std::vector<void*> to;
    std::vector<float> low, sums(static_cast<std::size_t>(first.back() * args.ranks), 3.0f);
    for (std::int64_t i = 0; i < first.back(); ++i) {
      in.push_back(rows.Row(i));
      to.push_back(out.Row(i));
      for (std::int64_t j = 0; j < args.ranks; ++j) low.push_back(static_cast<float>(Below(5) - 2));
    }
    const bool wants_sums = trial % 7 != 0;
    std::vector<LowRankRows> list(static_cast<std::size_t>(experts));
    for (std::int64_t x = 0; x < experts; ++x) {
      if (first[x + 1] == first[x]) continue;
      list[x] = {first[x + 1] - first[x], in.data() + first[x], to.data() + first[x], low.data() + first[x] * args.ranks,
                 wants_sums ? sums.data() + first[x] * args.ranks : nullptr};
    }
    args.experts = list;
    const PoisonedBuffer scratch(4 * AcrossExpertsScratch(experts, args.ranks, std::ssize(parameters.pieces)));
    args.scratch = scratch.As<float>();
    SCOPED_TRACE(testing::Message() << "trial " << trial << " experts " << experts << " features " << features << " ranks "
                                    << args.ranks);
    tier_->expand_across_experts(args);
    tier_->contract_across_experts(args);
    for (std::int64_t x = 0; x < experts; ++x) {
      for (std::int64_t row = first[x]; row < first[x + 1]; ++row) {
        for (std::int64_t c = 0; c < width; ++c) {
          double expected = 0;
          const bool written = c >= args.first_feature && c < end;
          for (std::int64_t j = 0; j < args.ranks && written; ++j) {
            expected += static_cast<double>(low[row * args.ranks + j]) * parameters.At(c - args.first_feature, j, x);
          }
          ASSERT_EQ(out.At(row, c), written ? out.Rounded(expected) : before.At(row, c)) << x << " " << c;
        }
        for (std::int64_t j = 0; j < args.ranks; ++j) {
          double expected = 3;
          for (std::int64_t f = 0; f < features && wants_sums; ++f) {
            expected += static_cast<double>(rows.At(row, args.first_feature + f)) * parameters.At(f, j, x);
          }
          ASSERT_EQ(static_cast<double>(sums[row * args.ranks + j]), expected) << x << " " << row << " " << j;
        }
      }
    }
    parameters.CheckGradients([&](std::int64_t f, std::int64_t j, std::int64_t x) {
      double sum = 0;
      for (std::int64_t row = first[x]; row < first[x + 1]; ++row) {
        sum += static_cast<double>(rows.At(row, args.first_feature + f) * low[row * args.ranks + j]);
      }
      return sum;
    });
    if (HasFatalFailure()) return;
  }
}

TEST_P(LowRankTest, AlongFeatures) {
  for (int trial = 0; trial < 120; ++trial) {
    const std::int64_t features = 1 + Below(trial % 4 == 0 ? 400 : 90);
    Pieces parameters(features, 1, false, random_);
    AlongFeaturesArgs args;
    args.pieces = parameters.pieces;
    args.ranks = parameters.ranks();
    args.features = features;
    const std::int64_t count = Below(trial % 10 == 0 ? kMostLowRankRows + 1 : 20);
    args.dtype = AnyType();
    Rows rows(args.dtype, count, features, random_), out(args.dtype, count, features, random_);
    std::vector<const void*> in;
    std::vector<void*> to;
    std::vector<float> low, sums(static_cast<std::size_t>(count * args.ranks), -7.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      in.push_back(rows.Row(i));
      to.push_back(out.Row(i));
      for (std::int64_t j = 0; j < args.ranks; ++j) low.push_back(static_cast<float>(Below(5) - 2));
    }
    args.expert = {count, in.data(), to.data(), low.data(), sums.data()};
    SCOPED_TRACE(testing::Message() << "trial " << trial << " rows " << count << " features " << features << " ranks "
                                    << args.ranks);
    tier_->contract_along_features(args);
    tier_->expand_along_features(args);
    tier_->outer_along_features(args);
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t j = 0; j < args.ranks; ++j) {
        double expected = 0;
        bool covered = false;
        for (const LowRankPiece& piece : parameters.pieces) {
          covered = covered || (j >= piece.first_rank && j < piece.first_rank + piece.ranks);
        }
        for (std::int64_t f = 0; f < features; ++f) expected += static_cast<double>(rows.At(i, f)) * parameters.At(f, j, 0);
        ASSERT_EQ(static_cast<double>(sums[i * args.ranks + j]), covered ? expected : -7.0) << i << " " << j;
      }
      for (std::int64_t f = 0; f < features; ++f) {
        double expected = 0;
        for (std::int64_t j = 0; j < args.ranks; ++j) {
          expected += static_cast<double>(low[i * args.ranks + j]) * parameters.At(f, j, 0);
        }
        ASSERT_EQ(out.At(i, f), out.Rounded(expected)) << i << " " << f;
      }
    }
    parameters.CheckGradients([&](std::int64_t f, std::int64_t j, std::int64_t) {
      double sum = 0;
      for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(rows.At(i, f) * low[i * args.ranks + j]);
      return sum;
    });
    if (HasFatalFailure()) return;
  }
}

/// Numbers that are not exact: what is computed with, beside which other rows and features, changes no bit.
TEST_P(LowRankTest, NoBitDependsOnTheRest) {
  const std::int64_t experts = 20, features = 96, ranks = 16, count = 13;
  const auto reals = [this](std::int64_t n) {
    std::vector<float> values;
    for (; n > 0; --n) values.push_back(static_cast<float>(Below(1 << 20)) / (1 << 19) - 1.0f);
    return values;
  };
  const auto narrow = [](const std::vector<float>& values) {
    std::vector<BFloat16> rounded;
    for (const float value : values) rounded.push_back(ToBFloat16(value));
    return rounded;
  };
  const std::vector<float> parameter = reals(features * ranks * experts), low = reals(count * ranks),
                           wide = reals(count * features);
  const std::vector<BFloat16> bf16 = narrow(wide);
  const PoisonedBuffer scratch(4 * AcrossExpertsScratch(experts, ranks, 2));
  struct Result {
    std::vector<float> out, sums, gradient;
  };
  // Expert 17's rows, or one expert's, in runs of so many rows and features; two pieces of odd ranks.
  const auto compute = [&](bool across, DType dtype, std::int64_t rows_at_once, std::int64_t features_at_once) {
    Result result{std::vector<float>(wide.size()), std::vector<float>(low.size()), std::vector<float>(parameter.size())};
    std::vector<BFloat16> out_bf16 = narrow(result.out);
    for (std::int64_t i = 0; i < count; i += rows_at_once) {
      for (std::int64_t f = 0; f < features; f += features_at_once) {
        std::vector<const void*> rows;
        std::vector<void*> out;
        for (std::int64_t k = i; k < std::min(count, i + rows_at_once); ++k) {
          const std::int64_t at = k * features + (across ? 0 : f);
          const bool fp32 = dtype == DType::kFloat32;
          rows.push_back(fp32 ? static_cast<const void*>(wide.data() + at) : bf16.data() + at);
          out.push_back(fp32 ? static_cast<void*>(result.out.data() + at) : out_bf16.data() + at);
        }
        const LowRankRows some{std::ssize(rows), rows.data(), out.data(), low.data() + i * ranks,
                               result.sums.data() + i * ranks};
        const std::int64_t rank_stride = across ? experts : features, feature_stride = across ? ranks * experts : 1;
        LowRankPiece pieces[2];
        for (std::int64_t rank = 0, p = 0; p < 2; rank += pieces[p++].ranks) {
          const std::int64_t first = f * feature_stride + rank * rank_stride;
          pieces[p] = {parameter.data() + first,
                       result.gradient.data() + first,
                       feature_stride,
                       rank_stride,
                       feature_stride,
                       rank_stride,
                       rank,
                       p == 0 ? 5 : ranks - 5};
        }
        if (across) {
          std::vector<LowRankRows> list(static_cast<std::size_t>(experts));
          list[17] = some;
          const AcrossExpertsArgs args{pieces, list, ranks, f, features_at_once, dtype, scratch.As<float>()};
          tier_->expand_across_experts(args);
          tier_->contract_across_experts(args);
        } else {
          const AlongFeaturesArgs args{pieces, some, ranks, features_at_once, dtype};
          tier_->expand_along_features(args);
          tier_->outer_along_features(args);
          if (features_at_once == features) tier_->contract_along_features(args);
        }
      }
    }
    if (dtype == DType::kBFloat16) {
      for (std::size_t i = 0; i < out_bf16.size(); ++i) result.out[i] = ToFloat(out_bf16[i]);
    }
    return result;
  };
  for (const bool across : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Result whole = compute(across, dtype, count, features);
      const Result by_row = compute(across, dtype, 1, features);
      EXPECT_EQ(by_row.out, whole.out);
      EXPECT_EQ(by_row.sums, whole.sums);
      for (const std::int64_t at_once : {16, 48, 6}) {  // parts of vectors, too; even, for features are contracted in pairs
        const Result by_features = compute(across, dtype, count, at_once);
        EXPECT_EQ(by_features.out, whole.out) << at_once;
        EXPECT_EQ(by_features.gradient, whole.gradient) << at_once;
        if (across) {
          EXPECT_EQ(by_features.sums, whole.sums) << at_once;
        }
      }
    }
  }
}

/// Parameters and rows are rounded to bf16, and nothing else.
TEST_P(LowRankTest, RoundsOperands) {
  const std::int64_t features = 3, ranks = 3;
  const float third = 1.0f / 3.0f;
  std::vector<float> parameter;
  for (std::int64_t i = 0; i < features * ranks; ++i) parameter.push_back(1.0f / static_cast<float>(3 + 2 * i));
  const PoisonedBuffer scratch(4 * AcrossExpertsScratch(1, ranks, 1));
  for (std::int64_t f = 0; f < features; ++f) {
    for (std::int64_t j = 0; j < ranks; ++j) {
      const float expected = ToFloat(ToBFloat16(parameter[f * ranks + j])), rounded = ToFloat(ToBFloat16(third));
      std::vector<float> row(features), low(ranks), sums(ranks), out(features);
      row[f] = third;
      low[j] = third;
      const void* row_data = row.data();
      void* out_data = out.data();
      const LowRankRows rows{1, &row_data, &out_data, low.data(), sums.data()};
      std::vector<float> by_rank;
      for (std::int64_t k = 0; k < ranks; ++k) {
        for (std::int64_t c = 0; c < features; ++c) by_rank.push_back(parameter[c * ranks + k]);
      }
      const LowRankPiece along_piece{by_rank.data(), nullptr, 1, features, 0, 0, 0, ranks};
      const AlongFeaturesArgs along{{&along_piece, 1}, rows, ranks, features, DType::kFloat32};
      tier_->contract_along_features(along);
      EXPECT_EQ(sums[j], rounded * expected) << f << " " << j;
      tier_->expand_along_features(along);
      EXPECT_EQ(out[f], third * expected) << f << " " << j;
      std::fill(sums.begin(), sums.end(), 0.0f);
      std::fill(out.begin(), out.end(), 0.0f);
      const LowRankPiece across_piece{parameter.data(), nullptr, ranks, 1, 0, 0, 0, ranks};
      const AcrossExpertsArgs across{{&across_piece, 1}, {&rows, 1}, ranks, 0, features, DType::kFloat32, scratch.As<float>()};
      tier_->contract_across_experts(across);
      EXPECT_EQ(sums[j], rounded * expected) << f << " " << j;
      tier_->expand_across_experts(across);
      EXPECT_EQ(out[f], third * expected) << f << " " << j;
    }
  }
}

/// What is not a number stays one, and touches nobody else's sums and rows: not the other experts', and, with odd numbers of
/// features and ranks, nothing that is not there.
TEST_P(LowRankTest, NanPassesThrough) {
  const std::int64_t experts = 3, features = 21, ranks = 4;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> parameter(static_cast<std::size_t>(features * ranks * experts), 1.0f);
  for (std::int64_t i = 2; i < std::ssize(parameter); i += experts) parameter[i] = infinity;  // of expert 2, which has no rows
  LowRankPiece pieces[2];
  pieces[0] = {parameter.data(), nullptr, ranks * experts, experts, 0, 0, 0, 3};
  pieces[1] = {parameter.data() + 3 * experts, nullptr, ranks * experts, experts, 0, 0, 3, 1};
  std::vector<float> row(static_cast<std::size_t>(features), 1.0f), bad = row, out(row.size()), bad_out(row.size());
  bad[20] = std::numeric_limits<float>::quiet_NaN();
  const void* rows[2] = {row.data(), bad.data()};
  void* outs[2] = {out.data(), bad_out.data()};
  std::vector<float> low(2 * ranks, 0.0f), sums(2 * ranks, 0.0f);
  low[ranks + 3] = infinity;  // the rank behind an odd number
  const PoisonedBuffer scratch(4 * AcrossExpertsScratch(experts, ranks, 2));
  const LowRankRows list[experts] = {
      {1, rows, outs, low.data(), sums.data()}, {1, rows + 1, outs + 1, low.data() + ranks, sums.data() + ranks}, {}};
  AcrossExpertsArgs args;
  args.pieces = pieces;
  args.experts = list;
  args.ranks = ranks;
  args.features = features;
  args.scratch = scratch.As<float>();
  tier_->contract_across_experts(args);
  for (std::int64_t j = 0; j < ranks; ++j) {
    EXPECT_EQ(sums[j], 21.0f);
    EXPECT_NE(sums[ranks + j], sums[ranks + j]);
  }
  tier_->expand_across_experts(args);
  for (std::int64_t f = 0; f < features; ++f) {
    EXPECT_EQ(out[f], 0.0f) << f;
    EXPECT_EQ(bad_out[f], infinity) << f;
  }
}

MOESAIC_TEST_ON_EVERY_TIER(LowRankTest);

}  // namespace
}  // namespace moesaic
