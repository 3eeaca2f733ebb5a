// Opens a few ranges; nvtx_test.cc looks at what a tool sees of them.
#include <thread>

#include "profiling/range.h"
#include "profiling/trace.h"

int main() {
  using moesaic::profiling::Range;
  using moesaic::profiling::RangeId;
  using moesaic::profiling::RegisterRange;

  const RangeId outer = RegisterRange("backward", "layer");
  RegisterRange("GU3_lora_pass_gate", "backward_gate_up", moesaic::profiling::RangeKind::kSum);
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
    const moesaic::profiling::TaskScope task(7, 32);
    const moesaic::profiling::Share share{late, {1000, 0}};
    Range work(RegisterRange("P", "GU3_lora_pass_gate"), {1500, 10}, {&share, 1});
  }
  moesaic::profiling::SetTimersEnabled(true);
  {
    Range a(outer);
  }
  return 0;
}
