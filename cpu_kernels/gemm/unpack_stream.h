// The unpack form (kernels.h, UnpackGemmArgs) of a matrix unit where one cell takes all rows. Each weight is used once, so the
// way from memory decides: weights come in the order in which they lie, superblock after superblock, and pass through L1 into
// right factors. Sums of a superblock's columns wait in L1 meanwhile.
#pragma once

#include <cstdint>
#include <span>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/simd.h"

namespace {

/// Up to four tile columns of a superblock: a page of 4 KB for each of its panels.
struct WeightPages {
  const GemmSegment* segment = nullptr;
  std::int64_t panel = 0, panels = 0;    ///< of the segment's weights
  std::int64_t column = 0, columns = 0;  ///< tile columns
};

/// The weights of a call: eight tile columns along the whole contraction, a superblock at a time, then the next eight.
class PagesInOrder {
 public:
  explicit PagesInOrder(const UnpackGemmArgs& args)
      : segments_(args.segments), end_(args.first_column + args.columns), group_end_(args.first_column) {
    BeginGroup();
  }

  bool done() const { return group_ >= end_; }
  const WeightPages& pages() const { return pages_; }
  /// The first of the columns whose sums wait together.
  std::int64_t group() const { return group_; }
  /// Whether the contraction begins here.
  bool begins() const { return begins_; }

  void Next() {
    pages_.column += pages_.columns;
    if (pages_.column < group_end_) return Fit();
    begins_ = false;
    pages_.column = group_;
    pages_.panel += kSuperblock;
    if (pages_.panel >= pages_.segment->weights.panels) {
      pages_.panel = 0;
      if (++pages_.segment == segments_.data() + segments_.size()) return BeginGroup();
    }
    Fit();
  }

 private:
  void BeginGroup() {
    begins_ = true;
    group_ = group_end_;
    group_end_ = Least((group_ / kSuperblock + 1) * kSuperblock, end_);
    pages_ = {segments_.data(), 0, 0, group_, 0};
    Fit();
  }

  void Fit() {
    pages_.panels = Least(kSuperblock, pages_.segment->weights.panels - pages_.panel);
    pages_.columns = Least(kPageTiles - pages_.column % kPageTiles, group_end_ - pages_.column);
  }

  std::span<const GemmSegment> segments_;
  std::int64_t end_, group_ = 0, group_end_;
  bool begins_ = true;
  WeightPages pages_;
};

/// Right tiles on their way through L1: each pair of them, of a column's low and high half, is unpacked kLead steps before its
/// only use.
class UnpackRing {
 public:
  static constexpr std::int64_t kPairs = 4;  ///< 8 KB
  static constexpr int kLead = 2;

  explicit UnpackRing(const UnpackGemmArgs& args) : at_(args) { BeginPages(); }

  /// Unpacks the next pair.
  MOESAIC_INLINE void Step() {
    if (panels_ == 0) return;
    BFloat16* low = ring_ + written_ * 2 * kTileElements;
    BFloat16* high = low + kTileElements;
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t to = half * (kTileElements / 2);
      InterleaveRowPairs<kPanelRows / 2>(Stored(panel_ + half), low + to, high + to);
    }
    written_ = (written_ + 1) % kPairs;
    panel_ += 2;
    if (panel_ >= panels_) NextColumn();
  }

  const BFloat16* pair(std::int64_t slot) const { return ring_ + slot * 2 * kTileElements; }

 private:
  /// A tile of the column: zeros where the last panel of a pair is missing.
  MOESAIC_INLINE const BFloat16* Stored(std::int64_t panel) {
    alignas(64) static constexpr BFloat16 kZeros[kTileElements] = {};
    if (panel >= panels_) return kZeros;
    if (tiles_ != nullptr) return tiles_ + panel * down_;
    const WeightPages& pages = at_.pages();
    return WeightTile(pages.segment->weights, pages.panel + panel, pages.column + column_, decoded_);
  }

  MOESAIC_INLINE void NextColumn() {
    panel_ = 0;
    tiles_ += along_;
    if (++column_ < at_.pages().columns) return;
    at_.Next();
    BeginPages();
  }

  void BeginPages() {
    const WeightPages& pages = at_.pages();
    const TileMatrix& weights = pages.segment->weights;
    panels_ = at_.done() ? 0 : pages.panels;
    column_ = 0;
    const bool is_compressed = at_.done() || weights.codec != nullptr;
    tiles_ = is_compressed ? nullptr : weights.Tile(pages.panel, pages.column);
    down_ = is_compressed ? 0 : weights.RunDownColumn(pages.panel, pages.column).stride;
    along_ = is_compressed ? 0 : weights.RunAlongPanel(pages.panel, pages.column).stride;
  }

  PagesInOrder at_;
  const BFloat16* tiles_ = nullptr;      ///< of the column; null: to be decoded
  std::int64_t down_ = 0, along_ = 0;    ///< elements between tiles of a column, of a panel
  std::int64_t column_ = 0;              ///< of the pages
  std::int64_t panel_ = 0, panels_ = 0;  ///< of the pages; none: all is unpacked
  std::int64_t written_ = 0;
  alignas(64) BFloat16 ring_[kPairs * 2 * kTileElements];
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// The ring goes on, and half of each page that comes after these ones is prefetched. (16 AMX threads, 1 to 16 rows: all lines
/// 4% less to 14% more time, a quarter of them 4% less to 12% more.)
class StreamBeside {
 public:
  static constexpr Passing kPassing = Passing::kLeft;
  static constexpr std::int64_t kOfPage = kPageTiles / 2;

  explicit StreamBeside(UnpackRing& ring) : ring_(ring) {}
  StreamBeside(const StreamBeside&) = delete;
  StreamBeside& operator=(const StreamBeside&) = delete;

  /// Before all steps.
  /// @param first  pages of the call
  void Begin(const PagesInOrder& first) {
    Aim(first, 1);
    Prefetcher::Steps(prefetcher_).Next();
    for (int i = 0; i < UnpackRing::kLead; ++i) ring_.Step();
  }

  /// @param next  to be prefetched during the next `steps`
  void Aim(const PagesInOrder& next, std::int64_t steps) {
    const WeightPages& pages = next.pages();
    ahead_ = {};
    if (!next.done()) {
      ahead_ = {&pages.segment->weights, pages.panel, pages.panels, pages.column, pages.columns, kOfPage};
    }
    prefetcher_.Aim(ahead_, kNone, kNoLines, steps);
  }

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(StreamBeside& beside) : ring_(beside.ring_), ahead_(beside.prefetcher_) {}
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void NextRun() {}
    MOESAIC_INLINE void Next() {
      ring_.Step();
      ahead_.Next();
    }

   private:
    UnpackRing& ring_;
    Prefetcher::Steps ahead_;
  };

 private:
  static constexpr WeightsAhead kNone{};
  static constexpr LinesAhead kNoLines{};

  UnpackRing& ring_;
  WeightsAhead ahead_;
  Prefetcher prefetcher_;
};

/// At most kMaxA panels of activations.
template <class Cell>
void UnpackFewPanels(const UnpackGemmArgs& args) {
  alignas(64) float sums[kSuperblock][Cell::kMaxA * kPanelRows * kTileColumns];
  const int na = static_cast<int>(args.panels);
  PagesInOrder now(args), next = now;
  if (now.done()) return;
  UnpackRing ring(args);
  StreamBeside beside(ring);
  beside.Begin(now);
  std::int64_t slot = 0;
  for (; !now.done(); now = next) {
    const WeightPages& pages = now.pages();
    const TileMatrix& activations = pages.segment->activations;
    const std::int64_t pairs = CeilDiv(pages.panels, 2);
    next.Next();
    beside.Aim(next, pairs * pages.columns);
    for (std::int64_t column = pages.column; column < pages.column + pages.columns; ++column) {
      CellRun runs[2];
      int count = 0;
      for (std::int64_t k = 0; k < pairs; ++count) {
        CellRun& run = runs[count];
        run.length = Least(UnpackRing::kPairs - slot, pairs - k);
        run.a_stride = activations.column_stride * kTileElements;
        run.b_stride = 2 * kTileElements;
        for (int a = 0; a < na; ++a) run.a[a] = activations.Tile(args.first_panel + a, pages.panel / 2 + k);
        for (int b = 0; b < 2; ++b) run.b[b] = ring.pair(slot) + b * kTileElements;
        slot = (slot + run.length) % UnpackRing::kPairs;
        k += run.length;
      }
      const bool in_c = args.rows == nullptr;
      float* c = in_c ? args.c + (column - args.first_column) * kTileColumns : sums[column - now.group()];
      Compute<Cell>(na, 2, runs, count, c, in_c ? args.ldc : kTileColumns, args.accumulate || !now.begins(), beside);
    }
    if (args.rows == nullptr || (!next.done() && next.group() == now.group())) continue;
    for (std::int64_t column = now.group(); column < pages.column + pages.columns; ++column) {
      ScatterRows(sums[column - now.group()], kTileColumns, na * kPanelRows, args.rows, column * kTileColumns);
    }
  }
  if (args.rows != nullptr) StreamFence();
}

}  // namespace
