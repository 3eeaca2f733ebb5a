#include "moe/lora_in_place.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "moe/workspace.h"

namespace moesaic::moe {
namespace {

/// Numbers of so many experts lie in a cache line.
constexpr std::int64_t kLineOfExperts = 16;
/// Parts of a matrix's features in a sweep: as many as there are threads on most hosts, and few enough to add up.
constexpr std::int64_t kRanges = 16;
/// What a sweep transposes of parameters, and then of their gradients, stays in L2. (Rank 16 of 256 experts fits.)
constexpr std::int64_t kSweepBytes = std::int64_t{320} << 10;
static_assert(kSweepBytes / (kLineOfExperts * kLowRankBlockPitch * 4) * kLineOfExperts <= 1024, "what a kernel takes");
/// Of an expert, on average over those that have any: with more, packing is the faster way.
constexpr std::int64_t kMostMeanRows = 32;
/// Of the rank-wide intermediates of a call: within LoraBudget(), for nothing is packed.
constexpr std::int64_t kMostLowBytes = std::int64_t{32} << 20;

/// Of so many rows, by the sweeps of backward, which keep sums for each range: those of down, and of gate and up.
std::int64_t LowBytes(std::int64_t rows, std::int64_t input_rank, std::int64_t down_rank) {
  return rows * 4 * (input_rank + down_rank + kRanges * (down_rank + 2 * input_rank));
}

}  // namespace

bool LoraInPlace::IsFaster(std::span<const std::int64_t> rows, std::int64_t input_rank, std::int64_t down_rank) {
  std::int64_t all = 0, experts = 0;
  for (const std::int64_t count : rows) {
    if (count > kMostLowRankRows) return false;
    all += count;
    experts += count > 0 ? 1 : 0;
  }
  return all <= kMostMeanRows * experts && LowBytes(all, input_rank, down_rank) <= kMostLowBytes;
}

bool LoraInPlace::Serves(const LayerConfig& config, const LoraCall& lora, std::span<const Job> jobs) {
  if (!lora.any() || !lora.LiesInPlace() || jobs.empty()) return false;
  std::vector<std::int64_t> rows(static_cast<std::size_t>(config.num_experts));
  for (const Job& job : jobs) {
    if (job.previous >= 0) return false;
    rows[static_cast<std::size_t>(job.expert)] = job.rows;
  }
  return IsFaster(rows, lora.input_rank(), lora.down_rank());
}

LoraInPlace::LoraInPlace(const LayerConfig& config, LoraCall lora, std::span<const Job> jobs, const std::int32_t* slots)
    : config_(config),
      lora_(std::move(lora)),
      jobs_(jobs),
      slots_(slots),
      kernels_(ChosenKernels()),
      job_of_expert_(static_cast<std::size_t>(config.num_experts)) {
  for (const Job& job : jobs_) {
    job_of_expert_[static_cast<std::size_t>(job.expert)] = &job;
    rows_ += job.rows;
  }
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const auto m = static_cast<LoraMatrix>(i);
    Matrix& matrix = matrix_[i];
    matrix.pieces = lora_.InPlace(m);
    matrix.ranks = lora_.RankOf(m);
    matrix.features = lora_.FeaturesOf(m);
    matrix.Divide(config.num_experts);
  }
  inner_pitch_ = RoundUp(config.intermediate_size, kTileColumns);
}

std::int64_t LoraInPlace::BindLow(void* memory, bool backward) {
  Carver carver(memory);
  const std::int64_t r1 = lora_.input_rank(), r2 = lora_.down_rank();
  low_ = carver.Take<float>(rows_ * r1);
  down_low_ = carver.Take<float>(rows_ * r2);
  if (backward) {
    q_parts_ = carver.Take<float>(matrix_[kLoraBDownT].ranges() * rows_ * r2);
    for (int i = 0; i < 2; ++i) {
      const Matrix& matrix = matrix_[kLoraBGate + i];
      p_parts_[i] = matrix.pieces.empty() ? nullptr : carver.Take<float>(matrix.ranges() * rows_ * r1);
    }
  }
  return carver.used();
}

std::int64_t LoraInPlace::BindForward(void* memory, std::int64_t pitch, std::int64_t count) {
  Carver carver(memory);
  pitch_ = pitch;
  const std::int64_t r1 = lora_.input_rank(), r2 = lora_.down_rank();
  if (r1 > 0) added_input_ = carver.Take<float>(rows_ * 2 * inner_pitch_);
  if (r2 > 0) added_ = carver.Take<BFloat16>(count * pitch);
  if (memory == nullptr) return carver.used();
  input_rows_.resize(static_cast<std::size_t>(rows_));
  output_rows_.resize(input_rows_.size());
  for (std::int64_t i = 0; i < rows_; ++i) {
    if (r1 > 0) input_rows_[i] = added_input_ + i * 2 * inner_pitch_;
    if (r2 > 0) output_rows_[i] = added_ + slots_[i] * pitch;
  }
  return carver.used();
}

std::int64_t LoraInPlace::BindBackward(void* memory, std::int64_t pitch, std::int64_t count, bool d_hidden) {
  Carver carver(memory);
  pitch_ = pitch;
  wants_p_ = d_hidden || lora_.wants(kLoraA);
  const std::int64_t r1 = lora_.input_rank(), r2 = lora_.down_rank();
  q_ = carver.Take<float>(rows_ * r2);
  wq_ = carver.Take<float>(rows_ * r2);
  if (r1 > 0) intermediate_ = carver.Take<BFloat16>(rows_ * 2 * inner_pitch_);
  if (r1 > 0 && d_hidden) added_ = carver.Take<BFloat16>(count * pitch);
  if (memory == nullptr) return carver.used();
  input_rows_.resize(static_cast<std::size_t>(rows_));
  d_out_.resize(input_rows_.size());
  for (std::int64_t i = 0; i < rows_ && r1 > 0; ++i) input_rows_[i] = intermediate_ + i * 2 * inner_pitch_;
  return carver.used();
}

std::int64_t LoraInPlace::StageScratchBytes() const {
  const std::int64_t low = kMostLowRankRows * std::max(lora_.input_rank(), lora_.down_rank()) * 4;
  const std::int64_t rows = kMostLowRankRows * inner_pitch_ * 4;
  std::int64_t transposed = 0;
  for (const LoraMatrix m : {kLoraBGate, kLoraBUp, kLoraBDownT}) {
    transposed = std::max(transposed, matrix_[m].ScratchBytes(matrix_[m].experts));
  }
  return std::max(transposed, low + rows) + 256;
}

void LoraInPlace::Matrix::Divide(std::int64_t all_experts) {
  range = RoundUp(CeilDiv(features, kRanges), kPanelRows);
  const std::int64_t line_bytes = ScratchBytes(kLineOfExperts) - ScratchBytes(0);
  const std::int64_t most = kLineOfExperts * std::max<std::int64_t>(1, kSweepBytes / std::max<std::int64_t>(1, line_bytes));
  experts = RoundUp(CeilDiv(all_experts, CeilDiv(all_experts, most)), kLineOfExperts);
}

std::int64_t LoraInPlace::SweepsOf(std::int64_t experts, std::int64_t features, std::int64_t ranks) {
  Matrix matrix;
  matrix.pieces.resize(1);
  matrix.ranks = ranks;
  matrix.features = features;
  matrix.Divide(experts);
  return matrix.Sweeps(experts);
}

std::int64_t LoraInPlace::Sweeps(LoraMatrix m) const {
  const Matrix& matrix = matrix_[m];
  if (matrix.pieces.empty()) return 0;
  return matrix.Sweeps(config_.num_experts);
}

double LoraInPlace::SweepFlops(LoraMatrix m) const {
  const Matrix& matrix = matrix_[m];
  return 2.0 * static_cast<double>(rows_ * matrix.ranks * matrix.features) / static_cast<double>(Sweeps(m));
}

LoraInPlace::Sweep LoraInPlace::SweepOf(const Matrix& matrix, std::int64_t index) const {
  const std::int64_t range = index % matrix.ranges(), expert = index / matrix.ranges() * matrix.experts;
  const std::int64_t feature = range * matrix.range;
  return {expert, std::min(matrix.experts, config_.num_experts - expert), range, feature,
          std::min(matrix.range, matrix.features - feature)};
}

std::vector<LowRankPiece> LoraInPlace::PiecesOf(const Matrix& matrix, std::int64_t expert, std::int64_t first_feature) const {
  std::vector<LowRankPiece> pieces;
  for (const LoraCall::PieceInPlace& at : matrix.pieces) {
    LowRankPiece piece = at.piece;
    piece.parameter += expert * at.expert_stride + first_feature * piece.feature_stride;
    if (piece.gradient != nullptr) {
      piece.gradient += expert * at.gradient_expert_stride + first_feature * piece.gradient_feature_stride;
    }
    pieces.push_back(piece);
  }
  return pieces;
}

void LoraInPlace::Run(const SweepCall& call) const {
  const Matrix& matrix = call.matrix;
  const Sweep sweep = SweepOf(matrix, call.index);
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, sweep.first_expert, sweep.first_feature);
  std::vector<LowRankRows> experts(static_cast<std::size_t>(sweep.experts));
  for (std::int64_t x = 0; x < sweep.experts; ++x) {
    const Job* job = job_of_expert_[static_cast<std::size_t>(sweep.first_expert + x)];
    if (job == nullptr) continue;
    LowRankRows& expert = experts[static_cast<std::size_t>(x)];
    expert.count = job->rows;
    if (call.rows != nullptr) expert.rows = call.rows + job->begin;
    if (call.out != nullptr) expert.out = call.out + job->begin;
    expert.low = call.low + job->begin * matrix.ranks;
    if (call.parts == nullptr) continue;
    expert.sums = call.parts + (sweep.range * rows_ + job->begin) * matrix.ranks;
    std::fill(expert.sums, expert.sums + job->rows * matrix.ranks, 0.0f);
  }
  AcrossExpertsArgs args;
  args.pieces = pieces;
  args.experts = experts;
  args.ranks = matrix.ranks;
  args.first_feature = call.offset + sweep.first_feature;
  args.features = sweep.features;
  args.dtype = call.dtype;
  args.scratch = static_cast<float*>(ThreadScratch(matrix.ScratchBytes(matrix.experts)));
  (call.use == Use::kExpand ? kernels_.expand_across_experts : kernels_.contract_across_experts)(args);
}

void LoraInPlace::Scale(const Job& job, std::int64_t ranks, const float* scale, float* sums, BFloat16* saved) {
  for (std::int64_t i = 0; i < job.rows; ++i, sums += ranks) {
    for (std::int64_t k = 0; k < ranks; ++k) sums[k] *= scale[k];
    for (std::int64_t k = 0; k < ranks && saved != nullptr; ++k) saved[i * ranks + k] = ToBFloat16(sums[k]);
  }
}

void LoraInPlace::InputLow(const Job& job, const void* const* rows, DType dtype, BFloat16* saved) {
  const Matrix& matrix = matrix_[kLoraA];
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, job.expert, 0);
  AlongFeaturesArgs args;
  args.pieces = pieces;
  args.ranks = matrix.ranks;
  args.features = matrix.features;
  args.expert = {.count = job.rows, .rows = rows, .sums = low_ + job.begin * matrix.ranks};
  args.dtype = dtype;
  kernels_.contract_along_features(args);
  Scale(job, matrix.ranks, lora_.input_scale(), args.expert.sums, saved);
}

void LoraInPlace::ExpandGateUp(LoraMatrix m, std::int64_t sweep) {
  const std::int64_t offset = m == kLoraBUp ? inner_pitch_ : 0;
  Run({Use::kExpand, matrix_[m], sweep, offset, DType::kFloat32, low_, nullptr, nullptr, input_rows_.data()});
}

void LoraInPlace::FillSums(const Job& job, const float* const* rows, std::int64_t features, float* sums,
                           std::int64_t ld) const {
  for (std::int64_t t = 0; t < job.rows; t += kPanelRows) {
    const float* panel[kPanelRows] = {};
    for (std::int64_t f = 0; f < features; f += kPanelRows) {
      for (std::int64_t i = 0; i < std::min(kPanelRows, job.rows - t); ++i) panel[i] = rows[t + i] + f;
      kernels_.transpose(panel, sums + f * ld + t, ld);
    }
  }
}

bool LoraInPlace::StartGateUp(LoraMatrix m, const Job& job, std::int64_t first_feature, std::int64_t features, float* sums,
                              std::int64_t ld) const {
  if (matrix_[m].pieces.empty()) return false;
  const float* rows[kMostLowRankRows];
  for (std::int64_t i = 0; i < job.rows; ++i) {
    rows[i] = added_input_ + ((job.begin + i) * 2 + (m == kLoraBUp ? 1 : 0)) * inner_pitch_ + first_feature;
  }
  FillSums(job, rows, features, sums, ld);
  return true;
}

namespace {

/// Columns [first, first + columns) of operand tiles as rows, `pitch` elements apart.
void CopyRows(const TileMatrix& tiles, std::int64_t rows, std::int64_t first, std::int64_t columns, BFloat16* out,
              std::int64_t pitch) {
  for (std::int64_t c = first / kTileColumns; c * kTileColumns < first + columns; ++c, out += kTileColumns) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const BFloat16* row = tiles.Tile(i / kPanelRows, c) + i % kPanelRows * kTileColumns;
      std::memcpy(out + i * pitch, row, kTileColumns * sizeof(BFloat16));
    }
  }
}

}  // namespace

void LoraInPlace::DownLow(const Job& job, const TileMatrix& z, BFloat16* saved) {
  const Matrix& matrix = matrix_[kLoraADownT];
  if (matrix.pieces.empty()) return;
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, job.expert, 0);
  auto* copy = static_cast<BFloat16*>(ThreadScratch(job.rows * inner_pitch_ * 2));
  CopyRows(z, job.rows, 0, inner_pitch_, copy, inner_pitch_);
  const void* rows[kMostLowRankRows];
  for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = copy + i * inner_pitch_;
  AlongFeaturesArgs args;
  args.pieces = pieces;
  args.ranks = matrix.ranks;
  args.features = matrix.features;
  args.expert = {.count = job.rows, .rows = rows, .sums = down_low_ + job.begin * matrix.ranks};
  args.dtype = DType::kBFloat16;
  kernels_.contract_along_features(args);
  Scale(job, matrix.ranks, lora_.down_scale(), args.expert.sums, saved);
}

void LoraInPlace::ExpandDown(std::int64_t sweep) {
  Run({Use::kExpand, matrix_[kLoraBDownT], sweep, 0, DType::kBFloat16, down_low_, nullptr, nullptr, output_rows_.data()});
}

void LoraInPlace::LoadLow(const Job& job, const BFloat16* saved_input, const BFloat16* saved_down, const float* weights) {
  const std::int64_t r1 = lora_.input_rank(), r2 = lora_.down_rank();
  float *low = low_ + job.begin * r1, *down_low = down_low_ + job.begin * r2;
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < r1; ++k) low[i * r1 + k] = ToFloat(saved_input[i * r1 + k]);
    for (std::int64_t k = 0; k < r2; ++k) down_low[i * r2 + k] = weights[i] * ToFloat(saved_down[i * r2 + k]);
  }
}

void LoraInPlace::ContractDown(std::int64_t sweep, DType dtype) {
  Run({Use::kContract, matrix_[kLoraBDownT], sweep, 0, dtype, down_low_, q_parts_, d_out_.data(), nullptr});
}

void LoraInPlace::AddUp(const Job& job, const Matrix& matrix, const float* parts, const float* scale, float* sums) const {
  const std::int64_t ranks = matrix.ranks;
  for (std::int64_t range = 0; range < matrix.ranges(); ++range) {
    const float* part = parts + (range * rows_ + job.begin) * ranks;
    for (std::int64_t i = 0; i < job.rows; ++i) {
      for (std::int64_t k = 0; k < ranks; ++k) sums[i * ranks + k] += part[i * ranks + k] * scale[k];
    }
  }
}

void LoraInPlace::DownGradientLow(const Job& job, const float* weights) {
  const std::int64_t ranks = lora_.down_rank();
  if (ranks == 0) return;
  float *q = q_ + job.begin * ranks, *wq = wq_ + job.begin * ranks;
  std::fill(q, q + job.rows * ranks, 0.0f);
  AddUp(job, matrix_[kLoraBDownT], q_parts_, lora_.down_scale(), q);
  for (std::int64_t i = 0; i < job.rows; ++i) {
    for (std::int64_t k = 0; k < ranks; ++k) wq[i * ranks + k] = weights[i] * q[i * ranks + k];
  }
}

bool LoraInPlace::StartDown(const Job& job, std::int64_t first_feature, std::int64_t features, float* sums, std::int64_t ld,
                            void* scratch) const {
  const Matrix& matrix = matrix_[kLoraADownT];
  if (matrix.pieces.empty()) return false;
  const std::int64_t pitch = RoundUp(features, kTileColumns);
  void* out[kMostLowRankRows];
  const float* rows[kMostLowRankRows];
  for (std::int64_t i = 0; i < job.rows; ++i) {
    float* row = static_cast<float*>(scratch) + i * pitch;
    out[i] = row;
    rows[i] = row;
  }
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, job.expert, first_feature);
  AlongFeaturesArgs args;
  args.pieces = pieces;
  args.ranks = matrix.ranks;
  args.features = std::min(features, matrix.features - first_feature);
  args.expert = {.count = job.rows, .out = out, .low = q_ + job.begin * matrix.ranks};
  kernels_.expand_along_features(args);
  FillSums(job, rows, features, sums, ld);
  return true;
}

void LoraInPlace::KeepIntermediate(const Job& job, std::int64_t first_feature, std::int64_t features, const TileMatrix& z,
                                   const TileMatrix& d_gate, const TileMatrix& d_up, void* scratch) {
  if (intermediate_ != nullptr) {
    BFloat16* rows = intermediate_ + job.begin * 2 * inner_pitch_ + first_feature;
    CopyRows(d_gate, job.rows, first_feature, features, rows, 2 * inner_pitch_);
    CopyRows(d_up, job.rows, first_feature, features, rows + inner_pitch_, 2 * inner_pitch_);
  }
  if (!lora_.wants(kLoraADownT)) return;
  const Matrix& matrix = matrix_[kLoraADownT];
  const std::int64_t pitch = RoundUp(features, kTileColumns);
  auto* copy = static_cast<BFloat16*>(scratch);
  CopyRows(z, job.rows, first_feature, features, copy, pitch);
  const void* rows[kMostLowRankRows];
  for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = copy + i * pitch;
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, job.expert, first_feature);
  AlongFeaturesArgs args;
  args.pieces = pieces;
  args.ranks = matrix.ranks;
  args.features = std::min(features, matrix.features - first_feature);
  args.expert = {.count = job.rows, .rows = rows, .low = wq_ + job.begin * matrix.ranks};
  args.dtype = DType::kBFloat16;
  kernels_.outer_along_features(args);
}

void LoraInPlace::ContractGateUp(LoraMatrix m, std::int64_t sweep) {
  const std::int64_t offset = m == kLoraBUp ? inner_pitch_ : 0;
  float* sums = wants_p_ ? p_parts_[m - kLoraBGate] : nullptr;
  Run({Use::kContract, matrix_[m], sweep, offset, DType::kBFloat16, low_, sums, input_rows_.data(), nullptr});
}

void LoraInPlace::InputGradients(std::int64_t expert, const void* const* rows, DType dtype) {
  const Job* job = job_of_expert_[static_cast<std::size_t>(expert)];
  AlongFeaturesArgs args;
  if (job == nullptr) {
    for (const LoraMatrix m : {kLoraA, kLoraADownT}) {
      const std::vector<LowRankPiece> pieces = PiecesOf(matrix_[m], expert, 0);
      args.pieces = pieces;
      args.ranks = matrix_[m].ranks;
      args.features = matrix_[m].features;
      kernels_.outer_along_features(args);
    }
    return;
  }
  const Matrix& matrix = matrix_[kLoraA];
  if (matrix.pieces.empty() || !wants_p_) return;
  float* p = static_cast<float*>(ThreadScratch(job->rows * matrix.ranks * 4));
  std::fill(p, p + job->rows * matrix.ranks, 0.0f);
  for (int i = 0; i < 2; ++i) {
    if (p_parts_[i] != nullptr) AddUp(*job, matrix_[kLoraBGate + i], p_parts_[i], lora_.input_scale(), p);
  }
  const std::vector<LowRankPiece> pieces = PiecesOf(matrix, expert, 0);
  args.pieces = pieces;
  args.ranks = matrix.ranks;
  args.features = matrix.features;
  args.expert = {.count = job->rows, .rows = rows, .low = p};
  void* out[kMostLowRankRows];
  if (added_ != nullptr) {
    for (std::int64_t i = 0; i < job->rows; ++i) out[i] = added_ + slots_[job->begin + i] * pitch_;
    args.expert.out = out;
    args.dtype = DType::kBFloat16;
    kernels_.expand_along_features(args);
  }
  args.dtype = dtype;
  kernels_.outer_along_features(args);
}

}  // namespace moesaic::moe
