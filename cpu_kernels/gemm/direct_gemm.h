// The direct form (kernels.h, DirectGemmArgs): stored tiles of the weights are left factors as they lie.
#pragma once

#include <cstdint>
#include <span>

#include "cpu_kernels/gemm/cell.h"

namespace {

/// Tiles [begin, end) of a segment's contraction.
struct SlicePart {
  std::size_t segment;  ///< of a product's
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
    while (left_ > 0 && count_ < kMaxParts && (size_ < depth_ || left_ < depth_ / 2)) {
      const std::int64_t begin = begin_, columns = segments_[segment_].weights.columns;
      const std::int64_t room = kMostTiles - RoundUp(size_, kSuperblock), rest = columns - begin;
      std::int64_t tiles = rest < depth_ ? rest : depth_;
      if (tiles > room) tiles = room;
      if (tiles == 0) return;
      parts_[count_++] = {segment_, begin, begin + tiles};
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

/// What a cell multiplies: `na` panels of a product's weights from `panel` on, along a slice, with the first panels of the
/// activations.
struct DirectRuns {
  CellRun runs[kMaxRuns];
  int count = 0, most_right;

  DirectRuns(const DirectProduct& product, std::span<const SlicePart> parts, std::int64_t panel, int na, int nb,
             BFloat16* decoded)
      : most_right(nb) {
    for (const SlicePart& part : parts) {
      const auto& [weights, activations] = product.segments[part.segment];
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
      for (int b = 0; b < most_right; ++b) runs[r].b[b] += panels * kTileElements;
    }
  }
};

/// A piece of the part of a slice, `panel` of a product and more up to `most_panels` along `most_columns`.
inline WeightsAhead PieceOf(const SlicePart& part, const DirectGemmArgs& args, const DirectProduct& product, std::int64_t panel,
                            std::int64_t most_panels, std::int64_t most_columns) {
  return {&product.segments[part.segment].weights, args.first_panel + panel, Least(most_panels, args.panels - panel),
          part.begin, Least(most_columns, part.end - part.begin)};
}

/// What the next call begins with.
inline WeightsAhead PieceOfNextCall(const PrefetchRange& range, std::int64_t most_panels, std::int64_t most_columns) {
  return {&range.weights, range.first_panel, Least(most_panels, range.panels), range.first_column,
          Least(most_columns, range.columns)};
}

/// The other lines of a call's PrefetchRange, a share for each of `pieces`.
class OthersAhead {
 public:
  OthersAhead(const PrefetchRange& range, std::int64_t pieces)
      : left_(range.lines), share_(CeilDiv(range.lines, pieces > 0 ? pieces : 1)) {
    next_.begin[0] = range.others[0];
    next_.begin[1] = range.others[1];
  }

  const LinesAhead& Next() {
    if (share_ == 0) return next_;
    for (const BFloat16*& line : next_.begin) line += next_.lines * kTileColumns;
    next_.lines = Least(share_, left_);
    left_ -= next_.lines;
    return next_;
  }

 private:
  LinesAhead next_;
  std::int64_t left_, share_;
};

/// Of weights that tile loads meet once. (AMX, 1 to 32 rows: all tiles 3% more time on two threads and 1% on 16.)
inline constexpr std::int64_t kOfPageOnce = 3;

/// A piece of the direct form, kMaxA panels of the weights along one slice, is multiplied with all activations before the next:
/// all panels of a slice, the twin's after the others, then those of the next slice. Cells with slices use them where they meet
/// weights more than once: the slice of the activations stays in L2 and, on a matrix unit, the piece in L1, past which the
/// activations go for each product. (With both factors from L2, tile loads alone fill its bandwidth.) All sums of the call
/// then wait in C.
template <class Cell>
void DirectGemm(const DirectGemmArgs& args) {
  const DirectProduct* const products[] = {&args, &args.twin};
  const int count = args.twin.segments.empty() ? 1 : 2;
  const bool sliced = Cell::kSliceTiles > 0 && args.activation_panels > Cell::kMaxB && args.panels > 1;
  const int nb_most = sliced && Cell::kVectorsIdle ? 1 : Cell::kMaxB;
  const std::int64_t passes = CeilDiv(args.activation_panels, nb_most);
  // Tile loads that meet weights once: these need be no more than a superblock ahead. (Without prefetches, with a single panel
  // of activations too, 16 threads take a tenth longer.)
  const bool once = Cell::kVectorsIdle && passes == 1;
  const std::int64_t columns_ahead = sliced ? Cell::kSliceTiles : once ? kSuperblock : kMaxRuns * kSuperblock;
  DirectSlices slice(args.segments, sliced ? Cell::kSliceTiles : 0);
  std::int64_t pieces = 0;
  for (DirectSlices all = slice; !all.done(); all.Next()) pieces += count * CeilDiv(args.panels, Cell::kMaxA);
  OthersAhead others(args.prefetch, pieces);
  Prefetcher prefetcher;
  [[maybe_unused]] const typename Cell::Scope scope;
  for (bool first = true; !slice.done(); first = false) {
    DirectSlices next = slice;
    next.Next();
    for (int i = 0; i < count; ++i) {
      const DirectProduct& product = *products[i];
      const bool last_product = i + 1 == count;
      for (std::int64_t p = 0; p < args.panels; p += Cell::kMaxA) {
        const int na = Least(Cell::kMaxA, args.panels - p);
        const bool last = p + na == args.panels;
        const DirectProduct& next_product = *products[last ? (i + 1) % count : i];
        const std::span<const SlicePart> parts = last && last_product ? next.parts() : slice.parts();
        const std::int64_t panel = last ? 0 : p + na;
        WeightsAhead rest;
        WeightsAhead ahead = parts.empty() ? PieceOfNextCall(args.prefetch, Cell::kMaxA, columns_ahead)
                                           : PieceOf(parts[0], args, next_product, panel, Cell::kMaxA, columns_ahead);
        if (once) {
          ahead.of_page = kOfPageOnce;
          const SlicePart& part = slice.parts()[0];
          rest = {&product.segments[part.segment].weights, args.first_panel + p, na, part.begin + kSuperblock,
                  part.end - part.begin - kSuperblock,     kOfPageOnce};
          if (rest.columns < 0) rest.columns = 0;
        } else if (parts.size() > 1) {
          // An adapter's tiles, from where another thread packed them.
          rest = PieceOf(parts[1], args, next_product, panel, Cell::kMaxA, columns_ahead);
        }
        prefetcher.Aim(rest, ahead, others.Next(), slice.size() * passes);
        DirectRuns group(product, slice.parts(), args.first_panel + p, na, nb_most, args.scratch);
        // Passes of even width: two of 2 panels take a tenth less than one of 3 and one of 1 (AVX512-BF16).
        int nb = 0;
        for (std::int64_t t = 0, pass = 0; pass < passes; ++pass, t += nb, group.Advance(nb)) {
          nb = Least(CeilDiv(args.activation_panels - t, passes - pass), nb_most);
          float* c = product.c + p * kPanelRows * args.ldc + t * kPanelRows;
          Compute<Cell>(na, nb, group.runs, group.count, c, args.ldc, product.accumulate || !first, prefetcher);
        }
      }
    }
    slice = next;
  }
}

}  // namespace
