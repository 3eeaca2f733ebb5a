// What each instruction-set tier brings for fused dense layers and attention: rows after a GEMM, their backward, SiLU * mul,
// rotary embeddings, softmax, few queries, log-probabilities, and an fp32 GEMM.
//
// Rows are bf16 or fp32 in memory and fp32 in between; each has one order of summation, whatever block it is computed in. NaN
// passes through. No function here throws or takes a lock; all may run on any number of threads at once.
#pragma once

#include <cstdint>

#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic {

enum class Activation : std::int8_t {
  kNone,
  kGelu,      ///< x / 2 (1 + erf(x / sqrt(2))), within 2e-7 of it, relative to |x|
  kGeluTanh,  ///< x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
};

enum class Norm : std::int8_t {
  kNone,
  kLayerNorm,  ///< (v - mean(v)) / sqrt(var(v) + eps) * gamma + beta
  kRmsNorm,    ///< v / sqrt(mean(v^2) + eps) * gamma
};

/// sums[r][c] = transposed[c][r] for 16 rows, as the direct form of GEMM gives them.
struct TurnPanelArgs {
  const float* transposed = nullptr;  ///< [columns][transposed_ld]
  std::int64_t transposed_ld = 0;     ///< elements, as ld
  std::int64_t columns = 0;           ///< a multiple of 16
  float* sums = nullptr;              ///< [16][ld]
  std::int64_t ld = 0;
};

/// Rows that an epilogue walks side by side, and what it needs for their v: a line more than they have, for other cache sets.
inline constexpr int kEpilogueRows = 8;
constexpr std::int64_t EpilogueScratch(std::int64_t columns) { return kEpilogueRows * ((columns + 15) / 16 * 16 + 16); }

/// For each row:  pre = sums + bias + addend    v = activation(pre) + residual    out = norm(v)
struct RowEpilogueArgs {
  DType dtype = DType::kBFloat16;  ///< of addend, residual, out, pre and normalized: bf16 or fp32
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  /// Of a GEMM, [rows][ld]; null: v = residual. With `transposed` scratch for 16 rows of whole vectors.
  float* sums = nullptr;
  std::int64_t ld = 0;  ///< elements, as transposed_ld
  /// Not null: the sums of up to 16 rows, [columns rounded up to 16][transposed_ld], 16 of a column side by side.
  const float* transposed = nullptr;
  std::int64_t transposed_ld = 0;
  const float* bias = nullptr;   ///< [columns]; with sums never null
  const void* addend = nullptr;  ///< [rows][addend_stride], or null
  std::int64_t addend_stride = 0;
  Activation activation = Activation::kNone;
  const void* residual = nullptr;  ///< [rows][residual_stride]; with sums it may be null
  std::int64_t residual_stride = 0;
  Norm norm = Norm::kNone;
  const float* gamma = nullptr;  ///< [columns]; with a norm never null
  const float* beta = nullptr;   ///< [columns]; with a layer norm never null
  float epsilon = 0;
  float* values = nullptr;  ///< scratch, EpilogueScratch(columns); with a norm never null
  void* out = nullptr;      ///< [rows][out_stride]; may be `residual`
  std::int64_t out_stride = 0;
  bool stream = false;  ///< out is written past the caches: FinishStores() comes before another thread may read it
  void* pre = nullptr;  ///< [rows][pre_stride], or null: what the activation's backward needs
  std::int64_t pre_stride = 0;
  void* normalized = nullptr;    ///< [rows][columns], or null: out without gamma and beta
  float* inverse_std = nullptr;  ///< [rows], with normalized
};

/// For each row, with n = normalized, s = inverse_std, g = d_out * gamma:
///   d_in = s (g - mean(g) - n mean(g n))    without mean(g) for the RMS norm
///   d_gamma += d_out * n    d_beta += d_out
struct NormBackwardArgs {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Norm norm = Norm::kLayerNorm;
  const void* d_out = nullptr;  ///< [rows][columns], as all below
  const void* normalized = nullptr;
  const float* inverse_std = nullptr;  ///< [rows]
  const float* gamma = nullptr;        ///< [columns]
  void* d_in = nullptr;
  float* d_gamma = nullptr;  ///< [columns]
  float* d_beta = nullptr;   ///< [columns]
};

/// d_pre = d_out * activation'(pre), `count` values side by side. d_pre may be d_out.
struct ActivationBackwardArgs {
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kGelu;
  std::int64_t count = 0;
  const void* d_out = nullptr;
  const void* pre = nullptr;
  void* d_pre = nullptr;
};

/// out = silu(gate) * up, rows of `columns`. out may be gate or up.
struct SiluMulArgs {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const void* gate = nullptr;  ///< [rows][in_stride]
  const void* up = nullptr;    ///< [rows][in_stride]
  std::int64_t in_stride = 0;
  void* out = nullptr;  ///< [rows][out_stride]
  std::int64_t out_stride = 0;
  bool stream = false;  ///< as in RowEpilogueArgs
};

/// d_gate = d_out * up * s (1 + gate (1 - s))    d_up = d_out * gate * s    with s = sigma(gate)
struct SiluMulBackwardArgs {
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const void* d_out = nullptr;  ///< [rows][out_stride]
  std::int64_t out_stride = 0;
  const void* gate = nullptr;  ///< [rows][in_stride]
  const void* up = nullptr;
  std::int64_t in_stride = 0;
  void* d_gate = nullptr;  ///< [rows][d_in_stride]
  void* d_up = nullptr;
  std::int64_t d_in_stride = 0;
};

/// For each row:  powers = e^(scale x + bias - m), m the largest of its scale x + bias    inverse_sums = 1 / sum of powers
/// Where all are -infinity the sum counts as infinite. Powers are within 1e-4, relative, before they are rounded to bf16; the
/// sum is that of the unrounded ones. What lies beyond rows and columns in their tiles is filled with zeros.
struct SoftmaxRowsArgs {
  const float* x = nullptr;  ///< [rows][ld]; where a row does not see all columns, anything
  std::int64_t ld = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  float scale = 1;
  const float* bias = nullptr;  ///< [columns], or null
  /// The first row sees so many columns, each one after it one more, up to all; others count as -infinity. 0: all see all.
  std::int64_t first_sees = 0;
  /// [rows], or null: the first column that each row sees, from 0 on; those before it count as -infinity, too.
  const std::int32_t* first_columns = nullptr;
  TileMatrix powers;              ///< operand [rows][columns], activations' order
  float* inverse_sums = nullptr;  ///< [rows]
  float* most = nullptr;          ///< [rows] m, without bias m / ln 2; 0 where all are -infinity. Null: not wanted
};

/// Gradients of softmax's x, of which a row is a key and a column a query:
///   probability = e^(scale x + bias - m) inverse_sums    d_x = probability (scale d_probability - delta)
/// both rounded to bf16, with m and inverse_sums as SoftmaxRows gave them. Both are 0 where a query does not see a key,
/// whatever x and d_probability are there, and beyond rows and columns in their tiles.
struct SoftmaxGradArgs {
  const float* x = nullptr;              ///< [rows][ld]
  const float* d_probability = nullptr;  ///< [rows][ld]
  std::int64_t ld = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  float scale = 1;
  const float* bias = nullptr;          ///< [rows], or null
  const float* most = nullptr;          ///< [columns]
  const float* inverse_sums = nullptr;  ///< [columns]
  const float* delta = nullptr;         ///< [columns]: scale times the sum over a query's keys of probability d_probability
  std::int64_t diagonal = 0;            ///< row r is seen from column diagonal + r on; -rows or less: everywhere
  /// [columns], with memory for the next multiple of 16, or null: the first row that each column sees; 0 or less: all.
  const std::int32_t* first_rows = nullptr;
  TileMatrix probability;  ///< operand [rows][columns], activations' order, as both below
  TileMatrix d_x;          ///< operand
  TileMatrix d_x_pairs;    ///< row pairs
};

/// out[r] = scale * sum over c of a[r][c] b[r][c], in 16 interleaved parts
struct RowDotsArgs {
  const BFloat16* a = nullptr;  ///< [rows][a_stride]
  std::int64_t a_stride = 0;
  const BFloat16* b = nullptr;  ///< [rows][b_stride]
  std::int64_t b_stride = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  float scale = 1;
  float* out = nullptr;  ///< [rows]
};

/// What is known of the logits z of sixteen rows, side by side, from the columns met so far.
struct alignas(64) LogitStatistics {
  static constexpr float kNone = -__builtin_inff();
  float most[16];           ///< the largest, m
  float sum[16] = {};       ///< of e^(z - m)
  float weighted[16] = {};  ///< of e^(z - m) (z - m)
  float squares[16] = {};   ///< of e^2(z - m)
  float total[16] = {};     ///< of z
  float before[16];         ///< the largest before the target
  float target[16] = {};    ///< of the target, once it was met

  /// Before any column.
  constexpr LogitStatistics() {
    for (int i = 0; i < 16; ++i) most[i] = before[i] = kNone;
  }
};

/// Logits of up to sixteen rows: z = scale (product + bias).
struct LogitBlock {
  const float* products = nullptr;  ///< [columns][ld], rows side by side; `by_rows`: [16][ld]
  bool by_rows = false;
  std::int64_t ld = 0;          ///< elements
  std::int64_t columns = 0;     ///< those that there are; memory for the next multiple of 16
  const float* bias = nullptr;  ///< [columns], or null
  float scale = 1;
  const std::int32_t* targets = nullptr;  ///< [16] each row's column, from the first one here on; any that is not here
};

/// Takes the columns of a block, which are behind those met so far, into the statistics. Sums of a call are taken in the order
/// of its columns, and added to what was there. A logit of -infinity counts as 0 in all sums but the total.
struct FoldLogitsArgs {
  LogitBlock block;
  LogitStatistics* statistics = nullptr;
};

/// The gradient of the products, with p = e^(z - log_sum) and the entropy H of a row:
///   scale (d_log_prob (1 at the target - p) - d_entropy p (z - log_sum + H))
/// zeros in the columns that only fill the last tile.
struct LogitGradArgs {
  LogitBlock block;
  const float* log_sum = nullptr;     ///< [16] log of the sum of e^z over all columns
  const float* d_log_prob = nullptr;  ///< [16]
  const float* entropy = nullptr;     ///< [16], with d_entropy
  const float* d_entropy = nullptr;   ///< [16], or null: zeros
  TileMatrix operand;                 ///< bf16: sixteen rows of operand tiles are written here, from
  std::int64_t panel = 0;             ///< this panel and
  std::int64_t tile_column = 0;       ///< this column on
  float* rows = nullptr;              ///< fp32, where it is no operand: [16][rows_ld], 64-byte aligned
  std::int64_t rows_ld = 0;           ///< elements
};

/// Queries that AttendFew takes side by side, and keys of a part of it.
inline constexpr std::int64_t kQueriesTogether = 8, kKeysTogether = 128;

/// Attention of queries that share keys and values, to some of these, with exponents of 2:
///   e[r][s] = scale / ln 2 sum over d: q[r][d] k[s][d] + bias[s]
///   most[r] = the largest of them
///   p[r][s] = 2^(e[r][s] - most[r])
///   sums[r] = sum over s: p[r][s]
///   out[r][d] = sum over s: p[r][s] v[s][d]
/// In fp32, but for what p is approximated to, 1e-4. Where a query sees none of the keys, most is -infinity and the sums are 0.
struct AttendFewArgs {
  const BFloat16* const* q = nullptr;  ///< [rows], each [size]
  std::int64_t rows = 0;
  std::int64_t size = 0;  ///< a multiple of 32
  float scale = 1;
  const BFloat16* k = nullptr;  ///< [keys][k_stride]
  std::int64_t k_stride = 0;
  const BFloat16* v = nullptr;  ///< [keys][v_stride]
  std::int64_t v_stride = 0;
  std::int64_t keys = 0;               ///< 1 to kKeysTogether
  const float* bias = nullptr;         ///< [keys], 0 or -infinity; null: 0
  const std::int64_t* seen = nullptr;  ///< [rows]: how many of the keys a query sees, from the first on; null: all
  float* scratch = nullptr;            ///< AttendFewScratch(size) floats, 64-byte aligned
  float* most = nullptr;               ///< [rows]
  float* sums = nullptr;               ///< [rows]
  float* out = nullptr;                ///< [rows][size], of each 32 numbers the even ones first; 64-byte aligned
};
constexpr std::int64_t AttendFewScratch(std::int64_t size) { return kQueriesTogether * (size + kKeysTogether); }

/// to[r] = sum over p: w[p] out[p][r] / sum over p: w[p] sums[p][r],  w[p] = 2^(most[p][r] - the largest of them), parts in
/// their order, rounded to bf16; 0 where all sums are.
struct MergeAttendedArgs {
  std::int64_t parts = 0;
  std::int64_t rows = 0;
  std::int64_t size = 0;
  float* most = nullptr;          ///< [parts][rows], overwritten
  const float* sums = nullptr;    ///< [parts][rows]
  const float* out = nullptr;     ///< [parts][rows][size], as AttendFew gives it
  BFloat16* const* to = nullptr;  ///< [rows], each [size]
};

/// The fp32 GEMM over weights W [N, K], packed in panels of 16 rows of W:  panels[n / 16][k][n % 16] = W[n][k], zeros beyond N
/// and up to a multiple of 16 in K.
///   forward     C[t][n] = sum over k: A[t][k] W[n][k]
///   transposed  C[t][k] = sum over n: A[t][n] W[n][k]
/// Sums in parts of 128 products each, which are then added up: for long contractions a third of the rounding error of one sum.
struct Fp32GemmArgs {
  const float* a = nullptr;  ///< [rows][lda]; rows that lie a multiple of 4 KB apart share cache sets
  std::int64_t lda = 0;
  std::int64_t rows = 0;
  const float* panels = nullptr;  ///< 64-byte aligned
  std::int64_t n = 0;             ///< N
  std::int64_t k = 0;             ///< K
  bool transposed = false;
  std::int64_t first = 0;    ///< the panel of 16 columns of C to begin with
  std::int64_t count = 0;    ///< panels of C
  float* c = nullptr;        ///< [rows][ldc], 64-byte aligned; column 16 first comes to c[0]; whole panels are written
  std::int64_t ldc = 0;      ///< elements, a multiple of 16
  float* scratch = nullptr;  ///< kFp32GemmScratch floats, 64-byte aligned
};

/// Numbers of the contraction in one part of the sum: so much of A's rows, and their sums, are to stay in the L2 cache.
inline constexpr std::int64_t kFp32Depth = 128;
inline constexpr std::int64_t kFp32GemmScratch = 3 * 16 * kFp32Depth;

/// Vectors turned by the angles of a position, as rotary embeddings turn queries and keys. With x = [x1; x2], c = [c1; c2] and
/// s = [s1; s2] in halves, each product rounded to `dtype`, and their sum again:
///   out = [x1 c1 - x2 s1; x2 c2 + x1 s2]      back: out = [x1 c1 + x2 s2; x2 c2 - x1 s1], the transpose of that
/// `out` may be `x`.
struct RotateArgs {
  DType dtype = DType::kBFloat16;  ///< of all: bf16 or fp32
  std::int64_t count = 0;          ///< vectors, one after the other
  std::int64_t size = 0;           ///< of a vector, a multiple of 32
  const void* x = nullptr;         ///< [count][size]
  void* out = nullptr;             ///< [count][size]
  const void* cos = nullptr;       ///< [size]
  const void* sin = nullptr;       ///< [size]
  bool back = false;
};

struct FusedKernels {
  void (*turn_panel)(const TurnPanelArgs&);
  void (*row_epilogue)(const RowEpilogueArgs&);
  void (*norm_backward)(const NormBackwardArgs&);
  void (*activation_backward)(const ActivationBackwardArgs&);
  void (*silu_mul)(const SiluMulArgs&);
  void (*silu_mul_backward)(const SiluMulBackwardArgs&);
  void (*rotate)(const RotateArgs&);
  void (*softmax_rows)(const SoftmaxRowsArgs&);
  void (*softmax_grad)(const SoftmaxGradArgs&);
  void (*row_dots)(const RowDotsArgs&);
  void (*fold_logits)(const FoldLogitsArgs&);
  void (*logit_grad)(const LogitGradArgs&);
  void (*attend_few)(const AttendFewArgs&);
  void (*merge_attended)(const MergeAttendedArgs&);
  void (*fp32_gemm)(const Fp32GemmArgs&);
};

}  // namespace moesaic
