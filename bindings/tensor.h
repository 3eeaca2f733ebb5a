// Between torch tensors and the engine's views, without linking libtorch: tensors come in as checked pointers, through their
// Python attributes, and go out through DLPack.
//
// Threads: everything here needs the Python lock.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "bindings/dlpack.h"
#include "cpu_kernels/tensor_view.h"

namespace moesaic::bindings {

/// Looks up what the functions below need of torch. Called once while the module is imported: a thread that initialised it
/// later could wait for another that waits for the Python lock.
void LoadTorch();

/// The name of an argument in error messages: "lora[0].gate_up.a" is put together only when one is needed.
struct ArgumentName {
  const char* base;           ///< "hidden"; of a LoRA tensor: "gate_up.a"
  std::int64_t adapter = -1;  ///< index of the adapter, -1: none

  std::string ToString() const;
};

/// A view of a dense CPU tensor with one to three dimensions of one of the engine's types. Holds no reference.
/// Throws pybind11::type_error where `object` is no torch.Tensor, std::invalid_argument on a wrong device, layout, type or
/// number of dimensions.
/// @param expected_types  for the message, "bfloat16 or float32"
TensorView ViewOf(pybind11::handle object, const ArgumentName& name, const char* expected_types);

/// A one-dimensional contiguous torch.uint8 tensor of exactly `bytes` bytes. Errors as ViewOf.
void* BytesOf(pybind11::handle object, const ArgumentName& name, std::int64_t bytes);

/// A tensor in arena memory on its way to Python: written by the engine, then turned into a torch tensor, whose storage gives
/// the block back to the arena when it dies, on whichever thread that is.
class OutputTensor {
 public:
  OutputTensor() = default;
  /// Contents are undefined. Throws std::bad_alloc.
  /// @param like  dtype and shape are taken; the strides are dense and in the order of its strides, which for a dense tensor
  ///              are its own: a gradient laid out like its parameter is accumulated without a copy
  static OutputTensor Like(const TensorView& like);
  static OutputTensor Contiguous(DType dtype, std::int64_t rows, std::int64_t columns);
  static OutputTensor Bytes(std::int64_t bytes);
  /// No arena memory: a tensor of the caller's, which ToTorch() gives back. Errors as ViewOf.
  static OutputTensor Into(pybind11::handle tensor, const ArgumentName& name, const char* expected_types);

  bool defined() const { return managed_ != nullptr || given_; }
  /// Undefined for an undefined tensor; that of Bytes() has no type.
  const TensorView& view() const { return view_; }
  void* data() const { return view_.data; }

  /// The torch tensor, or None for an undefined one. Leaves this object undefined.
  pybind11::object ToTorch();

 private:
  struct Managed;
  struct Deleter {
    void operator()(Managed* managed) const;
  };
  OutputTensor(const TensorView& layout, DLDataType type);

  std::unique_ptr<Managed, Deleter> managed_;
  pybind11::object given_;
  TensorView view_;
};

}  // namespace moesaic::bindings
