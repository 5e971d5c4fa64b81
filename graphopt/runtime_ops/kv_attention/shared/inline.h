// Small functions of both backends.
#pragma once

// These functions are compiled for every set of instructions: without this the linker could keep the copy that was
// compiled for wide vectors for a machine that has none.
#if defined(__CUDACC__)
#define GRAPHOPT_INLINE __host__ __device__ __forceinline__
// Before a template that calls what it is given: nvcc would warn of each instance that calls a function of the host alone.
#define GRAPHOPT_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
#define GRAPHOPT_INLINE inline __attribute__((always_inline))
#define GRAPHOPT_CALLS_EITHER
#endif
