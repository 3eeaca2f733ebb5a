#include "bindings/sampling_bindings.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/tensor.h"
#include "sampling/sampler.h"
#include "threadpool/pool.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

constexpr const char* kLogitTypes = "bfloat16, float16 or float32";
constexpr const char* kIdTypes = "int64 or int32";

TensorView OptionalView(const py::object& tensor, const char* name, const char* types) {
  return tensor.is_none() ? TensorView{} : ViewOf(tensor, {name}, types);
}

/// A result that Python has made: contiguous, [rows].
template <typename T>
T* ResultOf(const py::object& tensor, const char* name, DType dtype, std::int64_t rows) {
  if (tensor.is_none()) return nullptr;
  const TensorView view = ViewOf(tensor, {name}, kIdTypes);
  if (view.rank != 1 || view.dtype != dtype || view.shape[0] != rows || (view.stride[0] != 1 && rows > 1)) {
    throw std::invalid_argument(std::string(name) + " is no contiguous tensor for " + std::to_string(rows) + " rows");
  }
  return static_cast<T*>(view.data);
}

sampling::Confidence KindNamed(const std::string& kind) {
  if (kind == "probability") return sampling::Confidence::kProbability;
  if (kind == "margin") return sampling::Confidence::kMargin;
  if (kind == "entropy") return sampling::Confidence::kEntropy;
  throw std::invalid_argument("return_confidence is \"" + kind +
                              "\"; expected a bool, \"probability\", \"margin\" or \"entropy\"");
}

/// @param filters    temperature, top_k, top_p, min_p, typical_p
/// @param penalties  repetition, frequency, presence
/// @param stream     seed, offset, row_ids
void Sample(const py::object& logits, const py::tuple& filters, const py::tuple& penalties, const py::object& context,
            const py::tuple& stream, const py::object& ids, const py::object& confidence, const std::string& kind,
            const py::object& kept, const py::object& scores) {
  sampling::SampleArgs args;
  args.logits = ViewOf(logits, {"logits"}, kLogitTypes);
  args.options = {filters[0].cast<double>(),   filters[1].cast<std::int64_t>(), filters[2].cast<double>(),
                  filters[3].cast<double>(),   filters[4].cast<double>(),       penalties[0].cast<double>(),
                  penalties[1].cast<double>(), penalties[2].cast<double>()};
  args.context = OptionalView(context, "context", kIdTypes);
  args.seed = stream[0].cast<std::uint64_t>();
  args.offset = stream[1].cast<std::uint64_t>();
  args.row_ids = OptionalView(stream[2], "row_ids", kIdTypes);
  args.confidence_kind = KindNamed(kind);
  args.scores = OptionalView(scores, "out", kLogitTypes);
  const std::int64_t rows = args.logits.shape[0];
  args.ids = ResultOf<std::int64_t>(ids, "ids", DType::kInt64, rows);
  args.confidence = ResultOf<float>(confidence, "confidence", DType::kFloat32, rows);
  if (!kept.is_none()) args.kept = static_cast<std::uint8_t*>(BytesOf(kept, {"kept"}, rows * args.logits.shape[1]));
  const py::gil_scoped_release unlocked;
  sampling::Sample(args, threadpool::Pool::Default());
}

}  // namespace

void BindSampling(py::module_& module) {
  module.def("sample", &Sample, py::arg("logits"), py::arg("filters"), py::arg("penalties"), py::arg("context"),
             py::arg("stream"), py::arg("ids"), py::arg("confidence"), py::arg("kind"), py::arg("kept"), py::arg("scores"));
}

}  // namespace moesaic::bindings
