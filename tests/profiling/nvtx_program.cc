// Opens a few ranges; nvtx_test.cc looks at what a tool sees of them.
#include <thread>

#include "profiling/range.h"

int main() {
  using moesaic::profiling::Range;
  using moesaic::profiling::RangeId;
  using moesaic::profiling::RegisterRange;

  const RangeId outer = RegisterRange("backward", "layer");
  const RangeId inner = RegisterRange("D3_gemm", "backward");
  RegisterRange("never opened", "layer");
  {
    Range a(outer);
    {
      Range b(inner);
    }
    {
      Range b(inner);
    }
  }
  const RangeId late = RegisterRange("A1_silu_backward", "backward");  // after the tool was found
  std::thread([&] { Range range(late); }).join();
  {
    Range work(RegisterRange("P", "GU3_lora_pass_gate"));
    work.AddWork(1500, 10);
    work.AddWork(1000, 0);
  }
  moesaic::profiling::SetTimersEnabled(true);
  {
    Range a(outer);
  }
  return 0;
}
