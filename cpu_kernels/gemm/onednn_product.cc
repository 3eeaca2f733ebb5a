#include "cpu_kernels/gemm/onednn_product.h"

#include <omp.h>

#include <dnnl.hpp>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace moesaic {
namespace {

using dnnl::memory;

[[noreturn]] void Throw(dnnl_status_t status) {
  if (status == dnnl_out_of_memory) throw std::bad_alloc();
  throw std::runtime_error("oneDNN: a matrix product failed with status " + std::to_string(static_cast<int>(status)));
}

const dnnl::engine& CpuEngine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

/// A matmul primitive for bf16 and its arguments, whose pointers change from call to call.
class Bf16Product {
 public:
  explicit Bf16Product(int k)
      : left_(Describe(kOneDnnRows, k, memory::data_type::bf16)),
        right_(Describe(k, kOneDnnColumns, memory::data_type::bf16)),
        c_(Describe(kOneDnnRows, kOneDnnColumns, memory::data_type::f32)),
        stream_(CpuEngine()) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::matmul::primitive_desc description(CpuEngine(), left_.get_desc(), right_.get_desc(), c_.get_desc(), attributes);
    product_ = dnnl::matmul(description);
    const memory scratchpad(description.scratchpad_desc(), CpuEngine());
    arguments_ = {{DNNL_ARG_SRC, left_}, {DNNL_ARG_WEIGHTS, right_}, {DNNL_ARG_DST, c_}, {DNNL_ARG_SCRATCHPAD, scratchpad}};
  }

  void Run(const BFloat16* left, const BFloat16* right, float* c) {
    left_.set_data_handle(const_cast<BFloat16*>(left));
    right_.set_data_handle(const_cast<BFloat16*>(right));
    c_.set_data_handle(c);
    product_.execute(stream_, arguments_);
    stream_.wait();
  }

 private:
  static memory Describe(std::int64_t rows, std::int64_t columns, memory::data_type type) {
    return memory({{rows, columns}, type, {columns, 1}}, CpuEngine(), DNNL_MEMORY_NONE);
  }

  memory left_, right_, c_;
  dnnl::stream stream_;
  dnnl::matmul product_;
  std::unordered_map<int, memory> arguments_;
};

}  // namespace

bool OneDnnHasBf16() {
  static const bool has = [] {
    switch (dnnl::get_effective_cpu_isa()) {
      case dnnl::cpu_isa::avx2_vnni_2:
      case dnnl::cpu_isa::avx512_core_bf16:
      case dnnl::cpu_isa::avx512_core_fp16:
      case dnnl::cpu_isa::avx512_core_amx:
      case dnnl::cpu_isa::avx512_core_amx_fp16:
        return true;
      default:
        return false;
    }
  }();
  return has;
}

OneDnnOnThisThread::OneDnnOnThisThread() : team_(omp_get_max_threads()) { omp_set_num_threads(1); }
OneDnnOnThisThread::~OneDnnOnThisThread() { omp_set_num_threads(team_); }

void OneDnnProduct(const float* left, const float* right, float* c, int k) {
  const dnnl_status_t status =
      dnnl_sgemm('N', 'N', kOneDnnRows, kOneDnnColumns, k, 1.0f, left, k, right, kOneDnnColumns, 0.0f, c, kOneDnnColumns);
  if (status != dnnl_success) Throw(status);
}

void OneDnnProduct(const BFloat16* left, const BFloat16* right, float* c, int k) {
  thread_local std::unique_ptr<Bf16Product> products[8];
  std::unique_ptr<Bf16Product>& product = products[k / 32 - 1];
  try {
    if (product == nullptr) product = std::make_unique<Bf16Product>(k);
    product->Run(left, right, c);
  } catch (const dnnl::error& error) {
    Throw(error.status);
  }
}

}  // namespace moesaic
