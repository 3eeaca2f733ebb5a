#include "profiling/bench/gemm_probe.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "profiling/bench/rate.h"

namespace moesaic::bench {
namespace {

AlignedBuffer TilesOf(const TileMatrix& matrix) {
  return AlignedBuffer(matrix.size() * static_cast<std::int64_t>(sizeof(BFloat16)));
}

std::int64_t CheckSizes(GemmProbe::Form form, const MatrixView& activations, const MatrixView& weights, int copies) {
  const bool direct = form == GemmProbe::Form::kDirect;
  const std::int64_t contraction = direct ? weights.columns : weights.rows;
  const std::int64_t columns = direct ? weights.rows : weights.columns;
  if (contraction != activations.columns) {
    throw std::invalid_argument("weights have a contraction of " + std::to_string(contraction) +
                                ", expected the activations' " + std::to_string(activations.columns));
  }
  if (activations.rows < 1 || contraction < 1 || columns < 1 || activations.column_stride != 1 || weights.column_stride != 1) {
    throw std::invalid_argument("activations and weights: expected at least one row and column, and contiguous rows");
  }
  if (copies < 1) throw std::invalid_argument("copies is " + std::to_string(copies) + ", expected at least 1");
  return columns;
}

/// Packs all rows of a matrix into `tiles`, which `out` names in the arguments.
void PackRows(const KernelTier& tier, const MatrixView& matrix, TileMatrix PackRowsArgs::* out, const TileMatrix& tiles) {
  std::vector<const void*> rows(static_cast<std::size_t>(matrix.rows));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    rows[r] =
        static_cast<const std::byte*>(matrix.data) + static_cast<std::int64_t>(r) * matrix.row_stride * SizeOf(matrix.dtype);
  }
  PackRowsArgs pack;
  pack.rows = rows.data();
  pack.dtype = matrix.dtype;
  pack.count = matrix.rows;
  pack.columns = matrix.columns;
  pack.*out = tiles;
  pack.panels = RoundUp(CeilDiv(matrix.rows, kPanelRows), out == &PackRowsArgs::row_pairs ? 2 : 1);
  pack.tile_columns = CeilDiv(matrix.columns, kTileColumns);
  tier.pack_rows(pack);
}

}  // namespace

GemmProbe::GemmProbe(const KernelTier& tier, Form form, const MatrixView& activations, const MatrixView& weights, int copies)
    : tier_(tier),
      form_(form),
      rows_(activations.rows),
      columns_(CheckSizes(form, activations, weights, copies)),
      row_count_(form == Form::kDirect ? tier.StoredRows(rows_) : 0) {
  for (int i = 0; i < copies; ++i) PackWeights(weights);

  activations_ = TileMatrix::Activations(nullptr, rows_, activations.columns);
  activation_buffer_ = TilesOf(activations_);
  activations_.data = static_cast<BFloat16*>(activation_buffer_.data());
  TileMatrix PackRowsArgs::* const order = form != Form::kDirect ? &PackRowsArgs::operand
                                           : row_count_ > 0      ? &PackRowsArgs::stored
                                                                 : &PackRowsArgs::pairs;
  PackRows(tier_, activations, order, activations_);

  const std::int64_t c_panels = form == Form::kDirect ? weights_[0].panels : activations_.panels;
  ldc_ = SumsPitch(form == Form::kDirect   ? activations_.panels * kPanelRows
                   : form == Form::kUnpack ? weights_[0].columns * kTileColumns
                                           : weights_[0].panels * kPanelRows);
  c_ = AlignedBuffer(c_panels * kPanelRows * ldc_ * static_cast<std::int64_t>(sizeof(float)));
  const GemmSegment segment{weights_[0], activations_};
  const std::int64_t scratch = form == Form::kDirect   ? DirectScratchElements({&segment, 1})
                               : form == Form::kUnpack ? UnpackScratchElements({&segment, 1})
                                                       : 0;
  scratch_ = AlignedBuffer(scratch * static_cast<std::int64_t>(sizeof(BFloat16)));
}

void GemmProbe::PackWeights(const MatrixView& weights) {
  const auto shape = form_ == Form::kGradient ? &TileMatrix::RowPairs : &TileMatrix::Weights;
  TileMatrix tiles = shape(nullptr, weights.rows, weights.columns);
  AlignedBuffer& buffer = weight_buffers_.emplace_back(TilesOf(tiles));
  tiles.data = static_cast<BFloat16*>(buffer.data());
  if (form_ == Form::kGradient) {
    PackRows(tier_, weights, &PackRowsArgs::row_pairs, tiles);
  } else {
    std::vector<float> scratch(static_cast<std::size_t>(kPanelRows * tiles.columns * kTileColumns));
    for (std::int64_t panel = 0; panel < tiles.panels; ++panel) PackPanel(weights, panel, tiles, scratch.data());
  }
  weights_.push_back(tiles);
}

void GemmProbe::Call() {
  const TileMatrix& weights = weights_[next_];
  next_ = (next_ + 1) % weights_.size();
  auto* c = static_cast<float*>(c_.data());
  if (form_ == Form::kGradient) {
    const GradientSegment segment{activations_, weights};
    GradientGemmArgs args;
    args.segments = {&segment, 1};
    args.panels = activations_.panels;
    args.c = c;
    args.ldc = ldc_;
    tier_.gradient_gemm(args);
    return;
  }
  const GemmSegment segment{weights, activations_};
  if (form_ == Form::kDirect) {
    DirectGemmArgs args;
    args.segments = {&segment, 1};
    args.panels = weights.panels;
    args.activation_panels = activations_.panels;
    args.row_count = row_count_;
    args.c = c;
    args.ldc = ldc_;
    args.scratch = static_cast<BFloat16*>(scratch_.data());
    tier_.direct_gemm(args);
  } else {
    UnpackGemmArgs args;
    args.segments = {&segment, 1};
    args.panels = activations_.panels;
    args.row_count = rows_;
    args.columns = weights.columns;
    args.c = c;
    args.ldc = ldc_;
    args.scratch = static_cast<BFloat16*>(scratch_.data());
    tier_.unpack_gemm(args);
  }
}

std::vector<double> GemmProbe::Measure(int count) {
  std::vector<double> times(static_cast<std::size_t>(std::max(count, 0)));
  for (double& time : times) {
    const std::int64_t start = profiling::Now();
    Call();
    time = 1e6 * SecondsSince(start);
  }
  return times;
}

void GemmProbe::Result(const MatrixView& out) const {
  if (out.rows != rows_ || out.columns != columns_ || out.dtype != DType::kFloat32) {
    throw std::invalid_argument("out has shape [" + std::to_string(out.rows) + ", " + std::to_string(out.columns) +
                                "], expected fp32 of [" + std::to_string(rows_) + ", " + std::to_string(columns_) + "]");
  }
  const auto* c = static_cast<const float*>(c_.data());
  for (std::int64_t t = 0; t < rows_; ++t) {
    for (std::int64_t n = 0; n < columns_; ++n) {
      static_cast<float*>(out.data)[t * out.row_stride + n * out.column_stride] =
          form_ == Form::kDirect ? c[n * ldc_ + t] : c[t * ldc_ + n];
    }
  }
}

}  // namespace moesaic::bench
