#include "cuda/kernel.h"

namespace graphopt {

const OrtApi* device_api = nullptr;

DeviceMemory::~DeviceMemory() {
  if (!allocator_) return;
  // An error here cannot be reported.
  if (data_) ReleaseStatus::call(device_api, AllocatorFree::call(device_api, allocator_, data_));
  ReleaseAllocator::call(device_api, allocator_);
}

OrtStatus* DeviceMemory::allocate(const OrtKernelInfo* info, size_t bytes) {
  GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetAllocator::call(device_api, info, kDefaultMemory, &allocator_));
  return AllocatorAlloc::call(device_api, allocator_, bytes, &data_);
}

OrtStatus* DeviceMemory::copy_of(const Node& node, const OrtKernelInfo* info, const void* host, size_t bytes) {
  GRAPHOPT_RETURN_IF_ERROR(allocate(info, bytes));
  GRAPHOPT_RETURN_IF_MESSAGE(node, copy_to_device(data_, host, bytes, nullptr));
  // A kernel's own stream does not wait for this one.
  GRAPHOPT_RETURN_IF_MESSAGE(node, wait_for(nullptr));
  return nullptr;
}

DeviceCall::~DeviceCall() {
  if (!allocator_) return;
  // The allocator is ordered by the stream: memory it reuses is touched only after the kernels already started.
  ReleaseStatus::call(device_api, AllocatorFree::call(device_api, allocator_, scratch_));
  ReleaseAllocator::call(device_api, allocator_);
}

OrtStatus* DeviceCall::begin(OrtKernelContext* context, const OrtValue* near, size_t bytes) {
#if !defined(GRAPHOPT_INTERPRETED)
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetGPUComputeStream::call(device_api, context, &stream_));
#endif
  if (!bytes) return nullptr;
  const OrtMemoryInfo* memory = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(GetTensorMemoryInfo::call(device_api, near, &memory));
  OrtAllocator* allocator = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetAllocator::call(device_api, context, memory, &allocator));
  OrtStatus* failure = KernelContextGetScratchBuffer::call(device_api, context, memory, bytes, &scratch_);
  if (failure || !scratch_) {
    ReleaseAllocator::call(device_api, allocator);
    return failure ? failure : CreateStatus::call(device_api, kFail, "out of device memory for scratch");
  }
  allocator_ = allocator;
  return nullptr;
}

}  // namespace graphopt
