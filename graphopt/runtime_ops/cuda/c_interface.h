// The CUDA operators without onnxruntime: what tests, tools/bench/gpu.py and the operators for onnxruntime call alike.
//
// Each call starts kernels on a stream (a cudaStream_t; null for the default one) and returns before they are done. It
// returns null or an error message, which is valid until the thread's next call. All pointers are to device memory, at
// multiples of 16 bytes, unless marked "host"; scratch holds as many bytes as ..._scratch returns, and may be null
// where that is 0. No kernel allocates. Callers check shapes; codes are never trusted.
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

// A matrix S(outer) (x) C (x) S(inner) of +1 and -1, where S is Sylvester's matrix of that order. Where core, the order
// of C, is 1, C is the matrix [sign]; sign is 1 elsewhere. C is a Kronecker product of matrices of the orders in
// `parts`, 0 behind the last.
#define GRAPHOPT_CORE_PARTS 4
struct GraphoptFactor {
  int32_t outer, core, inner, sign;
  int32_t parts[GRAPHOPT_CORE_PARTS];
  const void* signs;  // of the parts of C, as ..._factor packs them; not read where core is 1
};

// Takes a matrix [order, order] of +1 and -1 apart, row by row, all in host memory. Returns the bytes of its packed
// signs, and writes them where `signs` is not null; factor->signs is left alone. 0 and an error in `failure` where it
// cannot.
GRAPHOPT_PUBLIC size_t graphopt_cuda_hadamard_factor(const int8_t* matrix, int32_t order, struct GraphoptFactor* factor,
                                                     void* signs, const char** failure);

// Every run of left x right numbers, seen as a matrix X [left, right], becomes left^T X right / sqrt(left x right).
struct GraphoptHadamard {
  const void* x;  // [runs, left x right], at any multiple of a number's size
  void* y;        // the same; it may be x
  int64_t runs;
  int32_t type;  // of x and y; sums are of floats
  struct GraphoptFactor left, right;
  void* scratch;
};
GRAPHOPT_PUBLIC size_t graphopt_cuda_hadamard_scratch(const struct GraphoptHadamard* call);
GRAPHOPT_PUBLIC const char* graphopt_cuda_hadamard(const struct GraphoptHadamard* call, void* stream);

// y = g / (1 + exp(-g)) u for both halves g, u of each row of x; sums are of floats.
struct GraphoptSwiGLU {
  const void* x;  // [rows, 2 columns], at any multiple of a number's size
  void* y;        // [rows, columns], likewise
  int64_t rows;
  int32_t columns, type;
};
GRAPHOPT_PUBLIC const char* graphopt_cuda_swiglu(const struct GraphoptSwiGLU* call, void* stream);

// Queries, keys and values of one row for each token, heads of `size` numbers. The first `rotary` numbers of a head of
// queries or keys are turned in pairs: neighbours where interleaved, else those rotary / 2 apart.
struct GraphoptSplitRotary {
  const void* x;             // [tokens, (heads + 2 kv_heads) size], all pointers at any multiple of a number's size
  const void *cos, *sin;     // [tokens, rotary / 2]
  void *queries;             // [tokens, heads size]
  void *keys, *values;       // [tokens, kv_heads size]
  int64_t tokens;
  int32_t heads, kv_heads, size;
  int32_t rotary, interleaved, type;
};
GRAPHOPT_PUBLIC const char* graphopt_cuda_split_rotary(const struct GraphoptSplitRotary* call, void* stream);

// Device memory for caches. These functions return when they are done; kernels that use the memory must have finished
// before.
GRAPHOPT_PUBLIC const char* graphopt_cuda_allocate(void** memory, size_t bytes);  // zeros, at a multiple of 256 bytes
GRAPHOPT_PUBLIC void graphopt_cuda_free(void* memory);
// Copies `rows` runs of bytes that begin a pitch apart; each side may be memory of the host or of the device. The two
// do not overlap.
GRAPHOPT_PUBLIC const char* graphopt_cuda_copy(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                               size_t bytes, size_t rows);
GRAPHOPT_PUBLIC const char* graphopt_cuda_memory_left(size_t* bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
