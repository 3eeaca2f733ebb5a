#include "bindings/bench_bindings.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings/tensor.h"
#include "bindings/thread_source.h"
#include "cpu_kernels/gemm/pack.h"
#include "cpu_kernels/kernels.h"
#include "cpu_kernels/tensor_text.h"
#include "moe/workspace.h"
#include "profiling/bench/ceiling.h"
#include "profiling/bench/gemm_probe.h"
#include "profiling/bench/machine_probe.h"
#include "profiling/bench/pool_probe.h"
#include "threadpool/node_memory.h"
#include "threadpool/pool.h"
#include "threadpool/topology.h"

namespace py = pybind11;

namespace moesaic::bindings {

const KernelTier& RunnableTier(const std::string& isa) {
  for (const KernelTier* tier : KernelTiers()) {
    if (tier->name == isa && tier->runs_here()) return *tier;
  }
  throw std::invalid_argument("isa is \"" + isa + "\", expected a tier that runs here");
}

namespace {

// The probes run either on the calling thread alone or on all threads of the process's pool, as the engine does.
threadpool::Pool* TeamOf(int threads) {
  if (threads == 1) return nullptr;
  threadpool::Pool& pool = threadpool::Pool::Default();
  if (threads != pool.num_threads()) {
    throw std::invalid_argument("threads is " + std::to_string(threads) + ", expected 1 or the pool's " +
                                std::to_string(pool.num_threads()));
  }
  return &pool;
}

py::list ComputeProbeRows() {
  py::list rows;
  for (const bench::ComputeProbe& probe : bench::ComputeProbes()) {
    py::dict row;
    row["isa"] = probe.isa;
    row["instruction"] = probe.instruction;
    row["available"] = probe.available;
    rows.append(row);
  }
  return rows;
}

py::dict CacheToDict(const threadpool::Topology::Cache& cache) {
  py::dict row;
  row["bytes"] = cache.bytes;
  row["pus"] = cache.pus;
  return row;
}

py::dict TopologyToDict() {
  const threadpool::Topology& topology = threadpool::Topology::Host();
  py::list nodes;
  for (const threadpool::Topology::NumaNode& node : topology.nodes) {
    py::dict row;
    row["os_index"] = node.os_index;
    row["package"] = node.package;
    row["memory_bytes"] = node.memory_bytes;
    row["pus"] = node.pus;
    nodes.append(row);
  }
  py::dict result;
  result["is_host"] = topology.is_host;
  result["packages"] = topology.packages;
  result["cores"] = topology.cores;
  result["pus"] = topology.pus.size();
  result["nodes"] = nodes;
  result["l1d"] = CacheToDict(topology.l1d);
  result["l2"] = CacheToDict(topology.l2);
  result["l3"] = CacheToDict(topology.l3);
  result["affinity"] = topology.affinity;
  result["cpu_quota"] = topology.cpu_quota;
  result["usable_cores"] = topology.UsableCores();
  return result;
}

/// Where the weights of a layer would be packed now: a row for each node, with what a page that is meant for it does.
py::list NumaRows() {
  const threadpool::Topology& topology = threadpool::Pool::Default().topology();
  py::list rows;
  for (const threadpool::Topology::ComputeNode& compute : topology.ComputeNodes()) {
    const int os_index = topology.nodes.empty() ? 0 : topology.nodes[static_cast<std::size_t>(compute.node)].os_index;
    py::dict row;
    row["os_index"] = os_index;
    row["cores"] = compute.cores;
    row["bind_error"] = py::none();
    row["lies_on"] = py::none();
    if (topology.is_host) {
      const std::string error = threadpool::WhyNotBound(os_index);
      if (!error.empty()) row["bind_error"] = error;
      const threadpool::NodeMemory page(1, os_index);
      *static_cast<volatile char*>(page.data()) = 1;
      if (const int node = threadpool::NodeOfPage(page.data()); node >= 0) row["lies_on"] = node;
    }
    rows.append(row);
  }
  return rows;
}

void RegisterPoolProbe(py::module_& module) {
  using WithoutLock = py::call_guard<py::gil_scoped_release>;
  using bench::PoolProbe;
  py::class_<PoolProbe>(module, "PoolProbe", "A pool of its own and what it costs; profiling/bench/pool_probe.h.")
      .def(py::init([](int threads, const std::string& source) {
             return std::make_unique<PoolProbe>(threads, SourceNamed(source));
           }),
           py::arg("threads"), py::arg("source"))
      .def("empty_jobs", &PoolProbe::EmptyJobs, py::arg("count"), WithoutLock())
      .def("wakes", &PoolProbe::Wakes, py::arg("count"), py::arg("pause_seconds"), WithoutLock())
      .def("edges", &PoolProbe::Edges, py::arg("count"), py::arg("length"), WithoutLock())
      .def("small_tasks", &PoolProbe::SmallTasks, py::arg("count"), py::arg("tasks"), py::arg("task_us"), WithoutLock())
      .def("steals", &PoolProbe::Steals, py::arg("count"), WithoutLock());
  module.def("empty_openmp_regions", &bench::EmptyOpenMpRegions, py::arg("count"), py::arg("threads"), WithoutLock());
}

MatrixView MatrixOf(const py::object& tensor, const char* name, DType dtype) {
  const TensorView view = ViewOf(tensor, {name}, NameOf(dtype));
  if (view.rank != 2 || view.dtype != dtype) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(view.rank) + " dimensions of " +
                                NameOf(view.dtype) + "; expected two of " + NameOf(dtype));
  }
  return {view.data, view.dtype, view.shape[0], view.shape[1], view.stride[0], view.stride[1]};
}

bench::GemmProbe::Form FormNamed(const std::string& form) {
  using Form = bench::GemmProbe::Form;
  if (form == "direct") return Form::kDirect;
  if (form == "unpack") return Form::kUnpack;
  if (form == "gradient") return Form::kGradient;
  throw std::invalid_argument("form is \"" + form + "\"; expected \"direct\", \"unpack\" or \"gradient\"");
}

std::unique_ptr<bench::GemmProbe> MakeGemmProbe(std::size_t tier, const std::string& form, const py::object& activations,
                                                const py::object& weights, int copies) {
  if (tier >= KernelTiers().size() || !KernelTiers()[tier]->runs_here()) {
    throw std::invalid_argument("tier is " + std::to_string(tier) + ", expected one of kernel_tiers() that runs here");
  }
  return std::make_unique<bench::GemmProbe>(*KernelTiers()[tier], FormNamed(form),
                                            MatrixOf(activations, "activations", DType::kBFloat16),
                                            MatrixOf(weights, "weights", DType::kBFloat16), copies);
}

/// A pool of `threads` own threads, on which the machine is measured.
class MachineProbe {
 public:
  MachineProbe(int threads, std::int64_t far_bytes)
      : pool_(threads, threadpool::ThreadSource::kOwn), memory_(&pool_, far_bytes), stream_(memory_, &pool_) {}
  double Compute(const std::string& isa, double seconds) {
    return alone() ? bench::MeasureBestCompute(isa, &pool_, seconds) : bench::MeasureCompute(isa, &pool_, seconds);
  }
  double Read(std::int64_t bytes, double seconds) { return bench::MeasureBlockRead(&pool_, bytes, seconds); }
  double Memory(double seconds) { return alone() ? memory_.MeasureBest(seconds) : memory_.Measure(seconds); }
  std::pair<double, double> Stream(const std::string& isa, bool direct, std::int64_t rows, double seconds) {
    const bench::BestAndMean rates = stream_.Measure(RunnableTier(isa), direct, rows, seconds);
    return {rates.best, rates.mean};
  }
  double Fetch(const std::string& isa) { return bench::MeasureFetch(RunnableTier(isa), pool_); }
  std::unique_ptr<bench::KernelProbe> Kernels(const std::string& isa) {
    return std::make_unique<bench::KernelProbe>(RunnableTier(isa), &pool_);
  }
  std::pair<double, double> Dispatch() {
    const bench::PoolFigures figures = bench::MeasurePool(pool_);
    return {figures.job_us, figures.task_us};
  }

 private:
  bool alone() const { return pool_.num_threads() == 1; }

  threadpool::Pool pool_;
  bench::ReadProbe memory_;
  bench::StreamProbe stream_;
};

py::dict KernelFiguresOf(const bench::KernelProbe& probe, double product_ns) {
  const KernelFigures figures = probe.Figures(product_ns);
  py::dict row;
  row["left_panels"] = figures.left_panels;
  row["right_panels"] = figures.right_panels;
  row["step_ns"] = figures.step_ns;
  std::array<std::vector<double>, 2> few;
  for (std::size_t form = 0; form < few.size(); ++form) {
    few[form].assign(figures.few_tile_ns[form].begin(), figures.few_tile_ns[form].begin() + figures.measured_rows);
  }
  row["most_few_rows"] = figures.most_few_rows;
  row["most_stored_rows"] = figures.most_stored_rows;
  row["few_tile_ns"] = few;
  row["cell_ns"] = figures.cell_ns;
  row["again_ns"] = figures.again_ns;
  row["call_ns"] = figures.call_ns;
  row["unpack_tile_ns"] = figures.unpack_tile_ns;
  row["unpack_overlaps"] = figures.unpack_overlaps;
  row["pack_gbps"] = figures.pack_gbps;
  return row;
}

void RegisterMachineProbe(py::module_& module) {
  using WithoutLock = py::call_guard<py::gil_scoped_release>;
  py::class_<MachineProbe>(module, "MachineProbe", "Probes on a pool of so many own threads; profiling/bench/machine_probe.h.")
      .def(py::init<int, std::int64_t>(), py::arg("threads"), py::arg("far_bytes"), WithoutLock())
      .def("compute", &MachineProbe::Compute, py::arg("isa"), py::arg("seconds"), WithoutLock())
      .def("read", &MachineProbe::Read, py::arg("bytes"), py::arg("seconds"), WithoutLock())
      .def("memory", &MachineProbe::Memory, py::arg("seconds"), WithoutLock())
      .def("stream", &MachineProbe::Stream, py::arg("isa"), py::arg("direct"), py::arg("rows"), py::arg("seconds"),
           WithoutLock())
      .def("dispatch", &MachineProbe::Dispatch, WithoutLock())
      .def("fetch", &MachineProbe::Fetch, py::arg("isa"), WithoutLock())
      .def("kernels", &MachineProbe::Kernels, py::arg("isa"), py::keep_alive<0, 1>(),
           "A KernelProbe on all threads at the same time.");
  py::class_<bench::LatencyProbe>(module, "LatencyProbe", "Loads that depend on each other; profiling/bench/machine_probe.h.")
      .def(py::init<std::int64_t>(), py::arg("bytes"), WithoutLock())
      .def("measure", &bench::LatencyProbe::Measure, py::arg("seconds"), WithoutLock());
  py::class_<bench::KernelProbe>(module, "KernelProbe", "A tier's kernels in L1; profiling/bench/machine_probe.h.")
      .def(py::init([](const std::string& isa) { return std::make_unique<bench::KernelProbe>(RunnableTier(isa)); }),
           py::arg("isa"))
      .def("turn", &bench::KernelProbe::Turn, WithoutLock())
      .def("figures", &KernelFiguresOf, py::arg("product_ns"));
  module.def(
      "measure_cell", [](const std::string& isa) { return bench::MeasureCell(RunnableTier(isa)); }, py::arg("isa"),
      WithoutLock());
}

void RegisterGemmProbe(py::module_& module) {
  module.def(
      "kernel_tiers",
      [] {
        py::list tiers;
        for (const KernelTier* tier : KernelTiers()) tiers.append(py::make_tuple(tier->name, tier->runs_here()));
        return tiers;
      },
      "(name, runs here) of every tier of kernels, best first.");
  py::class_<bench::GemmProbe>(module, "GemmProbe", "One call of a GEMM kernel; profiling/bench/gemm_probe.h.")
      .def(py::init(&MakeGemmProbe), py::arg("tier"), py::arg("form"), py::arg("activations"), py::arg("weights"),
           py::arg("copies") = 1)
      .def("measure", &bench::GemmProbe::Measure, py::arg("count"), py::call_guard<py::gil_scoped_release>())
      .def(
          "result",
          [](const bench::GemmProbe& self, const py::object& out) { self.Result(MatrixOf(out, "out", DType::kFloat32)); },
          py::arg("out"));
}

}  // namespace

void RegisterBench(py::module_& module) {
  using WithoutLock = py::call_guard<py::gil_scoped_release>;
  module.def("topology", &TopologyToDict, "The machine as threadpool/topology.h describes it.");
  module.def("numa", &NumaRows, "The NUMA nodes among which weights are divided: os_index, cores, bind_error, lies_on.");
  module.def("openmp_threads_are_bound", &threadpool::OpenMpThreadsAreBound, "Whether OpenMP keeps its threads on places.");
  module.def("last_level_cache_bytes", &bench::LastLevelCacheBytes, "Bytes of all last-level caches together; 0: unknown.");
  module.def("compute_probes", &ComputeProbeRows, "Every compute probe, best first: isa, instruction, available.");
  module.def(
      "measure_compute",
      [](const std::string& isa, int threads, double seconds) { return bench::MeasureCompute(isa, TeamOf(threads), seconds); },
      py::arg("isa"), py::arg("threads"), py::arg("seconds"), WithoutLock(),
      "GFLOP/s of multiply-adds on registers, on 1 thread or on all of the pool. ValueError for anything else.");
  py::class_<bench::ReadProbe>(module, "ReadProbe", "Streaming reads of a buffer larger than the caches.")
      .def(py::init([](int threads, std::int64_t bytes) { return std::make_unique<bench::ReadProbe>(TeamOf(threads), bytes); }),
           py::arg("threads"), py::arg("bytes") = 0, WithoutLock())
      .def("measure", &bench::ReadProbe::Measure, py::arg("seconds"), WithoutLock(), "GB/s.")
      .def_property_readonly("bytes", &bench::ReadProbe::bytes)
      .def_property_readonly("method", &bench::ReadProbe::method);
  module.def("scratch_bytes", &moe::StoredWorkspaceBytes, "Scratch memory that calls of the layer left behind for the next.");
  RegisterPoolProbe(module);
  RegisterGemmProbe(module);
  RegisterMachineProbe(module);
}

}  // namespace moesaic::bindings
