// All of CUDA that kernels may use: the same kernel compiles with nvcc for a GPU, and as plain C++ for host.h, which
// interprets it thread by thread, so that tests run it on any machine.
//
// A kernel takes one struct by value, its blocks have one dimension and a multiple of 32 threads, and all shared memory
// is dynamic. Whatever has "all lanes" in its comment must be reached by the 32 lanes of a warp together.
#pragma once

#include "cuda/platform.h"

#if !defined(__CUDACC__)
#include "interpreter/host.h"
#endif

namespace graphopt {

// Where this thread is. Blocks have one dimension: y and z of thread_index are 0.
GRAPHOPT_DEVICE Index3 thread_index() {
#if defined(__CUDACC__)
  return {threadIdx.x, 0, 0};
#else
  return {host::thread_index(), 0, 0};
#endif
}
GRAPHOPT_DEVICE Index3 block_index() {
#if defined(__CUDACC__)
  return {blockIdx.x, blockIdx.y, blockIdx.z};
#else
  return host::block_index();
#endif
}
GRAPHOPT_DEVICE Index3 block_count() {
#if defined(__CUDACC__)
  return {gridDim.x, gridDim.y, gridDim.z};
#else
  return host::block_count();
#endif
}
GRAPHOPT_DEVICE unsigned thread_count() {
#if defined(__CUDACC__)
  return blockDim.x;
#else
  return host::thread_count();
#endif
}
GRAPHOPT_DEVICE int lane() { return static_cast<int>(thread_index().x % kWarp); }
GRAPHOPT_DEVICE int warp() { return static_cast<int>(thread_index().x / kWarp); }

// The block's dynamic shared memory, at a multiple of 128 bytes; uninitialized.
GRAPHOPT_DEVICE char* shared_memory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(128) char graphopt_shared_memory[];
  return graphopt_shared_memory;
#else
  return host::shared_memory();
#endif
}

// Of shared memory, as products of matrices and copies count it.
GRAPHOPT_DEVICE unsigned address_in_shared(const void* shared) {
#if defined(__CUDACC__)
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
#else
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(shared));
#endif
}

// All threads of the block, none of which may have returned.
GRAPHOPT_DEVICE void sync_block() {
#if defined(__CUDACC__)
  __syncthreads();
#else
  host::sync_block();
#endif
}

// All lanes; what they wrote to memory before is seen by the others behind it.
GRAPHOPT_DEVICE void sync_warp() {
#if defined(__CUDACC__)
  __syncwarp();
#else
  host::sync_warp();
#endif
}

// `value` of lane `from` (modulo 32), or of the lane whose number differs from this one's in the bits of `mask`; 4 or 8
// bytes. All lanes.
template <typename T>
GRAPHOPT_DEVICE T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
#if defined(__CUDACC__)
  return __shfl_sync(0xffffffffu, value, from);
#else
  return host::shuffle(value, from % kWarp);
#endif
}
template <typename T>
GRAPHOPT_DEVICE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
#if defined(__CUDACC__)
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return host::shuffle(value, (lane() ^ mask) % kWarp);
#endif
}

// Bit i is lane i's value. All lanes.
GRAPHOPT_DEVICE uint32_t ballot(bool value) {
#if defined(__CUDACC__)
  return __ballot_sync(0xffffffffu, value);
#else
  return host::ballot(value);
#endif
}

// Over groups of `Lanes` neighbouring lanes, a power of two; every lane has the result, with the same bits. All lanes.
template <int Lanes = kWarp, typename T>
GRAPHOPT_DEVICE T reduce_sum(T value) {
  GRAPHOPT_UNROLL
  for (int mask = Lanes / 2; mask > 0; mask /= 2) value = value + shuffle_xor(value, mask);
  return value;
}
template <int Lanes = kWarp, typename T>
GRAPHOPT_DEVICE T reduce_max(T value) {
  GRAPHOPT_UNROLL
  for (int mask = Lanes / 2; mask > 0; mask /= 2) {
    const T other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// Adds in global or shared memory and returns the previous value; the order among threads is undefined, so integers
// only.
GRAPHOPT_DEVICE int32_t atomic_add(int32_t* at, int32_t value) {
#if defined(__CUDACC__)
  return atomicAdd(at, value);
#else
  return host::atomic_add(at, value);
#endif
}
GRAPHOPT_DEVICE uint32_t atomic_add(uint32_t* at, uint32_t value) {
#if defined(__CUDACC__)
  return atomicAdd(at, value);
#else
  return host::atomic_add(at, value);
#endif
}

// In a kernel that launch_early() starts, this returns when the kernel before it on the stream is done: what that one
// writes must not be read earlier, and what it reads not written. All threads, once.
GRAPHOPT_DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel, if launch_early() starts it, may begin once all blocks have come here or have ended.
GRAPHOPT_DEVICE void let_next_begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A thread of the grid that sees a write of this thread after the fence also sees those before it.
GRAPHOPT_DEVICE void fence() {
#if defined(__CUDACC__)
  __threadfence();
#endif
}

}  // namespace graphopt

#include "cuda/memory.h"
#include "cuda/numbers.h"
#include "cuda/pairs.h"
