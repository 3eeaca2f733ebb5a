// Adapters of every layout to tiles and gradients back, bit by bit against the definition in moe/lora.h, on every tier.
#include "moe/lora.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/isa.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"

namespace moesaic::moe {
namespace {

std::int64_t Below(std::mt19937_64& random, std::int64_t n) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
}

/// A tensor of three dimensions in any order, with gaps, off the grid of cache lines, some axes backwards. Memory holds 0xff.
struct Strided {
  std::vector<std::byte> bytes;
  TensorView view;

  Strided(DType dtype, const std::array<std::int64_t, 3>& shape, std::mt19937_64& random) {
    view.dtype = dtype;
    view.rank = 3;
    view.shape = shape;
    std::array<int, 3> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    std::int64_t size = 1;
    std::int64_t offset = Below(random, 2) * Below(random, 20);
    for (const int d : order) {
      view.stride[d] = size;
      size *= shape[d] + (Below(random, 3) == 0 ? Below(random, 5) : 0);
      if (Below(random, 12) != 0) continue;
      offset += view.stride[d] * (shape[d] - 1);
      view.stride[d] = -view.stride[d];
    }
    bytes.assign(static_cast<std::size_t>((size + 2 * 20 + offset + 16) * SizeOf(dtype)), std::byte{0xff});
    const auto misalignment = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64);
    view.data = bytes.data() + (64 - misalignment) % 64 + offset * SizeOf(dtype);
  }
  Strided(Strided&&) = default;

  /// A copy of the memory, and the view of it.
  std::pair<std::vector<std::byte>, TensorView> Copy() const {
    std::pair<std::vector<std::byte>, TensorView> copy{bytes, view};
    copy.second.data = copy.first.data() + (static_cast<const std::byte*>(view.data) - bytes.data());
    return copy;
  }
};

/// Numbers of all magnitudes but denormal ones (of which tiers may make zeros), halfway between two of bf16, NaN and infinite.
float AnyFloat(std::mt19937_64& random) {
  const std::int64_t kind = Below(random, 20);
  if (kind == 0) return std::numeric_limits<float>::quiet_NaN();
  if (kind == 1) return std::numeric_limits<float>::infinity();
  if (kind == 2) return 0.0f;
  const float value =
      std::ldexp(1.0f + static_cast<float>(Below(random, 1 << 20)) * 0x1p-20f, static_cast<int>(Below(random, 200)) - 100);
  const float sign = random() % 2 == 0 ? 1.0f : -1.0f;
  if (kind > 6) return sign * value;
  const BFloat16 low = ToBFloat16(value);
  std::uint32_t bits = static_cast<std::uint32_t>(low.bits) << 16 | 0x8000u;
  float tie;
  std::memcpy(&tie, &bits, sizeof(tie));
  return sign * tie;
}

/// A parameter and its gradient, which may be of another type and layout, or not wanted.
struct Parameter {
  Strided value;
  Strided gradient;
  bool wanted;

  Parameter(DType dtype, const std::array<std::int64_t, 3>& shape, std::mt19937_64& random)
      : value(dtype, shape, random),
        gradient(Below(random, 2) == 0 ? DType::kFloat32 : DType::kBFloat16, shape, random),
        wanted(Below(random, 5) != 0) {
    for (std::int64_t e = 0; e < shape[0]; ++e) {
      for (std::int64_t i = 0; i < shape[1]; ++i) {
        for (std::int64_t j = 0; j < shape[2]; ++j) StoreFloat(value.view, e, i, j, AnyFloat(random));
      }
    }
  }
};

/// Where element (i, j) of a matrix comes from.
struct Source {
  const Parameter* parameter = nullptr;
  std::int64_t i = 0;
  std::int64_t j = 0;
};

/// Random adapters, and the five matrices from their definition.
class LoraProblem {
 public:
  LoraProblem(const LayerConfig& config, std::mt19937_64& random) : config_(config) {
    const bool same_dtype = Below(random, 2) == 0;
    const std::int64_t count = 1 + Below(random, 3);
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t form = Below(random, 4);
      adapters.emplace_back();
      gradients.emplace_back();
      const DType dtype = same_dtype || Below(random, 2) == 0 ? DType::kFloat32 : DType::kBFloat16;
      const std::int64_t h = config.hidden_size, inner = config.intermediate_size;
      if (form != 1) AddInput(adapters.back().gate_up, gradients.back().gate_up, dtype, 2 * inner, true, true, random);
      if (form == 1) AddInput(adapters.back().gate, gradients.back().gate, dtype, inner, true, false, random);
      if (form >= 1) AddInput(adapters.back().up, gradients.back().up, dtype, inner, false, true, random);
      if (form != 3) {
        const std::int64_t r = Rank(random), row = Size(kLoraBDownT).first;
        Parameter* a = Add(adapters.back().down.a, gradients.back().down.a, dtype, {config.num_experts, r, inner}, random);
        Parameter* b = Add(adapters.back().down.b, gradients.back().down.b, dtype, {config.num_experts, h, r}, random);
        for (std::int64_t k = 0; k < r; ++k) {
          for (std::int64_t i = 0; i < inner; ++i) At(kLoraADownT, i, row + k) = {a, k, i};
          for (std::int64_t i = 0; i < h; ++i) At(kLoraBDownT, row + k, i) = {b, i, k};
        }
        down_rank += r;
      }
    }
  }

  /// Rows and columns of a matrix without padding.
  std::pair<std::int64_t, std::int64_t> Size(LoraMatrix m) const {
    if (m == kLoraA) return {input_rank, config_.hidden_size};
    if (m == kLoraADownT) return {config_.intermediate_size, down_rank};
    if (m == kLoraBDownT) return {down_rank, config_.hidden_size};
    return {config_.intermediate_size, input_rank};
  }

  /// Null where no parameter is.
  Source Get(LoraMatrix m, std::int64_t i, std::int64_t j) const {
    const auto& rows = sources_[m];
    if (i >= static_cast<std::int64_t>(rows.size()) || j >= static_cast<std::int64_t>(rows[i].size())) return {};
    return rows[i][j];
  }

  std::vector<LoraAdapter> adapters;
  std::vector<LoraAdapterGrad> gradients;
  std::vector<std::unique_ptr<Parameter>> parameters;
  std::int64_t input_rank = 0;
  std::int64_t down_rank = 0;

 private:
  static std::int64_t Rank(std::mt19937_64& random) {
    constexpr std::array<std::int64_t, 4> kUsual = {8, 16, 32, 64};
    return Below(random, 2) == 0 ? kUsual[Below(random, 4)] : 1 + Below(random, 64);
  }

  Source& At(LoraMatrix m, std::int64_t i, std::int64_t j) {
    auto& rows = sources_[m];
    if (static_cast<std::int64_t>(rows.size()) <= i) rows.resize(i + 1);
    if (static_cast<std::int64_t>(rows[i].size()) <= j) rows[i].resize(j + 1);
    return rows[i][j];
  }

  Parameter* Add(TensorView& view, TensorView& gradient, DType dtype, const std::array<std::int64_t, 3>& shape,
                 std::mt19937_64& random) {
    parameters.push_back(std::make_unique<Parameter>(dtype, shape, random));
    Parameter* parameter = parameters.back().get();
    view = parameter->value.view;
    if (parameter->wanted) gradient = parameter->gradient.view;
    return parameter;
  }

  void AddInput(LoraPair& pair, LoraPairGrad& gradient, DType dtype, std::int64_t out, bool gate, bool up,
                std::mt19937_64& random) {
    const std::int64_t r = Rank(random), h = config_.hidden_size, inner = config_.intermediate_size;
    Parameter* a = Add(pair.a, gradient.a, dtype, {config_.num_experts, r, h}, random);
    Parameter* b = Add(pair.b, gradient.b, dtype, {config_.num_experts, out, r}, random);
    for (std::int64_t k = 0; k < r; ++k) {
      for (std::int64_t i = 0; i < h; ++i) At(kLoraA, input_rank + k, i) = {a, k, i};
      for (std::int64_t i = 0; i < inner; ++i) {
        if (gate) At(kLoraBGate, i, input_rank + k) = {b, i, k};
        if (up) At(kLoraBUp, i, input_rank + k) = {b, (gate ? inner : 0) + i, k};
      }
    }
    input_rank += r;
  }

  LayerConfig config_;
  std::array<std::vector<std::vector<Source>>, kNumLoraMatrices> sources_;
};

class LoraTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    try {
      ForceIsa(GetParam());
    } catch (const UnsupportedHostError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  void TearDown() override { ForceIsa(""); }
};

/// All strips of a matrix, in pieces of random length.
template <typename Visit>
void ForStrips(const LoraCall& lora, LoraMatrix m, std::mt19937_64& random, Visit visit) {
  for (std::int64_t begin = 0, end; begin < lora.strips(m); begin = end) {
    end = std::min(lora.strips(m), begin + 1 + Below(random, 3));
    visit(LoraCall::Strips{begin, end});
  }
}

void ExpectPacked(const LoraProblem& problem, LoraMatrix m, std::int64_t expert, const TileMatrix& tiles) {
  const bool wide = m == kLoraA || m == kLoraBDownT, down = m == kLoraADownT || m == kLoraBDownT;
  const bool twice = (down ? problem.down_rank : problem.input_rank) <= kPanelRows;
  for (std::int64_t i = 0; i < tiles.panels * kPanelRows; ++i) {
    for (std::int64_t j = 0; j < tiles.columns * kTileColumns; ++j) {
      const Source source = problem.Get(m, twice && wide ? i % kPanelRows : i, twice && !wide ? j % kPanelRows : j);
      const float value =
          source.parameter != nullptr ? LoadFloat(source.parameter->value.view, expert, source.i, source.j) : 0.0f;
      const BFloat16 packed =
          tiles.Tile(i / kPanelRows, j / kTileColumns)[i % kPanelRows * kTileColumns + StoredPosition(j % kTileColumns)];
      ASSERT_EQ(packed.bits, ToBFloat16(value).bits)
          << "matrix " << m << " expert " << expert << " element " << i << ", " << j << ": " << value;
    }
  }
}

TEST_P(LoraTest, EveryLayoutToTilesAndBack) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 25; ++trial) {
    const LayerConfig config{1 + Below(random, 40), 1 + Below(random, trial % 4 == 0 ? 700 : 80),
                             1 + Below(random, trial % 4 == 1 ? 300 : 80)};
    LoraProblem problem(config, random);
    const LoraCall lora(config, {0, config.intermediate_size}, problem.adapters, problem.gradients);
    const std::int64_t size = std::int64_t{1} << Below(random, 5);  // of a group
    SCOPED_TRACE(testing::Message() << "trial " << trial << " E " << config.num_experts << " H " << config.hidden_size << " I "
                                    << config.intermediate_size << " ranks " << problem.input_rank << ", " << problem.down_rank
                                    << " groups of " << size);

    std::vector<std::vector<std::byte>> expected;  // the memory of each gradient
    std::vector<TensorView> expected_views;
    for (const auto& parameter : problem.parameters) {
      auto [bytes, view] = parameter->gradient.Copy();
      expected.push_back(std::move(bytes));
      expected_views.push_back(view);
    }

    for (std::int64_t first = 0; first < config.num_experts; first += size) {
      const std::int64_t count = std::min(size, config.num_experts - first);
      std::vector<ExpertLora> group(static_cast<std::size_t>(count));
      std::vector<AlignedBuffer> memory;
      for (ExpertLora& expert : group) {
        if (Below(random, 4) == 0) continue;  // no rows
        memory.emplace_back(lora.expert_bytes() + 64);
        std::memset(memory.back().data(), 0xff, static_cast<std::size_t>(lora.expert_bytes()));
        void* tiles = memory.back().data();
        memory.emplace_back(lora.gradient_bytes() + 64);
        auto* sums = static_cast<float*>(memory.back().data());
        for (std::int64_t k = 0; k < lora.gradient_bytes() / 4; ++k) sums[k] = AnyFloat(random);
        expert = lora.Bind(tiles, sums);
      }
      for (int i = 0; i < kNumLoraMatrices; ++i) {
        const auto m = static_cast<LoraMatrix>(i);
        ForStrips(lora, m, random, [&](const LoraCall::Strips& strips) { lora.Pack(m, strips, first, group); });
        const auto [rows, columns] = problem.Size(m);
        for (std::int64_t x = 0; x < count; ++x) {
          const ExpertLora& expert = group[static_cast<std::size_t>(x)];
          if (expert.matrix[m].data != nullptr) ExpectPacked(problem, m, first + x, expert.matrix[m]);
          if (HasFatalFailure()) return;
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
              const Source source = problem.Get(m, r, c);
              if (source.parameter == nullptr || !source.parameter->wanted) continue;
              const float* sums = expert.gradient[m];
              std::size_t p = 0;
              while (problem.parameters[p].get() != source.parameter) ++p;
              const std::int64_t at = m == kLoraBDownT ? c * lora.gradient_columns(m) + r : r * lora.gradient_columns(m) + c;
              StoreFloat(expected_views[p], first + x, source.i, source.j, sums != nullptr ? sums[at] : 0.0f);
            }
          }
        }
        if (!lora.wants(m)) continue;
        ForStrips(lora, m, random, [&](const LoraCall::Strips& strips) { lora.WriteGradients(m, strips, first, group); });
      }
    }
    for (std::size_t p = 0; p < expected.size(); ++p) {
      const TensorView& view = problem.parameters[p]->gradient.view;
      ASSERT_TRUE(problem.parameters[p]->gradient.bytes == expected[p])
          << "gradient " << p << " type " << static_cast<int>(view.dtype) << " shape " << view.shape[1] << " x "
          << view.shape[2] << " strides " << view.stride[0] << ", " << view.stride[1] << ", " << view.stride[2];
    }
  }
}

TEST_P(LoraTest, PartsCoverAMatrixInPiecesWorthATask) {
  const LayerConfig config{128, 2048, 768};
  LoraAdapter adapter;
  float nothing;
  const auto a = [&](std::int64_t features) {
    return TensorView{&nothing, DType::kFloat32, 3, {128, 16, features}, {16 * features, features, 1}};
  };
  const auto b = [&](std::int64_t features) {
    return TensorView{&nothing, DType::kFloat32, 3, {128, features, 16}, {1, 16 * 128, 128}};
  };
  adapter.gate_up = {a(2048), b(1536), 1.0f};
  adapter.down = {a(768), b(2048), 1.0f};
  const LoraCall lora(config, {0, config.intermediate_size}, {&adapter, 1}, {});
  EXPECT_EQ(lora.parameters(), 16 * (2048 + 1536 + 768 + 2048));
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const auto m = static_cast<LoraMatrix>(i);
    const bool wide = m == kLoraA || m == kLoraBDownT;
    EXPECT_EQ(lora.strips(m), wide ? 16 : 12);
    const bool by_expert = m == kLoraA || m == kLoraADownT;
    const auto expect = [&](std::int64_t experts, std::int64_t elements, std::int64_t of_experts, std::int64_t of_strips) {
      const LoraCall::Share share = lora.ShareOf(m, experts, elements);
      EXPECT_EQ(share.experts, of_experts);
      EXPECT_EQ(share.strips, of_strips);
    };
    // Whole matrices of as many experts as are worth a task, or strips of all of them.
    expect(16, 64 * 1024, by_expert ? (wide ? 2 : 5) : 16, by_expert ? lora.strips(m) : wide ? 2 : 4);
    expect(1, 64 * 1024, 1, lora.strips(m));
    expect(16, 1024, by_expert ? 1 : 16, 1);  // less than a matrix
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, LoraTest, testing::ValuesIn([] {
                           std::set<std::string> names;
                           for (const KernelTier* tier : KernelTiers()) names.insert(tier->name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace moesaic::moe
