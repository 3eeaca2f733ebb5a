#include "threadpool/openmp_region.h"

#include <omp.h>

#include <optional>
#include <vector>

#include "threadpool/affinity.h"

namespace moesaic::threadpool {

bool OpenMpThreadsAreBound() { return omp_get_proc_bind() != omp_proc_bind_false; }

void RunInOpenMpRegion(Executor& executor, const Topology& topology) {
  const bool several_nodes = topology.nodes.size() > 1, keeps_nodes = executor.job().keeps_nodes();
  std::vector<Topology::Pu> pretended;
  if (several_nodes && !topology.is_host) pretended = topology.Places(executor.lanes());
  for (int lane = 0; several_nodes && lane < executor.lanes(); ++lane) executor.SetNode(lane, kAnyNode);
  // Always the same number of threads, however small the job: libgomp ends the threads by which a team shrinks, and starts new
  // ones when it grows again.
#pragma omp parallel num_threads(executor.lanes())
  {
    const int lane = omp_get_thread_num();
    std::optional<StayOnNode> stay;
    if (several_nodes) {
      if (keeps_nodes && topology.is_host) stay.emplace(topology);
      executor.SetNode(lane, pretended.empty() ? topology.NodeOfCallingThread() : pretended[lane].node);
    }
    if (keeps_nodes) {
#pragma omp barrier  // who is where must be known before anybody takes a task for a node without lanes
    }
    executor.RunUntilDone(lane, lane);
  }
}

}  // namespace moesaic::threadpool
