#include "moe/pass.h"

#include <algorithm>
#include <utility>

#include "cpu_kernels/tensor_access.h"
#include "moe/phases.h"
#include "profiling/calls.h"

namespace moesaic::moe {
namespace {

constexpr std::int64_t kBlocksPerUnit = kIntermediateUnit / kTileColumns;
/// Columns whose sums wait while the unpack form takes a contraction in slices or superblocks.
constexpr std::int64_t kSumsPitch = SumsPitch(kSuperblock * kTileColumns);
/// Large buffers are whole huge pages: jobs, adapters, and those that grow with T.
constexpr std::int64_t kRounding = std::int64_t{12} << 20;

/// From one expert's adapters to the next: not a multiple of 4 KB, so that the same element of all experts of a group, which
/// are written and read together, does not lie in one cache set.
std::int64_t ExpertPitch(std::int64_t bytes) { return bytes == 0 ? 0 : RoundUp(bytes, 4096) + 64; }

std::vector<LoraCall> LoraOfShards(const LayerConfig& config, std::span<const Shard> shards,
                                   std::span<const LoraAdapter> adapters, std::span<const LoraAdapterGrad> gradients) {
  std::vector<LoraCall> calls;
  for (const Shard& shard : shards) calls.emplace_back(config, shard, adapters, gradients);
  return calls;
}

/// Whole in every shard: its gradient is the sum of theirs.
bool IsInEveryShard(LoraMatrix m) { return m == kLoraA || m == kLoraBDownT; }

}  // namespace

RowSource MakeRowSource(const TensorView& tensor, AlignedBuffer& copy) {
  const std::int64_t rows = tensor.shape[0], columns = tensor.shape[1], size = SizeOf(tensor.dtype);
  if (tensor.stride[1] == 1 || columns == 1) {
    return {static_cast<const char*>(tensor.data), tensor.dtype, tensor.stride[0] * size};
  }
  copy.Ensure(rows * columns * SizeOf(DType::kBFloat16));
  auto* to = static_cast<BFloat16*>(copy.data());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) *to++ = ToBFloat16(LoadFloat(tensor, i, j));
  }
  return {static_cast<const char*>(copy.data()), DType::kBFloat16, columns * SizeOf(DType::kBFloat16)};
}

Pass::Pass(Phase direction, const LayerConfig& config_, const PackedWeights& weights_, std::span<const LoraAdapter> adapters,
           std::span<const LoraAdapterGrad> gradients, std::int64_t tokens_, std::int64_t top_k_, const threadpool::Pool& pool)
    : config(config_),
      weights(weights_),
      shards(weights_.shards()),
      kernels(ChosenKernels()),
      lora_of_shard_(LoraOfShards(config_, shards, adapters, gradients)),
      lora(lora_of_shard_.front()),
      tokens(tokens_),
      top_k(top_k_),
      padded_hidden(RoundUp(config_.hidden_size, kTileColumns)),
      threads(pool.num_threads()),
      graph(workspace->graph),
      direction_(direction) {}

void Pass::Plan() {
  lora_group_ = LoraGroup();
  jobs = BuildJobs(config, shards, routing, lora_group_);
  if (shards.size() == 1 && LoraInPlace::Serves(config, lora, jobs)) {
    const std::int32_t* slots = routing + config.num_experts + 1;
    in_place = std::make_unique<LoraInPlace>(config, std::move(lora_of_shard_.front()), jobs, slots);
    lora_of_shard_.front() = LoraCall(config, shards.front(), {}, {});
  }
  groups = BuildGroups(config, jobs, lora_group_);
  for (const Job& job : jobs) most_rows = std::max(most_rows, RoundUp(job.rows, kTileColumns));
}

std::int64_t Pass::LoraGroup() const {
  if (!lora.any()) return config.num_experts;
  std::int64_t expert_bytes = 0;  // of all shards
  for (const LoraCall& call : lora_of_shard_) {
    expert_bytes += ExpertPitch(call.expert_bytes()) + ExpertPitch(call.gradient_bytes());
  }
  // Several groups in flight, so that one can be packed or written while others compute: three, of 16 experts where memory is
  // enough, and two on a few threads. Smaller groups would read and write each cache line of PEFT's B more often. (Groups of 4
  // for 16 experts on 2 threads, 16 tokens: a backward takes 1.7 times as long.)
  const std::int64_t in_flight = threads <= 4 ? 2 : 3;
  std::int64_t group = kLoraGroup;
  while (group > 1 && in_flight * group * expert_bytes > LoraBudget(threads)) group /= 2;
  return group;
}

std::int64_t Pass::PartSize(std::int64_t job, Cut cut) const {
  const PartSizes& sizes = part_sizes_[static_cast<std::size_t>(job)];
  return cut == Cut::kIntermediate ? sizes.intermediate : sizes.hidden;
}

std::int64_t Pass::PartsOf(std::int64_t job, Cut cut) const {
  if (cut == Cut::kWhole) return 1;
  const std::int64_t size = cut == Cut::kIntermediate ? InnerOf(jobs[job]) : config.hidden_size;
  return CeilDiv(CeilDiv(size, kTileColumns), PartSize(job, cut));
}

Pass::Range Pass::RangeOf(std::int64_t job, Cut cut, std::int64_t part) const {
  const std::int64_t size = cut == Cut::kIntermediate ? InnerOf(jobs[job]) : config.hidden_size;
  const std::int64_t step = PartSize(job, cut);
  return {part * step, std::min((part + 1) * step, CeilDiv(size, kTileColumns))};
}

void Pass::Allocate(std::int64_t job_bytes) {
  const auto count = static_cast<std::int64_t>(jobs.size()), num_shards = static_cast<std::int64_t>(shards.size());
  BlockingQuery query;
  query.jobs = count;
  query.rows = most_rows;
  query.hidden = config.hidden_size;
  query.intermediate = LargestShard(shards);
  query.tokens = tokens;
  query.threads = threads;
  query.matrix_unit = kernels.unpack_overlaps;
  const std::int64_t lora_bytes = in_place ? BindLow() : lora.any() ? BindLora() : 0;
  const std::int64_t thread_bytes = threads * StageScratchBytes();
  const std::int64_t rest = ScratchBudget(threads) - kRounding - lora_bytes - thread_bytes;
  job_bytes_ = RoundUp(std::max<std::int64_t>(job_bytes, 1), 64);
  job_slots_ = std::clamp<std::int64_t>(std::min(JobBudget(threads), rest) / (job_bytes_ * num_shards), 1,
                                        std::max<std::int64_t>(count / num_shards, 1));
  Workspace::Fit(workspace->jobs, job_slots_ * job_bytes_ * num_shards, rest);
  free_slots_.clear();
  for (std::int64_t s = 0; s < num_shards; ++s) free_slots_.push_back(std::make_unique<SlotPool>(job_slots_, threads));
  slot_of_job_.resize(jobs.size());
  query.slots = job_slots_ * num_shards;
  blocking = ChooseBlocking(query);
  CutJobs();
}

void Pass::CutJobs() {
  // Parts of I are whole units; parts of H whole superblocks, where there are several.
  const std::int64_t units = blocking.intermediate_units_per_task, columns = blocking.hidden_columns_per_task;
  const std::int64_t all_units = CeilDiv(LargestShard(shards), kIntermediateUnit);
  const std::int64_t all_columns = CeilDiv(config.hidden_size, kTileColumns);
  const PartSizes most{units * kBlocksPerUnit, columns};
  const PartSizes tail{CeilDiv(units, blocking.tail_parts) * kBlocksPerUnit, ColumnsOfPart(columns, blocking.tail_parts)};
  std::int64_t rows = 0;
  for (const Job& job : jobs) rows += job.rows;
  const std::int64_t count = static_cast<std::int64_t>(jobs.size()), first_tail_job = count - blocking.tail_jobs;
  part_sizes_.clear();
  for (std::int64_t job = 0; job < count; ++job) {
    PartSizes sizes = job < first_tail_job ? most : tail;
    const std::int64_t parts = blocking.cuts_long_jobs ? PartsOfLongJob(jobs[job].rows, rows, threads) : 1;
    sizes.intermediate = std::min(sizes.intermediate, UnitsOfPart(all_units, parts) * kBlocksPerUnit);
    sizes.hidden = std::min(sizes.hidden, ColumnsOfPart(all_columns, parts));
    part_sizes_.push_back(sizes);
  }
}

std::int64_t Pass::StageScratchBytes() const {
  const std::int64_t rank = std::max(lora.padded_input_rank(), lora.padded_down_rank());
  // Unpacked weights, two tile columns of 64 bytes a row: those of both base products of a stage and of the adapters' two
  // parts.
  const std::int64_t unpacked = 256 * (RoundUp(LargestShard(shards), kTileColumns) + rank);
  // The low rank products hold two fp32 blocks of [rows][rank]; those of a step's blocks of I, 32 fp32 columns each with a
  // cache line more a row and three times as many in bf16; those of the unpack form a superblock of columns.
  const std::int64_t steps = 384 * std::max(most_rows, kMostStepBytes / 256);
  // Row pairs for a gradient, with a panel more in each column (TileMatrix::Activations).
  const std::int64_t gradient = kGradientBytes / 8 * 9;
  const std::int64_t sums = 4 * kSumsPitch * most_rows;
  if (in_place) return unpacked + std::max(steps, sums) + in_place->StageScratchBytes() + 256;
  return unpacked + std::max({8 * rank * most_rows, steps, sums, gradient}) + 256;
}

std::int64_t Pass::BindLow() {
  const bool backward = direction_ == Phase::kBackward;
  const std::int64_t bytes = in_place->BindLow(nullptr, backward);
  Workspace::Fit(workspace->lora, bytes, LoraBudget(threads));
  return in_place->BindLow(workspace->lora.data(), backward);
}

/// Experts with rows take consecutive places in the ring; a group's places are freed when its gradients are written.
std::int64_t Pass::BindLora() {
  std::int64_t group_bytes = 0, parameters = 0;
  for (const LoraCall& call : lora_of_shard_) {
    parameters += config.num_experts * call.parameters();
    group_bytes += lora_group_ * (ExpertPitch(call.expert_bytes()) + ExpertPitch(call.gradient_bytes()));
  }
  lora_task_elements_ = LoraTaskElements(parameters, threads);
  const auto count = static_cast<std::int64_t>(groups.size());
  group_slots_ = std::clamp<std::int64_t>(LoraBudget(threads) / std::max<std::int64_t>(group_bytes, 1), 1, count);
  Workspace::Fit(workspace->lora, group_slots_ * group_bytes, LoraBudget(threads));
  expert_lora_.resize(shards.size() * static_cast<std::size_t>(config.num_experts));
  char* ring = static_cast<char*>(workspace->lora.data());
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const LoraCall& call = lora_of_shard_[s];
    const std::int64_t bytes = ExpertPitch(call.expert_bytes()), sums = ExpertPitch(call.gradient_bytes());
    ExpertLora* of_expert = expert_lora_.data() + static_cast<std::int64_t>(s) * config.num_experts;
    const ExpertLora at_first = call.Bind(ring, sums > 0 ? ring + bytes : nullptr);
    for (std::int64_t g = 0; g < count; ++g) {
      for (std::size_t x = 0; x < groups[g].experts.size(); ++x) {
        const std::int64_t place = g % group_slots_ * lora_group_ + static_cast<std::int64_t>(x);
        of_expert[groups[g].experts[x]] = at_first.At(place * (bytes + sums));
      }
    }
    ring += group_slots_ * lora_group_ * (bytes + sums);
  }
  return group_slots_ * group_bytes;
}

void* Pass::JobMemory(std::int64_t job) const {
  const std::int64_t slot = jobs[job].shard * job_slots_ + slot_of_job_[static_cast<std::size_t>(job)];
  return static_cast<char*>(workspace->jobs.data()) + slot * job_bytes_;
}

void Pass::BeginJob(void* pass, std::int64_t job, int worker) {
  Pass& self = *static_cast<Pass*>(pass);
  self.slot_of_job_[static_cast<std::size_t>(job)] = self.free_slots_[self.jobs[job].shard]->Take(worker);
}

void Pass::EndJob(void* pass, std::int64_t job, int worker) {
  Pass& self = *static_cast<Pass*>(pass);
  self.free_slots_[self.jobs[job].shard]->Free(self.slot_of_job_[static_cast<std::size_t>(job)], worker);
}

void Pass::PackForDirect(const Job& job, const void* const* rows, DType dtype, const TileMatrix& tiles) const {
  PackRowsArgs pack;
  pack.rows = rows;
  pack.dtype = dtype;
  pack.count = job.rows;
  pack.columns = config.hidden_size;
  (StoredRows(job) > 0 ? pack.stored : pack.pairs) = tiles;
  pack.panels = CeilDiv(job.rows, kPanelRows);
  pack.tile_columns = tiles.columns;
  kernels.pack_rows(pack);
}

void Pass::MultiplyToRows(const Job& job, std::span<const GemmSegment> segments, Range columns) const {
  BFloat16* rows[kMaxChunkRows] = {};
  const std::int32_t* slots = Slots(job);
  for (std::int64_t i = 0; i < job.rows; ++i) rows[i] = RowOf(job.shard, slots[i]);
  UnpackGemmArgs gemm;
  gemm.segments = segments;
  gemm.panels = CeilDiv(job.rows, kPanelRows);
  gemm.row_count = job.rows;
  gemm.first_column = columns.begin;
  gemm.columns = columns.end - columns.begin;
  gemm.rows = rows;
  const std::int64_t unpacked = UnpackScratchElements(segments);
  const std::int64_t sums = gemm.panels * kPanelRows * kSumsPitch;
  Carver carver(ThreadScratch(2 * unpacked + 4 * sums + 128));
  gemm.scratch = carver.Take<BFloat16>(unpacked);
  gemm.c = carver.Take<float>(sums);
  gemm.ldc = kSumsPitch;
  gemm.depth = blocking.unpack_depth;
  kernels.unpack_gemm(gemm);
}

Phase Pass::PhaseThatReads(LoraMatrix m) const {
  const bool down = m == kLoraADownT || m == kLoraBDownT;
  if (direction_ == Phase::kForward) return down ? Phase::kDownLora : Phase::kGateUpLora;
  if (down) return Phase::kD4LoraGrad;
  return m == kLoraA ? Phase::kGU3GateDXLora : m == kLoraBGate ? Phase::kGU3GateP : Phase::kGU3UpP;
}

Phase PhaseOfGradient(LoraMatrix m) {
  if (m == kLoraADownT || m == kLoraBDownT) return Phase::kD4LoraGrad;
  return m == kLoraA ? Phase::kGU3GateDA : m == kLoraBGate ? Phase::kGU3GateDB : Phase::kGU3UpDB;
}

Pass::LoraPart Pass::LoraPartOf(std::int64_t index) const {
  const auto m = static_cast<LoraMatrix>(TaskIndex::Part(index) % kNumLoraMatrices);
  const auto num_shards = static_cast<std::int64_t>(shards.size());
  const std::int64_t group = TaskIndex::Job(index) / num_shards, shard = TaskIndex::Job(index) % num_shards;
  const LoraCall& call = lora_of_shard_[static_cast<std::size_t>(shard)];
  const LoraCall::Share share = ShareOf(call, m);
  const std::int64_t part = TaskIndex::Part(index) / kNumLoraMatrices, parts = CeilDiv(call.strips(m), share.strips);
  const std::int64_t strip = part % parts * share.strips, of_group = part / parts * share.experts;
  const std::int64_t first = groups[group].first_expert + of_group,
                     count = std::min(share.experts, ExpertsOf(group) - of_group);
  return {m, shard, {strip, std::min(strip + share.strips, call.strips(m))}, first, LoraOfExperts(shard, first, count)};
}

void Pass::PackTask(void* pass, std::int64_t index, int) {
  const Pass& self = *static_cast<const Pass*>(pass);
  const LoraPart part = self.LoraPartOf(index);
  const PhaseRange range(self.PhaseThatReads(part.matrix));
  // Of A and the transposed B of down, each is what one direction computes the rank-wide intermediate from.
  self.lora_of_shard_[part.shard].Pack(part.matrix, part.strips, part.first_expert, part.experts);
}

void Pass::WriteTask(void* pass, std::int64_t index, int) {
  const Pass& self = *static_cast<const Pass*>(pass);
  const LoraPart part = self.LoraPartOf(index);
  const PhaseRange range(PhaseOfGradient(part.matrix));
  const LoraCall& call = self.lora_of_shard_[part.shard];
  for (std::size_t s = 1; s < self.shards.size() && IsInEveryShard(part.matrix); ++s) {
    const auto other = static_cast<std::int64_t>(s);
    call.AddGradients(part.matrix, part.strips, self.LoraOfExperts(other, part.first_expert, part.experts.size()),
                      part.experts);
  }
  call.WriteGradients(part.matrix, part.strips, part.first_expert, part.experts);
}

Pass::Tasks Pass::AddLoraTasks(TaskFunction function, std::int64_t group, std::int64_t shard, TaskId after) {
  Tasks tasks{static_cast<TaskId>(graph.size()), 0};
  const LoraCall& call = lora_of_shard_[static_cast<std::size_t>(shard)];
  const std::int64_t index = group * static_cast<std::int64_t>(shards.size()) + shard;
  for (int i = 0; i < kNumLoraMatrices; ++i) {
    const auto m = static_cast<LoraMatrix>(i);
    if (function == WriteTask && (!lora.wants(m) || (IsInEveryShard(m) && shard > 0))) continue;
    const LoraCall::Share share = ShareOf(call, m);
    const std::int64_t parts = CeilDiv(ExpertsOf(group), share.experts) * CeilDiv(call.strips(m), share.strips);
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t code = TaskIndex::Encode(index, part * kNumLoraMatrices + m);
      const TaskId task = AddOfShard(function, code, shard, TaskGraph::Start::kNext);
      if (after >= 0) graph.AddEdge(after, task);
      ++tasks.count;
    }
  }
  return tasks;
}

TaskId Pass::AddOfShard(TaskFunction function, std::int64_t index, std::int64_t shard, TaskGraph::Start start) {
  if (shards.size() == 1) return graph.Add(function, this, index, start);
  return graph.AddOnNode(function, this, index, shards[static_cast<std::size_t>(shard)].node);
}

TaskId Pass::Join(std::span<const Tasks> tasks) {
  if (tasks.size() == 1 && tasks.front().count == 1) return tasks.front().first;
  const TaskId join = graph.Add([](void*, std::int64_t, int) {}, nullptr, 0);
  for (const Tasks& some : tasks) AddEdges(some, join);
  return join;
}

void Pass::AddEdges(Tasks before, TaskId after) {
  for (std::int64_t i = 0; i < before.count; ++i) graph.AddEdge(before[i], after);
}

TaskId Pass::AddJob(void* context, std::int64_t job, std::span<const Stage> stages, TaskId start, TaskRanges& sums) {
  const std::int64_t previous = jobs[job].previous;
  // The same ranges as in the expert's previous job, or else all of that job's sums come first.
  const bool same_ranges = previous >= 0 && PartSize(job, Cut::kIntermediate) == PartSize(previous, Cut::kIntermediate) &&
                           PartSize(job, Cut::kHidden) == PartSize(previous, Cut::kHidden);
  const TaskId all_sums = previous >= 0 && !same_ranges && !sums.empty() ? Join(sums) : -1;
  if (previous < 0) sums.clear();
  std::size_t sum = 0;     // of the stages that add up
  Tasks before{start, 1};  // the last stage that is waited for
  for (const Stage& stage : stages) {
    const std::int64_t parts = PartsOf(job, stage.cut);
    const bool matched = stage.sums && before.count == parts;
    if (!matched && before.count > 1 && parts > 1) before = {Join(std::array{before}), 1};
    const Tasks tasks{static_cast<TaskId>(graph.size()), parts};
    for (std::int64_t part = 0; part < parts; ++part) {
      const TaskId task = graph.Add(stage.function, context, TaskIndex::Encode(job, part));
      AddEdges(matched ? Tasks{before[part], 1} : before, task);
      if (stage.sums && previous >= 0) graph.AddEdge(same_ranges ? sums[sum][part] : all_sums, task);
    }
    job_tasks_ += parts;
    if (stage.swept) swept_.push_back(tasks);
    if (stage.sums) {
      if (previous < 0) sums.push_back(tasks);
      sums[sum++] = tasks;
    } else {
      before = tasks;
    }
  }
  const TaskId end = graph.Add(EndJob, this, job);
  for (const Tasks& tasks : sums) AddEdges(tasks, end);
  AddEdges(before, end);
  return end;
}

TaskId Pass::AddSweep(void* context, TaskFunction function, std::int64_t count, TaskId after) {
  if (count == 0) return after;
  const Tasks tasks{static_cast<TaskId>(graph.size()), count};
  for (std::int64_t i = 0; i < count; ++i) {
    const TaskId task = graph.Add(function, context, i);
    if (after >= 0) graph.AddEdge(after, task);
  }
  return Join(std::array{tasks});
}

TaskId Pass::AddJobs(void* context, std::span<const Stage> stages, TaskId before) {
  const bool pack = lora.any(), write = lora.wants_any();
  const auto num_shards = static_cast<std::int64_t>(shards.size());
  std::vector<TaskId> job_ends(jobs.size()), slot_ends(group_slots_, -1), packed(shards.size(), -1);
  TaskRanges ends, all;
  swept_.reserve(jobs.size());
  ends.reserve(jobs.size());
  all.reserve(groups.size());
  std::vector<TaskRanges> sums(shards.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const JobGroup& group = groups[g];
    if (group.jobs == 0 && !write) continue;
    const auto g_index = static_cast<std::int64_t>(g);
    TaskId& slot_free = slot_ends[g_index % group_slots_];
    for (std::int64_t shard = 0; pack && group.jobs > 0 && shard < num_shards; ++shard) {
      packed[shard] = Join(std::array{AddLoraTasks(PackTask, g_index, shard, slot_free)});
    }
    ends.clear();
    for (std::int64_t job = group.first_job; job < group.first_job + group.jobs; ++job) {
      // In turn: the last jobs are cut finer, and must be the last to begin.
      const std::int64_t shard = jobs[job].shard, turn = job_slots_ * num_shards;
      const TaskId begin = AddOfShard(BeginJob, job, shard, TaskGraph::Start::kInTurn);
      if (packed[shard] >= 0) graph.AddEdge(packed[shard], begin);
      if (before >= 0) graph.AddEdge(before, begin);
      if (job >= turn) graph.AddEdge(job_ends[job - turn], begin);
      job_ends[job] = AddJob(context, job, stages, begin, sums[shard]);
      ends.push_back({job_ends[job], 1});
    }
    const TaskId computed = ends.empty() ? -1 : Join(ends);
    if (computed >= 0) all.push_back({computed, 1});
    if (!write) {
      slot_free = computed;
      continue;
    }
    // What comes behind the jobs does not wait for these.
    ends.clear();
    for (std::int64_t shard = 0; shard < num_shards; ++shard) {
      ends.push_back(AddLoraTasks(WriteTask, g_index, shard, computed));
    }
    if (g_index + group_slots_ < static_cast<std::int64_t>(groups.size())) slot_free = Join(ends);
  }
  profiling::NoteJobs(static_cast<std::int64_t>(jobs.size()), job_slots_ * num_shards, job_tasks_);
  return Join(all);
}

}  // namespace moesaic::moe
