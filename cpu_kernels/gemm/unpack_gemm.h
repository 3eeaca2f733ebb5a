// The unpack form (kernels.h, UnpackGemmArgs): stored tiles of the weights are unpacked into right factors, a tile column at a
// time. (As many rows as one cell takes have unpack_stream.h, AVX-512 and AVX2 without a matrix unit register_unpack.h.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu_kernels/gemm/cell.h"
#include "cpu_kernels/gemm/unpack_stream.h"
#include "cpu_kernels/simd.h"
#include "cpu_kernels/transpose.h"

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
    while (panel_ >= Panels()) {
      ++segment_;
      panel_ = 0;
    }
    const TileMatrix& weights = args_->segments[segment_].weights;
    const std::int64_t panel = panel_++;
    if (panel >= weights.panels) return kZeroTile;
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

/// Brings stored tiles to L2 in the order of the columns, sixteen at a time in turns (LinesInTurn says why): each lies in a
/// page of its own.
class TilesAhead {
 public:
  static constexpr std::int64_t kLine = LinesInTurn::kLine, kLinesOfTile = kTileElements / kLine;

  /// @param from  the first column, or slice of one
  TilesAhead(const UnpackGemmArgs& args, const ColumnOrder& from) : args_(args), at_(from), tiles_(args, from) {
    BeginColumn();
  }

  TilesAhead(const TilesAhead&) = delete;
  TilesAhead& operator=(const TilesAhead&) = delete;

  /// So many lines more than before may be prefetched. What is begun with the last of them is finished: it is taken off the
  /// next.
  void Allow(std::int64_t lines) { allowed_ += lines; }

  /// The way on. What changes stays in registers as long as it lives.
  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(TilesAhead& ahead) : ahead_(ahead), line_(ahead.line_) {}
    MOESAIC_INLINE ~Steps() { ahead_.line_ = line_; }
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    /// False: no more are allowed, or there are none.
    MOESAIC_INLINE bool Next(std::int64_t lines) {
      for (; lines > 0; --lines) {
        if (line_ == 0) [[unlikely]] {
          if (!ahead_.NextTiles()) return false;
          line_ = -kTiles * kLinesOfTile;
        }
        __builtin_prefetch(ahead_.ends_[line_ & (kTiles - 1)] + (line_ >> kLogTiles) * kLine, 0, 2);
        ++line_;
      }
      return true;
    }

   private:
    TilesAhead& ahead_;
    std::int64_t line_;
  };

 private:
  static constexpr int kLogTiles = 4;
  static constexpr std::int64_t kTiles = 1 << kLogTiles;

  [[gnu::noinline, gnu::cold]] bool NextTiles() {
    if (allowed_ <= 0) return false;
    int count = 0;
    while (count < kTiles && !at_.done()) {
      if (left_ == 0) {
        at_.Next();
        BeginColumn();
        continue;
      }
      --left_;
      const BFloat16* tile = tiles_.Next(nullptr);
      if (tile != nullptr) ends_[count++] = tile + kTileElements;
    }
    if (count == 0) return false;
    allowed_ -= count * kLinesOfTile;
    for (int t = count; t < kTiles; ++t) ends_[t] = ends_[0];
    return true;
  }

  void BeginColumn() {
    left_ = at_.done() ? 0 : 2 * at_.slice().size();
    if (!at_.done()) tiles_ = ColumnTiles(args_, at_);
  }

  const UnpackGemmArgs& args_;
  ColumnOrder at_;
  ColumnTiles tiles_;
  std::int64_t left_ = 0, allowed_ = 0;
  std::int64_t line_ = 0;  ///< of all tiles in turns, up to 0: the next one
  const BFloat16* ends_[kTiles];
};

/// Lays a slice of one tile column of the weights out as two panels of right tiles, `low` for its columns 0..15 and `high`
/// for 16..31, a tile now and then between the runs of other cells, and prefetches as much of what comes after it, some lines
/// at each of their steps. (All lines of a tile where one is unpacked: up to 3% slower. A share of the next two, four or eight
/// columns instead, to read memory in longer runs, was no faster at any number of rows.)
class ColumnUnpacker {
 public:
  static constexpr Passing kPassing = Passing::kLeft;

  /// @param at  nothing to do where it is done
  /// @param runs, steps  of the cells meanwhile
  ColumnUnpacker(const UnpackGemmArgs& args, const ColumnOrder& at, std::int64_t runs, std::int64_t steps, BFloat16* right,
                 TilesAhead& ahead)
      : tiles_(args, at),
        ahead_(ahead),
        low_(right),
        high_(right + at.slice().size() * kTileElements),
        left_(at.done() ? 0 : 2 * at.slice().size()),
        per_1024_runs_(CeilDiv(1024 * left_, runs > 0 ? runs : 1)),
        lines_per_step_(CeilDiv(left_ * TilesAhead::kLinesOfTile, steps > 0 ? steps : 1)) {
    ahead.Allow(left_ * TilesAhead::kLinesOfTile);
  }

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(ColumnUnpacker& unpacker)
        : unpacker_(unpacker), ahead_(unpacker.ahead_), lines_(unpacker.lines_per_step_) {}
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void NextRun() { unpacker_.NextRun(); }
    MOESAIC_INLINE void Next() {
      if (!ahead_.Next(lines_)) [[unlikely]]
        unpacker_.lines_per_step_ = lines_ = 0;
    }

   private:
    ColumnUnpacker& unpacker_;
    TilesAhead::Steps ahead_;
    std::int64_t lines_;
  };

  /// The rest of both, in turns.
  void Finish() {
    TilesAhead::Steps ahead(ahead_);
    while (left_ > 0) {
      Tile();
      ahead.Next(TilesAhead::kLinesOfTile);
    }
    while (ahead.Next(TilesAhead::kLinesOfTile)) {
    }
  }

 private:
  void NextRun() {
    credit_ += per_1024_runs_;
    for (; credit_ >= 1024 && left_ > 0; credit_ -= 1024) Tile();
  }

  /// Two stored tiles make one right tile: 8 row pairs each.
  [[gnu::noinline]] void Tile() {
    InterleaveRowPairs<kPanelRows / 2>(tiles_.Next(decoded_), low_, high_);
    low_ += kTileElements / 2;
    high_ += kTileElements / 2;
    --left_;
  }

  ColumnTiles tiles_;
  TilesAhead& ahead_;
  BFloat16* low_;
  BFloat16* high_;
  std::int64_t left_, per_1024_runs_, credit_ = 0, lines_per_step_;
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// Runs of a cell of the unpack form, at most, and one more for each segment.
inline constexpr std::int64_t kMostUnpackRuns = 16, kMostSegments = 8;

/// Left panels of a cell of the unpack form: a slice's two right panels that stay in L1 meet them one by one.
template <class Cell>
int UnpackPanels(const ColumnOrder& at) {
  return Cell::kSliceTiles > 0 && at.depth() <= Cell::kSliceTiles ? 1 : Cell::kMaxA;
}

/// Rows of C on their way to where the caller wants them, where the vector units are idle: those of one cell, written while the
/// next one computes, a share before each of its runs, or behind the last one. (Loads right behind the tile stores wait for
/// these, and many streamed lines at once for each other: a tenth of all products. Some at each step would keep what the
/// prefetches need out of the registers.)
template <class Aside>
class RowsBehind {
 public:
  static constexpr Passing kPassing = Aside::kPassing;

  /// @param column  of C, elements, where the rows begin
  /// @param runs  of a cell
  RowsBehind(Aside& aside, std::int64_t column, std::int64_t runs) : aside_(aside), column_(column), runs_(runs) {}

  /// Rows of the cell that was computed last. Those of the one before have been written.
  void Begin(const float* c, std::int64_t ldc, std::int64_t rows, BFloat16* const* out) {
    c_ = c;
    ldc_ = ldc;
    out_ = out;
    left_ = rows;
    per_run_ = CeilDiv(rows, runs_);
  }

  void Finish() { Write(left_); }

  class Steps {
   public:
    MOESAIC_INLINE explicit Steps(RowsBehind& rows) : rows_(rows), aside_(rows.aside_) {}
    Steps(const Steps&) = delete;
    Steps& operator=(const Steps&) = delete;

    MOESAIC_INLINE void NextRun() {
      if (rows_.left_ > 0) rows_.Write(rows_.left_ < rows_.per_run_ ? rows_.left_ : rows_.per_run_);
      aside_.NextRun();
    }
    MOESAIC_INLINE void Next() { aside_.Next(); }

   private:
    RowsBehind& rows_;
    typename Aside::Steps aside_;
  };

 private:
  [[gnu::noinline]] void Write(std::int64_t rows) {
    ScatterRows(c_, ldc_, rows, out_, column_);
    c_ += rows * ldc_;
    out_ += rows;
    left_ -= rows;
  }

  Aside& aside_;
  std::int64_t column_, runs_, per_run_ = 0;
  const float* c_ = nullptr;
  BFloat16* const* out_ = nullptr;
  std::int64_t ldc_ = 0, left_ = 0;
};

/// A slice of one tile column of C from its unpacked right panels, all rows.
/// @param run_length  steps between two calls of the aside's NextRun, at most
template <class Cell, class Aside>
void UnpackedColumn(const UnpackGemmArgs& args, const ColumnOrder& at, const BFloat16* right, std::int64_t run_length,
                    Aside& aside) {
  static_assert(Cell::kMaxB >= 2);
  const Slice& slice = at.slice();
  const int na_most = UnpackPanels<Cell>(at);
  CellRun runs[kMostUnpackRuns + kMostSegments];
  int count = 0;
  std::int64_t first = 0;
  for (const GemmSegment& segment : args.segments) {
    const std::int64_t last = first + CeilDiv(segment.weights.panels, 2), end = last < slice.end ? last : slice.end;
    for (std::int64_t k = first > slice.begin ? first : slice.begin; k < end; k += run_length) {
      CellRun& run = runs[count++];
      run.length = Least(run_length, end - k);
      run.a_stride = segment.activations.column_stride * kTileElements;
      run.b_stride = kTileElements;
      for (int a = 0; a < na_most; ++a) run.a[a] = segment.activations.Tile(args.first_panel + a, k - first);
      for (int b = 0; b < 2; ++b) run.b[b] = right + (b * slice.size() + k - slice.begin) * kTileElements;
    }
    first = last;
  }
  const bool to_rows = args.rows != nullptr && at.last_slice(), in_c = args.rows == nullptr || at.sliced();
  const bool accumulate = args.accumulate || slice.begin > 0;
  const std::int64_t offset = args.rows != nullptr ? at.offset() : at.column() - args.first_column;
  const std::int64_t ldc = in_c ? args.ldc : kTileColumns;
  // Where C keeps no sums: those of this cell, and of the one before, on their way to the rows.
  alignas(64) float blocks[2][Cell::kMaxA * kPanelRows * kTileColumns];
  RowsBehind<Aside> behind(aside, at.column() * kTileColumns, count);
  for (std::int64_t p = 0; p < args.panels; p += na_most) {
    const int na = Least(na_most, args.panels - p);
    float* c = in_c ? args.c + p * kPanelRows * ldc + offset * kTileColumns : blocks[p / na_most % 2];
    if (!to_rows) {
      Compute<Cell>(na, 2, runs, count, c, ldc, accumulate, aside);
    } else if constexpr (Cell::kVectorsIdle) {
      Compute<Cell>(na, 2, runs, count, c, ldc, accumulate, behind);
      behind.Finish();
      behind.Begin(c, ldc, na * kPanelRows, args.rows + p * kPanelRows);
    } else {
      Compute<Cell>(na, 2, runs, count, c, ldc, accumulate, aside);
      ScatterRows(c, ldc, na * kPanelRows, args.rows + p * kPanelRows, at.column() * kTileColumns);
    }
    for (int r = 0; r < count; ++r) {
      for (int a = 0; a < na_most; ++a) runs[r].a[a] += na_most * kTileElements;
    }
  }
  behind.Finish();
}

/// A column is unpacked while the one before it is multiplied, where that costs nothing, or else just before.
template <class Cell>
void UnpackGemm(const UnpackGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  if constexpr (Cell::kVectorsIdle) {
    if (args.panels <= Cell::kMaxA) return UnpackFewPanels<Cell>(args);
  }
  ColumnOrder now(args), next = now;
  if (now.done()) return;
  next.Next();
  BFloat16* right = args.scratch;
  BFloat16* next_right = right + 2 * now.most_tiles() * kTileElements;
  TilesAhead tiles_ahead(args, next);
  ColumnUnpacker(args, now, 1, 1, right, tiles_ahead).Finish();
  for (; !now.done(); now = next, next.Next(), std::swap(right, next_right)) {
    // One or two tiles beside each cell: before its only run. With few panels there are more, each between two runs.
    const std::int64_t steps = now.slice().size(), passes = CeilDiv(args.panels, UnpackPanels<Cell>(now));
    const std::int64_t tiles = next.done() ? 0 : 2 * next.slice().size(), shortest = CeilDiv(steps, kMostUnpackRuns);
    std::int64_t run_length = tiles > 2 * passes ? steps * passes / tiles : steps;
    if (run_length < shortest) run_length = shortest;
    ColumnUnpacker unpacker(args, next, passes * CeilDiv(steps, run_length), passes * steps, next_right, tiles_ahead);
    if constexpr (Cell::kVectorsIdle) {
      UnpackedColumn<Cell>(args, now, right, run_length, unpacker);
    } else {
      NothingAside nothing;
      UnpackedColumn<Cell>(args, now, right, steps, nothing);
    }
    unpacker.Finish();
  }
  if (args.rows != nullptr) StreamFence();
}

}  // namespace
