#include "bindings/tensor.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bindings/arena.h"
#include "bindings/dlpack.h"

namespace py = pybind11;

namespace moesaic::bindings {
namespace {

/// What is looked up in torch once and kept for the life of the process.
struct Torch {
  py::object tensor_type;
  py::object parameter_type;
  const DLPackExchangeAPI* exchange = nullptr;  // null before PyTorch 2.10
  py::object from_dlpack;
  py::object uint8;
  std::array<std::pair<py::object, DType>, 5> dtypes;
  // Interned names: attribute look-up compares pointers.
  py::str data_ptr{Intern("data_ptr")};
  py::str untyped_storage{Intern("untyped_storage")};
  py::str dtype{Intern("dtype")};
  py::str is_cpu{Intern("is_cpu")};
  py::str is_neg{Intern("is_neg")};
  py::str shape{Intern("shape")};
  py::str stride{Intern("stride")};

  Torch() {
    const py::module_ torch = py::module_::import("torch");
    tensor_type = torch.attr("Tensor");
    parameter_type = torch.attr("nn").attr("Parameter");
    exchange = FindExchange();
    from_dlpack = py::module_::import("torch.utils.dlpack").attr("from_dlpack");
    uint8 = torch.attr("uint8");
    dtypes = {{{torch.attr("bfloat16"), DType::kBFloat16},
               {torch.attr("float32"), DType::kFloat32},
               {torch.attr("int64"), DType::kInt64},
               {torch.attr("int32"), DType::kInt32},
               {torch.attr("float16"), DType::kFloat16}}};
  }

  const DLPackExchangeAPI* FindExchange() const {
    if (!py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
    const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    const bool usable = api->header.version.major == 1 && api->managed_tensor_to_py_object_no_sync != nullptr &&
                        api->dltensor_from_py_object_no_sync != nullptr;
    return usable ? api : nullptr;
  }

  static py::str Intern(const char* text) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text)); }

  static const Torch& Get() {
    // Never destroyed: the interpreter is gone before static objects are.
    static const Torch* const torch = new Torch;
    return *torch;
  }
};

py::object Attribute(py::handle object, const py::str& name) {
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.ptr()));
}

py::object CallMethod(py::handle object, const py::str& name) {
  return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name.ptr()));
}

/// A tensor whose storage was taken from it lies at its offset: below this address, 1 TiB, it is asked for its storage. (What
/// the system maps lies above; the heap of an interpreter that is always loaded to the same place, below.)
constexpr std::uintptr_t kLowMemory = std::uintptr_t{1} << 40;

/// What DLPack says of an ordinary tensor in dense CPU memory, in one call instead of one for each property: seven tensors come
/// with a call of the layer, and right after a pass over the weights no cache holds any of what those properties run through.
/// False for everything else; the checks below then say what it is.
bool Describe(py::handle object, DLTensor* tensor) {
  const Torch& torch = Torch::Get();
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  if (torch.exchange == nullptr || !(type.is(torch.tensor_type) || type.is(torch.parameter_type))) return false;
  if (torch.exchange->dltensor_from_py_object_no_sync(object.ptr(), tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (reinterpret_cast<std::uintptr_t>(tensor->data) < kLowMemory) return false;
  if (tensor->device.device_type != kDLCPU || tensor->ndim < 1 || tensor->ndim > 3 || tensor->strides == nullptr) return false;
  const py::object negated = CallMethod(object, torch.is_neg);  // which DLPack cannot tell
  if (!negated) PyErr_Clear();
  return negated.ptr() == Py_False;
}

std::byte* DataOf(const DLTensor& tensor) { return static_cast<std::byte*>(tensor.data) + tensor.byte_offset; }

/// Turns the Python error that is set, as a sparse or a fake tensor raises one, into one that names the argument.
[[noreturn]] void FailNotDense(const ArgumentName& name) {
  const py::error_already_set error;
  if (!error.matches(PyExc_Exception)) throw error;  // KeyboardInterrupt and its like
  throw std::invalid_argument(name.ToString() + " has no readable memory; expected a dense CPU tensor (" +
                              std::string(py::str(error.value())) + ")");
}

std::string Text(const py::object& object) { return object ? std::string(py::str(object)) : "unknown"; }

/// Checks that `object` is a tensor in readable memory; what is left to check is its type.
void CheckTensor(py::handle object, const ArgumentName& name) {
  const Torch& torch = Torch::Get();
  if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(torch.tensor_type.ptr()))) {
    throw py::type_error(name.ToString() + " is a " + Py_TYPE(object.ptr())->tp_name + "; expected a torch.Tensor");
  }
  if (Attribute(object, torch.is_cpu).ptr() != Py_True) {
    throw std::invalid_argument(name.ToString() + " is on " + Text(object.attr("device")) + "; expected a CPU tensor");
  }
  const py::object negated = CallMethod(object, torch.is_neg);
  if (!negated) FailNotDense(name);
  if (negated.ptr() == Py_True) {
    throw std::invalid_argument(name.ToString() + " is a lazily negated view; expected plain memory, as resolve_neg() gives");
  }
}

/// Fills data, rank, shape and stride.
void ReadGeometry(py::handle object, const ArgumentName& name, TensorView* view) {
  const Torch& torch = Torch::Get();
  const py::object shape = Attribute(object, torch.shape);
  const py::object stride = shape ? CallMethod(object, torch.stride) : py::object();
  const py::object address = stride ? CallMethod(object, torch.data_ptr) : py::object();
  if (!address) FailNotDense(name);
  const Py_ssize_t rank = PyTuple_GET_SIZE(shape.ptr());
  if (rank < 1 || rank > 3) {
    throw std::invalid_argument(name.ToString() + " has shape " + std::string(py::str(py::list(shape))) +
                                "; expected one to three dimensions");
  }
  view->rank = static_cast<int>(rank);
  for (Py_ssize_t d = 0; d < rank; ++d) {
    view->shape[static_cast<std::size_t>(d)] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), d));
    view->stride[static_cast<std::size_t>(d)] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride.ptr(), d));
  }
  view->data = PyLong_AsVoidPtr(address.ptr());
  if (PyErr_Occurred()) FailNotDense(name);  // symbolic sizes
  const auto end = view->shape.begin() + view->rank;
  if (std::find(view->shape.begin(), end, 0) != end) return;
  // Where a storage has no memory a tensor's address is its offset.
  const py::object storage = CallMethod(object, torch.untyped_storage);
  const py::object memory = storage ? CallMethod(storage, torch.data_ptr) : py::object();
  if (!memory) FailNotDense(name);
  if (PyLong_AsVoidPtr(memory.ptr()) == nullptr) {
    throw std::invalid_argument(name.ToString() +
                                " has no memory behind it, as fake tensors have none; expected a CPU tensor with data");
  }
}

DLDataType ToDLPack(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kInt64:
      return {kDLInt, 64, 1};
    case DType::kFloat32:
      break;
  }
  return {kDLFloat, 32, 1};
}

/// False where the engine has no such type.
bool FromDLPack(const DLTensor& tensor, TensorView* view) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kInt64, DType::kInt32, DType::kFloat16}) {
    const DLDataType type = ToDLPack(dtype);
    if (tensor.dtype.code != type.code || tensor.dtype.bits != type.bits || tensor.dtype.lanes != type.lanes) continue;
    view->data = DataOf(tensor);
    view->dtype = dtype;
    view->rank = tensor.ndim;
    std::copy_n(tensor.shape, tensor.ndim, view->shape.begin());
    std::copy_n(tensor.strides, tensor.ndim, view->stride.begin());
    return true;
  }
  return false;
}

/// Dense strides for view->shape in the order of view->stride: the dimension with the smallest stride stays innermost. Expanded
/// dimensions (stride 0) become the outermost ones, equal strides fall back to row-major order.
void MakeDense(TensorView* view) {
  const auto key = [view](std::size_t dim) {
    return view->stride[dim] == 0 ? std::numeric_limits<std::int64_t>::max() : view->stride[dim];
  };
  std::array<std::size_t, 3> dims = {0, 1, 2};
  const auto end = dims.begin() + view->rank;
  std::reverse(dims.begin(), end);
  std::stable_sort(dims.begin(), end, [&](std::size_t x, std::size_t y) { return key(x) < key(y); });
  std::int64_t stride = 1;
  for (auto dim = dims.begin(); dim != end; ++dim) {
    view->stride[*dim] = stride;
    stride *= std::max<std::int64_t>(view->shape[*dim], 1);
  }
}

std::int64_t Elements(const TensorView& view) {
  return std::accumulate(view.shape.begin(), view.shape.begin() + view.rank, std::int64_t{1}, std::multiplies<>());
}

}  // namespace

void LoadTorch() { Torch::Get(); }

std::string ArgumentName::ToString() const { return adapter < 0 ? base : "lora[" + std::to_string(adapter) + "]." + base; }

TensorView ViewOf(py::handle object, const ArgumentName& name, const char* expected_types) {
  TensorView view;
  if (DLTensor tensor; Describe(object, &tensor) && FromDLPack(tensor, &view)) return view;
  CheckTensor(object, name);
  const Torch& torch = Torch::Get();
  const py::object dtype = Attribute(object, torch.dtype);
  const auto known = std::find_if(torch.dtypes.begin(), torch.dtypes.end(), [&](const auto& d) { return d.first.is(dtype); });
  if (known == torch.dtypes.end()) {
    throw std::invalid_argument(name.ToString() + " is " + Text(dtype) + "; expected " + expected_types);
  }
  view.dtype = known->second;
  ReadGeometry(object, name, &view);
  return view;
}

void* BytesOf(py::handle object, const ArgumentName& name, std::int64_t bytes) {
  if (DLTensor tensor; Describe(object, &tensor) && tensor.dtype.code == kDLUInt && tensor.dtype.bits == 8 &&
                       tensor.dtype.lanes == 1 && tensor.ndim == 1 && tensor.shape[0] == bytes &&
                       (tensor.strides[0] == 1 || bytes <= 1)) {
    return DataOf(tensor);
  }
  CheckTensor(object, name);
  TensorView view;
  ReadGeometry(object, name, &view);
  const bool is_bytes = Attribute(object, Torch::Get().dtype).is(Torch::Get().uint8);
  if (!is_bytes || view.rank != 1 || view.shape[0] != bytes || (view.stride[0] != 1 && bytes > 1)) {
    throw std::invalid_argument(name.ToString() + " is " + Text(object.attr("dtype")) + " of shape " +
                                std::string(py::str(py::list(object.attr("shape")))) +
                                "; expected contiguous torch.uint8 of shape [" + std::to_string(bytes) +
                                "], as forward gave for these arguments");
  }
  return view.data;
}

/// The memory of a tensor, and what DLPack says of it: in the form that PyTorch takes from a function, and in the older one
/// that it takes from a capsule.
struct OutputTensor::Managed {
  DLManagedTensorVersioned versioned;
  DLManagedTensor capsuled;
  std::array<std::int64_t, 3> shape;
  std::array<std::int64_t, 3> stride;
  std::int64_t bytes;

  static void Free(void* managed) {
    auto* self = static_cast<Managed*>(managed);
    Arena::Default().Release(self->versioned.dl_tensor.data, self->bytes);
    delete self;
  }
};

void OutputTensor::Deleter::operator()(Managed* managed) const { Managed::Free(managed); }

OutputTensor::OutputTensor(const TensorView& layout, DLDataType type) : view_(layout) {
  auto managed = std::make_unique<Managed>();
  managed->shape = layout.shape;
  managed->stride = layout.stride;
  managed->bytes = Elements(layout) * (type.bits / 8);
  view_.data = Arena::Default().Allocate(managed->bytes);
  managed->versioned = {{1, 0},
                        managed.get(),
                        [](DLManagedTensorVersioned* self) { Managed::Free(self->manager_ctx); },
                        0,
                        {view_.data, {kDLCPU, 0}, layout.rank, type, managed->shape.data(), managed->stride.data(), 0}};
  managed->capsuled = {managed->versioned.dl_tensor, managed.get(),
                       [](DLManagedTensor* self) { Managed::Free(self->manager_ctx); }};
  managed_.reset(managed.release());
}

OutputTensor OutputTensor::Like(const TensorView& like) {
  TensorView layout = like;
  MakeDense(&layout);
  return OutputTensor(layout, ToDLPack(layout.dtype));
}

OutputTensor OutputTensor::Contiguous(DType dtype, std::int64_t rows, std::int64_t columns) {
  return OutputTensor({nullptr, dtype, 2, {rows, columns, 0}, {columns, 1, 0}}, ToDLPack(dtype));
}

OutputTensor OutputTensor::Bytes(std::int64_t bytes) {
  return OutputTensor({nullptr, DType::kFloat32, 1, {bytes, 0, 0}, {1, 0, 0}}, {kDLUInt, 8, 1});
}

OutputTensor OutputTensor::Into(py::handle tensor, const ArgumentName& name, const char* expected_types) {
  OutputTensor output;
  output.view_ = ViewOf(tensor, name, expected_types);
  output.given_ = py::reinterpret_borrow<py::object>(tensor);
  return output;
}

py::object OutputTensor::ToTorch() {
  if (given_) return std::exchange(given_, {});
  if (!defined()) return py::none();
  const Torch& torch = Torch::Get();
  if (torch.exchange != nullptr) {
    void* object = nullptr;
    if (torch.exchange->managed_tensor_to_py_object_no_sync(&managed_.release()->versioned, &object) != 0) {
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
  }
  // PyTorch renames the capsule when it takes the tensor over; one that still has its name was not taken.
  PyObject* capsule = PyCapsule_New(&managed_->capsuled, "dltensor", [](PyObject* self) {
    if (!PyCapsule_IsValid(self, "dltensor")) return;
    auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) throw py::error_already_set();
  [[maybe_unused]] const auto* released = managed_.release();  // PyTorch's now, or the capsule's
  return torch.from_dlpack(py::reinterpret_steal<py::object>(capsule));
}

}  // namespace moesaic::bindings
