// Memory for caches on the device: see c_interface.h.
#include "cuda/c_interface.h"
#include "cuda/launch.h"

#if defined(__CUDACC__)
using graphopt::error_text;

const char* graphopt_cuda_allocate(void** memory, size_t bytes) {
  const char* failure = error_text(cudaMalloc(memory, bytes));
  if (!failure) failure = error_text(cudaMemset(*memory, 0, bytes));
  return failure ? failure : error_text(cudaStreamSynchronize(nullptr));
}

void graphopt_cuda_free(void* memory) { cudaFree(memory); }

const char* graphopt_cuda_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
                               size_t rows) {
  // not cudaMemcpy2D, whose pitches must be below 2^31
  for (size_t row = 0; row < rows; ++row) {
    void* const target = static_cast<char*>(to) + row * to_pitch;
    const void* const source = static_cast<const char*>(from) + row * from_pitch;
    if (const char* failure = error_text(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault))) return failure;
  }
  return error_text(cudaStreamSynchronize(nullptr));
}

const char* graphopt_cuda_memory_left(size_t* bytes) {
  size_t all;
  return error_text(cudaMemGetInfo(bytes, &all));
}
#else
#include <stdlib.h>
#include <unistd.h>

#include <cstring>

const char* graphopt_cuda_allocate(void** memory, size_t bytes) {
  constexpr size_t kAlignment = 256;
  const size_t whole = bytes / kAlignment * kAlignment + kAlignment;
  *memory = whole > bytes ? aligned_alloc(kAlignment, whole) : nullptr;
  if (!*memory) return "out of memory";
  std::memset(*memory, 0, bytes);
  return nullptr;
}

void graphopt_cuda_free(void* memory) { free(memory); }

const char* graphopt_cuda_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t bytes,
                               size_t rows) {
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, bytes);
  }
  return nullptr;
}

const char* graphopt_cuda_memory_left(size_t* bytes) {
  *bytes = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return nullptr;
}
#endif
