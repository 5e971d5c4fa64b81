#include "cuda/copy.h"

#include "cuda/launch.h"

namespace graphopt {
#if defined(__CUDACC__)
const char* copy_to_device(void* device, const void* host, size_t bytes, void* stream) {
  // Memory that is not pinned has been staged by CUDA when the call returns.
  return error_text(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
}

const char* copy_to_host(void* host, const void* device, size_t bytes, void* stream) {
  const auto status = cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream));
  return status == cudaSuccess ? wait_for(stream) : error_text(status);
}

const char* copy_on_device(void* to, const void* from, size_t bytes, void* stream) {
  return error_text(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

const char* wait_for(void* stream) { return error_text(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }
#else
const char* copy_to_device(void* device, const void* host, size_t bytes, void*) {
  std::memcpy(device, host, bytes);
  return nullptr;
}

const char* copy_to_host(void* host, const void* device, size_t bytes, void*) {
  std::memcpy(host, device, bytes);
  return nullptr;
}

const char* copy_on_device(void* to, const void* from, size_t bytes, void*) {
  std::memcpy(to, from, bytes);
  return nullptr;
}

const char* wait_for(void*) { return nullptr; }
#endif

}  // namespace graphopt
