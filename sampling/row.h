// One row on its way to a token: passes over its blocks, and what is decided between them.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_kernels/aligned_buffer.h"
#include "cpu_kernels/kernels.h"
#include "sampling/cut.h"
#include "sampling/sampler.h"

namespace moesaic::sampling {

/// Memory of one row, kept from call to call. Large vocabularies touch only the part that they need.
struct RowScratch {
  /// Room for rows of V elements in so many pieces. Throws std::bad_alloc.
  void Ensure(std::int64_t vocabulary, std::int64_t pieces);

  float* packed = nullptr;     ///< [V] the row, where it cannot be read in place
  float* max = nullptr;        ///< [blocks]
  float* sum = nullptr;        ///< [blocks]
  float* bound = nullptr;      ///< [blocks] of sums, where there are none
  float* above = nullptr;      ///< [blocks]
  double* mass = nullptr;      ///< [blocks]
  double* numbers = nullptr;   ///< [blocks, rounded up to 64] of the race
  double* earliest = nullptr;  ///< [blocks]
  float* values = nullptr;     ///< [V + 16 a piece] a list of elements: their logits, columns and weights
  std::int32_t* columns = nullptr;
  double* weights = nullptr;
  std::vector<std::int64_t> piece_counts;
  std::vector<std::int64_t> context;
  std::vector<double> distances;
  std::vector<float> rounded;
  CutFinder finder;

 private:
  AlignedBuffer buffer_;
};

/// What a row came to.
struct Choice {
  std::int64_t id = -1;
  float confidence = 0;
};

/// Begin, Scan of every piece, Plan; if that says so CollectPiece of every piece; Finish. Pieces may be worked on by several
/// threads at once; what comes out does not depend on how a row is cut.
class Row {
 public:
  /// Blocks [first, last).
  struct Piece {
    std::int64_t first, last;
  };

  Row(const SampleArgs& args, const SamplingKernels& kernels);

  /// @param pieces  all blocks in order; must stay until Finish
  void Begin(std::int64_t row, RowScratch* scratch, const std::vector<Piece>* pieces);
  void Scan(std::int64_t piece);
  /// Whether a second pass over all pieces is needed. Throws std::invalid_argument where the row has no distribution.
  bool Plan();
  void CollectPiece(std::int64_t piece);
  Choice Finish();

 private:
  static constexpr float kLowest = std::numeric_limits<float>::lowest();
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  bool Greedy() const { return options_.temperature == 0; }
  bool HasTopK() const { return options_.top_k > 0 && options_.top_k < logits_.size; }
  /// What scratch_->mass has of each block.
  enum class Masses : std::uint8_t {
    kNone,
    kKept,   ///< the mass of what is kept
    kWhole,  ///< not yet what cut_ keeps of it; `sum` has the whole
  };

  bool IsSmall() const;
  bool WantsProbability() const { return args_.confidence != nullptr && args_.confidence_kind == Confidence::kProbability; }
  bool NeedsSums() const;
  float* Bounds() const;
  bool CutsSums() const;
  void ScanExactly();
  void SumMasses();

  void Pack();
  void Penalise();
  void FindMaximum();
  void ShareInfinities();

  // The list: elements with low <= x <= high.
  ElementList List() const { return {scratch_->values, scratch_->columns, scratch_->weights, count_}; }
  void Collect(float low, float high, double* mass);
  std::int64_t PlaceOf(std::int64_t piece) const;
  void JoinPieces();
  void WeighList();
  double ListWeight() const;
  template <typename Keep>
  void Retain(Keep keep);

  // Filters (filters.cc). Each leaves the kept tokens as the list, or as cut_ and the masses of the blocks.
  void TakeTopK();
  float BoundOfTopK() const;
  void EstimateTopP();
  TopPEstimate Estimate(const TopPEstimateArgs& args);
  bool PlanTopP();
  void ChooseBracket();
  bool TakePeak(double target);
  void FinishTopP();
  void TakeMinP();
  float BoundOfMinP() const;
  void TakeTypical();
  void KeepAbove(float bound);
  void ListKept();

  // Results.
  std::int64_t Draw();
  std::int64_t DrawBlock(PhiloxStream stream);
  void BoundMasses(double* bounds) const;
  double MassOf(std::int64_t b);
  Piece ListOf(std::int64_t b) const;
  float ConfidenceOf(std::int64_t id);
  void Unpack(std::int64_t id) const;
  float At(std::int64_t column) const;

  const SampleArgs& args_;
  const Options& options_;
  const SamplingKernels& kernels_;
  const double temperature_;  // 1 where greedy
  std::int64_t index_ = 0;
  RowScratch* scratch_ = nullptr;
  const std::vector<Piece>* pieces_ = nullptr;
  LogitRow logits_;
  float max_ = 0;
  bool listed_ = false;   // the kept tokens are the list; else what cut_ keeps, of which masses_ says more
  bool pending_ = false;  // a second pass has been asked for
  std::int64_t count_ = 0;
  Cut cut_;
  Masses masses_ = Masses::kNone;
  double total_ = 0;           // mass of the row, relative to its largest logit; after a filter of what is kept, unless listed
  double doubt_ = 0;           // by how much the fast sums may be off
  float low_ = 0, high_ = 0;   // the bracket around the boundary of top_p
  bool is_estimated_ = false;  // high_ is where the sample has the boundary: the pass with exact sums adds up what is above
  double density_ = 0;         // of mass below that
  double above_ = 0;           // the mass above it
  bool is_above_ = false;      // the bracket is above it
  bool is_coarse_ = false;     // the first pass gives coarse sums
  float reference_ = 0;        // their m
};

}  // namespace moesaic::sampling
