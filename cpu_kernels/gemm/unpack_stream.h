// The unpack form (kernels.h, UnpackGemmArgs) of a matrix unit where one cell takes all rows. Each weight is used once, so the
// way from memory decides: weights come in the order in which they lie, superblock after superblock, and pass through L1 into
// right factors. Sums of a superblock's columns wait meanwhile: in L1, or in the caller's C.
#pragma once

#include <cstdint>
#include <span>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

namespace {

/// Up to four tile columns of a superblock: of whole superblocks a page of 4 KB for each panel.
struct WeightPages {
  const GemmSegment* segment = nullptr;
  std::int64_t panel = 0, panels = 0;    ///< of the segment's weights
  std::int64_t column = 0, columns = 0;  ///< tile columns
};

/// The weights of a call: eight tile columns (a group) along the whole contraction, a superblock at a time, then the next
/// eight.
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
  /// The group that begins where the last one ended.
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
  std::int64_t end_, group_, group_end_;
  bool begins_ = true;
  WeightPages pages_;
};

/// Right tiles on their way through a ring in L1, and weights on their way to L2. Each pair of right tiles, a column's low and
/// high half, is unpacked kLead steps before its only use.
class WeightStream {
 public:
  static constexpr Passing kPassing = Passing::kLeft;
  static constexpr int kMostRuns = 2;  ///< of a column of a superblock

  explicit WeightStream(const UnpackGemmArgs& args) : at_(args) {
    Aim(at_, 1);
    Prefetcher::Steps(prefetcher_).Next();  // the first pages at once: there is nothing to do beside them
    BeginPages();
    for (int i = 0; i < kLead; ++i) Unpack();
  }
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  /// What is prefetched during the next `steps`.
  void Aim(const PagesInOrder& next, std::int64_t steps) {
    const WeightPages& pages = next.pages();
    ahead_ = {};
    if (!next.done()) {
      ahead_ = {&pages.segment->weights, pages.panel, pages.panels, pages.column, pages.columns, kOfPage};
    }
    prefetcher_.Aim(ahead_, kNone, kNoLines, steps);
  }

  /// Where the next column's pairs come to lie, of so many at most kPairs: the right factors of `runs`. Returns how many these
  /// are.
  int NextColumn(std::int64_t pairs, CellRun* runs) {
    int count = 0;
    for (; pairs > 0; ++count) {
      CellRun& run = runs[count];
      run.length = Least(kPairs - read_, pairs);
      run.b_stride = 2 * kTileElements;
      for (int b = 0; b < 2; ++b) run.b[b] = ring_ + (2 * read_ + b) * kTileElements;
      read_ = (read_ + run.length) % kPairs;
      pairs -= run.length;
    }
    return count;
  }

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(WeightStream& stream) : stream_(stream), ahead_(stream.prefetcher_) {}
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void NextRun() {}
    MOESAIC_INLINE void Next() {
      stream_.Unpack();
      ahead_.Next();
    }

   private:
    WeightStream& stream_;
    Prefetcher::Steps ahead_;
  };

 private:
  static constexpr std::int64_t kPairs = 4;  ///< 8 KB
  static constexpr int kLead = 2;
  static_assert(kLead < kPairs && kSuperblock / 2 <= kPairs);
  /// Half of each page. (16 AMX threads, 1 to 16 rows: all lines 4% less to 14% more time, a quarter of them 4% less to 12%
  /// more.)
  static constexpr std::int64_t kOfPage = kPageTiles / 2;
  static constexpr WeightsAhead kNone{};
  static constexpr LinesAhead kNoLines{};

  /// The next pair.
  MOESAIC_INLINE void Unpack() {
    if (panels_ == 0) return;
    BFloat16* low = ring_ + written_ * 2 * kTileElements;
    BFloat16* high = low + kTileElements;
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t to = half * (kTileElements / 2);
      InterleaveRowPairs<kPanelRows / 2>(Stored(panel_ + half), low + to, high + to);
    }
    written_ = (written_ + 1) % kPairs;
    panel_ += 2;
    if (panel_ < panels_) return;
    panel_ = 0;
    tiles_ += along_;
    if (++column_ < at_.pages().columns) return;
    at_.Next();
    BeginPages();
  }

  /// A tile of the column: zeros where the last panel of a pair is missing.
  MOESAIC_INLINE const BFloat16* Stored(std::int64_t panel) {
    if (panel >= panels_) return kZeroTile;
    if (tiles_ != nullptr) return tiles_ + panel * down_;
    const WeightPages& pages = at_.pages();
    return WeightTile(pages.segment->weights, pages.panel + panel, pages.column + column_, decoded_);
  }

  void BeginPages() {
    const WeightPages& pages = at_.pages();
    panels_ = at_.done() ? 0 : pages.panels;
    column_ = 0;
    tiles_ = nullptr;
    down_ = along_ = 0;
    const TileMatrix& weights = pages.segment->weights;
    if (panels_ == 0 || weights.codec != nullptr) return;
    tiles_ = weights.Tile(pages.panel, pages.column);
    down_ = weights.RunDownColumn(pages.panel, pages.column).stride;
    along_ = weights.RunAlongPanel(pages.panel, pages.column).stride;
  }

  PagesInOrder at_;
  const BFloat16* tiles_ = nullptr;      ///< of the column; null: to be decoded
  std::int64_t down_ = 0, along_ = 0;    ///< elements between tiles of a column, of a panel
  std::int64_t column_ = 0;              ///< of the pages
  std::int64_t panel_ = 0, panels_ = 0;  ///< of the pages; none: all is unpacked
  std::int64_t written_ = 0, read_ = 0;  ///< pairs of the ring
  WeightsAhead ahead_;
  Prefetcher prefetcher_;
  alignas(64) BFloat16 ring_[kPairs * 2 * kTileElements];
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// At most kMaxA panels of activations.
template <class Cell>
void UnpackFewPanels(const UnpackGemmArgs& args) {
  alignas(64) float sums[kSuperblock][Cell::kMaxA * kPanelRows * kTileColumns];
  const int na = static_cast<int>(args.panels);
  const bool to_rows = args.rows != nullptr;
  PagesInOrder now(args), next = now;
  if (now.done()) return;
  WeightStream stream(args);
  for (; !now.done(); now = next) {
    const WeightPages& pages = now.pages();
    const TileMatrix& activations = pages.segment->activations;
    const std::int64_t pairs = CeilDiv(pages.panels, 2), end = pages.column + pages.columns;
    next.Next();
    stream.Aim(next, pairs * pages.columns);
    for (std::int64_t column = pages.column; column < end; ++column) {
      CellRun runs[WeightStream::kMostRuns];
      const int count = stream.NextColumn(pairs, runs);
      for (std::int64_t r = 0, k = pages.panel / 2; r < count; k += runs[r++].length) {
        runs[r].a_stride = activations.column_stride * kTileElements;
        for (int a = 0; a < na; ++a) runs[r].a[a] = activations.Tile(args.first_panel + a, k);
      }
      float* c = to_rows ? sums[column - now.group()] : args.c + (column - args.first_column) * kTileColumns;
      const std::int64_t ldc = to_rows ? kTileColumns : args.ldc;
      Compute<Cell>(na, 2, runs, count, c, ldc, args.accumulate || !now.begins(), stream);
    }
    if (!to_rows || next.group() == now.group()) continue;
    for (std::int64_t column = now.group(); column < end; ++column) {
      ScatterRows(sums[column - now.group()], kTileColumns, na * kPanelRows, args.rows, column * kTileColumns);
    }
  }
  if (to_rows) StreamFence();
}

}  // namespace
