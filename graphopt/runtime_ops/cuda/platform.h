// What nvcc and a C++ compiler call differently, and the types that both sides of a launch share. The host's own sources
// (matmul_table/cuda/pack.cc) take this file alone: device.h needs nvcc, or the interpreter of the tests.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define GRAPHOPT_DEVICE __device__ __forceinline__
#define GRAPHOPT_BOTH __host__ __device__ __forceinline__
#define GRAPHOPT_KERNEL(threads, blocks_per_sm) __global__ __launch_bounds__(threads, blocks_per_sm)
#define GRAPHOPT_UNROLL _Pragma("unroll")
#define GRAPHOPT_NO_UNROLL _Pragma("unroll 1")
#else
#include <cmath>

#define GRAPHOPT_DEVICE inline
#define GRAPHOPT_BOTH inline
#define GRAPHOPT_KERNEL(threads, blocks_per_sm)
#define GRAPHOPT_UNROLL
#define GRAPHOPT_NO_UNROLL
#endif

namespace graphopt {

constexpr int kWarp = 32;

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

// 8 and 16 bytes that are loaded or stored at once.
struct alignas(8) Word2 {
  uint32_t words[2];
};
struct alignas(16) Word4 {
  uint32_t words[4];
};

}  // namespace graphopt
