#include "sampling/row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cpu_kernels/tensor_access.h"
#include "sampling/retain.h"
#include "sampling/stages.h"

namespace moesaic::sampling {
namespace {

/// Up to here a row is taken as a list at once.
constexpr std::int64_t kSmallVocabulary = 8192;
/// A longer list is drawn from in two steps.
constexpr std::int64_t kManyTokens = 1024;
/// By so much may the largest exponent exceed the coarse sums' reference.
constexpr double kMostAboveReference = 100;

[[noreturn]] void FailRow(std::int64_t row, const char* what) {
  throw std::invalid_argument("logits has " + std::string(what) + " in row " + std::to_string(row) +
                              "; expected numbers, at least one of them above -infinity");
}

}  // namespace

void RowScratch::Ensure(std::int64_t vocabulary, std::int64_t pieces) {
  const std::int64_t blocks = LogitRow{nullptr, DType::kFloat32, vocabulary}.blocks();
  const std::int64_t listed = vocabulary + 16 * pieces;
  const auto carve = [&](void* base) {
    Carver carver(base);
    max = carver.Take<float>(blocks);
    sum = carver.Take<float>(blocks);
    bound = carver.Take<float>(blocks);
    above = carver.Take<float>(blocks);
    mass = carver.Take<double>(blocks);
    numbers = carver.Take<double>((blocks + 63) / 64 * 64);
    earliest = carver.Take<double>(blocks);
    values = carver.Take<float>(listed);
    columns = carver.Take<std::int32_t>(listed);
    weights = carver.Take<double>(listed);
    packed = carver.Take<float>(vocabulary);
    return carver.used();
  };
  buffer_.Ensure(carve(nullptr));
  carve(buffer_.data());
  piece_counts.resize(static_cast<std::size_t>(pieces));
}

Row::Row(const SampleArgs& args, const SamplingKernels& kernels)
    : args_(args),
      options_(args.options),
      kernels_(kernels),
      temperature_(args.options.temperature == 0 ? 1.0 : args.options.temperature) {}

bool Row::IsSmall() const { return logits_.size <= kSmallVocabulary; }

/// Sums of all blocks serve top_p of a long row, and the probability of a token that is drawn from all or greedy.
bool Row::NeedsSums() const {
  if (Greedy()) return WantsProbability();
  if (HasTopK()) return false;
  if (options_.top_p < 1) return !IsSmall();
  return WantsProbability() && options_.min_p == 0 && options_.typical_p == 1;
}

/// Where bounds of the blocks' sums go, for a row that is drawn from whole and without sums; else null.
float* Row::Bounds() const {
  const bool whole = !HasTopK() && options_.top_p == 1 && options_.min_p == 0 && options_.typical_p == 1;
  return whole && !Greedy() && !NeedsSums() && args_.ids != nullptr ? scratch_->bound : nullptr;
}

/// Whether top_p cuts what the sums are of.
bool Row::CutsSums() const { return !Greedy() && NeedsSums() && options_.top_p < 1; }

void Row::Begin(std::int64_t row, RowScratch* scratch, const std::vector<Piece>* pieces) {
  index_ = row;
  scratch_ = scratch;
  pieces_ = pieces;
  listed_ = pending_ = is_estimated_ = is_coarse_ = is_above_ = false;
  masses_ = Masses::kNone;
  count_ = 0;
  cut_ = Cut();
  const TensorView& logits = args_.logits;
  logits_ = {static_cast<const char*>(logits.data) + row * logits.stride[0] * SizeOf(logits.dtype), logits.dtype,
             logits.shape[1]};
  const bool penalties = args_.context.defined() && (options_.repetition_penalty != 1 || options_.frequency_penalty != 0 ||
                                                     options_.presence_penalty != 0);
  if (logits.stride[1] != 1 || penalties) Pack();
  if (penalties) Penalise();
  if (CutsSums()) EstimateTopP();
}

void Row::Pack() {
  StageRange range(Stage::kPack, logits_.size * (SizeOf(logits_.dtype) + 4));
  for (std::int64_t i = 0; i < logits_.size; ++i) scratch_->packed[i] = LoadFloat(args_.logits, index_, i);
  logits_ = {scratch_->packed, DType::kFloat32, logits_.size};
}

void Row::Penalise() {
  StageRange range(Stage::kScale);
  std::vector<std::int64_t>& seen = scratch_->context;
  seen.clear();
  for (std::int64_t i = 0; i < args_.context.shape[1]; ++i) {
    const std::int64_t token = LoadInt(args_.context, index_, i);
    if (token >= 0 && token < logits_.size) seen.push_back(token);
  }
  std::sort(seen.begin(), seen.end());
  const auto repetition = static_cast<float>(options_.repetition_penalty);
  for (std::size_t i = 0, next = 0; i < seen.size(); i = next) {
    while (next < seen.size() && seen[next] == seen[i]) ++next;
    float& x = scratch_->packed[seen[i]];
    x = x < 0 ? x * repetition : x / repetition;
    x -= static_cast<float>(options_.frequency_penalty * static_cast<double>(next - i) + options_.presence_penalty);
  }
}

void Row::Scan(std::int64_t piece) {
  const bool sums = NeedsSums();
  const auto [first, last] = (*pieces_)[static_cast<std::size_t>(piece)];
  StageRange range(sums ? Stage::kSoftmax : Stage::kSelect,
                   std::min((last - first) * kSamplingBlock, logits_.size) * SizeOf(logits_.dtype));
  if (is_coarse_) {
    return kernels_.scan_coarsely({logits_, first, last, 1 / temperature_, reference_, scratch_->max, scratch_->sum});
  }
  ScanBlocksArgs scan{logits_, first, last, 1 / temperature_, scratch_->max};
  if (sums) scan.sum = scratch_->sum;
  scan.bound = Bounds();
  if (is_estimated_) scan.above = scratch_->above;
  scan.high = high_;
  kernels_.scan_blocks(scan);
}

void Row::FindMaximum() {
  const float* max = scratch_->max;
  int nan = 0;
  for (std::int64_t b = 0; b < logits_.blocks(); ++b) nan |= std::isnan(max[b]) ? 1 : 0;
  if (nan != 0) FailRow(index_, "a NaN");
  max_ = RangeOf(max, static_cast<std::size_t>(logits_.blocks())).most;
  if (max_ == -kInfinity) FailRow(index_, "nothing but -infinity");
  if (max_ == kInfinity) ShareInfinities();
}

/// The limit of the softmax: +infinity becomes 0, and all else -infinity.
void Row::ShareInfinities() {
  StageRange range(Stage::kPack);
  const TensorView view{const_cast<void*>(logits_.data), logits_.dtype, 2, {1, logits_.size, 0}, {0, 1, 0}};
  for (std::int64_t i = 0; i < logits_.size; ++i) {
    scratch_->packed[i] = LoadFloat(view, 0, i) == kInfinity ? 0.0f : -kInfinity;
  }
  logits_ = {scratch_->packed, DType::kFloat32, logits_.size};
  is_estimated_ = is_coarse_ = false;
  ScanBlocksArgs scan{logits_, 0, logits_.blocks(), 1 / temperature_, scratch_->max, NeedsSums() ? scratch_->sum : nullptr};
  scan.bound = Bounds();
  kernels_.scan_blocks(scan);
  max_ = 0;
}

/// After coarse sums that do not suffice.
void Row::ScanExactly() {
  is_coarse_ = false;
  kernels_.scan_blocks({logits_, 0, logits_.blocks(), 1 / temperature_, scratch_->max, scratch_->sum,
                        is_estimated_ ? scratch_->above : nullptr, high_});
  SumMasses();
}

/// The blocks' masses and their sum, relative to the largest logit.
void Row::SumMasses() {
  const std::int64_t blocks = logits_.blocks();
  const double exponent = static_cast<double>(CoarseScale(1 / temperature_)) * max_ - reference_;
  if (is_coarse_ && exponent > kMostAboveReference) return ScanExactly();
  if (is_coarse_) {
    const double factor = std::exp2(-exponent);
    for (std::int64_t b = 0; b < blocks; ++b) scratch_->mass[b] = static_cast<double>(scratch_->sum[b]) * factor;
  } else {
    kernels_.block_mass({scratch_->max, scratch_->sum, blocks, max_, 1 / temperature_, scratch_->mass});
  }
  total_ = std::accumulate(scratch_->mass, scratch_->mass + blocks, 0.0);
}

bool Row::Plan() {
  FindMaximum();
  if (NeedsSums()) {
    StageRange range(Stage::kSoftmax);
    SumMasses();
    masses_ = Masses::kKept;
  }
  if (Greedy()) return false;
  StageRange range(Stage::kSelect);
  if (HasTopK()) TakeTopK();
  if (options_.top_p < 1) pending_ = PlanTopP();
  return pending_;
}

Choice Row::Finish() {
  if (!Greedy()) {
    StageRange range(Stage::kSelect);
    if (pending_) {
      JoinPieces();
      FinishTopP();
    }
    if (options_.min_p > 0) TakeMinP();
    if (options_.typical_p < 1) TakeTypical();
  }
  Choice choice;
  if (args_.ids != nullptr || Greedy()) choice.id = Draw();
  if (args_.kept != nullptr || args_.scores.defined()) Unpack(choice.id);
  if (args_.confidence != nullptr) choice.confidence = ConfidenceOf(choice.id);
  return choice;
}

void Row::CollectPiece(std::int64_t piece) {
  const auto [first, last] = (*pieces_)[static_cast<std::size_t>(piece)];
  StageRange range(Stage::kSelect, std::min((last - first) * kSamplingBlock, logits_.size) * SizeOf(logits_.dtype));
  const std::int64_t place = PlaceOf(piece);
  scratch_->piece_counts[static_cast<std::size_t>(piece)] =
      kernels_.collect({logits_, first, last, scratch_->max, low_, high_, max_, 1 / temperature_,
                        is_estimated_ ? nullptr : scratch_->mass, scratch_->values + place, scratch_->columns + place});
}

/// Where the list of a piece begins, with room for all its elements and 16 more.
std::int64_t Row::PlaceOf(std::int64_t piece) const {
  return (*pieces_)[static_cast<std::size_t>(piece)].first * kSamplingBlock + 16 * piece;
}

/// The lists of the pieces become one.
void Row::JoinPieces() {
  count_ = 0;
  for (std::size_t piece = 0; piece < pieces_->size(); ++piece) {
    const std::int64_t place = PlaceOf(static_cast<std::int64_t>(piece));
    const std::int64_t count = scratch_->piece_counts[piece];
    std::memmove(scratch_->values + count_, scratch_->values + place, static_cast<std::size_t>(count) * sizeof(float));
    std::memmove(scratch_->columns + count_, scratch_->columns + place, static_cast<std::size_t>(count) * sizeof(std::int32_t));
    count_ += count;
  }
}

void Row::Collect(float low, float high, double* mass) {
  count_ = kernels_.collect({logits_, 0, logits_.blocks(), scratch_->max, low, high, max_, 1 / temperature_, mass,
                             scratch_->values, scratch_->columns});
}

void Row::WeighList() { kernels_.weights({scratch_->values, count_, max_, temperature_, scratch_->weights}); }

/// Four sums: one addition would wait for the other.
double Row::ListWeight() const {
  double sums[4] = {};
  for (std::int64_t i = 0; i < count_ / 4 * 4; i += 4) {
    for (std::int64_t j = 0; j < 4; ++j) sums[j] += scratch_->weights[i + j];
  }
  for (std::int64_t i = count_ / 4 * 4; i < count_; ++i) sums[0] += scratch_->weights[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/// The tokens that are left as a list, where they are not one.
void Row::ListKept() {
  if (listed_) return;
  Collect(cut_.value, kInfinity, nullptr);
  WeighList();
  Retain([this](std::int64_t i) { return cut_.Keeps(scratch_->values[i], scratch_->columns[i]); });
  listed_ = true;
}

/// Where the list has the elements of a block.
Row::Piece Row::ListOf(std::int64_t b) const {
  const std::int32_t* columns = scratch_->columns;
  const auto place = [&](std::int64_t column) { return std::lower_bound(columns, columns + count_, column) - columns; };
  return {place(b * kSamplingBlock), place((b + 1) * kSamplingBlock)};
}

/// The mass of what is kept of a block. The list is lost where it takes another look at the block.
double Row::MassOf(std::int64_t b) {
  double* mass = scratch_->mass + b;
  if (masses_ == Masses::kNone) {
    kernels_.scan_blocks({logits_, b, b + 1, 1 / temperature_, scratch_->max, scratch_->sum});
    kernels_.block_mass({scratch_->max + b, scratch_->sum + b, 1, max_, 1 / temperature_, mass});
  }
  if (masses_ != Masses::kWhole) return *mass;
  // What is above the cut, and those of its value that stay.
  count_ = kernels_.collect({logits_, b, b + 1, scratch_->max, cut_.value, cut_.value, max_, 1 / temperature_, scratch_->mass,
                             scratch_->values, scratch_->columns});
  WeighList();
  double sum = *mass;
  for (std::int64_t i = 0; i < count_; ++i) sum += scratch_->columns[i] <= cut_.column ? scratch_->weights[i] : 0.0;
  return sum;
}

/// For every block a number that MassOf does not exceed.
void Row::BoundMasses(double* bounds) const {
  const std::int64_t blocks = logits_.blocks();
  if (masses_ == Masses::kKept) return (void)std::copy(scratch_->mass, scratch_->mass + blocks, bounds);
  const float* sums = masses_ == Masses::kWhole ? scratch_->sum : scratch_->bound;
  kernels_.block_mass({scratch_->max, sums, blocks, max_, 1 / temperature_, bounds});
  for (std::int64_t b = 0; b < blocks; ++b) bounds[b] *= 1.00001;  // rounding
}

/// One of many tokens is drawn in two steps, a block and a token of it: V / 256 + 256 random numbers instead of V. The race is
/// won by the least E / mass, and E / bound is the earliest that a block can arrive. So few masses need to be known: a draw
/// from all tokens adds up some blocks instead of all, one after top_p looks for its bracket's tokens in some.
std::int64_t Row::DrawBlock(PhiloxStream stream) {
  const std::int64_t blocks = logits_.blocks();
  const double* numbers = scratch_->numbers;
  double* earliest = scratch_->earliest;
  stream.domain = PhiloxStream::kBlocks;
  kernels_.exponentials({blocks, stream, scratch_->numbers});
  BoundMasses(earliest);
  for (std::int64_t b = 0; b < blocks; ++b) earliest[b] = numbers[b] / earliest[b];
  std::int64_t winner = std::min_element(earliest, earliest + blocks) - earliest;
  double least = numbers[winner] / MassOf(winner);
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (earliest[b] > least || b == winner) continue;
    const double time = numbers[b] / MassOf(b);
    if (time > least || (time == least && b > winner)) continue;
    least = time;
    winner = b;
  }
  return winner;
}

std::int64_t Row::Draw() {
  StageRange range(Stage::kDraw);
  if (Greedy()) {
    std::int64_t b = 0;
    while (scratch_->max[b] != max_) ++b;
    std::int64_t column = b * kSamplingBlock;
    while (At(column) != max_) ++column;
    return column;
  }
  PhiloxStream stream{args_.seed, args_.offset, static_cast<std::uint32_t>(index_), PhiloxStream::kColumns};
  if (args_.row_ids.defined()) stream.row = static_cast<std::uint32_t>(LoadInt(args_.row_ids, index_, 0));
  if (listed_ && count_ > kManyTokens) {
    std::fill(scratch_->mass, scratch_->mass + logits_.blocks(), 0.0);
    for (std::int64_t i = 0; i < count_; ++i) scratch_->mass[scratch_->columns[i] / kSamplingBlock] += scratch_->weights[i];
    masses_ = Masses::kKept;
    const auto [first, last] = ListOf(DrawBlock(stream));
    return scratch_
        ->columns[first + kernels_.race({scratch_->weights + first, scratch_->columns + first, last - first, stream})];
  }
  if (!listed_) {
    const std::int64_t b = DrawBlock(stream);
    count_ = kernels_.collect({logits_, b, b + 1, scratch_->max, cut_.value, kInfinity, max_, 1 / temperature_, nullptr,
                               scratch_->values, scratch_->columns});
    Retain([this](std::int64_t i) { return cut_.Keeps(scratch_->values[i], scratch_->columns[i]); });
    WeighList();
  }
  if (count_ == 1) return scratch_->columns[0];
  return scratch_->columns[kernels_.race({scratch_->weights, scratch_->columns, count_, stream})];
}

float Row::ConfidenceOf(std::int64_t id) {
  StageRange range(Stage::kConfidence);
  if (args_.confidence_kind == Confidence::kProbability) {
    const double total = listed_ ? ListWeight() : total_;
    return static_cast<float>(std::exp((static_cast<double>(At(id)) - max_) / temperature_) / total);
  }
  ListKept();
  const double total = ListWeight();
  if (args_.confidence_kind == Confidence::kMargin) {
    double first = 0, second = 0;
    for (std::int64_t i = 0; i < count_; ++i) {
      const double w = scratch_->weights[i];
      second = std::max(second, std::min(first, w));
      first = std::max(first, w);
    }
    return static_cast<float>((first - second) / total);
  }
  double sum = 0;
  for (std::int64_t i = 0; i < count_; ++i) {
    sum += scratch_->weights[i] * ((static_cast<double>(scratch_->values[i]) - max_) / temperature_);
  }
  return static_cast<float>(std::log(total) - sum / total);
}

float Row::At(std::int64_t column) const {
  return LoadFloat({const_cast<void*>(logits_.data), logits_.dtype, 2, {1, logits_.size, 0}, {0, 1, 0}}, 0, column);
}

void Row::Unpack(std::int64_t id) const {
  StageRange range(Stage::kUnpack);
  const TensorView& scores = args_.scores;
  std::uint8_t* kept = args_.kept != nullptr ? args_.kept + index_ * logits_.size : nullptr;
  std::int64_t next = 0;  // of the list, whose columns ascend
  for (std::int64_t i = 0; i < logits_.size; ++i) {
    const float x = At(i);
    bool keep = false;
    if (Greedy()) {
      keep = i == id;
    } else if (listed_) {
      keep = next < count_ && scratch_->columns[next] == i;
      next += keep ? 1 : 0;
    } else {
      keep = cut_.Keeps(x, static_cast<std::int32_t>(i));
    }
    if (kept != nullptr) kept[i] = keep ? 1 : 0;
    if (scores.defined()) {
      StoreFloat(scores, index_, i, 0, keep ? static_cast<float>(static_cast<double>(x) / temperature_) : -kInfinity);
    }
  }
}

}  // namespace moesaic::sampling
