// The direct form (kernels.h, DirectGemmArgs): stored tiles of the weights are left factors as they lie.
#pragma once

#include <cstdint>
#include <span>

#include "cpu_kernels/gemm/cell.h"

namespace {

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

}  // namespace
