// Where every blocking parameter comes from.
//
// Two kinds of answers, kept apart. ChunkRows is part of the order of summation: a function of the shape and of an expert's
// rows alone. Blocking is everything that may be tuned: it changes which core computes what and in which order it walks memory,
// never a bit of a result. tile_evaluator/ has the model of a single GEMM; what is here stands on measurements of whole layers.
#pragma once

#include <cstdint>
#include <limits>

namespace moesaic {

/// Bytes of one core's L2 cache on this host, from the C library; 1 MiB where it does not know.
std::int64_t HostL2Bytes();

/// Most rows of a chunk, whatever the shape.
inline constexpr std::int64_t kMaxChunkRows = 384;

/// Of an expert with `rows` rows those that are computed together: a multiple of 32 in [32, kMaxChunkRows], all chunks equal
/// but for a shorter last one. LoRA gradients add up chunk after chunk. The usual chunk has as many as keep its activations in
/// about 6.5 MiB, so that every thread can have one in flight; but 192, below which the weights would be read from memory more
/// often than arithmetic can hide, as long as those take at most 33 MiB. Half as many again are still one chunk, for two would
/// read the weights twice. (16 AMX threads, 128 rows an expert on average, H 4,096, I 14,336: chunks of at most 128 rows, in
/// which half of the experts had two, took 1.15 times as long; with 256 rows 1.3 to 1.6 times. docs/experiments)
std::int64_t ChunkRows(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate);

/// A call of the layer, as far as its blocking depends on it.
struct BlockingQuery {
  std::int64_t jobs = 0;          ///< (expert, chunk) pairs with rows
  std::int64_t rows = 0;          ///< most rows of a job
  std::int64_t hidden = 0;        ///< H
  std::int64_t intermediate = 0;  ///< I
  int threads = 1;
  std::int64_t slots = std::numeric_limits<std::int64_t>::max();  ///< jobs that fit the scratch memory at a time
  bool matrix_unit = false;  ///< products of tiles (KernelTier::unpack_overlaps), whose factors must come from near caches
  std::int64_t tokens = 0;   ///< T
};

struct Blocking {
  std::int64_t intermediate_units_per_task;  ///< units of kIntermediateUnit rows of I that one task computes, >= 1
  std::int64_t hidden_columns_per_task;      ///< tile columns (32) of H that one task computes, >= 1
  std::int64_t tokens_per_merge;             ///< tokens that one merge task adds up, >= 1
  std::int64_t tail_jobs = 0;                ///< the last jobs, which are cut finer so that no core idles while others finish
  std::int64_t tail_parts = 1;               ///< how many times finer
  bool cuts_long_jobs = true;                ///< PartsOfLongJob()
  std::int64_t gradient_columns = 4;         ///< tile columns of X or dO whose row pairs are in cache at a time, 1 to
                                             ///< kMostGradientColumns
  std::int64_t blocks_per_step = 1;  ///< blocks of 32 rows of I whose products are computed before their activations, >= 1
  std::int64_t unpack_depth = 0;  ///< right tiles (32) of the unpack form's contraction that are taken at a time, a multiple of
                                  ///< 8; 0: all
};

/// Parts into which each of `pieces` of work is cut for `threads` threads: so many tasks a thread that the last ones do not
/// leave cores idle, three in a single product. One where the pieces are so many already.
std::int64_t PartsForThreads(std::int64_t pieces, int threads, std::int64_t tasks_of_thread = 3);

/// Jobs a thread from which on they are not cut but for the last ones, and tasks a thread in each stage of fewer, which waits
/// for the last task of the one before; less than that where pieces are too large. (20 to 32 experts on 16 threads, which are
/// not equally fast: with three tasks a thread forward takes 1.07 to 1.16 times as long. docs/experiments)
inline constexpr std::int64_t kWholeJobsOfThread = 3, kLayerTasksOfThread = 12;

/// Parts into which the stages of a job with so many of all rows are cut at least, so that each is at most half of what a
/// thread has of them: without, the others would wait for the thread of a hot expert's job.
std::int64_t PartsOfLongJob(std::int64_t rows, std::int64_t all_rows, int threads);

/// Parameters of adapters, or of their gradients, that make a task, of so many that a call packs or writes: three tasks for
/// each thread, of 64 K at most, some 25 us of one core's share of the memory's bandwidth, and of 16 K at least. (With 64 K
/// always, and what else changed with it, small layers took 1.03 to 1.07 of the time on 16 threads: docs/experiments.)
std::int64_t LoraTaskElements(std::int64_t parameters, int threads);

/// Rows of I in the smallest task, and in one partial sum of the routing weights' gradient.
inline constexpr std::int64_t kIntermediateUnit = 128;

/// Bytes of the sums of a step's blocks, gate and up, at most, where those are several.
inline constexpr std::int64_t kMostStepBytes = std::int64_t{512} << 10;

/// Blocking::blocks_per_step for jobs of so many rows: as many as have 64 KB of sums, and 4 at most. With slices of the
/// contraction 256 KB: a slice of the activations stays in L2 while all blocks pass by. And 512 KB and 8, where the activations
/// are more than a quarter of L2, for each step brings them all once more. (16 AMX threads, H 4,096, 128 rows: with half of
/// both up to a tenth longer. docs/experiments)
std::int64_t StepBlocks(bool matrix_unit, std::int64_t rows, std::int64_t hidden, std::int64_t l2_bytes);

/// Blocking::gradient_columns, and bytes of their row pairs, at most.
inline constexpr std::int64_t kMostGradientColumns = 32, kGradientBytes = std::int64_t{512} << 10;

/// Blocking::gradient_columns for jobs of so many rows: as many as have half of L2. A row's piece of many columns is fetched
/// ahead, one of 256 bytes hardly: with 64 rows and 4 columns packing took three times as long, with 256 rows twice. (Two Zen 5
/// cores, 1,024 rows an expert, an eighth, a quarter, half of L2: 10.7, 8.2, 6.1 ms of a backward.) Beside a matrix unit, where
/// two hardware threads may share L2, an eighth, and 16 columns: more gained nothing on 16 AMX threads.
std::int64_t GradientColumns(bool matrix_unit, std::int64_t rows, std::int64_t l2_bytes);

/// Blocking::unpack_depth for a contraction of so many right tiles with so many panels of activations. A matrix unit takes what
/// stays in L1 as right factors, where those meet more than one cell's rows. On the tiers portable and onednn a slice's
/// activations, 1 KB for a panel and a tile, stay in a quarter of L2 while the weights of a superblock of columns pass by;
/// contractions whose activations stay in half of it are not cut.
std::int64_t UnpackSlice(bool matrix_unit, std::int64_t tiles, std::int64_t panels, std::int64_t l2_bytes);

/// Rows that a task takes of work that memory limits, of which each reads and writes so many bytes: some 256 KB.
std::int64_t RowsPerTask(std::int64_t row_bytes);

/// Blocking::tokens_per_merge for so many tokens: four tasks for each of several threads, of at most 32 tokens.
std::int64_t TokensPerMerge(std::int64_t tokens, int threads);

Blocking ChooseBlocking(const BlockingQuery& query);

/// Of so many units of I, those in a part where there are `parts`, >= 1: rounded down, so that there may be up to twice as many
/// parts. Likewise of so many tile columns of H: a multiple of 8, or all. (Rounded up, 8 experts on 16 threads had two thirds
/// of the tasks that were asked for, and took up to 5% longer: docs/experiments.)
std::int64_t UnitsOfPart(std::int64_t units, std::int64_t parts);
std::int64_t ColumnsOfPart(std::int64_t columns, std::int64_t parts);

/// While it lives, ChooseBlocking returns `blocking`. For tests; not thread safe.
class ScopedBlocking {
 public:
  explicit ScopedBlocking(const Blocking& blocking);
  ~ScopedBlocking();
  ScopedBlocking(const ScopedBlocking&) = delete;
  ScopedBlocking& operator=(const ScopedBlocking&) = delete;
};

}  // namespace moesaic
