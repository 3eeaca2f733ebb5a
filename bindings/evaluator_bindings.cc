#include "bindings/evaluator_bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bench_bindings.h"
#include "cpu_kernels/gemm/tiles.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tile_evaluator.h"
#include "cpu_kernels/tile_evaluator/gemm_model.h"
#include "moe/lora_in_place.h"
#include "profiling/bench/grouped_gemm.h"
#include "threadpool/pool.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

template <typename T>
T Field(const py::dict& dict, const char* name) {
  if (!dict.contains(name)) throw std::invalid_argument(std::string("figure ") + name + " is missing");
  try {
    return dict[name].cast<T>();
  } catch (const py::cast_error&) {
    throw std::invalid_argument(std::string("figure ") + name + " has the wrong type");
  }
}

MachineModel MachineOf(const py::dict& figures) {
  MachineModel machine;
  machine.threads = Field<int>(figures, "threads");
  machine.compute_gflops = Field<double>(figures, "compute_gflops");
  machine.gbps = Field<std::array<double, kMemoryLevels>>(figures, "gbps");
  machine.latency_ns = Field<std::array<double, kMemoryLevels>>(figures, "latency_ns");
  machine.cache_bytes = Field<std::array<std::int64_t, 3>>(figures, "cache_bytes");
  machine.l3_bytes = Field<std::int64_t>(figures, "l3_bytes");
  machine.job_us = Field<double>(figures, "job_us");
  machine.task_us = Field<double>(figures, "task_us");
  machine.claim_ns = Field<double>(figures, "claim_ns");
  machine.fetch_ns = Field<double>(figures, "fetch_ns");
  KernelFigures& kernel = machine.kernel;
  kernel.left_panels = Field<std::int64_t>(figures, "left_panels");
  kernel.right_panels = Field<std::int64_t>(figures, "right_panels");
  kernel.step_ns = Field<std::array<std::array<double, 3>, 2>>(figures, "step_ns");
  const auto few = Field<std::array<std::vector<double>, 2>>(figures, "few_tile_ns");
  kernel.most_few_rows = Field<std::int64_t>(figures, "most_few_rows");
  kernel.most_stored_rows = Field<std::int64_t>(figures, "most_stored_rows");
  kernel.measured_rows = static_cast<std::int64_t>(few[0].size());
  if (few[0].size() != few[1].size() || few[0].size() > kMostMeasuredRows) {
    throw std::invalid_argument("figure few_tile_ns has " + std::to_string(few[0].size()) + " and " +
                                std::to_string(few[1].size()) + " entries, expected equal numbers, at most " +
                                std::to_string(kMostMeasuredRows));
  }
  for (std::size_t form = 0; form < few.size(); ++form) {
    std::copy(few[form].begin(), few[form].end(), kernel.few_tile_ns[form].begin());
  }
  machine.direct_factor = Field<double>(figures, "direct_factor");
  machine.unpack_factor = Field<double>(figures, "unpack_factor");
  kernel.cell_ns = Field<double>(figures, "cell_ns");
  kernel.again_ns = Field<double>(figures, "again_ns");
  kernel.call_ns = Field<double>(figures, "call_ns");
  kernel.unpack_tile_ns = Field<double>(figures, "unpack_tile_ns");
  kernel.unpack_overlaps = Field<bool>(figures, "unpack_overlaps");
  kernel.overlap = Field<double>(figures, "overlap");
  kernel.unpack_overlap = Field<double>(figures, "unpack_overlap");
  kernel.few_overlap = Field<double>(figures, "few_overlap");
  kernel.pack_gbps = Field<double>(figures, "pack_gbps");
  for (const auto& [name, by_threads] : {std::pair("uneven", &machine.uneven),
                                         {"direct_gbps", &kernel.direct_gbps},
                                         {"unpack_gbps", &kernel.unpack_gbps},
                                         {"few_direct_gbps", &kernel.few_direct_gbps},
                                         {"few_unpack_gbps", &kernel.few_unpack_gbps}}) {
    *by_threads = Field<std::vector<double>>(figures, name);
    if (by_threads->size() != static_cast<std::size_t>(machine.threads)) {
      throw std::invalid_argument(std::string("figure ") + name + " has " + std::to_string(by_threads->size()) +
                                  " entries, expected one for each of " + std::to_string(machine.threads) + " threads");
    }
  }
  if (kernel.left_panels < 1 || kernel.left_panels > 2 || kernel.right_panels < 2 || kernel.right_panels > 3) {
    throw std::invalid_argument("figures left_panels, right_panels are " + std::to_string(kernel.left_panels) + ", " +
                                std::to_string(kernel.right_panels) + ", expected 1 or 2, and 2 or 3");
  }
  return machine;
}

GemmForm FormNamed(const std::string& form) {
  if (form == "direct") return GemmForm::kDirect;
  if (form == "unpack") return GemmForm::kUnpack;
  if (form == "gradient") return GemmForm::kGradient;
  throw std::invalid_argument("form is \"" + form + "\"; expected \"direct\", \"unpack\" or \"gradient\"");
}

CandidateSpace SpaceNamed(const std::string& space) {
  if (space == "pruned") return CandidateSpace::kPruned;
  if (space == "published") return CandidateSpace::kPublished;
  throw std::invalid_argument("space is \"" + space + "\"; expected \"pruned\" or \"published\"");
}

LoopOrder OrderNamed(const std::string& order) {
  if (order == "rows") return LoopOrder::kRows;
  if (order == "columns") return LoopOrder::kColumns;
  if (order == "depth") return LoopOrder::kDepth;
  throw std::invalid_argument("order is \"" + order + "\"; expected \"rows\", \"columns\" or \"depth\"");
}

const char* NameOf(LoopOrder order) {
  return order == LoopOrder::kRows ? "rows" : order == LoopOrder::kColumns ? "columns" : "depth";
}

/// (rows of each group, k, n, bytes of an input value, of an output value, of a weight, form, packed, cached)
using ProblemTuple = std::tuple<std::vector<std::int64_t>, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double,
                                std::string, bool, bool>;

GemmProblem ProblemOf(const ProblemTuple& tuple) {
  GemmProblem problem;
  std::map<std::int64_t, std::int64_t, std::greater<>> counts;  // long groups first, as a good schedule has them
  for (const std::int64_t rows : std::get<0>(tuple)) {
    if (rows > 0) ++counts[rows];
  }
  for (const auto& [rows, groups] : counts) problem.groups.push_back({rows, groups});
  problem.k = std::get<1>(tuple);
  problem.n = std::get<2>(tuple);
  problem.input_bytes = std::get<3>(tuple);
  problem.output_bytes = std::get<4>(tuple);
  problem.weight_bytes = std::get<5>(tuple);
  problem.form = FormNamed(std::get<6>(tuple));
  problem.packed = std::get<7>(tuple);
  problem.cached = std::get<8>(tuple);
  if (problem.k < 1 || problem.n < 1 || problem.groups.empty()) {
    throw std::invalid_argument("shape has k " + std::to_string(problem.k) + ", n " + std::to_string(problem.n) +
                                ", expected positive sizes and a group with rows");
  }
  return problem;
}

/// (task_rows, task_columns, call_rows, call_columns, call_depth, order)
using ConfigurationTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::string>;

ConfigurationTuple TupleOf(const GemmConfiguration& c) {
  return {c.task_rows, c.task_columns, c.call_rows, c.call_columns, c.call_depth, NameOf(c.order)};
}

GemmConfiguration ConfigurationOf(const ConfigurationTuple& tuple) {
  const auto& [task_rows, task_columns, call_rows, call_columns, call_depth, order] = tuple;
  return {task_rows, task_columns, call_rows, call_columns, call_depth, OrderNamed(order)};
}

/// (configuration, milliseconds, parts, bound, candidates)
using AnswerTuple = std::tuple<ConfigurationTuple, double, std::array<double, kGemmParts>, std::int64_t, std::int64_t>;

AnswerTuple TupleOf(const GemmAnswer& answer) {
  return {TupleOf(answer.configuration), answer.estimate.milliseconds, answer.estimate.parts,
          static_cast<std::int64_t>(answer.estimate.bound), answer.candidates};
}

/// The model of one machine at one number of threads.
class Evaluator {
 public:
  explicit Evaluator(const py::dict& figures) : machine_(MachineOf(figures)) {}

  std::vector<AnswerTuple> Choose(const std::vector<ProblemTuple>& shapes, const std::string& space) const {
    std::vector<GemmProblem> problems;
    problems.reserve(shapes.size());
    for (const ProblemTuple& shape : shapes) problems.push_back(ProblemOf(shape));
    const CandidateSpace candidates = SpaceNamed(space);
    std::vector<GemmAnswer> answers(problems.size());
    {
      const py::gil_scoped_release unlocked;
      const auto choose = [&](std::int64_t i, int) {
        const auto at = static_cast<std::size_t>(i);
        answers[at] = ChooseGemm(problems[at], machine_, candidates);
      };
      if (problems.size() == 1) {
        choose(0, 0);
      } else {
        threadpool::Pool::Default().ParallelFor(static_cast<std::int64_t>(problems.size()), choose);
      }
    }
    std::vector<AnswerTuple> tuples;
    tuples.reserve(answers.size());
    for (const GemmAnswer& answer : answers) tuples.push_back(TupleOf(answer));
    return tuples;
  }

  std::vector<AnswerTuple> Rank(const ProblemTuple& shape, const std::string& space, std::size_t count) const {
    std::vector<AnswerTuple> tuples;
    for (const GemmAnswer& answer : RankGemm(ProblemOf(shape), machine_, SpaceNamed(space), count)) {
      tuples.push_back(TupleOf(answer));
    }
    return tuples;
  }

  AnswerTuple Estimate(const ProblemTuple& shape, const ConfigurationTuple& configuration) const {
    const GemmProblem problem = ProblemOf(shape);
    GemmAnswer answer;
    answer.configuration = ConfigurationOf(configuration);
    if (!Legal(problem, answer.configuration)) throw std::invalid_argument("configuration is not one that the kernels can run");
    answer.estimate = EstimateGemm(problem, answer.configuration, machine_);
    answer.candidates = 1;
    return TupleOf(answer);
  }

 private:
  MachineModel machine_;
};

/// A grouped GEMM on the process's pool.
class GroupedGemm {
 public:
  GroupedGemm(const std::string& isa, const ProblemTuple& shape, std::shared_ptr<bench::FarWeights> far)
      : gemm_(RunnableTier(isa), ProblemOf(shape), threadpool::Pool::Default(), std::move(far)) {}

  std::vector<std::vector<double>> Measure(const std::vector<ConfigurationTuple>& tuples, int count) {
    std::vector<GemmConfiguration> configurations;
    configurations.reserve(tuples.size());
    for (const ConfigurationTuple& tuple : tuples) configurations.push_back(ConfigurationOf(tuple));
    return gemm_.Measure(configurations, count);
  }

  std::vector<std::pair<double, double>> MeasurePasses(const ConfigurationTuple& tuple, int count) {
    std::vector<std::pair<double, double>> passes;
    for (const auto& [packing_ms, uneven] : gemm_.MeasurePasses(ConfigurationOf(tuple), count)) {
      passes.emplace_back(packing_ms, uneven);
    }
    return passes;
  }

  std::uint64_t Digest() const { return gemm_.Digest(); }

 private:
  bench::GroupedGemm gemm_;
};

}  // namespace

void RegisterEvaluator(py::module_& module) {
  py::list parts;
  for (std::size_t i = 0; i < kGemmParts; ++i) parts.append(std::string(GemmPartName(static_cast<GemmPart>(i))));
  module.attr("gemm_parts") = py::tuple(parts);
  module.attr("gemm_model_version") = kGemmModelVersion;
  module.attr("most_measured_rows") = kMostMeasuredRows;
  module.def("chunk_rows", &ChunkRows, py::arg("rows"), py::arg("hidden"), py::arg("intermediate"));
  module.def(
      "choose_blocking",
      [](std::int64_t jobs, std::int64_t hidden, std::int64_t intermediate, int threads, std::int64_t slots) {
        const Blocking b = ChooseBlocking({jobs, 1, hidden, intermediate, threads, slots});
        return std::tuple(b.intermediate_units_per_task, b.hidden_columns_per_task, b.tail_jobs, b.tail_parts);
      },
      py::arg("jobs"), py::arg("hidden"), py::arg("intermediate"), py::arg("threads"), py::arg("slots"));
  module.def("units_of_part", &UnitsOfPart, py::arg("units"), py::arg("parts"));
  module.def("columns_of_part", &ColumnsOfPart, py::arg("columns"), py::arg("parts"));
  module.def("parts_of_long_job", &PartsOfLongJob, py::arg("rows"), py::arg("all_rows"), py::arg("threads"));
  module.def("tokens_per_merge", &TokensPerMerge, py::arg("tokens"), py::arg("threads"));
  module.def("are_stored_rows", &AreStoredRows, py::arg("rows"), py::arg("most_few"), py::arg("most_stored"));
  module.def("unpack_slice", &UnpackSlice, py::arg("matrix_unit"), py::arg("tiles"), py::arg("panels"), py::arg("l2_bytes"));
  module.def(
      "adapters_in_place",
      [](const std::vector<std::int64_t>& rows, std::int64_t input_rank, std::int64_t down_rank) {
        return moe::LoraInPlace::IsFaster(rows, input_rank, down_rank);
      },
      py::arg("rows"), py::arg("input_rank"), py::arg("down_rank"));
  module.def("sweeps_in_place", &moe::LoraInPlace::SweepsOf, py::arg("experts"), py::arg("features"), py::arg("ranks"));
  py::class_<Evaluator>(module, "TileEvaluator", "The GEMM model of one machine; cpu_kernels/tile_evaluator/gemm_model.h.")
      .def(py::init<const py::dict&>(), py::arg("figures"))
      .def("choose", &Evaluator::Choose, py::arg("shapes"), py::arg("space"))
      .def("rank", &Evaluator::Rank, py::arg("shape"), py::arg("space"), py::arg("count"))
      .def("estimate", &Evaluator::Estimate, py::arg("shape"), py::arg("configuration"));
  py::class_<bench::FarWeights, std::shared_ptr<bench::FarWeights>>(
      module, "FarWeights", "Weights that many GEMMs read on and on; profiling/bench/grouped_gemm.h.")
      .def(py::init([](std::int64_t bytes) { return std::make_shared<bench::FarWeights>(threadpool::Pool::Default(), bytes); }),
           py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
  py::class_<GroupedGemm>(module, "GroupedGemm", "A grouped GEMM on the engine's threads; profiling/bench/grouped_gemm.h.")
      .def(py::init<const std::string&, const ProblemTuple&, std::shared_ptr<bench::FarWeights>>(), py::arg("isa"),
           py::arg("shape"), py::arg("far") = nullptr, py::call_guard<py::gil_scoped_release>())
      .def("measure", &GroupedGemm::Measure, py::arg("configurations"), py::arg("count"),
           py::call_guard<py::gil_scoped_release>())
      .def("measure_passes", &GroupedGemm::MeasurePasses, py::arg("configuration"), py::arg("count"),
           py::call_guard<py::gil_scoped_release>())
      .def("digest", &GroupedGemm::Digest);
}

}  // namespace moesaic::bindings
