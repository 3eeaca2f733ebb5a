#include "threadpool/openmp_region.h"

#include <omp.h>

#include "threadpool/topology.h"

namespace moesaic::threadpool {

void RunInOpenMpRegion(Executor& executor) {
  const Topology& topology = Topology::Host();
  const bool tell_node = topology.is_host && topology.nodes.size() > 1;
  // Always the same number of threads, however small the job: libgomp ends the threads by which a team shrinks, and starts new
  // ones when it grows again.
#pragma omp parallel num_threads(executor.lanes())
  {
    const int lane = omp_get_thread_num();
    if (tell_node) executor.SetNode(lane, topology.NodeOfCallingThread());
    executor.RunUntilDone(lane, lane);
  }
}

}  // namespace moesaic::threadpool
