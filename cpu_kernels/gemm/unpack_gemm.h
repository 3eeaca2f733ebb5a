// The unpack form (kernels.h, UnpackGemmArgs): stored tiles of the weights are unpacked into right factors, a tile column at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/simd.h"

namespace {

/// Right tiles [begin, end) of a contraction, counted over its segments.
struct Slice {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

/// The order in which the unpack form computes C: tile column after tile column, along the whole contraction or, where it is
/// taken in slices, a superblock of columns at a time, slice after slice.
class ColumnOrder {
 public:
  explicit ColumnOrder(const UnpackGemmArgs& args)
      : args_(&args), column_(args.first_column), end_(args.first_column + args.columns) {
    for (const GemmSegment& segment : args.segments) total_ += CeilDiv(segment.weights.panels, 2);
    depth_ = args.depth > 0 && args.c != nullptr && args.depth < total_ ? args.depth : total_;
    BeginColumns();
  }

  bool done() const { return column_ >= end_; }
  std::int64_t column() const { return column_; }
  const Slice& slice() const { return slice_; }
  bool last_slice() const { return slice_.end == total_; }
  /// Columns since those began whose sums wait in C together.
  std::int64_t offset() const { return column_ - first_; }
  std::int64_t depth() const { return depth_; }
  /// Tiles of the longest slice.
  std::int64_t most_tiles() const { return total_ < depth_ + Joined() ? total_ : depth_ + Joined(); }
  bool sliced() const { return depth_ < total_; }

  void Next() {
    if (++column_ < last_) return;
    if (last_slice()) return BeginColumns();
    column_ = first_;
    NextSlice();
  }

 private:
  void BeginColumns() {
    first_ = column_;
    last_ = sliced() && end_ - column_ > kSuperblock ? column_ + kSuperblock : end_;
    slice_ = {};
    NextSlice();
  }

  /// A rest of less than half a slice, an adapter's for example, joins the last one: it is not worth a visit of C.
  std::int64_t Joined() const { return depth_ > 1 ? (depth_ - 1) / 2 : 0; }

  /// At most depth_ tiles, but for the last one. It ends where a segment does or a multiple of depth_ into one, so that cells
  /// which add up a run in parts see the same parts whatever the depth.
  void NextSlice() {
    const std::int64_t begin = slice_.end;
    slice_.begin = begin;
    if (total_ - begin <= depth_ + Joined()) {
      slice_.end = total_;
      return;
    }
    std::int64_t end = 0;
    for (const GemmSegment& segment : args_->segments) {
      end += CeilDiv(segment.weights.panels, 2);
      if (end <= begin) continue;
      if (end - begin > depth_) {
        if (slice_.end == begin) slice_.end = begin + depth_;
        return;
      }
      slice_.end = end;
    }
  }

  const UnpackGemmArgs* args_;
  std::int64_t total_ = 0, depth_ = 0;
  std::int64_t column_, end_, first_ = 0, last_ = 0;
  Slice slice_;
};

/// The stored tiles of a slice of one tile column, one after the other: zeros where the last panel of a pair is missing.
class ColumnTiles {
 public:
  ColumnTiles(const UnpackGemmArgs& args, const ColumnOrder& at)
      : args_(&args), column_(at.column()), panel_(2 * at.slice().begin) {
    for (; panel_ >= Panels(); ++segment_) panel_ -= Panels();
  }

  /// Decoded to `scratch` where it is compressed; null: there is no scratch for it.
  MOESAIC_INLINE const BFloat16* Next(BFloat16* scratch) {
    if (run_.length == 0) return NextRun(scratch);
    const BFloat16* tile = run_.data;
    run_.data += run_.stride;
    --run_.length;
    return tile;
  }

 private:
  std::int64_t Panels() const { return RoundUp(args_->segments[segment_].weights.panels, 2); }

  /// The next tile, and in run_ those that follow it at a constant distance.
  [[gnu::noinline]] const BFloat16* NextRun(BFloat16* scratch) {
    alignas(64) static constexpr BFloat16 kZeros[kTileElements] = {};
    while (panel_ >= Panels()) {
      ++segment_;
      panel_ = 0;
    }
    const TileMatrix& weights = args_->segments[segment_].weights;
    const std::int64_t panel = panel_++;
    if (panel >= weights.panels) return kZeros;
    if (weights.codec != nullptr) return scratch != nullptr ? WeightTile(weights, panel, column_, scratch) : nullptr;
    run_ = weights.RunDownColumn(panel, column_);
    panel_ += run_.length - 1;
    return Next(scratch);
  }

  const UnpackGemmArgs* args_;
  std::int64_t column_, panel_;
  std::size_t segment_ = 0;
  TileRun run_{};
};

/// Brings stored tiles to L2 in the order of the columns, as many at a time as take turns: each lies in a page of its own.
class TilesAhead {
 public:
  /// @param from  the first column, or slice of one
  TilesAhead(const UnpackGemmArgs& args, const ColumnOrder& from) : args_(args), at_(from), tiles_(args, from) {
    BeginColumn();
  }

  TilesAhead(const TilesAhead&) = delete;
  TilesAhead& operator=(const TilesAhead&) = delete;

  MOESAIC_INLINE void Step(std::int64_t lines) {
    LinesInTurn::Walk walk = walk_;
    for (std::int64_t i = 0; i < lines; ++i) {
      while (!walk.Prefetch()) [[unlikely]] {
        if (!NextTiles()) return;
        walk = walk_;
      }
    }
    walk_ = walk;
  }

 private:
  [[gnu::noinline, gnu::cold]] bool NextTiles() {
    lines_.Begin(kTileElements);
    while (lines_.count() < LinesInTurn::kMost && !at_.done()) {
      if (left_ == 0) {
        at_.Next();
        BeginColumn();
        continue;
      }
      --left_;
      const BFloat16* tile = tiles_.Next(nullptr);
      if (tile != nullptr) lines_.Add(tile);
    }
    walk_ = lines_.count() > 0 ? LinesInTurn::Walk(lines_) : LinesInTurn::Walk();
    return lines_.count() > 0;
  }

  void BeginColumn() {
    left_ = at_.done() ? 0 : 2 * at_.slice().size();
    if (!at_.done()) tiles_ = ColumnTiles(args_, at_);
  }

  const UnpackGemmArgs& args_;
  ColumnOrder at_;
  ColumnTiles tiles_;
  std::int64_t left_ = 0;
  LinesInTurn lines_;
  LinesInTurn::Walk walk_;
};

/// Lays a slice of one tile column of the weights out as two panels of right tiles, `low` for its columns 0..15 and `high`
/// for 16..31, a tile every few steps, and prefetches as much of what comes after it. (A share of the next two, four or eight
/// columns instead, to read memory in longer runs, was no faster at any number of rows.)
class ColumnUnpacker {
 public:
  static constexpr Passing kPassing = Passing::kLeft;

  /// @param at  nothing to do where it is done
  ColumnUnpacker(const UnpackGemmArgs& args, const ColumnOrder& at, std::int64_t steps, BFloat16* right, TilesAhead& ahead)
      : tiles_(args, at),
        ahead_(ahead),
        low_(right),
        high_(right + at.slice().size() * kTileElements),
        left_(at.done() ? 0 : 2 * at.slice().size()),
        per_1024_steps_(CeilDiv(1024 * left_, steps > 0 ? steps : 1)) {}

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(ColumnUnpacker& unpacker)
        : unpacker_(unpacker), credit_(unpacker.credit_), per_1024_steps_(unpacker.per_1024_steps_) {}
    MOESAIC_INLINE ~Steps() { unpacker_.credit_ = credit_; }
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void Next() {
      credit_ += per_1024_steps_;
      while (credit_ >= 1024) {
        credit_ -= 1024;
        unpacker_.Tile();
      }
    }

   private:
    ColumnUnpacker& unpacker_;
    std::int64_t credit_, per_1024_steps_;
  };

  void Finish() {
    while (left_ > 0) Tile();
  }

 private:
  /// Two stored tiles make one right tile: 8 row pairs each.
  [[gnu::noinline]] void Tile() {
    if (left_ == 0) return;
    --left_;
    InterleaveRowPairs<kPanelRows / 2>(tiles_.Next(decoded_), low_, high_);
    low_ += kTileElements / 2;
    high_ += kTileElements / 2;
    ahead_.Step(kTileElements / LinesInTurn::kLine);
  }

  ColumnTiles tiles_;
  TilesAhead& ahead_;
  BFloat16* low_;
  BFloat16* high_;
  std::int64_t left_, per_1024_steps_, credit_ = 0;
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// Left panels of a cell of the unpack form: a slice's two right panels that stay in L1 meet them one by one.
template <class Cell>
int UnpackPanels(const ColumnOrder& at) {
  return Cell::kSliceTiles > 0 && at.depth() <= Cell::kSliceTiles ? 1 : Cell::kMaxA;
}

/// A slice of one tile column of C from its unpacked right panels, all rows.
template <class Cell, class Aside>
void UnpackedColumn(const UnpackGemmArgs& args, const ColumnOrder& at, const BFloat16* right, Aside& aside) {
  static_assert(Cell::kMaxB >= 2);
  const Slice& slice = at.slice();
  const bool to_rows = args.rows != nullptr && at.last_slice();
  const std::int64_t offset = args.rows != nullptr ? at.offset() : at.column() - args.first_column;
  CellRun runs[8];
  const int na_most = UnpackPanels<Cell>(at);
  for (std::int64_t p = 0; p < args.panels; p += na_most) {
    const int na = Least(na_most, args.panels - p);
    int count = 0;
    std::int64_t first = 0;
    for (const GemmSegment& segment : args.segments) {
      const std::int64_t begin = first > slice.begin ? first : slice.begin;
      const std::int64_t last = first + CeilDiv(segment.weights.panels, 2), end = last < slice.end ? last : slice.end;
      if (begin < end) {
        CellRun& run = runs[count++];
        run.length = end - begin;
        run.a_stride = segment.activations.column_stride * kTileElements;
        run.b_stride = kTileElements;
        for (int a = 0; a < na; ++a) run.a[a] = segment.activations.Tile(args.first_panel + p + a, begin - first);
        for (int b = 0; b < 2; ++b) run.b[b] = right + (b * slice.size() + begin - slice.begin) * kTileElements;
      }
      first = last;
    }
    alignas(64) float block[Cell::kMaxA * kPanelRows * kTileColumns];
    const bool in_c = args.rows == nullptr || at.sliced();
    float* c = in_c ? args.c + p * kPanelRows * args.ldc + offset * kTileColumns : block;
    const std::int64_t ldc = in_c ? args.ldc : kTileColumns;
    Compute<Cell>(na, 2, runs, count, c, ldc, args.accumulate || slice.begin > 0, aside);
    if (to_rows) ScatterRows(c, ldc, na * 16, 32, args.rows + p * kPanelRows, at.column() * kTileColumns);
  }
}

/// Right tiles on their way through L1, for activations that one cell takes whole: each pair of them, low and high, is unpacked
/// kLead steps before its only use, column after column.
class UnpackRing {
 public:
  static constexpr Passing kPassing = Passing::kLeft;
  static constexpr std::int64_t kPairs = 4;  ///< 8 KB
  static constexpr int kLead = 2;
  static constexpr int kMostRuns = 256;
  static constexpr std::int64_t kLinesAhead = 256;  ///< of weights on their way to L2

  /// @param args  without depth
  explicit UnpackRing(const UnpackGemmArgs& args)
      : args_(args), at_(args), tiles_(args, at_), ahead_(args, at_), left_(at_.done() ? 0 : at_.depth()) {
    ahead_.Step(kLinesAhead);
    for (int i = 0; i < kLead; ++i) Step();
  }

  /// Whether Runs' places hold a column.
  static bool Holds(const UnpackGemmArgs& args) {
    std::int64_t runs = 0;
    for (const GemmSegment& segment : args.segments) runs += CeilDiv(segment.weights.panels, 2 * kPairs) + 1;
    return runs <= kMostRuns;
  }

  struct Steps {
    MOESAIC_INLINE explicit Steps(UnpackRing& of) : ring(of) {}
    MOESAIC_INLINE void Next() { ring.Step(); }
    UnpackRing& ring;
  };

  MOESAIC_INLINE void Step() {
    if (left_ == 0) return;
    BFloat16* low = ring_ + written_ * 2 * kTileElements;
    BFloat16* high = low + kTileElements;
    for (std::int64_t half = 0; half < kTileElements; half += kTileElements / 2) {
      InterleaveRowPairs<kPanelRows / 2>(tiles_.Next(decoded_), low + half, high + half);
    }
    ahead_.Step(2 * kTileElements / LinesInTurn::kLine);
    written_ = (written_ + 1) % kPairs;
    if (--left_ == 0) NextColumn();
  }

  /// The next column: what a cell multiplies with `na` panels of the activations.
  std::span<const CellRun> Runs(int na) {
    if (begin_ != runs_begin_) Build(na);
    begin_ = (begin_ + length_) % kPairs;
    return {runs_, static_cast<std::size_t>(count_)};
  }

 private:
  [[gnu::noinline]] void NextColumn() {
    at_.Next();
    if (at_.done()) return;
    tiles_ = ColumnTiles(args_, at_);
    left_ = at_.depth();
  }

  void Build(int na) {
    runs_begin_ = begin_;
    count_ = 0;
    length_ = 0;
    for (const GemmSegment& segment : args_.segments) {
      const std::int64_t tiles = CeilDiv(segment.weights.panels, 2);
      for (std::int64_t k = 0; k < tiles;) {
        const std::int64_t slot = (begin_ + length_) % kPairs;
        CellRun& run = runs_[count_++];
        run.length = Least(kPairs - slot, tiles - k);
        run.a_stride = segment.activations.column_stride * kTileElements;
        run.b_stride = 2 * kTileElements;
        for (int a = 0; a < na; ++a) run.a[a] = segment.activations.Tile(args_.first_panel + a, k);
        for (int b = 0; b < 2; ++b) run.b[b] = ring_ + (2 * slot + b) * kTileElements;
        k += run.length;
        length_ += run.length;
      }
    }
  }

  const UnpackGemmArgs& args_;
  ColumnOrder at_;
  ColumnTiles tiles_;
  TilesAhead ahead_;
  std::int64_t left_, written_ = 0;
  std::int64_t begin_ = 0, runs_begin_ = -1, length_ = 0;
  int count_ = 0;
  CellRun runs_[kMostRuns];
  alignas(64) BFloat16 ring_[kPairs * 2 * kTileElements];
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// At most kMaxA panels of activations.
template <class Cell>
void UnpackFewPanels(UnpackGemmArgs args) {
  args.depth = 0;
  const int na = static_cast<int>(args.panels);
  UnpackRing ring(args);
  for (std::int64_t column = 0; column < args.columns; ++column) {
    const std::span<const CellRun> runs = ring.Runs(na);
    alignas(64) float block[Cell::kMaxA * kPanelRows * kTileColumns];
    float* c = args.rows == nullptr ? args.c + column * kTileColumns : block;
    const std::int64_t ldc = args.rows == nullptr ? args.ldc : kTileColumns;
    Compute<Cell>(na, 2, runs.data(), static_cast<int>(runs.size()), c, ldc, args.accumulate, ring);
    if (args.rows != nullptr) ScatterRows(c, ldc, na * 16, 32, args.rows, (args.first_column + column) * kTileColumns);
  }
  if (args.rows != nullptr) StreamFence();
}

/// A column is unpacked while the one before it is multiplied, where that costs nothing, or else just before.
template <class Cell>
void UnpackGemm(const UnpackGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  if constexpr (Cell::kVectorsIdle) {
    if (args.panels <= Cell::kMaxA && UnpackRing::Holds(args)) return UnpackFewPanels<Cell>(args);
  }
  ColumnOrder now(args), next = now;
  if (now.done()) return;
  next.Next();
  BFloat16* right = args.scratch;
  BFloat16* next_right = right + 2 * now.most_tiles() * kTileElements;
  TilesAhead tiles_ahead(args, next);
  ColumnUnpacker(args, now, 1, right, tiles_ahead).Finish();
  for (; !now.done(); now = next, next.Next(), std::swap(right, next_right)) {
    const std::int64_t passes = CeilDiv(args.panels, UnpackPanels<Cell>(now));
    ColumnUnpacker unpacker(args, next, now.slice().size() * passes, next_right, tiles_ahead);
    if constexpr (Cell::kVectorsIdle) {
      UnpackedColumn<Cell>(args, now, right, unpacker);
    } else {
      NothingAside nothing;
      UnpackedColumn<Cell>(args, now, right, nothing);
    }
    unpacker.Finish();
  }
  if (args.rows != nullptr) StreamFence();
}

}  // namespace
