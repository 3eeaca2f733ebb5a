#include "moe/lora.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/kernels.h"

namespace moesaic::moe {
namespace {

float AsFloat(float value) { return value; }
float AsFloat(BFloat16 value) { return ToFloat(value); }
void Assign(float& out, float value) { out = value; }
void Assign(BFloat16& out, float value) { out = ToBFloat16(value); }

/// visit(x, i, j) for every expert x and element (i, j) of a block, the axis with the smallest stride innermost: each cache line
/// of the parameter is touched once.
template <typename Visit>
void VisitBlock(std::int64_t expert_stride, std::int64_t row_stride, std::int64_t column_stride, std::int64_t experts,
                std::int64_t rows, std::int64_t columns, Visit visit) {
  const std::int64_t e = std::abs(expert_stride), r = std::abs(row_stride), c = std::abs(column_stride);
  if (e < r && e < c) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t x = 0; x < experts; ++x) visit(x, i, j);
      }
    }
  } else if (c <= r) {
    for (std::int64_t x = 0; x < experts; ++x) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) visit(x, i, j);
      }
    }
  } else {
    for (std::int64_t x = 0; x < experts; ++x) {
      for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t i = 0; i < rows; ++i) visit(x, i, j);
      }
    }
  }
}

}  // namespace

LoraCall::LoraCall(const LayerConfig& config, std::span<const LoraAdapter> adapters, std::span<const LoraAdapterGrad> gradients)
    : config_(config) {
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
      pieces_[m].rows = config.intermediate_size;
      pieces_[m].columns = padded_input_rank();
    }
  }
  if (down_rank_ > 0) {
    pieces_[kLoraADownT].rows = config.intermediate_size;
    pieces_[kLoraADownT].columns = padded_down_rank();
    pieces_[kLoraBDownT].rows = padded_down_rank();
    pieces_[kLoraBDownT].columns = config.hidden_size;
  }
}

void LoraCall::AddPiece(LoraMatrix m, const TensorView& view, const TensorView* gradient, bool transposed, std::int64_t first,
                        std::int64_t count, std::int64_t row, std::int64_t column) {
  const auto piece = [&](const TensorView& v) {
    char* data = static_cast<char*>(v.data) + first * v.stride[1] * SizeOf(v.dtype);
    if (transposed) return Piece{data, v.dtype, v.stride[0], v.stride[2], v.stride[1], row, column, v.shape[2], count};
    return Piece{data, v.dtype, v.stride[0], v.stride[1], v.stride[2], row, column, count, v.shape[2]};
  };
  pieces_[m].parameters.push_back(piece(view));
  if (gradient != nullptr && gradient->defined()) pieces_[m].gradients.push_back(piece(*gradient));
}

void LoraCall::AddPair(const LoraPair& pair, const LoraPairGrad* gradient, bool gate, bool up) {
  if (!pair.defined()) return;
  const std::int64_t rank = pair.a.shape[1], inner = config_.intermediate_size;
  const TensorView* a = gradient != nullptr ? &gradient->a : nullptr;
  const TensorView* b = gradient != nullptr ? &gradient->b : nullptr;
  AddPiece(kLoraA, pair.a, a, false, 0, rank, input_rank_, 0);
  if (gate) AddPiece(kLoraBGate, pair.b, b, false, 0, inner, 0, input_rank_);
  if (up) AddPiece(kLoraBUp, pair.b, b, false, gate ? inner : 0, inner, 0, input_rank_);
  input_rank_ += rank;
  input_scale_.insert(input_scale_.end(), static_cast<std::size_t>(rank), pair.scale);
}

void LoraCall::AddDown(const LoraPair& pair, const LoraPairGrad* gradient) {
  if (!pair.defined()) return;
  const std::int64_t rank = pair.a.shape[1];
  AddPiece(kLoraADownT, pair.a, gradient != nullptr ? &gradient->a : nullptr, true, 0, rank, 0, down_rank_);
  AddPiece(kLoraBDownT, pair.b, gradient != nullptr ? &gradient->b : nullptr, true, 0, config_.hidden_size, down_rank_, 0);
  down_rank_ += rank;
  down_scale_.insert(down_scale_.end(), static_cast<std::size_t>(rank), pair.scale);
}

bool LoraCall::wants_any() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Pieces& p) { return !p.gradients.empty(); });
}

ExpertLora LoraCall::Bind(void* matrices, void* gradients) const {
  ExpertLora lora;
  Carver tiles(matrices), sums(gradients);
  for (int m = 0; m < kNumLoraMatrices; ++m) {
    const Pieces& pieces = pieces_[m];
    TileMatrix matrix = TileMatrix::Weights(nullptr, pieces.rows, pieces.columns);
    matrix.data = tiles.Take<BFloat16>(matrix.size());
    lora.matrix[m] = matrix;
    if (!pieces.gradients.empty() && gradients != nullptr) {
      lora.gradient[m] = sums.Take<float>(matrix.panels * kPanelRows * matrix.columns * kTileColumns);
    }
  }
  return lora;
}

std::int64_t LoraCall::expert_bytes() const {
  std::int64_t bytes = 0;
  for (const Pieces& p : pieces_) {
    bytes += TileMatrix::Weights(nullptr, p.rows, p.columns).size() * static_cast<std::int64_t>(sizeof(BFloat16));
  }
  return bytes;
}

std::int64_t LoraCall::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (const Pieces& p : pieces_) {
    if (p.gradients.empty()) continue;
    bytes += TileMatrix::Weights(nullptr, p.rows, p.columns).size() * static_cast<std::int64_t>(sizeof(float));
  }
  return bytes;
}

void LoraCall::Pack(LoraMatrix m, std::span<const std::int64_t> experts, std::span<const ExpertLora> targets) const {
  const Pieces& pieces = pieces_[m];
  if (pieces.rows == 0 || experts.empty()) return;
  const KernelTier& kernels = ChosenKernels();
  // One tile of each expert, dense fp32.
  alignas(64) float dense[kLoraGroup][kPanelRows][kTileColumns];
  const std::int64_t panels = CeilDiv(pieces.rows, kPanelRows), columns = CeilDiv(pieces.columns, kTileColumns);
  for (std::int64_t p = 0; p < panels; ++p) {
    for (std::int64_t c = 0; c < columns; ++c) {
      std::memset(dense, 0, experts.size() * sizeof(dense[0]));
      for (const Piece& piece : pieces.parameters) {
        const std::int64_t row = std::max(piece.row, p * kPanelRows), column = std::max(piece.column, c * kTileColumns);
        const std::int64_t rows = std::min(piece.row + piece.rows, (p + 1) * kPanelRows) - row;
        const std::int64_t width = std::min(piece.column + piece.columns, (c + 1) * kTileColumns) - column;
        if (rows <= 0 || width <= 0) continue;
        const std::int64_t offset = (row - piece.row) * piece.row_stride + (column - piece.column) * piece.column_stride;
        const auto load = [&](const auto* from) {
          float(*block)[kPanelRows][kTileColumns] = dense;
          const std::int64_t i0 = row - p * kPanelRows, j0 = column - c * kTileColumns;
          VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, static_cast<std::int64_t>(experts.size()), rows, width,
                     [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                       block[x][i0 + i][j0 + j] =
                           AsFloat(from[experts[x] * piece.expert_stride + offset + i * piece.row_stride + j * piece.column_stride]);
                     });
        };
        if (piece.dtype == DType::kFloat32) {
          load(static_cast<const float*>(piece.data));
        } else {
          load(static_cast<const BFloat16*>(piece.data));
        }
      }
      for (std::size_t x = 0; x < experts.size(); ++x) {
        const void* rows[kPanelRows];
        for (int i = 0; i < kPanelRows; ++i) rows[i] = dense[x][i];
        PackRowsArgs args;
        args.rows = rows;
        args.count = kPanelRows;
        args.columns = kTileColumns;
        args.stored = TileMatrix::Activations(targets[x].matrix[m].Tile(p, c), kPanelRows, kTileColumns);
        args.panels = 1;
        args.tile_columns = 1;
        kernels.pack_rows(args);
      }
    }
  }
}

void LoraCall::WriteGradients(LoraMatrix m, std::int64_t first_expert, std::span<const ExpertLora> sources) const {
  const std::int64_t ld = RoundUp(pieces_[m].columns, kTileColumns);
  const auto experts = static_cast<std::int64_t>(sources.size());
  for (const Piece& piece : pieces_[m].gradients) {
    const auto store = [&](auto* to) {
      // Sixteen rows at a time: what several experts contribute to them stays in the L1 and L2 caches.
      for (std::int64_t i0 = 0; i0 < piece.rows; i0 += kPanelRows) {
        const std::int64_t rows = std::min(kPanelRows, piece.rows - i0);
        VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, experts, rows, piece.columns,
                   [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                     const float* sum = sources[x].gradient[m];
                     const float value = sum != nullptr ? sum[(piece.row + i0 + i) * ld + piece.column + j] : 0.0f;
                     Assign(to[(first_expert + x) * piece.expert_stride + (i0 + i) * piece.row_stride + j * piece.column_stride], value);
                   });
      }
    };
    if (piece.dtype == DType::kFloat32) {
      store(static_cast<float*>(piece.data));
    } else {
      store(static_cast<BFloat16*>(piece.data));
    }
  }
}

}  // namespace moesaic::moe
