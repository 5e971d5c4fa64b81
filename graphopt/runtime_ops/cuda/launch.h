// Starting a kernel, on a GPU's stream or in the host interpreter.
#pragma once

#include "cuda/device.h"

namespace graphopt {

#if defined(__CUDACC__)
// CUDA's last error or null; clears it.
inline const char* error_text(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}
#endif

// What a block may have on every GPU from sm_80 on; a kernel that needs less lets more blocks share a processor.
constexpr size_t kSharedBytes = 163 * 1024;
constexpr unsigned kThreads = 1024;

// Why a launch of this size is impossible; null if it is possible.
inline const char* refusal(Index3 grid, unsigned threads, size_t shared_bytes) {
  if (!threads || threads % kWarp || threads > kThreads) {
    return "a block must have a multiple of 32 threads, at most 1024";
  }
  if (!grid.x || !grid.y || !grid.z) return "a grid must have blocks";
  if (grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) return "a grid has more blocks than CUDA allows";
  return shared_bytes > kSharedBytes ? "a block must have at most 163 KiB of shared memory" : nullptr;
}

// Whether the current device runs code for sm_90a, in which alone wait_for_previous() waits.
inline bool runs_sm90a() {
#if defined(__CUDACC__)
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
#else
  return host::runs_sm90a();
#endif
}

// Of the current device; 2 in the interpreter.
inline unsigned processors() {
  int count = 2;
#if defined(__CUDACC__)
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
#endif
  return static_cast<unsigned>(count);
}

template <typename Arguments>
const char* launch(void (*kernel)(Arguments), Index3 grid, unsigned threads, size_t shared_bytes, void* stream,
                   Arguments arguments, bool early) {
  if (const char* failure = refusal(grid, threads, shared_bytes)) return failure;
#if defined(__CUDACC__)
  constexpr size_t kWithoutAsking = 48 * 1024;
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t status = cudaSuccess;
  if (shared_bytes > kWithoutAsking) {
    const int bytes = static_cast<int>(shared_bytes);
    status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  }
  if (status == cudaSuccess) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.x, grid.y, grid.z);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = early && runs_sm90a() ? 1 : 0;
    void* values[] = {&arguments};
    status = cudaLaunchKernelExC(&config, function, values);
  }
  return error_text(status);
#else
  (void)stream, (void)early;
  struct Call {
    void (*kernel)(Arguments);
    const Arguments& arguments;
  } const call{kernel, arguments};
  const auto body = [](const void* argument) {
    const Call& self = *static_cast<const Call*>(argument);
    self.kernel(self.arguments);
  };
  return host::run(body, &call, grid, threads, shared_bytes);
#endif
}

// Starts kernel(arguments) on the stream; returns null or an error. A stream is a cudaStream_t, null for the default
// one; the interpreter has none, and has finished when it returns.
template <typename Arguments>
const char* launch(void (*kernel)(Arguments), Index3 grid, unsigned threads, size_t shared_bytes, void* stream,
                   Arguments arguments) {
  return launch(kernel, grid, threads, shared_bytes, stream, arguments, false);
}
// The same for a kernel that calls wait_for_previous(): it may begin before the kernel before it has ended.
template <typename Arguments>
const char* launch_early(void (*kernel)(Arguments), Index3 grid, unsigned threads, size_t shared_bytes, void* stream,
                         Arguments arguments) {
  return launch(kernel, grid, threads, shared_bytes, stream, arguments, true);
}

}  // namespace graphopt
