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

/// visit(x, i, j) for every expert x and element (i, j) of a block, the axis with the smallest stride innermost: each cache
/// line of the parameter is touched once.
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

bool LoraCall::PackRowsInPlace(LoraMatrix m, std::span<const std::int64_t> experts, std::span<const ExpertLora> targets) const {
  const Pieces& pieces = pieces_[m];
  if (pieces.parameters.empty()) return false;
  for (const Piece& piece : pieces.parameters) {
    if (piece.column_stride != 1 || piece.columns != pieces.columns || piece.dtype != pieces.parameters.front().dtype)
      return false;
  }
  PackRowsArgs args;
  args.dtype = pieces.parameters.front().dtype;
  args.count = pieces.rows;
  args.columns = pieces.columns;
  args.panels = CeilDiv(pieces.rows, kPanelRows);
  args.tile_columns = CeilDiv(pieces.columns, kTileColumns);
  std::vector<const void*> rows(static_cast<std::size_t>(pieces.rows));
  for (std::size_t x = 0; x < experts.size(); ++x) {
    std::fill(rows.begin(), rows.end(), nullptr);
    for (const Piece& piece : pieces.parameters) {
      const char* data = static_cast<const char*>(piece.data) + experts[x] * piece.expert_stride * SizeOf(piece.dtype);
      for (std::int64_t i = 0; i < piece.rows; ++i) rows[piece.row + i] = data + i * piece.row_stride * SizeOf(piece.dtype);
    }
    args.rows = rows.data();
    args.stored = targets[x].matrix[m];
    ChosenKernels().pack_rows(args);
  }
  return true;
}

void LoraCall::Pack(LoraMatrix m, std::span<const std::int64_t> experts, std::span<const ExpertLora> targets) const {
  const Pieces& pieces = pieces_[m];
  if (pieces.rows == 0 || experts.empty() || PackRowsInPlace(m, experts, targets)) return;
  const KernelTier& kernels = ChosenKernels();
  alignas(64) Tile dense[kLoraGroup];
  const std::int64_t panels = CeilDiv(pieces.rows, kPanelRows), columns = CeilDiv(pieces.columns, kTileColumns);
  for (std::int64_t p = 0; p < panels; ++p) {
    for (std::int64_t c = 0; c < columns; ++c) {
      std::memset(dense, 0, experts.size() * sizeof(Tile));
      for (const Piece& piece : pieces.parameters) {
        Block block;
        block.row = std::max(piece.row, p * kPanelRows);
        block.column = std::max(piece.column, c * kTileColumns);
        block.rows = std::min(piece.row + piece.rows, (p + 1) * kPanelRows) - block.row;
        block.columns = std::min(piece.column + piece.columns, (c + 1) * kTileColumns) - block.column;
        if (block.rows > 0 && block.columns > 0) LoadBlock(piece, block, experts, dense);
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

void LoraCall::LoadBlock(const Piece& piece, const Block& block, std::span<const std::int64_t> experts, Tile* dense) const {
  const std::int64_t offset = (block.row - piece.row) * piece.row_stride + (block.column - piece.column) * piece.column_stride;
  const std::int64_t i0 = block.row % kPanelRows, j0 = block.column % kTileColumns;
  const auto count = static_cast<std::int64_t>(experts.size());
  const bool f32 = piece.dtype == DType::kFloat32;
  if (f32 && piece.expert_stride == 1 && experts.front() + 16 <= config_.num_experts) {
    // Sixteen experts side by side for each of sixteen columns: transposed, a row piece of each expert.
    const float* from = static_cast<const float*>(piece.data) + offset + experts.front();
    for (std::int64_t i = 0; i < block.rows; ++i) {
      for (std::int64_t j = 0; j < block.columns; j += 16) {
        const float* rows[16] = {};
        for (std::int64_t k = 0; k < std::min<std::int64_t>(16, block.columns - j); ++k) {
          rows[k] = from + i * piece.row_stride + (j + k) * piece.column_stride;
        }
        float transposed[16][16];
        ChosenKernels().transpose(rows, transposed[0], 16);
        const std::size_t bytes = static_cast<std::size_t>(std::min<std::int64_t>(16, block.columns - j)) * sizeof(float);
        for (std::int64_t x = 0; x < count; ++x) {
          std::memcpy(&dense[x][i0 + i][j0 + j], transposed[experts[x] - experts.front()], bytes);
        }
      }
    }
    return;
  }
  if (f32 && piece.row_stride == 1 && block.rows == kPanelRows) {
    for (std::int64_t x = 0; x < count; ++x) {
      const float* from = static_cast<const float*>(piece.data) + offset + experts[x] * piece.expert_stride;
      for (std::int64_t j = 0; j < block.columns; j += 16) {
        const float* rows[16] = {};
        const std::int64_t width = std::min<std::int64_t>(16, block.columns - j);
        for (std::int64_t k = 0; k < width; ++k) rows[k] = from + (j + k) * piece.column_stride;
        float transposed[16][16];
        ChosenKernels().transpose(rows, transposed[0], 16);
        for (int i = 0; i < 16; ++i) {
          std::memcpy(&dense[x][i][j0 + j], transposed[i], static_cast<std::size_t>(width) * sizeof(float));
        }
      }
    }
    return;
  }
  const auto load = [&](const auto* from) {
    VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, count, block.rows, block.columns,
               [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                 dense[x][i0 + i][j0 + j] =
                     AsFloat(from[experts[x] * piece.expert_stride + offset + i * piece.row_stride + j * piece.column_stride]);
               });
  };
  if (f32) {
    load(static_cast<const float*>(piece.data));
  } else {
    load(static_cast<const BFloat16*>(piece.data));
  }
}

bool LoraCall::WriteTransposed(LoraMatrix m, const Piece& piece, std::int64_t first_expert,
                               std::span<const ExpertLora> sources) const {
  if (piece.dtype != DType::kFloat32 || piece.expert_stride != 1 || sources.size() > 16) return false;
  const std::int64_t ld = RoundUp(pieces_[m].columns, kTileColumns);
  float* to = static_cast<float*>(piece.data) + first_expert;
  for (std::int64_t i = 0; i < piece.rows; ++i) {
    for (std::int64_t j = 0; j < piece.columns; j += 16) {
      const float* rows[16] = {};
      const std::int64_t width = std::min<std::int64_t>(16, piece.columns - j);
      float edge[16][16];
      for (std::size_t x = 0; x < sources.size(); ++x) {
        const float* sum = sources[x].gradient[m];
        if (sum == nullptr) continue;
        rows[x] = sum + (piece.row + i) * ld + piece.column + j;
        if (piece.column + j + 16 > ld) {  // the row ends before sixteen columns do
          std::memcpy(edge[x], rows[x], static_cast<std::size_t>(width) * sizeof(float));
          rows[x] = edge[x];
        }
      }
      float transposed[16][16];
      ChosenKernels().transpose(rows, transposed[0], 16);
      for (std::int64_t k = 0; k < width; ++k) {
        std::memcpy(to + i * piece.row_stride + (j + k) * piece.column_stride, transposed[k], sources.size() * sizeof(float));
      }
    }
  }
  return true;
}

void LoraCall::WriteGradients(LoraMatrix m, std::int64_t first_expert, std::span<const ExpertLora> sources) const {
  const std::int64_t ld = RoundUp(pieces_[m].columns, kTileColumns);
  const auto experts = static_cast<std::int64_t>(sources.size());
  for (const Piece& piece : pieces_[m].gradients) {
    if (WriteTransposed(m, piece, first_expert, sources)) continue;
    const auto store = [&](auto* to) {
      // Sixteen rows at a time: what several experts contribute to them stays in the L1 and L2 caches.
      for (std::int64_t i0 = 0; i0 < piece.rows; i0 += kPanelRows) {
        const std::int64_t rows = std::min(kPanelRows, piece.rows - i0);
        VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, experts, rows, piece.columns,
                   [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                     const float* sum = sources[x].gradient[m];
                     const float value = sum != nullptr ? sum[(piece.row + i0 + i) * ld + piece.column + j] : 0.0f;
                     Assign(
                         to[(first_expert + x) * piece.expert_stride + (i0 + i) * piece.row_stride + j * piece.column_stride],
                         value);
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
