// Both forms of GEMM over tiles, for any cell.
//
// A cell is what an instruction set brings: it multiplies kMaxA panels of left tiles with kMaxB panels of right tiles along the
// whole contraction, with the accumulators in registers:
//
//   template <int NA, int NB, class Aside>
//   static void Compute(const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside);
//   static constexpr bool kVectorsIdle;
//   static constexpr std::int64_t kSliceTiles;  // of DirectGemm; 0: contractions are not cut
//   using Product = ...;  // for few_rows.h; void where the cell serves few rows as well
//
// with C[16 a + i][16 b + j] (+)= sum over runs, tiles, pairs p: left_a[i][p] . right_b[p][j]. Once for each tile of the
// contraction it calls aside.Step(), which does a little of something else meanwhile: prefetch what comes next or, where the
// vector units are idle, unpack it.
//
// Included by the tier files only, inside their own namespace: everything here is compiled once for each instruction set.
#pragma once

#include <cstdint>
#include <utility>

#include "cpu_kernels/kernels.h"
#include "cpu_kernels/simd.h"

namespace {

using namespace moesaic;

inline constexpr int kMaxCellPanels = 3;
/// Runs of a panel: K / 256 for weights in superblocks. Longer contractions continue from C in memory, which is exact.
inline constexpr int kMaxRuns = 128;

struct CellRun {
  const BFloat16* a[kMaxCellPanels];
  const BFloat16* b[kMaxCellPanels];
  std::int64_t a_stride;
  std::int64_t b_stride;
  std::int64_t length;
};

/// Walks the lines of a PrefetchRange, a few at each step of the contraction, so that they arrive in L2 while the cell
/// computes.
class Prefetcher {
 public:
  Prefetcher(const PrefetchRange& range, std::int64_t steps)
      : range_(range), lines_per_step_(0), panel_(0), column_(0), line_(nullptr), end_(nullptr) {
    if (range.weights.data == nullptr) panel_ = range.panels;
    const std::int64_t lines = (range.panels - panel_) * range.columns * (kTileElements / kLine) + 2 * range.lines;
    if (steps > 0) lines_per_step_ = static_cast<int>(CeilDiv(lines, steps));
  }

  MOESAIC_INLINE void Step() {
    for (int i = 0; i < lines_per_step_; ++i) {
      if (line_ == end_ && !NextRun()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ += kLine;
    }
  }

 private:
  static constexpr std::int64_t kLine = 32;  // elements

  [[gnu::noinline]] bool NextRun() {
    if (panel_ == range_.panels) {
      if (other_ == 2 || range_.lines == 0) {
        lines_per_step_ = 0;
        return false;
      }
      line_ = range_.others[other_++];
      end_ = line_ + range_.lines * kLine;
      return true;
    }
    TileRun run = range_.weights.RunAlongPanel(range_.first_panel + panel_, range_.first_column + column_);
    if (run.stride != kTileElements) run.length = 1;
    if (run.length > range_.columns - column_) run.length = range_.columns - column_;
    line_ = run.data;
    end_ = run.data + run.length * kTileElements;
    column_ += run.length;
    if (column_ == range_.columns) {
      column_ = 0;
      ++panel_;
    }
    return true;
  }

  const PrefetchRange& range_;
  int lines_per_step_;
  std::int64_t panel_;
  std::int64_t column_;
  int other_ = 0;
  const BFloat16* line_;
  const BFloat16* end_;
};

template <class Cell, int NA, class Aside>
void ComputeNb(int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
  if (nb == 1) return Cell::template Compute<NA, 1>(runs, count, c, ldc, accumulate, aside);
  if constexpr (Cell::kMaxB >= 3) {
    if (nb == 3) return Cell::template Compute<NA, 3>(runs, count, c, ldc, accumulate, aside);
  }
  Cell::template Compute<NA, 2>(runs, count, c, ldc, accumulate, aside);
}

template <class Cell, class Aside>
void Compute(int na, int nb, const CellRun* runs, int count, float* c, std::int64_t ldc, bool accumulate, Aside& aside) {
  if constexpr (Cell::kMaxA >= 2) {
    if (na == 2) return ComputeNb<Cell, 2>(nb, runs, count, c, ldc, accumulate, aside);
  }
  ComputeNb<Cell, 1>(nb, runs, count, c, ldc, accumulate, aside);
}

inline int Least(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

/// The stored tiles of a panel from `column` on, before `end`: where they lie, or decoded to `scratch`.
inline TileRun WeightRun(const TileMatrix& weights, std::int64_t panel, std::int64_t column, std::int64_t end,
                         BFloat16* scratch) {
  if (weights.codec == nullptr) {
    TileRun run = weights.RunAlongPanel(panel, column);
    if (run.length > end - column) run.length = end - column;
    return run;
  }
  weights.codec->decode(weights, panel, column, end - column, scratch);
  return {scratch, kTileElements, end - column};
}

/// Tiles [begin, end) of a segment's contraction.
struct SlicePart {
  const GemmSegment* segment;
  std::int64_t begin, end;
};

/// The contraction of the direct form, slice after slice. Slices end with a segment or at a multiple of 8 tiles into one, so
/// that cells which add up a run in parts see the same parts whatever the depth.
class DirectSlices {
 public:
  /// @param depth  tiles of a slice, a multiple of 8; 0: as many as fit
  DirectSlices(std::span<const GemmSegment> segments, std::int64_t depth)
      : segments_(segments), depth_(depth > 0 ? depth : kMostTiles) {
    for (const GemmSegment& segment : segments) left_ += segment.weights.columns;
    Next();
  }

  bool done() const { return count_ == 0; }
  std::int64_t size() const { return size_; }
  std::span<const SlicePart> parts() const { return {parts_, static_cast<std::size_t>(count_)}; }

  void Next() {
    count_ = 0;
    size_ = 0;
    // A rest of less than half a slice, an adapter's for example, joins the last one: it is not worth a visit of C.
    while (left_ > 0 && count_ < kMaxParts && (size_ < depth_ || left_ <= depth_ / 2)) {
      const std::int64_t begin = begin_, columns = segments_[segment_].weights.columns;
      const std::int64_t room = kMostTiles - RoundUp(size_, kSuperblock), rest = columns - begin;
      std::int64_t tiles = rest < depth_ ? rest : depth_;
      if (tiles > room) tiles = room;
      if (tiles == 0) return;
      parts_[count_++] = {&segments_[segment_], begin, begin + tiles};
      size_ += tiles;
      left_ -= tiles;
      begin_ += tiles;
      if (begin_ == columns) {
        ++segment_;
        begin_ = 0;
      }
    }
  }

 private:
  static constexpr int kMaxParts = 8;
  static constexpr std::int64_t kMostTiles = (kMaxRuns - kMaxParts) * kSuperblock;

  std::span<const GemmSegment> segments_;
  std::int64_t depth_, left_ = 0, size_ = 0, begin_ = 0;
  std::size_t segment_ = 0;
  int count_ = 0;
  SlicePart parts_[kMaxParts];
};

/// What a cell multiplies: `na` panels of the weights from `panel` on, along a slice, with the first panels of the activations.
struct DirectRuns {
  CellRun runs[kMaxRuns];
  int count = 0;

  DirectRuns(const DirectGemmArgs& args, std::span<const SlicePart> parts, std::int64_t panel, int na, int nb) {
    BFloat16* decoded = args.scratch;
    for (const SlicePart& part : parts) {
      const TileMatrix &weights = part.segment->weights, &activations = part.segment->activations;
      for (std::int64_t k = part.begin; k < part.end;) {
        CellRun& run = runs[count++];
        for (int a = 0; a < na; ++a) {
          const TileRun tiles = WeightRun(weights, panel + a, k, part.end, decoded);
          if (weights.codec != nullptr) decoded += tiles.length * kTileElements;
          run.a[a] = tiles.data;
          run.a_stride = tiles.stride;
          run.length = tiles.length;
        }
        run.b_stride = activations.column_stride * kTileElements;
        for (int b = 0; b < nb; ++b) run.b[b] = activations.Tile(b, k);
        k += run.length;
      }
    }
  }

  /// To the next `panels` of the activations: those of a column follow each other.
  void Advance(int panels) {
    for (int r = 0; r < count; ++r) {
      for (int b = 0; b < panels; ++b) runs[r].b[b] += panels * kTileElements;
    }
  }
};

/// What piece `piece` of `pieces` brings to L2 meanwhile: `panel`, and more up to `most_panels`, of the part that comes after
/// it, or where there is none what the next call begins with; and its share of the other lines.
inline PrefetchRange PieceAhead(const DirectGemmArgs& args, std::span<const SlicePart> after, std::int64_t panel,
                                std::int64_t most_panels, std::int64_t piece, std::int64_t pieces) {
  PrefetchRange range = args.prefetch;
  if (!after.empty()) {
    range.weights = after[0].segment->weights;
    range.first_panel = args.first_panel + panel;
    range.panels = args.panels - panel;
    range.first_column = after[0].begin;
    range.columns = after[0].end - after[0].begin;
  }
  range.panels = Least(most_panels, range.panels);
  const std::int64_t first = range.lines * piece / pieces;
  range.lines = range.lines * (piece + 1) / pieces - first;
  for (const BFloat16*& other : range.others) {
    if (other != nullptr) other += first * kTileColumns;
  }
  return range;
}

/// A piece of the direct form, kMaxA panels of the weights along one slice, is multiplied with all activations before the next:
/// all panels of a slice, then those of the next slice. Cells with slices use them where they meet weights more than once: a
/// piece stays in L1, the slice of the activations in L2, and the activations stream past in products of one panel. (With
/// both factors from L2, tile loads alone fill its bandwidth.) All sums of the call then wait in C.
template <class Cell>
void DirectGemm(const DirectGemmArgs& args) {
  const std::int64_t passes = CeilDiv(args.activation_panels, Cell::kMaxB);
  const bool sliced = Cell::kSliceTiles > 0 && passes > 1 && args.panels > 1;
  const int nb_most = sliced ? 1 : Cell::kMaxB;
  DirectSlices slice(args.segments, sliced ? Cell::kSliceTiles : 0);
  std::int64_t pieces = 0, piece = 0;
  for (DirectSlices all = slice; !all.done(); all.Next()) pieces += CeilDiv(args.panels, Cell::kMaxA);
  [[maybe_unused]] const typename Cell::Scope scope;
  for (bool accumulate = args.accumulate; !slice.done(); accumulate = true) {
    DirectSlices next = slice;
    next.Next();
    for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA, ++piece) {
      const int na = Least(Cell::kMaxA, args.panels - p);
      const bool last = p + na == args.panels;
      PrefetchRange ahead =
          PieceAhead(args, last ? next.parts() : slice.parts(), last ? 0 : p + na, Cell::kMaxA, piece, pieces);
      if (sliced) ahead.columns = Least(Cell::kSliceTiles, ahead.columns);
      // Tile loads, of a cell with idle vectors, that meet each weight once bring memory at its full rate by themselves, and
      // faster alone than beside prefetches: 98 and 82 GB/s with 16 rows on 16 threads, 16 and 14 on one.
      if (Cell::kVectorsIdle && passes == 1) ahead.weights = {};
      Prefetcher prefetcher(ahead, slice.size() * CeilDiv(args.activation_panels, nb_most));
      DirectRuns group(args, slice.parts(), args.first_panel + p, na, nb_most);
      for (std::int64_t t = 0; t < args.activation_panels; t += nb_most, group.Advance(nb_most)) {
        float* c = args.c + p * kPanelRows * args.ldc + t * kPanelRows;
        Compute<Cell>(na, Least(nb_most, args.activation_panels - t), group.runs, group.count, c, args.ldc, accumulate,
                      prefetcher);
      }
    }
    slice = next;
  }
}

inline const BFloat16* WeightTile(const TileMatrix& weights, std::int64_t panel, std::int64_t column, BFloat16* scratch) {
  if (weights.codec == nullptr) return weights.Tile(panel, column);
  weights.codec->decode(weights, panel, column, 1, scratch);
  return scratch;
}

struct NothingAside {
  MOESAIC_INLINE void Step() {}
};

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

  /// At most depth_ tiles. It ends where a segment does or a multiple of depth_ into one, so that cells which add up a run in
  /// parts see the same parts whatever the depth.
  void NextSlice() {
    const std::int64_t begin = slice_.end;
    slice_.begin = begin;
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
      : args_(args), column_(at.column()), panel_(2 * at.slice().begin) {
    for (; panel_ >= Panels(); ++segment_) panel_ -= Panels();
  }

  /// Decoded to `scratch` where it is compressed; null: there is no scratch for it.
  const BFloat16* Next(BFloat16* scratch) {
    alignas(64) static constexpr BFloat16 kZeros[kTileElements] = {};
    while (panel_ >= Panels()) {
      ++segment_;
      panel_ = 0;
    }
    const TileMatrix& weights = args_.segments[segment_].weights;
    const std::int64_t panel = panel_++;
    if (panel >= weights.panels) return kZeros;
    if (weights.codec != nullptr && scratch == nullptr) return nullptr;
    return WeightTile(weights, panel, column_, scratch);
  }

 private:
  std::int64_t Panels() const { return RoundUp(args_.segments[segment_].weights.panels, 2); }

  const UnpackGemmArgs& args_;
  std::int64_t column_, panel_;
  std::size_t segment_ = 0;
};

/// Lays a slice of one tile column of the weights out as two panels of right tiles, `low` for its columns 0..15 and `high`
/// for 16..31, in units of a quarter of a tile, a few at each step, and prefetches what comes after it. (A share of the
/// next two, four or eight columns instead, to read memory in longer runs, was no faster at any number of rows.)
class ColumnUnpacker {
 public:
  static constexpr int kUnits = 4;  ///< of a tile

  /// @param at     nothing to do where it is done
  /// @param ahead  what comes after `at`
  ColumnUnpacker(const UnpackGemmArgs& args, const ColumnOrder& at, const ColumnOrder& ahead, std::int64_t steps,
                 BFloat16* right)
      : tiles_(args, at),
        ahead_tiles_(args, ahead),
        ahead_left_(ahead.done() ? 0 : 2 * ahead.slice().size()),
        low_(right),
        high_(right + at.slice().size() * kTileElements),
        units_left_(at.done() ? 0 : 2 * at.slice().size() * kUnits),
        units_per_1024_steps_(CeilDiv(1024 * units_left_, steps > 0 ? steps : 1)) {}

  MOESAIC_INLINE void Step() {
    credit_ += units_per_1024_steps_;
    while (credit_ >= 1024 && units_left_ > 0) {
      credit_ -= 1024;
      Unit();
    }
  }

  void Finish() {
    while (units_left_ > 0) Unit();
  }

 private:
  MOESAIC_INLINE void Unit() {
    constexpr std::int64_t kElements = kTileElements / kUnits;
    if (unit_ % kUnits == 0) NextTile();
    const std::int64_t from = unit_ % kUnits * kElements;
    // Two stored tiles make one right tile: 8 row pairs each.
    const std::int64_t to = unit_ / 2 * kElements + unit_ % 2 * (kElements / 2);
    InterleaveRowPairs<kPanelRows / 2 / kUnits>(tile_ + from, low_ + to, high_ + to);
    if (ahead_ != nullptr) {
      for (std::int64_t line = 0; line < kElements; line += kTileColumns) __builtin_prefetch(ahead_ + from + line, 0, 2);
    }
    ++unit_;
    --units_left_;
  }

  [[gnu::noinline]] void NextTile() {
    tile_ = tiles_.Next(decoded_);
    ahead_ = ahead_left_-- > 0 ? ahead_tiles_.Next(nullptr) : nullptr;
  }

  ColumnTiles tiles_, ahead_tiles_;
  std::int64_t ahead_left_;
  BFloat16* low_;
  BFloat16* high_;
  std::int64_t units_left_, units_per_1024_steps_, credit_ = 0, unit_ = 0;
  const BFloat16* tile_ = nullptr;
  const BFloat16* ahead_ = nullptr;
  alignas(64) BFloat16 decoded_[kTileElements];
};

/// Rows of a cell's result, rounded to bf16, to where the caller wants them. A whole line goes past the caches, where the rows
/// of all experts do not fit.
inline void ScatterRows(const float* c, std::int64_t ldc, int rows, int columns, BFloat16* const* out, std::int64_t first) {
  for (int i = 0; i < rows; ++i, c += ldc) {
    if (out[i] == nullptr) continue;
    BFloat16* destination = out[i] + first;
    if (columns == 32 && IsAligned(destination)) {
      StreamLine(destination, NarrowBoth(LoadF32(c), LoadF32(c + 16)));
    } else {
      for (int j = 0; j < columns; j += 16) StoreBf16(destination + j, LoadF32(c + j));
    }
  }
}

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

/// A column is unpacked while the one before it is multiplied, where that costs nothing, or else just before.
template <class Cell>
void UnpackGemm(const UnpackGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  ColumnOrder now(args), next = now;
  if (now.done()) return;
  next.Next();
  BFloat16* right = args.scratch;
  BFloat16* next_right = right + 2 * now.depth() * kTileElements;
  ColumnUnpacker(args, now, next, 1, right).Finish();
  for (; !now.done(); now = next, next.Next(), std::swap(right, next_right)) {
    ColumnOrder ahead = next;
    ahead.Next();
    const std::int64_t passes = CeilDiv(args.panels, UnpackPanels<Cell>(now));
    ColumnUnpacker unpacker(args, next, ahead, now.slice().size() * passes, next_right);
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

template <class Cell>
void GradientGemm(const GradientGemmArgs& args) {
  [[maybe_unused]] const typename Cell::Scope scope;
  NothingAside nothing;
  const std::int64_t right_panels = args.segments[0].right.panels;
  for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
    const int na = Least(Cell::kMaxA, args.panels - p);
    for (std::int64_t n = 0; n < right_panels; n += Cell::kMaxB) {
      const int nb = Least(Cell::kMaxB, right_panels - n);
      CellRun runs[4];
      int count = 0;
      for (const GradientSegment& segment : args.segments) {
        CellRun& run = runs[count++];
        run.length = segment.left.columns;
        run.a_stride = segment.left.column_stride * kTileElements;
        run.b_stride = segment.right.column_stride * kTileElements;
        for (int a = 0; a < na; ++a) run.a[a] = segment.left.Tile(args.first_panel + p + a, 0);
        for (int b = 0; b < nb; ++b) run.b[b] = segment.right.Tile(n + b, 0);
      }
      float* c = args.c + p * kPanelRows * args.ldc + n * kPanelRows;
      Compute<Cell>(na, nb, runs, count, c, args.ldc, args.accumulate, nothing);
    }
  }
}

}  // namespace
