// Memory that cannot be had: every allocation of a call fails in turn, and each time the caller gets std::bad_alloc, nothing is
// leaked, and the next call is right. The program's allocator is replaced, so this is a program of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "moe/workspace.h"
#include "tests/moe/problem.h"

namespace {

std::atomic<bool> g_counting{false};
std::atomic<long> g_fail_at{-1};  // the allocation that fails, counted while g_counting; -1: none
std::atomic<long> g_allocations{0};
std::atomic<long> g_alive{0};

bool Fails() {
  if (!g_counting.load(std::memory_order_relaxed)) return false;
  if (g_allocations.fetch_add(1) != g_fail_at.load()) return false;
  errno = ENOMEM;  // which glibc asserts when it starts a thread
  return true;
}

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (Fails()) return nullptr;
  void* data = nullptr;
  if (posix_memalign(&data, std::max(alignment, sizeof(void*)), bytes) != 0) return nullptr;
  ++g_alive;
  return data;
}

void* AllocateOrThrow(std::size_t bytes, std::size_t alignment) {
  if (void* data = Allocate(bytes, alignment)) return data;
  throw std::bad_alloc();
}

void Release(void* data) {
  if (data == nullptr) return;
  --g_alive;
  std::free(data);
}

}  // namespace

// What C code asks for. (Not counted as alive: std::free, which returns it, is not replaced.)
// NOLINTBEGIN(bugprone-reserved-identifier, readability-identifier-naming): glibc's names of what is replaced below
extern "C" void* __libc_malloc(std::size_t bytes);
extern "C" void* __libc_calloc(std::size_t count, std::size_t bytes);
// NOLINTEND(bugprone-reserved-identifier, readability-identifier-naming)
extern "C" void* malloc(std::size_t bytes) noexcept { return Fails() ? nullptr : __libc_malloc(bytes); }
extern "C" void* calloc(std::size_t count, std::size_t bytes) noexcept {
  return Fails() ? nullptr : __libc_calloc(count, bytes);
}
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  if (Fails()) return nullptr;
  void* data = nullptr;
  return posix_memalign(&data, alignment, bytes) == 0 ? data : nullptr;
}

void* operator new(std::size_t bytes) { return AllocateOrThrow(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return AllocateOrThrow(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t align) {
  return AllocateOrThrow(bytes, static_cast<std::size_t>(align));
}
void* operator new[](std::size_t bytes, std::align_val_t align) {
  return AllocateOrThrow(bytes, static_cast<std::size_t>(align));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, alignof(std::max_align_t)); }
void operator delete(void* data) noexcept { Release(data); }
void operator delete[](void* data) noexcept { Release(data); }
void operator delete(void* data, std::size_t) noexcept { Release(data); }
void operator delete[](void* data, std::size_t) noexcept { Release(data); }
void operator delete(void* data, std::align_val_t) noexcept { Release(data); }
void operator delete[](void* data, std::align_val_t) noexcept { Release(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { Release(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { Release(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { Release(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { Release(data); }

namespace moesaic::moe {
namespace {

using threadpool::Pool;

ProblemSpec Spec() {
  ProblemSpec spec;
  spec.tokens = 40;
  spec.experts = 5;
  spec.top_k = 2;
  spec.hidden = 48;
  spec.intermediate = 40;
  spec.adapters = {{.gate_up = 3, .down = 2, .peft_strides = true}, {.gate = 2, .up = 1, .dtype = DType::kBFloat16}};
  return spec;
}

/// Lets the n-th allocation of `call` fail, for n = 0, 1, ... until it is done before that. `call` says whether its result is
/// right: an allocation that it can do without may fail unseen. `again` says whether all works afterwards.
/// @return how many of the failures reached the caller
template <typename Call, typename Again>
long FailEachInTurn(Call call, Again again) {
  long failures = 0;
  bool thrown = false, reached = true;
  const auto fail = [&](long n) {  // what is left of it
    ReleaseWorkspaces();           // so that every buffer is asked for again
    const long alive = g_alive;
    g_allocations = 0;
    g_fail_at = n;
    bool right = false, other = false;
    thrown = false;
    g_counting = true;
    try {
      right = call();
    } catch (const std::bad_alloc&) {
      thrown = true;
    } catch (const std::system_error&) {  // of a thread that cannot be started
      thrown = true;
    } catch (...) {
      other = true;
    }
    g_counting = false;
    reached = g_allocations > n;
    const bool works = again();
    ReleaseWorkspaces();
    EXPECT_FALSE(other) << "allocation " << n << " gave another exception";
    EXPECT_TRUE(thrown || right) << "allocation " << n << " gave a wrong result";
    EXPECT_TRUE(works) << "after allocation " << n;
    return g_alive - alive;
  };
  // A worker keeps some scratch memory for as long as it lives, and on a busy host may take its first task at any time. What
  // leaks does so each time.
  constexpr int kMostWorkers = 3;
  for (long n = 0; reached; ++n) {
    long left = fail(n);
    for (int worker = 0; left > 0 && worker < kMostWorkers; ++worker) left = fail(n);
    EXPECT_LE(left, 0) << "allocation " << n << " failed, and something is left";
    failures += thrown ? 1 : 0;
    if (testing::Test::HasFailure()) break;
  }
  return failures;
}

/// Adapters in place: few rows, fp32 in PEFT's layout.
ProblemSpec SpecInPlace() {
  ProblemSpec spec = Spec();
  spec.tokens = 8;
  spec.adapters = {{.gate_up = 3, .down = 2, .peft_strides = true}, {.gate = 2, .up = 1, .peft_strides = true}};
  return spec;
}

class Allocation : public testing::TestWithParam<ProblemSpec> {};

INSTANTIATE_TEST_SUITE_P(Adapters, Allocation, testing::Values(Spec(), SpecInPlace()),
                         [](const auto& info) { return info.index == 0 ? "packed" : "in_place"; });

TEST_P(Allocation, EachOfACallFails) {
  const Problem problem(GetParam());
  for (const int threads : {1, 2}) {
    Pool pool(threads);
    const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
    const Saved saved(layer, problem);
    const Tensor out = RunForward(layer, problem, pool, &saved);
    const Gradients gradients = RunBackward(layer, problem, pool, saved);
    const auto again = [&] {
      const Saved own(layer, problem);
      return RunForward(layer, problem, pool, &own) == out && Equal(RunBackward(layer, problem, pool, own), gradients);
    };
    const Tensor other = out.Like();
    const ForwardArgs forward{problem.hidden.view(), problem.ids.view(), problem.top_k_weights.view(),
                              problem.lora,          other.view(),       nullptr};
    const auto run_forward = [&] {
      layer.Forward(forward, pool);
      return other == out;
    };
    EXPECT_GT(FailEachInTurn(run_forward, again), 10);
    const Tensor d_hidden = problem.hidden.Like(), d_weights = problem.top_k_weights.Like();
    const Tensor d_a = problem.adapters[0][0].a.Like(), d_b = problem.adapters[0][3].b.Like();
    std::vector<LoraAdapterGrad> d_lora(problem.lora.size());
    d_lora[0].gate_up.a = d_a.view();
    d_lora[0].down.b = d_b.view();
    const BackwardArgs backward{problem.hidden.view(), problem.top_k_weights.view(),
                                problem.lora,          &saved.state,
                                problem.d_out.view(),  d_hidden.view(),
                                d_weights.view(),      d_lora};
    const auto run_backward = [&] {
      layer.Backward(backward, pool);
      return d_hidden == gradients.hidden && d_weights == gradients.top_k_weights && d_a == gradients.lora[0][0].a &&
             d_b == gradients.lora[0][3].b;
    };
    EXPECT_GT(FailEachInTurn(run_backward, again), 10);
    std::unique_ptr<ExpertsLayer> packed;
    const auto pack = [&] {
      packed = std::make_unique<ExpertsLayer>(problem.config(), problem.gate_up.view(), problem.down.view(), pool);
      return true;
    };
    const auto packed_is_right = [&] {
      const bool right = packed == nullptr || RunForward(*packed, problem, pool) == out;
      packed.reset();
      return right && again();
    };
    EXPECT_GE(FailEachInTurn(pack, packed_is_right), 3);  // the layer and its weights
  }
}

TEST(AllocationOfThreads, EachOfANewPoolFails) {
  const Problem problem(Spec());
  Pool one(1);
  const ExpertsLayer layer(problem.config(), problem.gate_up.view(), problem.down.view(), one);
  const Tensor out = RunForward(layer, problem, one);
  const Tensor other = out.Like();
  const ForwardArgs forward{problem.hidden.view(), problem.ids.view(), problem.top_k_weights.view(),
                            problem.lora,          other.view(),       nullptr};
  const auto call = [&] {
    Pool pool(3);
    layer.Forward(forward, pool);
    return other == out;
  };
  EXPECT_GT(FailEachInTurn(call, [&] { return RunForward(layer, problem, one) == out; }), 10);
}

}  // namespace
}  // namespace moesaic::moe
