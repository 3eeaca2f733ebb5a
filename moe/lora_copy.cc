// Adapters to tiles, and gradients back: along whatever lies side by side in memory.
//
//   columns   A of gate and up, and B and A of down in other layouts: each row of the matrix is read as it lies
//   experts   B as PEFT keeps it: a cache line holds one element of 16 experts, and gives each of their tiles one element
//   rows      A of down, and B of down where its rank is innermost: a cache line is a piece of a column
//
// The last two are the same kernel with another meaning of its 16 lanes. It takes a row or a panel of tiles at a time, so that
// what a page of 4 KB holds is used up while its address is at hand. Everything else goes element by element.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cpu_kernels/kernels.h"
#include "moe/lora.h"

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

/// Where the hardware does not run ahead of itself, because vectors lie far apart.
constexpr std::int64_t kLinesAhead = 64;

}  // namespace

LoraCall::Axis LoraCall::AxisOf(const Piece& piece) const {
  Axis best = Axis::kNone;
  std::int64_t most = 0;
  const auto consider = [&](Axis axis, std::int64_t stride, std::int64_t extent) {
    extent = std::min(extent, kPanelRows);
    if (stride != 1 || extent <= most) return;
    best = axis;
    most = extent;
  };
  consider(Axis::kColumns, piece.column_stride, piece.columns);
  consider(Axis::kRows, piece.row_stride, piece.rows);
  consider(Axis::kExperts, piece.expert_stride, config_.num_experts);
  return best;
}

LoraCall::Axis LoraCall::PackingAxis(const Pieces& pieces) const {
  const Piece& first = pieces.parameters.front();
  const Axis axis = AxisOf(first);
  for (const Piece& piece : pieces.parameters) {
    if (AxisOf(piece) != axis || piece.dtype != first.dtype) return Axis::kNone;
    // A tile's row is read from one place, or a tile's column.
    if (axis == Axis::kColumns && (piece.column != 0 || piece.columns != first.columns)) return Axis::kNone;
    if (axis == Axis::kRows && (piece.row != 0 || piece.rows != first.rows)) return Axis::kNone;
  }
  return axis;
}

bool LoraCall::LiesByExpert(const Pieces& pieces) const {
  const auto lies = [this](const Piece& piece) { return AxisOf(piece) == Axis::kColumns || AxisOf(piece) == Axis::kRows; };
  return std::all_of(pieces.parameters.begin(), pieces.parameters.end(), lies) &&
         std::all_of(pieces.gradients.begin(), pieces.gradients.end(), lies);
}

LoraCall::Block LoraCall::Intersect(const Piece& piece, const Tiles& tiles) {
  const std::int64_t row = std::max(piece.row, tiles.first_panel * kPanelRows);
  const std::int64_t column = std::max(piece.column, tiles.first_column * kTileColumns);
  return {row, column, std::min(piece.row + piece.rows, tiles.end_panel * kPanelRows) - row,
          std::min(piece.column + piece.columns, tiles.end_column * kTileColumns) - column};
}

void LoraCall::Pack(LoraMatrix m, const Strips& strips, std::int64_t first_expert, std::span<const ExpertLora> targets) const {
  const bool repeats = MatrixOf(m).repeats;
  PackCall call{m, IsRankTwice(RankOf(m)) && !repeats, TilesOf(m, strips), first_expert, targets};
  if (repeats) call.tiles.end_panel = 1;
  // A matrix of up or gate that no adapter feeds is all zeros.
  switch (pieces_[m].parameters.empty() ? Axis::kNone : PackingAxis(pieces_[m])) {
    case Axis::kColumns:
      PackAlongRows(call);
      break;
    case Axis::kRows:
      PackAcrossRows(call);
      break;
    case Axis::kExperts:
      PackAcrossExperts(call);
      break;
    case Axis::kNone:
      PackScattered(call);
      break;
  }
}

void LoraCall::PackAlongRows(const PackCall& call) const {
  const Pieces& pieces = pieces_[call.m];
  const void* rows[kPanelRows];
  PackRowsArgs args;
  args.rows = rows;
  args.dtype = pieces.parameters.front().dtype;
  args.count = kPanelRows;
  args.columns = pieces.parameters.front().columns;
  args.repeat = call.repeat;
  args.panels = 1;
  args.first_column = call.tiles.first_column;
  args.tile_columns = call.tiles.end_column - call.tiles.first_column;
  const auto row_of = [&pieces](std::int64_t expert, std::int64_t i) -> const void* {
    for (const Piece& piece : pieces.parameters) {
      if (i >= piece.row && i < piece.row + piece.rows) return piece.At(expert, i, 0);
    }
    return nullptr;
  };
  const std::int64_t first_panel = call.tiles.first_panel, end_panel = call.tiles.end_panel;
  for (std::size_t x = 0; x < call.targets.size(); ++x) {
    args.stored = call.targets[x].matrix[call.m];
    if (args.stored.data == nullptr) continue;
    const std::int64_t expert = call.first_expert + static_cast<std::int64_t>(x);
    const bool is_last = x + 1 == call.targets.size();
    for (args.first_panel = first_panel; args.first_panel < end_panel; ++args.first_panel) {
      for (std::int64_t i = 0; i < kPanelRows; ++i) rows[i] = row_of(expert, args.first_panel * kPanelRows + i);
      args.next = args.first_panel + 1 < end_panel ? row_of(expert, (args.first_panel + 1) * kPanelRows)
                  : is_last                        ? nullptr
                                                   : row_of(expert + 1, first_panel * kPanelRows);
      ChosenKernels().pack_rows(args);
    }
  }
}

void LoraCall::PackAcrossExperts(const PackCall& call) const {
  const Pieces& pieces = pieces_[call.m];
  const Piece& nearest = pieces.parameters.front();
  const std::int64_t step = std::min(std::abs(nearest.row_stride), std::abs(nearest.column_stride));
  const auto pack_tile = [&](std::int64_t panel, std::int64_t column) {
    const std::int64_t first_column = column * kTileColumns, end_row = (panel + 1) * kPanelRows;
    // Rows that the same pieces cover, and rows that none does.
    for (std::int64_t row = panel * kPanelRows, end = end_row; row < end_row; row = end, end = end_row) {
      PackColumnsArgs args;
      args.dtype = pieces.parameters.front().dtype;
      args.width = static_cast<std::int64_t>(call.targets.size());
      for (const Piece& piece : pieces.parameters) {
        if (piece.row + piece.rows <= row) continue;
        end = std::min(end, piece.row > row ? piece.row : piece.row + piece.rows);
        if (piece.row > row) continue;
        const std::int64_t end_column = std::min(first_column + kTileColumns, piece.column + piece.columns);
        for (std::int64_t j = std::max(first_column, piece.column); j < end_column; ++j) {
          args.columns[j - first_column] = piece.At(call.first_expert, row, j);
          args.step[j - first_column] = piece.row_stride;
        }
      }
      args.steps = end - row;
      args.repeat = call.repeat;
      args.ahead = kLinesAhead * step;
      args.out_step = kTileColumns;
      for (std::size_t x = 0; x < call.targets.size(); ++x) {
        const TileMatrix& target = call.targets[x].matrix[call.m];
        if (target.data != nullptr) args.out[x] = target.Tile(panel, column) + row % kPanelRows * kTileColumns;
      }
      ChosenKernels().pack_columns(args);
    }
  };
  // Across the matrix first: there the elements of a page lie, whichever side is the rank.
  const Tiles& tiles = call.tiles;
  if (pieces.columns > pieces.rows) {
    for (std::int64_t c = tiles.first_column; c < tiles.end_column; ++c) {
      for (std::int64_t p = tiles.first_panel; p < tiles.end_panel; ++p) pack_tile(p, c);
    }
  } else {
    for (std::int64_t p = tiles.first_panel; p < tiles.end_panel; ++p) {
      for (std::int64_t c = tiles.first_column; c < tiles.end_column; ++c) pack_tile(p, c);
    }
  }
}

void LoraCall::PackAcrossRows(const PackCall& call) const {
  const Pieces& pieces = pieces_[call.m];
  const std::int64_t rows = pieces.parameters.front().rows;
  const auto pack_tiles = [&](std::int64_t expert, const TileMatrix& target, std::int64_t panel, std::int64_t count,
                              std::int64_t width, std::int64_t column) {
    PackColumnsArgs args;
    args.dtype = pieces.parameters.front().dtype;
    args.width = width;
    for (const Piece& piece : pieces.parameters) {
      if (width == 0) break;
      const std::int64_t first = column * kTileColumns, end = std::min(first + kTileColumns, piece.column + piece.columns);
      for (std::int64_t j = std::max(first, piece.column); j < end; ++j) {
        args.columns[j - first] = piece.At(expert, panel * kPanelRows, j);
        args.step[j - first] = kPanelRows;
      }
    }
    args.steps = count;
    args.repeat = call.repeat;
    args.ahead = count * kPanelRows;
    if (count > 1) args.out_step = target.Tile(panel + 1, column) - target.Tile(panel, column);
    for (std::int64_t i = 0; i < kPanelRows; ++i) args.out[i] = target.Tile(panel, column) + i * kTileColumns;
    ChosenKernels().pack_columns(args);
  };
  for (std::size_t x = 0; x < call.targets.size(); ++x) {
    const TileMatrix& target = call.targets[x].matrix[call.m];
    if (target.data == nullptr) continue;
    const std::int64_t expert = call.first_expert + static_cast<std::int64_t>(x);
    for (std::int64_t c = call.tiles.first_column; c < call.tiles.end_column; ++c) {
      // Whole panels of a superblock, whose tiles lie at a constant distance, or one panel that the rows end in or before.
      for (std::int64_t p = call.tiles.first_panel, count = 1; p < call.tiles.end_panel; p += count) {
        const std::int64_t width = std::clamp<std::int64_t>(rows - p * kPanelRows, 0, kPanelRows);
        const std::int64_t end = std::min({call.tiles.end_panel, (p / kSuperblock + 1) * kSuperblock, rows / kPanelRows});
        count = width == kPanelRows ? end - p : 1;
        pack_tiles(expert, target, p, count, width, c);
      }
    }
  }
}

void LoraCall::PackScattered(const PackCall& call) const {
  alignas(64) Tile dense[kLoraGroup];
  for (std::int64_t p = call.tiles.first_panel; p < call.tiles.end_panel; ++p) {
    for (std::int64_t c = call.tiles.first_column; c < call.tiles.end_column; ++c) {
      std::memset(dense, 0, call.targets.size() * sizeof(Tile));
      for (const Piece& piece : pieces_[call.m].parameters) {
        const Block block = Intersect(piece, {p, p + 1, c, c + 1});
        if (block.rows > 0 && block.columns > 0) LoadScattered(piece, block, call, dense);
      }
      for (std::size_t x = 0; x < call.targets.size(); ++x) {
        if (call.targets[x].matrix[call.m].data == nullptr) continue;
        const void* rows[kPanelRows];
        for (int i = 0; i < kPanelRows; ++i) rows[i] = dense[x][i];
        PackRowsArgs args;
        args.rows = rows;
        args.count = kPanelRows;
        args.columns = call.repeat ? kTileColumns / 2 : kTileColumns;
        args.repeat = call.repeat;
        args.stored = TileMatrix::Activations(call.targets[x].matrix[call.m].Tile(p, c), kPanelRows, kTileColumns);
        args.panels = 1;
        args.tile_columns = 1;
        ChosenKernels().pack_rows(args);
      }
    }
  }
}

void LoraCall::LoadScattered(const Piece& piece, const Block& block, const PackCall& call, Tile* dense) {
  const std::int64_t i0 = block.row % kPanelRows, j0 = block.column % kTileColumns;
  const auto load = [&](const auto* from) {
    VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, static_cast<std::int64_t>(call.targets.size()),
               block.rows, block.columns, [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                 dense[x][i0 + i][j0 + j] =
                     AsFloat(from[x * piece.expert_stride + i * piece.row_stride + j * piece.column_stride]);
               });
  };
  if (piece.dtype == DType::kFloat32) {
    load(static_cast<const float*>(piece.At(call.first_expert, block.row, block.column)));
  } else {
    load(static_cast<const BFloat16*>(piece.At(call.first_expert, block.row, block.column)));
  }
}

void LoraCall::AddGradients(LoraMatrix m, const Strips& strips, std::span<const ExpertLora> from,
                            std::span<const ExpertLora> to) const {
  const Tiles tiles = GradientTilesOf(m, strips);
  const std::int64_t ld = gradient_columns(m), rows = std::min(tiles.end_panel * kPanelRows, gradient_rows(m));
  const std::int64_t first = tiles.first_column * kTileColumns, end = std::min(tiles.end_column * kTileColumns, ld);
  for (std::size_t x = 0; x < to.size(); ++x) {
    const float* addend = from[x].gradient[m];
    float* sum = to[x].gradient[m];
    if (sum == nullptr) continue;
    for (std::int64_t i = tiles.first_panel * kPanelRows; i < rows; ++i) {
      for (std::int64_t j = first; j < end; ++j) sum[i * ld + j] += addend[i * ld + j];
    }
  }
}

void LoraCall::WriteGradients(LoraMatrix m, const Strips& strips, std::int64_t first_expert,
                              std::span<const ExpertLora> sources) const {
  const std::int64_t ld = gradient_columns(m);
  const Tiles tiles = GradientTilesOf(m, strips);
  for (const Piece& piece : pieces_[m].gradients) {
    const WriteCall call{m, Intersect(piece, tiles), ld, first_expert, sources};
    if (call.block.rows <= 0 || call.block.columns <= 0) continue;
    switch (AxisOf(piece)) {
      case Axis::kColumns:
        WriteAlongRows(piece, call);
        break;
      case Axis::kRows:
        WriteAcrossRows(piece, call);
        break;
      case Axis::kExperts:
        WriteAcrossExperts(piece, call);
        break;
      case Axis::kNone:
        WriteScattered(piece, call);
        break;
    }
  }
  FinishStores();
}

void LoraCall::WriteAlongRows(const Piece& piece, const WriteCall& call) {
  const Block& block = call.block;
  StoreRowsArgs args;
  args.ld = call.ld;
  args.rows = block.rows;
  args.columns = block.columns;
  args.dtype = piece.dtype;
  args.out_stride = piece.row_stride;
  for (std::size_t x = 0; x < call.sources.size(); ++x) {
    const float* sum = call.sources[x].gradient[call.m];
    args.in = sum != nullptr ? sum + block.row * call.ld + block.column : nullptr;
    args.out = piece.At(call.first_expert + static_cast<std::int64_t>(x), block.row, block.column);
    ChosenKernels().store_rows(args);
  }
}

void LoraCall::WriteAcrossRows(const Piece& piece, const WriteCall& call) {
  const Block& block = call.block;
  StoreColumnsArgs args;
  args.row_step = kPanelRows * call.ld;
  args.count = block.columns;
  args.dtype = piece.dtype;
  args.column_stride = piece.column_stride;
  args.out_step = kPanelRows;
  for (std::size_t x = 0; x < call.sources.size(); ++x) {
    const float* sum = call.sources[x].gradient[call.m];
    // All whole panels, then the rows that are left.
    for (std::int64_t i = 0; i < block.rows; i += args.steps * kPanelRows) {
      args.steps = std::max<std::int64_t>((block.rows - i) / kPanelRows, 1);
      args.width = std::min(block.rows - i, kPanelRows);
      for (std::int64_t k = 0; k < kPanelRows; ++k) {
        const bool valid = sum != nullptr && k < args.width;
        args.rows[k] = valid ? sum + (block.row + i + k) * call.ld + block.column : nullptr;
      }
      args.out = piece.At(call.first_expert + static_cast<std::int64_t>(x), block.row + i, block.column);
      ChosenKernels().store_columns(args);
    }
  }
}

void LoraCall::WriteAcrossExperts(const Piece& piece, const WriteCall& call) {
  const Block& block = call.block;
  StoreColumnsArgs args;
  args.row_step = call.ld;
  args.width = static_cast<std::int64_t>(call.sources.size());
  args.steps = block.rows;
  args.dtype = piece.dtype;
  args.column_stride = piece.column_stride;
  args.out_step = piece.row_stride;
  // A tile's columns at a time: each is a page of its own, or several, where the rank are rows.
  for (std::int64_t j = 0; j < block.columns; j += args.count) {
    args.count = std::min(kTileColumns, block.columns - j);
    for (std::size_t x = 0; x < call.sources.size(); ++x) {
      const float* sum = call.sources[x].gradient[call.m];
      args.rows[x] = sum != nullptr ? sum + block.row * call.ld + block.column + j : nullptr;
    }
    args.out = piece.At(call.first_expert, block.row, block.column + j);
    ChosenKernels().store_columns(args);
  }
}

void LoraCall::WriteScattered(const Piece& piece, const WriteCall& call) {
  const Block& block = call.block;
  const auto store = [&](auto* to) {
    // Sixteen rows at a time: what several experts contribute to them stays in the L1 and L2 caches.
    for (std::int64_t i0 = 0; i0 < block.rows; i0 += kPanelRows) {
      VisitBlock(piece.expert_stride, piece.row_stride, piece.column_stride, static_cast<std::int64_t>(call.sources.size()),
                 std::min(kPanelRows, block.rows - i0), block.columns, [&](std::int64_t x, std::int64_t i, std::int64_t j) {
                   const float* sum = call.sources[x].gradient[call.m];
                   const float value = sum != nullptr ? sum[(block.row + i0 + i) * call.ld + block.column + j] : 0.0f;
                   Assign(to[x * piece.expert_stride + (i0 + i) * piece.row_stride + j * piece.column_stride], value);
                 });
    }
  };
  if (piece.dtype == DType::kFloat32) {
    store(static_cast<float*>(piece.At(call.first_expert, block.row, block.column)));
  } else {
    store(static_cast<BFloat16*>(piece.At(call.first_expert, block.row, block.column)));
  }
}

}  // namespace moesaic::moe
