// The part of DLPack 1.3 (https://dmlc.github.io/dlpack/latest/c_api.html) that exchanges memory with PyTorch. The layout of
// these structs is the standard's, and so are their names.
#pragma once

#include <cstdint>

extern "C" {

enum DLDeviceType : std::int32_t { kDLCPU = 1 };
enum DLDataTypeCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };

struct DLDevice {
  DLDeviceType device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  std::uint64_t flags;
  DLTensor dl_tensor;
};

/// Functions of a library of tensors, for objects of exactly the type that gave them. They return 0, or -1 with a Python error
/// set. Null where the library has none.
struct DLPackExchangeAPI {
  struct {
    DLPackVersion version;
    void* prev_api;
  } header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  /// Takes the tensor over, in any case.
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** object);
  /// What `out` points to belongs to the object.
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
};
}
