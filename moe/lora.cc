#include "moe/lora.h"

#include <algorithm>
#include <utility>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/tile_evaluator.h"

namespace moesaic::moe {

LoraCall::LoraCall(const LayerConfig& config, const Shard& shard, std::span<const LoraAdapter> adapters,
                   std::span<const LoraAdapterGrad> gradients)
    : config_(config), shard_(shard) {
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const LoraAdapter& adapter = adapters[i];
    const LoraAdapterGrad* gradient = gradients.empty() ? nullptr : &gradients[i];
    AddPair(adapter.gate_up, gradient != nullptr ? &gradient->gate_up : nullptr, true, true);
    AddPair(adapter.gate, gradient != nullptr ? &gradient->gate : nullptr, true, false);
    AddPair(adapter.up, gradient != nullptr ? &gradient->up : nullptr, false, true);
    AddDown(adapter.down, gradient != nullptr ? &gradient->down : nullptr);
  }
  input_scale_.resize(static_cast<std::size_t>(padded_input_rank()), 0.0f);
  down_scale_.resize(static_cast<std::size_t>(padded_down_rank()), 0.0f);
  if (input_rank_ > 0) {
    pieces_[kLoraA].rows = padded_input_rank();
    pieces_[kLoraA].columns = config.hidden_size;
    for (LoraMatrix m : {kLoraBGate, kLoraBUp}) {
      pieces_[m].rows = shard.size;
      pieces_[m].columns = padded_input_rank();
    }
  }
  if (down_rank_ > 0) {
    pieces_[kLoraADownT].rows = shard.size;
    pieces_[kLoraADownT].columns = padded_down_rank();
    pieces_[kLoraBDownT].rows = padded_down_rank();
    pieces_[kLoraBDownT].columns = config.hidden_size;
  }
}

void LoraCall::AddPiece(LoraMatrix m, const TensorView& view, const TensorView* gradient, bool transposed, const Slice& slice,
                        std::int64_t row, std::int64_t column) {
  const auto piece = [&](TensorView v) {
    char* data = static_cast<char*>(v.data) + slice.first * v.stride[slice.axis] * SizeOf(v.dtype);
    v.shape[slice.axis] = slice.count;
    if (transposed) return Piece{data, v.dtype, v.stride[0], v.stride[2], v.stride[1], row, column, v.shape[2], v.shape[1]};
    return Piece{data, v.dtype, v.stride[0], v.stride[1], v.stride[2], row, column, v.shape[1], v.shape[2]};
  };
  pieces_[m].parameters.push_back(piece(view));
  if (gradient == nullptr || !gradient->defined()) return;
  Piece target = piece(*gradient);
  if (m == kLoraBDownT) {
    std::swap(target.row_stride, target.column_stride);
    std::swap(target.row, target.column);
    std::swap(target.rows, target.columns);
  }
  pieces_[m].gradients.push_back(target);
}

void LoraCall::AddPair(const LoraPair& pair, const LoraPairGrad* gradient, bool gate, bool up) {
  if (!pair.defined()) return;
  const std::int64_t rank = pair.a.shape[1], inner = config_.intermediate_size;
  const TensorView* a = gradient != nullptr ? &gradient->a : nullptr;
  const TensorView* b = gradient != nullptr ? &gradient->b : nullptr;
  AddPiece(kLoraA, pair.a, a, false, {1, 0, rank}, input_rank_, 0);
  if (gate) AddPiece(kLoraBGate, pair.b, b, false, {1, shard_.begin, shard_.size}, 0, input_rank_);
  if (up) AddPiece(kLoraBUp, pair.b, b, false, {1, (gate ? inner : 0) + shard_.begin, shard_.size}, 0, input_rank_);
  input_rank_ += rank;
  input_scale_.insert(input_scale_.end(), static_cast<std::size_t>(rank), pair.scale);
}

void LoraCall::AddDown(const LoraPair& pair, const LoraPairGrad* gradient) {
  if (!pair.defined()) return;
  const std::int64_t rank = pair.a.shape[1];
  const TensorView* a = gradient != nullptr ? &gradient->a : nullptr;
  const TensorView* b = gradient != nullptr ? &gradient->b : nullptr;
  AddPiece(kLoraADownT, pair.a, a, true, {2, shard_.begin, shard_.size}, 0, down_rank_);
  AddPiece(kLoraBDownT, pair.b, b, true, {1, 0, config_.hidden_size}, down_rank_, 0);
  down_rank_ += rank;
  down_scale_.insert(down_scale_.end(), static_cast<std::size_t>(rank), pair.scale);
}

bool LoraCall::LiesInPlace() const {
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const bool a = i == kLoraA || i == kLoraADownT;
    const auto fits = [&](const Piece& piece, bool ranks_are_rows) {
      const std::int64_t features = ranks_are_rows ? piece.column_stride : piece.row_stride;
      return piece.dtype == DType::kFloat32 && (a ? features : piece.expert_stride) == 1;
    };
    for (const Piece& piece : pieces_[i].parameters) {
      if (!fits(piece, i == kLoraA || i == kLoraBDownT)) return false;
    }
    for (const Piece& piece : pieces_[i].gradients) {
      if (!fits(piece, i == kLoraA)) return false;
    }
  }
  return true;
}

std::vector<LoraCall::PieceInPlace> LoraCall::InPlace(LoraMatrix m) const {
  std::vector<PieceInPlace> pieces;
  for (const Piece& from : pieces_[m].parameters) {
    const bool ranks_are_rows = m == kLoraA || m == kLoraBDownT;
    PieceInPlace to;
    to.piece.parameter = static_cast<const float*>(from.data);
    to.piece.feature_stride = ranks_are_rows ? from.column_stride : from.row_stride;
    to.piece.rank_stride = ranks_are_rows ? from.row_stride : from.column_stride;
    to.piece.first_rank = ranks_are_rows ? from.row : from.column;
    to.piece.ranks = ranks_are_rows ? from.rows : from.columns;
    to.expert_stride = from.expert_stride;
    pieces.push_back(to);
  }
  for (const Piece& from : pieces_[m].gradients) {
    const bool ranks_are_rows = m == kLoraA;
    const std::int64_t first_rank = ranks_are_rows ? from.row : from.column;
    for (PieceInPlace& to : pieces) {
      if (to.piece.first_rank != first_rank) continue;
      to.piece.gradient = static_cast<float*>(from.data);
      to.piece.gradient_feature_stride = ranks_are_rows ? from.column_stride : from.row_stride;
      to.piece.gradient_rank_stride = ranks_are_rows ? from.row_stride : from.column_stride;
      to.gradient_expert_stride = from.expert_stride;
    }
  }
  return pieces;
}

bool LoraCall::wants_any() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Pieces& p) { return !p.gradients.empty(); });
}

TileMatrix LoraCall::MatrixOf(LoraMatrix m) const {
  const Pieces& pieces = pieces_[m];
  const bool twice = pieces.rows > 0 && IsRankTwice(RankOf(m)) && (m == kLoraA || m == kLoraBDownT);
  if (twice) return TileMatrix::RepeatedPanel(nullptr, pieces.rows / kPanelRows, pieces.columns);
  return TileMatrix::Weights(nullptr, pieces.rows, pieces.columns);
}

ExpertLora ExpertLora::At(std::int64_t bytes) const {
  ExpertLora moved = *this;
  for (TileMatrix& m : moved.matrix) {
    if (m.data != nullptr) m.data += bytes / static_cast<std::int64_t>(sizeof(BFloat16));
  }
  for (float*& sums : moved.gradient) {
    if (sums != nullptr) sums += bytes / static_cast<std::int64_t>(sizeof(float));
  }
  return moved;
}

ExpertLora LoraCall::Bind(void* matrices, void* gradients) const {
  ExpertLora lora;
  Carver tiles(matrices), sums(gradients);
  for (int m = 0; m < kNumLoraMatrices; ++m) {
    const Pieces& pieces = pieces_[m];
    TileMatrix matrix = MatrixOf(static_cast<LoraMatrix>(m));
    matrix.data = tiles.Take<BFloat16>(matrix.size());
    lora.matrix[m] = matrix;
    if (!pieces.gradients.empty() && gradients != nullptr) {
      const auto which = static_cast<LoraMatrix>(m);
      lora.gradient[m] = sums.Take<float>(gradient_rows(which) * gradient_columns(which));
    }
  }
  return lora;
}

std::int64_t LoraCall::expert_bytes() const {
  std::int64_t bytes = 0;
  for (int m = 0; m < kNumLoraMatrices; ++m) {
    bytes += MatrixOf(static_cast<LoraMatrix>(m)).size() * static_cast<std::int64_t>(sizeof(BFloat16));
  }
  return bytes;
}

std::int64_t LoraCall::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const auto m = static_cast<LoraMatrix>(i);
    if (wants(m)) bytes += gradient_rows(m) * gradient_columns(m) * static_cast<std::int64_t>(sizeof(float));
  }
  return bytes;
}

std::int64_t LoraCall::strips(LoraMatrix m) const {
  const std::int64_t panels = CeilDiv(pieces_[m].rows, kPanelRows), columns = CeilDiv(pieces_[m].columns, kTileColumns);
  return CeilDiv(std::max(panels, columns), kStripTiles);
}

LoraCall::Share LoraCall::ShareOf(LoraMatrix m, std::int64_t experts, std::int64_t elements) const {
  const std::int64_t of_expert = std::max<std::int64_t>(1, RankOf(m) * FeaturesOf(m));
  if (LiesByExpert(pieces_[m])) experts = std::clamp<std::int64_t>(elements / of_expert, 1, experts);
  return {experts, std::max<std::int64_t>(1, std::min(elements * strips(m) / (of_expert * experts), strips(m)))};
}

std::int64_t LoraCall::parameters() const {
  std::int64_t count = 0;
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const auto m = static_cast<LoraMatrix>(i);
    if (rows(m) > 0) count += RankOf(m) * FeaturesOf(m);
  }
  return count;
}

LoraCall::Tiles LoraCall::TilesOf(LoraMatrix m, const Strips& strips) const {
  const std::int64_t panels = CeilDiv(pieces_[m].rows, kPanelRows), columns = CeilDiv(pieces_[m].columns, kTileColumns);
  const std::int64_t begin = strips.begin * kStripTiles, end = strips.end * kStripTiles;
  if (columns > panels) return {0, panels, begin, std::min(end, columns)};
  return {begin, std::min(end, panels), 0, columns};
}

LoraCall::Tiles LoraCall::GradientTilesOf(LoraMatrix m, const Strips& strips) const {
  const Tiles tiles = TilesOf(m, strips);
  if (m != kLoraBDownT) return tiles;
  return {2 * tiles.first_column, 2 * tiles.end_column, tiles.first_panel / 2, CeilDiv(tiles.end_panel, 2)};
}

}  // namespace moesaic::moe
