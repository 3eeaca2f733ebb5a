#include "sampling/sampler.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_access.h"
#include "cpu_kernels/tensor_text.h"
#include "sampling/row.h"
#include "sampling/stages.h"

namespace moesaic::sampling {
namespace {

/// 16,384 logits: less is not worth a task.
constexpr std::int64_t kLeastPiece = 64;
constexpr std::int64_t kMostColumns = std::int64_t{1} << 28;

template <typename T>
std::string Text(T value) {
  std::string text = std::to_string(value);
  if (text.find('.') != std::string::npos) text.erase(text.find_last_not_of('0') + 1);
  return text.ends_with('.') ? text + '0' : text;
}

template <typename T>
void Require(bool holds, const char* name, T value, const char* expected) {
  if (!holds) throw std::invalid_argument(std::string(name) + " is " + Text(value) + "; expected " + expected);
}

std::string TypedShape(const TensorView& view) { return ShapeText(view) + " of " + NameOf(view.dtype); }

bool IsFloat(DType dtype) { return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

void ValidateOptions(const Options& options) {
  const double t = options.temperature;
  Require(t >= 0 && std::isfinite(t), "temperature", t, "a number >= 0 (0: greedy)");
  // Below, 1 / T is no fp32 number any more.
  Require(t == 0 || (t >= 1e-30 && t <= 1e30), "temperature", t, "0, or a number from 1e-30 to 1e30");
  Require(options.top_k >= 0, "top_k", options.top_k, "a whole number >= 0 (0: off)");
  Require(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "a number in (0, 1]");
  Require(options.min_p >= 0 && options.min_p <= 1, "min_p", options.min_p, "a number in [0, 1]");
  Require(options.typical_p > 0 && options.typical_p <= 1, "typical_p", options.typical_p, "a number in (0, 1]");
  const double r = options.repetition_penalty;
  Require(r > 0 && std::isfinite(r), "repetition_penalty", r, "a number > 0");
  Require(std::isfinite(options.frequency_penalty), "frequency_penalty", options.frequency_penalty, "a finite number");
  Require(std::isfinite(options.presence_penalty), "presence_penalty", options.presence_penalty, "a finite number");
}

void Validate(const SampleArgs& args) {
  ValidateOptions(args.options);
  const TensorView& logits = args.logits;
  if (logits.rank != 2 || !IsFloat(logits.dtype)) {
    throw std::invalid_argument("logits has shape " + TypedShape(logits) +
                                "; expected [rows, V] of bfloat16, float16 or float32");
  }
  const std::int64_t rows = logits.shape[0];
  if (logits.shape[1] < 1 || logits.shape[1] > kMostColumns) {
    throw std::invalid_argument("logits has a vocabulary of " + std::to_string(logits.shape[1]) +
                                "; expected 1 to 2^28 tokens");
  }
  const TensorView& context = args.context;
  if (context.defined() && (context.rank != 2 || context.shape[0] != rows || IsFloat(context.dtype))) {
    throw std::invalid_argument("context has shape " + TypedShape(context) + "; expected [" + std::to_string(rows) +
                                ", n] of int64 or int32");
  }
  const TensorView& scores = args.scores;
  if (scores.defined() && (scores.rank != 2 || scores.dtype != logits.dtype || scores.shape != logits.shape)) {
    throw std::invalid_argument("out has shape " + TypedShape(scores) + "; expected " + TypedShape(logits) + ", as logits");
  }
  const TensorView& ids = args.row_ids;
  if (!ids.defined()) return;
  if (ids.rank != 1 || ids.shape[0] != rows || IsFloat(ids.dtype)) {
    throw std::invalid_argument("row_ids has shape " + TypedShape(ids) + "; expected [" + std::to_string(rows) +
                                "] of int64 or int32");
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t id = LoadInt(ids, i, 0);
    Require(id >= 0 && id < (std::int64_t{1} << 32), "row_ids", id, "numbers from 0 to 2^32 - 1");
  }
}

/// Kept from call to call; a second call at the same time makes its own.
using Scratch = std::vector<RowScratch>;
std::atomic<Scratch*> g_scratch{nullptr};

class BorrowedScratch {
 public:
  BorrowedScratch() : scratch_(g_scratch.exchange(nullptr)) {
    if (scratch_ == nullptr) scratch_ = std::make_unique<Scratch>();
  }
  ~BorrowedScratch() { delete g_scratch.exchange(scratch_.release()); }
  BorrowedScratch(const BorrowedScratch&) = delete;
  BorrowedScratch& operator=(const BorrowedScratch&) = delete;
  Scratch& operator*() const { return *scratch_; }

 private:
  std::unique_ptr<Scratch> scratch_;
};

/// All blocks, evenly cut.
std::vector<Row::Piece> Cut(std::int64_t blocks, std::int64_t pieces) {
  std::vector<Row::Piece> cut;
  for (std::int64_t i = 0; i < pieces; ++i) cut.push_back({blocks * i / pieces, blocks * (i + 1) / pieces});
  return cut;
}

class Batch {
 public:
  Batch(const SampleArgs& args, threadpool::Pool& pool, Scratch& scratch)
      : args_(args), pool_(pool), scratch_(scratch), rows_(args.logits.shape[0]) {
    const std::int64_t blocks = LogitRow{nullptr, args.logits.dtype, args.logits.shape[1]}.blocks();
    const std::int64_t threads = pool.num_threads();
    const std::int64_t wanted = rows_ >= threads ? 1 : (threads + rows_ - 1) / rows_;
    pieces_ = Cut(blocks, std::clamp<std::int64_t>(blocks / kLeastPiece, 1, wanted));
    const auto slots = static_cast<std::size_t>(split() || rows_ == 1 ? rows_ : threads);  // by row, or by worker
    if (scratch_.size() < slots) scratch_.resize(slots);
    for (std::size_t i = 0; i < slots; ++i) {
      scratch_[i].Ensure(args.logits.shape[1], static_cast<std::int64_t>(pieces_.size()));
    }
  }

  void Run() { split() ? RunSplit() : RunWhole(); }

 private:
  bool split() const { return pieces_.size() > 1; }

  void Report(std::int64_t row, const Choice& choice) const {
    if (args_.ids != nullptr) args_.ids[row] = choice.id;
    if (args_.confidence != nullptr) args_.confidence[row] = choice.confidence;
  }

  /// A row stays on one core, whose cache holds it for the second pass.
  void RunWhole() {
    const auto one = [this](std::int64_t i, int worker) {
      Row row(args_, *ChosenKernels().sampling);
      row.Begin(i, &scratch_[rows_ == 1 ? 0 : static_cast<std::size_t>(worker)], &pieces_);
      row.Scan(0);
      if (row.Plan()) row.CollectPiece(0);
      Report(i, row.Finish());
    };
    if (rows_ == 1) return one(0, 0);
    pool_.ParallelFor(rows_, one);
  }

  void RunSplit() {
    std::vector<Row> rows(static_cast<std::size_t>(rows_), Row(args_, *ChosenKernels().sampling));
    const auto count = static_cast<std::int64_t>(pieces_.size());
    const auto row_of = [&](std::int64_t task) -> Row& { return rows[static_cast<std::size_t>(task / count)]; };
    ForRows([&](std::int64_t i, int) {
      rows[static_cast<std::size_t>(i)].Begin(i, &scratch_[static_cast<std::size_t>(i)], &pieces_);
    });
    pool_.ParallelFor(rows_ * count, [&](std::int64_t task, int) { row_of(task).Scan(task % count); });
    std::vector<std::uint8_t> again(static_cast<std::size_t>(rows_));
    const auto finish = [&](std::int64_t i) { Report(i, rows[static_cast<std::size_t>(i)].Finish()); };
    ForRows([&](std::int64_t i, int) {
      again[static_cast<std::size_t>(i)] = rows[static_cast<std::size_t>(i)].Plan() ? 1 : 0;
      if (again[static_cast<std::size_t>(i)] == 0) finish(i);
    });
    if (std::count(again.begin(), again.end(), 0) == rows_) return;
    pool_.ParallelFor(rows_ * count, [&](std::int64_t task, int) {
      if (again[static_cast<std::size_t>(task / count)] != 0) row_of(task).CollectPiece(task % count);
    });
    ForRows([&](std::int64_t i, int) {
      if (again[static_cast<std::size_t>(i)] != 0) finish(i);
    });
  }

  /// One row needs no other threads.
  template <typename Body>
  void ForRows(Body body) {
    if (rows_ == 1) return body(0, 0);
    pool_.ParallelFor(rows_, body);
  }

  const SampleArgs& args_;
  threadpool::Pool& pool_;
  Scratch& scratch_;
  std::int64_t rows_;
  std::vector<Row::Piece> pieces_;
};

}  // namespace

void Sample(const SampleArgs& args, threadpool::Pool& pool) {
  Validate(args);
  if (args.logits.shape[0] == 0) return;
  StageRange range(Stage::kSample);
  const threadpool::Pool::Turn turn(pool);
  const BorrowedScratch scratch;
  Batch(args, pool, *scratch).Run();
}

void ReleaseScratch() { delete g_scratch.exchange(nullptr); }

}  // namespace moesaic::sampling
