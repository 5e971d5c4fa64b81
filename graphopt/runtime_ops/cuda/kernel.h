// A CUDA operator as onnxruntime sees it: what abi/custom_op.h is for the CPU.
//
// In the library for GPUs it is an operator of onnxruntime's CUDA provider. In the one that tests build, where the host
// interpreter runs the kernels (GRAPHOPT_INTERPRETED), it is one of the CPU provider, and "the device" is the host.
#pragma once

#include "abi/custom_op.h"
#include "cuda/copy.h"

namespace graphopt {

#if defined(GRAPHOPT_INTERPRETED)
constexpr const char* kProvider = nullptr;
#else
constexpr const char* kProvider = "CUDAExecutionProvider";
#endif

// onnxruntime's functions of version kScratchVersion; set before any kernel is made.
extern const OrtApi* device_api;

// Kernel: as for custom_op(), and host_input(index): whether an input stays in memory of the host. Such are those that
// the host must read, like lengths, and constants that are copied to the device in another layout.
template <typename Kernel, int Type>
OrtCustomOp cuda_op() {
  OrtCustomOp op = custom_op<Kernel, Type>();
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return kProvider; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t index) {
    return Kernel::host_input(index) ? kHostInput : kDefaultMemory;
  };
  return op;
}

// Passes on an error of the C interface or of a copy, with the node's name.
#define GRAPHOPT_RETURN_IF_MESSAGE(node, expression) \
  if (const char* message = (expression)) return (node).error("%s", message)

// Device memory that lives as long as a kernel.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // Takes `bytes`, more than 0, at a multiple of 256; called once.
  OrtStatus* allocate(const OrtKernelInfo* info, size_t bytes);
  // The same, and fills it with what the host has.
  OrtStatus* copy_of(const Node& node, const OrtKernelInfo* info, const void* host, size_t bytes);
  void* data() const { return data_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// A kernel call's share of the device: the provider's stream, and scratch that the next call may reuse.
class DeviceCall {
 public:
  DeviceCall() = default;
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;
  ~DeviceCall();

  // `near`: an input or output that is on the device; bytes: of scratch, which may be 0. Called once.
  OrtStatus* begin(OrtKernelContext* context, const OrtValue* near, size_t bytes);
  void* stream() const { return stream_; }
  void* scratch() const { return scratch_; }  // at a multiple of 256; null if there is no scratch

 private:
  void* stream_ = nullptr;
  OrtAllocator* allocator_ = nullptr;
  void* scratch_ = nullptr;
};

}  // namespace graphopt
