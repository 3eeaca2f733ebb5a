#include "bindings/bench_bindings.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "profiling/bench/ceiling.h"
#include "threadpool/pool.h"
#include "threadpool/topology.h"

namespace py = pybind11;

namespace moesaic::bindings {
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

}  // namespace

void RegisterBench(py::module_& module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("topology", &TopologyToDict, "The machine as threadpool/topology.h describes it.");
  module.def("last_level_cache_bytes", &bench::LastLevelCacheBytes, "Bytes of all last-level caches together; 0: unknown.");
  module.def("compute_probes", &ComputeProbeRows, "Every compute probe, best first: isa, instruction, available.");
  module.def(
      "measure_compute",
      [](const std::string& isa, int threads, double seconds) { return bench::MeasureCompute(isa, TeamOf(threads), seconds); },
      py::arg("isa"), py::arg("threads"), py::arg("seconds"), Unlocked(),
      "GFLOP/s of multiply-adds on registers, on 1 thread or on all of the pool. ValueError for anything else.");
  py::class_<bench::ReadProbe>(module, "ReadProbe", "Streaming reads of a buffer larger than the caches.")
      .def(py::init([](int threads, std::int64_t bytes) { return std::make_unique<bench::ReadProbe>(TeamOf(threads), bytes); }),
           py::arg("threads"), py::arg("bytes") = 0, Unlocked())
      .def("measure", &bench::ReadProbe::Measure, py::arg("seconds"), Unlocked(), "GB/s.")
      .def_property_readonly("bytes", &bench::ReadProbe::bytes)
      .def_property_readonly("method", &bench::ReadProbe::method);
}

}  // namespace moesaic::bindings
