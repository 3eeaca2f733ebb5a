// What forward and backward share: the plan of one call.
//
// A call is one task graph. For every adapter group there are tasks that pack its adapters and write their gradients, for every
// job a chain of stages (each split over I or H where there are few jobs), and after all jobs, over blocks of tokens, the
// merge. A worker that ends one stage goes on with the next of the same job, whose activations are in its cache.
//
// On several NUMA nodes each job is one node's shard of I (shards.h), begins there, and has its slot there.
//
// There are slots for the activations of so many jobs, and for the adapters of so many groups: a job waits for the end of the
// one that many jobs before it, and then takes the slot that its worker freed last, which is still in that core's caches. That
// bounds memory whatever the number of tokens.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu_kernels/gemm/split_tiles.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator.h"
#include "moe/jobs.h"
#include "moe/layer.h"
#include "moe/lora.h"
#include "moe/lora_in_place.h"
#include "moe/packed_weights.h"
#include "moe/phases.h"
#include "moe/workspace.h"

namespace moesaic::moe {

using threadpool::TaskFunction;
using threadpool::TaskGraph;
using threadpool::TaskId;

/// The phase of backward that computes the gradient of an adapter's matrix.
Phase PhaseOfGradient(LoraMatrix m);

/// Rows of a [T, H] tensor, contiguous in each row.
struct RowSource {
  const char* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t row_bytes = 0;

  const void* Row(std::int64_t token) const { return data + token * row_bytes; }
};

/// The tensor itself where its rows are contiguous, else a copy in `copy`: in bf16, to which packing would round it anyway, so
/// that the backward's two copies stay within 4 * T * H bytes.
RowSource MakeRowSource(const TensorView& tensor, AlignedBuffer& copy);

/// A task index that names a job and a part of its stage.
struct TaskIndex {
  static std::int64_t Encode(std::int64_t job, std::int64_t part) { return job << 24 | part; }
  static std::int64_t Job(std::int64_t index) { return index >> 24; }
  static std::int64_t Part(std::int64_t index) { return index & 0xffffff; }
};

/// What a stage's parts are ranges of: nothing (one part), blocks of 32 rows of I, or tile columns of H.
enum class Cut { kWhole, kIntermediate, kHidden };

/// One stage of a job: the same function for each of its parts, over TaskIndex(job, part).
struct Stage {
  TaskFunction function;
  Cut cut;
  /// Adds to the sums of the job's expert: waits for the same part of the expert's previous job, so that the order of addition
  /// is fixed, and the stages behind it do not wait for it.
  bool sums = false;
  /// The sweeps of adapters in place that come behind the jobs wait for it.
  bool swept = false;
};

class Pass {
 public:
  /// @param direction  Phase::kForward or Phase::kBackward
  Pass(Phase direction, const LayerConfig& config, const PackedWeights& weights, std::span<const LoraAdapter> adapters,
       std::span<const LoraAdapterGrad> gradients, std::int64_t tokens, std::int64_t top_k, const threadpool::Pool& pool);

  const LayerConfig& config;
  const PackedWeights& weights;
  const std::span<const Shard> shards;
  const KernelTier& kernels;

 private:
  std::vector<LoraCall> lora_of_shard_;

 public:
  /// Of the first shard: ranks, scales and what is wanted are those of all; none where `in_place` has them.
  const LoraCall& lora;
  std::unique_ptr<LoraInPlace> in_place;  ///< adapters that are used where they lie, since Plan()
  const LoraCall& adapters() const { return in_place ? in_place->lora() : lora; }
  const std::int64_t tokens;
  const std::int64_t top_k;
  const std::int64_t padded_hidden;  ///< H rounded up to a tile
  const int threads;
  WorkspaceLease workspace;
  TaskGraph& graph;  ///< the workspace's

  const std::int32_t* routing = nullptr;
  std::vector<Job> jobs;
  std::vector<JobGroup> groups;
  Blocking blocking{};
  std::int64_t most_rows = 0;  ///< of any job, rounded up to 32

  const std::int32_t* Slots(const Job& job) const { return routing + config.num_experts + 1 + job.begin; }
  /// Rows of I that a job computes: those of its shard.
  std::int64_t InnerOf(const Job& job) const { return shards[static_cast<std::size_t>(job.shard)].size; }
  /// Rows of I in a job's blocks of 32 from `first` to before `end`, padded to panels.
  double InnerOfBlocks(const Job& job, std::int64_t first, std::int64_t end) const {
    return static_cast<double>(std::min(end * kTileColumns, RoundUp(InnerOf(job), kPanelRows)) - first * kTileColumns);
  }
  /// Elements of saved.gate and saved.up before a job's 32 rows of I from 32 * block on. A shard's are together.
  std::int64_t SavedOffset(const Job& job, std::int64_t block) const {
    const Shard& shard = shards[static_cast<std::size_t>(job.shard)];
    return shard.begin * tokens * top_k + job.begin * shard.size + block * kTileColumns * job.rows;
  }
  /// Elements of saved.down_low before those of a job's rows: each shard has its own, which add up.
  std::int64_t SavedDownOffset(const Job& job) const { return (job.shard * tokens * top_k + job.begin) * lora.down_rank(); }
  /// workspace->rows: a shard's row of Y or dX for a slot, and the bytes of all of them.
  BFloat16* RowOf(std::int64_t shard, std::int64_t slot) const {
    return static_cast<BFloat16*>(workspace->rows.data()) + (shard * tokens * top_k + slot) * row_pitch();
  }
  std::int64_t RowBytes() const {
    const auto rows = static_cast<std::int64_t>(shards.size()) * tokens * top_k;
    return rows * row_pitch() * static_cast<std::int64_t>(sizeof(BFloat16));
  }

  /// Parts into which a job's stages are cut, and what a part covers.
  struct Range {
    std::int64_t begin, end;
  };
  std::int64_t PartsOf(std::int64_t job, Cut cut) const;
  Range RangeOf(std::int64_t job, Cut cut, std::int64_t part) const;

  /// Cuts the routing into jobs, and decides where adapters are used.
  void Plan();
  /// Lays out the rings and chooses the blocking. @param job_bytes  activations of one job with most_rows rows
  void Allocate(std::int64_t job_bytes);

  void* JobMemory(std::int64_t job) const;  ///< between the begin and the end of the job
  const ExpertLora& LoraOf(const Job& job) const {
    return expert_lora_[static_cast<std::size_t>(job.shard * config.num_experts + job.expert)];
  }

  /// Adds the tasks of the whole call but sweeps and the merge, and returns one that ends after all jobs; gradients of packed
  /// adapters may still be written then. `context` is what the stages' functions get, and a Pass. Jobs begin after `before`, if
  /// it is none of -1.
  TaskId AddJobs(void* context, std::span<const Stage> stages, TaskId before = -1);
  /// Tasks 0 to count - 1 of a sweep, after one, and one that ends after all of them.
  TaskId AddSweep(void* context, TaskFunction function, std::int64_t count, TaskId after);
  /// Ends after both.
  TaskId Join(TaskId a, TaskId b) { return Join(std::array{Tasks{a, 1}, Tasks{b, 1}}); }
  /// Ends after all stages that are `swept`.
  TaskId Swept() { return Join(swept_); }

  /// Elements from one row of workspace->rows to the next: H rounded up to a tile, and a cache line more where rows would else
  /// lie a multiple of 1 KB apart and share cache sets. (Measured: 5 to 15% of the GEMM that writes them.)
  std::int64_t row_pitch() const { return padded_hidden + (padded_hidden % 512 == 0 ? kTileColumns : 0); }

  /// The row_count of a job's direct GEMMs: its rows, or 0 where it takes activations as pairs.
  std::int64_t StoredRows(const Job& job) const { return kernels.StoredRows(job.rows); }
  /// Blocks of I in a step: a superblock of panels where activations are laid out for each.
  std::int64_t BlocksPerStep(const Job& job) const {
    return job.rows <= kernels.most_few_rows ? kSuperblock * kPanelRows / kTileColumns : blocking.blocks_per_step;
  }
  /// The few_rows of a job's gradients: its rows where the tier has a form for so few, else 0.
  std::int64_t FewGradientRows(const Job& job) const { return job.rows <= kernels.most_few_gradient_rows ? job.rows : 0; }
  /// What a direct GEMM takes a job's activations as: stored tiles where StoredRows() says so, else pairs. `rows`: one pointer
  /// for each row of the job, to H values.
  void PackForDirect(const Job& job, const void* const* rows, DType dtype, const TileMatrix& tiles) const;

  /// The unpack form for a range of tile columns of H, rounded to bf16, to the job's rows of workspace->rows.
  void MultiplyToRows(const Job& job, std::span<const GemmSegment> segments, Range columns) const;

  TileKind DirectKind(const Job& job) const { return StoredRows(job) > 0 ? TileKind::kStored : TileKind::kPairs; }

 private:
  /// Gives experts their places in the ring of adapters, or adapters in place their intermediates; returns the bytes.
  std::int64_t BindLora();
  std::int64_t BindLow();
  /// No stage asks more of ThreadScratch.
  std::int64_t StageScratchBytes() const;
  /// Experts whose adapters are packed together; all of them where there are none.
  std::int64_t LoraGroup() const;
  /// Blocks or columns in one part.
  std::int64_t PartSize(std::int64_t job, Cut cut) const;
  /// Fills part_sizes_: the last jobs are cut finer than most, and those with many of all rows.
  void CutJobs();
  /// A task that begins something of a shard: where there are several, on its node.
  TaskId AddOfShard(TaskFunction function, std::int64_t index, std::int64_t shard, TaskGraph::Start start);
  /// Tasks that were added one after the other.
  struct Tasks {
    TaskId first;
    std::int64_t count;
    TaskId operator[](std::int64_t i) const { return first + static_cast<TaskId>(i); }
  };
  using TaskRanges = std::vector<Tasks>;
  void AddEdges(Tasks before, TaskId after);
  /// Ends after all of them.
  TaskId Join(std::span<const Tasks> tasks);
  /// Adds the tasks of one job and returns its end. `sums`: by stage that adds up, the tasks of the job before it of the same
  /// expert and shard, and then those of this one.
  TaskId AddJob(void* context, std::int64_t job, std::span<const Stage> stages, TaskId start, TaskRanges& sums);
  /// The phase that packing an adapter's matrix counts for.
  Phase PhaseThatReads(LoraMatrix m) const;
  static void BeginJob(void* pass, std::int64_t job, int worker);
  static void EndJob(void* pass, std::int64_t job, int worker);
  /// Adds the tasks that pack the adapters of a group for a shard, or write their gradients: a share of one matrix each.
  Tasks AddLoraTasks(TaskFunction function, std::int64_t group, std::int64_t shard, TaskId after);
  std::int64_t ExpertsOf(std::int64_t group) const {
    return std::min(lora_group_, config.num_experts - groups[group].first_expert);
  }
  LoraCall::Share ShareOf(const LoraCall& call, LoraMatrix m) const {
    return call.ShareOf(m, std::min(lora_group_, config.num_experts), lora_task_elements_);
  }
  struct LoraPart {
    LoraMatrix matrix;
    std::int64_t shard;
    LoraCall::Strips strips;
    std::int64_t first_expert;
    std::span<const ExpertLora> experts;
  };
  LoraPart LoraPartOf(std::int64_t index) const;
  std::span<const ExpertLora> LoraOfExperts(std::int64_t shard, std::int64_t first_expert, std::size_t count) const {
    return std::span(expert_lora_).subspan(static_cast<std::size_t>(shard * config.num_experts + first_expert), count);
  }
  static void PackTask(void* pass, std::int64_t index, int worker);
  static void WriteTask(void* pass, std::int64_t index, int worker);

  Phase direction_;
  std::int64_t job_bytes_ = 0;
  /// Blocks of I and columns of H in a part of each job.
  struct PartSizes {
    std::int64_t intermediate, hidden;
  };
  std::vector<PartSizes> part_sizes_;
  std::int64_t job_tasks_ = 0;  ///< of all stages of all jobs
  TaskRanges swept_;
  std::int64_t job_slots_ = 1;                         ///< of each shard
  std::vector<std::unique_ptr<SlotPool>> free_slots_;  ///< by shard
  std::vector<std::int64_t> slot_of_job_;
  std::int64_t lora_group_ = 1;          ///< experts of a group
  std::int64_t lora_task_elements_ = 1;  ///< of a task that packs or writes
  std::int64_t group_slots_ = 1;
  std::vector<ExpertLora> expert_lora_;  ///< by shard and expert; empty entries for those without rows
};

}  // namespace moesaic::moe
