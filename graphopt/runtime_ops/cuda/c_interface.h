// The CUDA operators without onnxruntime: what tests, tools/bench_cuda.py and the operators for onnxruntime call alike.
//
// Each call starts kernels on a stream (a cudaStream_t; null for CUDA's own) and returns before they are done. It returns
// null, or what went wrong, in words that live until the thread's next call. All pointers are to memory of the device, at
// multiples of 16 bytes, unless the word "host" stands beside them; scratch holds as many bytes as ..._scratch says, and
// may be null where that is 0. Nothing is allocated. Callers check shapes; codes are never trusted.
//
// tests/runtime_ops/cuda/interface.py states the same structs for Python.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define GRAPHOPT_PUBLIC __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Types of numbers, as ONNX counts them.
enum GraphoptType { GRAPHOPT_FLOAT32 = 1, GRAPHOPT_FLOAT16 = 10, GRAPHOPT_BFLOAT16 = 16 };

#ifdef __cplusplus
}  // extern "C"
#endif
