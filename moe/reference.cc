#include "moe/reference.h"

#include <cmath>
#include <numbers>
#include <utility>

#include "cpu_kernels/tensor_access.h"

namespace moesaic::moe {
namespace {

// ---- Matrices ----

/// Expert e of a [E, m, n] view.
Matrix LoadExpert(const TensorView& view, std::int64_t e) {
  Matrix result(view.shape[1], view.shape[2]);
  for (std::int64_t i = 0; i < result.rows; ++i) {
    for (std::int64_t j = 0; j < result.cols; ++j) result(i, j) = LoadFloat(view, e, i, j);
  }
  return result;
}

Matrix Transpose(const Matrix& a) {
  Matrix result(a.cols, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) result(j, i) = a(i, j);
  }
  return result;
}

/// a b. The innermost loop runs along a row of b and of the result, so that the compiler can vectorise it.
Matrix Multiply(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, b.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    double* row = result.values.data() + i * result.cols;
    for (std::int64_t l = 0; l < a.cols; ++l) {
      const double factor = a(i, l);
      const double* b_row = b.values.data() + l * b.cols;
      for (std::int64_t j = 0; j < b.cols; ++j) row[j] += factor * b_row[j];
    }
  }
  return result;
}

Matrix Scale(double factor, Matrix a) {
  for (double& value : a.values) value *= factor;
  return a;
}

void Accumulate(Matrix& sum, const Matrix& a) {
  for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += a.values[i];
}

Matrix Columns(const Matrix& a, std::int64_t first, std::int64_t count) {
  Matrix result(a.rows, count);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < count; ++j) result(i, j) = a(i, first + j);
  }
  return result;
}

void AccumulateColumns(Matrix& sum, std::int64_t first, const Matrix& a) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) sum(i, first + j) += a(i, j);
  }
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// y(g) of gate.h, and y'(g).
struct Argument {
  double value;
  double slope;
};

Argument ArgumentOf(Gate activation, double g) {
  if (activation == Gate::kSilu) return {g, 1.0};
  const double twice_root = std::sqrt(8.0 / std::numbers::pi);
  return {twice_root * (g + 0.044715 * g * g * g), twice_root * (1.0 + 3.0 * 0.044715 * g * g)};
}

// ---- One expert ----

/// The rows of the batch that one expert gets.
struct Slot {
  std::int64_t token;
  std::int64_t j;
};

/// One LoRA pair at one expert: columns [column, column + b.rows) of the projection's output get scale * (x a^T) b^T. Gate and
/// up are one projection here, [2I, H]: a fused pair starts at column 0 and covers both, an up pair starts at column I.
struct LowRank {
  Matrix a;  // [r, in]
  Matrix b;  // [out, r]
  double scale;
  std::int64_t column;
  ReferencePairGrad* grad;  // null in forward
};

void AddPair(const LoraPair& pair, std::int64_t e, std::int64_t column, ReferencePairGrad* grad, std::vector<LowRank>& terms) {
  if (pair.defined()) terms.push_back({LoadExpert(pair.a, e), LoadExpert(pair.b, e), pair.scale, column, grad});
}

/// y = x w^T + sum over the terms of scale * (x a^T) b^T.
Matrix Project(const Matrix& x, const Matrix& w, const std::vector<LowRank>& terms) {
  Matrix y = Multiply(x, Transpose(w));
  for (const LowRank& term : terms) {
    const Matrix low = Multiply(x, Transpose(term.a));
    AccumulateColumns(y, term.column, Scale(term.scale, Multiply(low, Transpose(term.b))));
  }
  return y;
}

/// The backward of Project: returns dx = dy w + sum of scale * (dy b) a, and sets the terms' gradients at expert e:
/// db = scale * dy^T (x a^T), da = scale * (dy b)^T x.
Matrix ProjectBackward(const Matrix& x, const Matrix& w, std::vector<LowRank>& terms, const Matrix& dy, std::int64_t e) {
  Matrix dx = Multiply(dy, w);
  for (LowRank& term : terms) {
    const Matrix dy_term = Columns(dy, term.column, term.b.rows);
    const Matrix low = Multiply(x, Transpose(term.a));
    const Matrix d_low = Multiply(dy_term, term.b);
    Accumulate(dx, Scale(term.scale, Multiply(d_low, term.a)));
    term.grad->b[static_cast<std::size_t>(e)] = Scale(term.scale, Multiply(Transpose(dy_term), low));
    term.grad->a[static_cast<std::size_t>(e)] = Scale(term.scale, Multiply(Transpose(d_low), x));
  }
  return dx;
}

/// Everything that forward computes for one expert.
struct ExpertForward {
  std::vector<Slot> slots;
  Matrix gate_up_weight;  // [2I, H]
  Matrix down_weight;     // [H, I]
  std::vector<LowRank> gate_up_terms;
  std::vector<LowRank> down_terms;
  Matrix x;        // [T_e, H]
  Matrix gate_up;  // [T_e, 2I]: G, then U
  Matrix z;        // [T_e, I]
  Matrix y;        // [T_e, H]
};

/// @param grads  null in forward, else where the terms' gradients go
ExpertForward ForwardExpert(const ReferenceWeights& weights, const ReferenceInputs& inputs, std::int64_t e,
                            std::vector<Slot> slots, std::vector<ReferenceAdapterGrad>* grads) {
  const std::int64_t intermediate = weights.down.shape[2];
  ExpertForward f;
  f.slots = std::move(slots);
  f.gate_up_weight = LoadExpert(weights.gate_up, e);
  f.down_weight = LoadExpert(weights.down, e);
  for (std::size_t n = 0; n < inputs.lora.size(); ++n) {
    const LoraAdapter& adapter = inputs.lora[n];
    ReferenceAdapterGrad* grad = grads == nullptr ? nullptr : &(*grads)[n];
    AddPair(adapter.gate_up, e, 0, grad == nullptr ? nullptr : &grad->gate_up, f.gate_up_terms);
    AddPair(adapter.gate, e, 0, grad == nullptr ? nullptr : &grad->gate, f.gate_up_terms);
    AddPair(adapter.up, e, intermediate, grad == nullptr ? nullptr : &grad->up, f.gate_up_terms);
    AddPair(adapter.down, e, 0, grad == nullptr ? nullptr : &grad->down, f.down_terms);
  }

  const std::int64_t rows = static_cast<std::int64_t>(f.slots.size());
  f.x = Matrix(rows, inputs.hidden.shape[1]);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t h = 0; h < f.x.cols; ++h)
      f.x(i, h) = LoadFloat(inputs.hidden, f.slots[static_cast<std::size_t>(i)].token, h);
  }
  f.gate_up = Project(f.x, f.gate_up_weight, f.gate_up_terms);
  f.z = Matrix(rows, intermediate);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < intermediate; ++c) {
      const double g = f.gate_up(i, c);
      f.z(i, c) = g * Sigmoid(ArgumentOf(weights.activation, g).value) * f.gate_up(i, intermediate + c);
    }
  }
  f.y = Project(f.z, f.down_weight, f.down_terms);
  return f;
}

/// The slots of each expert, in the order of the batch. -1 and E belong to nobody.
std::vector<std::vector<Slot>> Route(const TensorView& ids, std::int64_t num_experts) {
  std::vector<std::vector<Slot>> slots(static_cast<std::size_t>(num_experts));
  for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
    for (std::int64_t j = 0; j < ids.shape[1]; ++j) {
      const std::int64_t e = LoadInt(ids, t, j);
      if (e >= 0 && e < num_experts) slots[static_cast<std::size_t>(e)].push_back({t, j});
    }
  }
  return slots;
}

void Allocate(const LoraPair& pair, ReferencePairGrad& grad) {
  if (!pair.defined()) return;
  grad.a.assign(static_cast<std::size_t>(pair.a.shape[0]), Matrix(pair.a.shape[1], pair.a.shape[2]));
  grad.b.assign(static_cast<std::size_t>(pair.b.shape[0]), Matrix(pair.b.shape[1], pair.b.shape[2]));
}

/// dG and dU side by side, [T_e, 2I], from dZ and the saved G, U.
Matrix GateBackward(Gate activation, const Matrix& gate_up, const Matrix& dz) {
  Matrix d_gate_up(gate_up.rows, gate_up.cols);
  for (std::int64_t i = 0; i < dz.rows; ++i) {
    for (std::int64_t c = 0; c < dz.cols; ++c) {
      const double g = gate_up(i, c);
      const double u = gate_up(i, dz.cols + c);
      const Argument y = ArgumentOf(activation, g);
      const double sigma = Sigmoid(y.value);
      d_gate_up(i, c) = dz(i, c) * u * sigma * (1.0 + g * (1.0 - sigma) * y.slope);
      d_gate_up(i, dz.cols + c) = dz(i, c) * g * sigma;
    }
  }
  return d_gate_up;
}

}  // namespace

Matrix ReferenceForward(const ReferenceWeights& weights, const ReferenceInputs& inputs) {
  const std::int64_t num_experts = weights.down.shape[0];
  Matrix out(inputs.hidden.shape[0], inputs.hidden.shape[1]);
  std::vector<std::vector<Slot>> slots = Route(inputs.ids, num_experts);
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (slots[static_cast<std::size_t>(e)].empty()) continue;
    const ExpertForward f = ForwardExpert(weights, inputs, e, std::move(slots[static_cast<std::size_t>(e)]), nullptr);
    for (std::size_t i = 0; i < f.slots.size(); ++i) {
      const double w = LoadFloat(inputs.weights, f.slots[i].token, f.slots[i].j);
      for (std::int64_t h = 0; h < out.cols; ++h) out(f.slots[i].token, h) += w * f.y(static_cast<std::int64_t>(i), h);
    }
  }
  return out;
}

ReferenceGradients ReferenceBackward(const ReferenceWeights& weights, const ReferenceInputs& inputs, const TensorView& d_out) {
  const std::int64_t num_experts = weights.down.shape[0];
  ReferenceGradients grads;
  grads.hidden = Matrix(inputs.hidden.shape[0], inputs.hidden.shape[1]);
  grads.weights = Matrix(inputs.weights.shape[0], inputs.weights.shape[1]);
  grads.lora.resize(inputs.lora.size());
  for (std::size_t n = 0; n < inputs.lora.size(); ++n) {
    Allocate(inputs.lora[n].gate_up, grads.lora[n].gate_up);
    Allocate(inputs.lora[n].gate, grads.lora[n].gate);
    Allocate(inputs.lora[n].up, grads.lora[n].up);
    Allocate(inputs.lora[n].down, grads.lora[n].down);
  }

  std::vector<std::vector<Slot>> slots = Route(inputs.ids, num_experts);
  for (std::int64_t e = 0; e < num_experts; ++e) {
    if (slots[static_cast<std::size_t>(e)].empty()) continue;
    ExpertForward f = ForwardExpert(weights, inputs, e, std::move(slots[static_cast<std::size_t>(e)]), &grads.lora);
    Matrix dy(f.y.rows, f.y.cols);  // w * D
    for (std::int64_t i = 0; i < dy.rows; ++i) {
      const auto [token, j] = f.slots[static_cast<std::size_t>(i)];
      const double w = LoadFloat(inputs.weights, token, j);
      for (std::int64_t h = 0; h < dy.cols; ++h) {
        const double d = LoadFloat(d_out, token, h);
        dy(i, h) = w * d;
        grads.weights(token, j) += d * f.y(i, h);  // the definition; the engine sums dZ0 * Z instead
      }
    }
    const Matrix dz = ProjectBackward(f.z, f.down_weight, f.down_terms, dy, e);
    const Matrix d_gate_up = GateBackward(weights.activation, f.gate_up, dz);
    const Matrix dx = ProjectBackward(f.x, f.gate_up_weight, f.gate_up_terms, d_gate_up, e);
    for (std::int64_t i = 0; i < dx.rows; ++i) {
      for (std::int64_t h = 0; h < dx.cols; ++h) grads.hidden(f.slots[static_cast<std::size_t>(i)].token, h) += dx(i, h);
    }
  }
  return grads;
}

}  // namespace moesaic::moe
