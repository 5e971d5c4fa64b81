// The C interface of the products with packed weights.
#pragma once

#include "cuda/c_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a product multiplies; the same numbers as graphopt::Operands.
enum GraphoptOperands { GRAPHOPT_BY_FLOAT32, GRAPHOPT_BY_FLOAT16, GRAPHOPT_BY_BFLOAT16, GRAPHOPT_BY_INT8 };

// What x is rounded to: MatMulTable's attribute `activations`; `token` is MatMulDynamic's rounding.
enum GraphoptActivations {
  GRAPHOPT_TO_FLOAT32,
  GRAPHOPT_TO_BFLOAT16,
  GRAPHOPT_TO_INT8,
  GRAPHOPT_TO_INT16,
  GRAPHOPT_TO_TOKEN
};

// How packed codes are decoded; graphopt_cuda_matmul_codec fills it in.
struct GraphoptMatMulCodec {
  int32_t operands, decoder, order;
  int32_t bits;         // of a packed code: 8 for a trellis that no decoder reads, whose weights are packed as bytes
  uint32_t flips;       // bits of each code that are packed inverted
  int32_t offset;       // value = step (decoded + offset)
  float step;           // a power of two, or max|table| / 32767
  float largest;        // magnitude of what is decoded, in steps
  uint32_t lookup[8];   // a table of 16 entries, two of bytes for a trellis, or constants
};

// Weights as a file has them, all on the host: K rows, N columns; codes uint8 [T, U, 32 bits], table float [entries], or
// [2, entries] of a trellis, whose sums are 127 of a step at most.
struct GraphoptMatMulWeights {
  uint64_t rows, columns;
  int32_t bits, entries, trellis;
  const uint8_t* codes;
  const float* table;
};

// y [m, N] = round(x [m, K]) W + bias, as graphopt/runtime_ops/matmul_table/spec/op.py says it.
struct GraphoptMatMul {
  const void* x;   // x_type [m, K], at any multiple of a number's size
  void* y;         // x_type [m, N]
  uint64_t m, rows, columns, group;  // rows is K, columns N
  int32_t x_type;                    // GraphoptType
  int32_t scale_type;                // float32 or float16
  int32_t activations;               // GraphoptActivations
  int32_t levels;                    // of `token`: 127 or 7
  float clip;                        // of `token`
  const void* packed;                // made by graphopt_cuda_matmul_pack
  const void* scales;                // scale_type [T, G, 16]
  const void* zero_points;           // the same, or null
  const float* bias;                 // float [N], or null
  float largest_scale;               // max|scales|; 0 where it is not known, and then tiny weights lose digits in float16
  struct GraphoptMatMulCodec codec;
  void* scratch;
};

// Which operands a product of x_type with this rounding multiplies.
GRAPHOPT_PUBLIC int32_t graphopt_cuda_matmul_operands(int32_t x_type, int32_t activations);

// On the host. Fills in the codec, and returns how many bytes packing takes.
GRAPHOPT_PUBLIC size_t graphopt_cuda_matmul_codec(const struct GraphoptMatMulWeights* weights, int32_t operands,
                                                  struct GraphoptMatMulCodec* codec);
// On the host: packs the codes for the codec, and returns the largest; a code past the table is packed like code 0.
GRAPHOPT_PUBLIC int32_t graphopt_cuda_matmul_pack(const struct GraphoptMatMulWeights* weights,
                                                  const struct GraphoptMatMulCodec* codec, void* to);

GRAPHOPT_PUBLIC size_t graphopt_cuda_matmul_table_scratch(const struct GraphoptMatMul* product);
GRAPHOPT_PUBLIC const char* graphopt_cuda_matmul_table(const struct GraphoptMatMul* product, void* stream);

// The same of x whose rows are transformed first, in runs of left x right numbers, as matmul_dynamic/op.py says it.
// With two factors of order 1 and sign 1 they are not. product.activations is GRAPHOPT_TO_TOKEN.
struct GraphoptMatMulDynamic {
  struct GraphoptMatMul product;
  struct GraphoptFactor left, right;
};
GRAPHOPT_PUBLIC size_t graphopt_cuda_matmul_dynamic_scratch(const struct GraphoptMatMulDynamic* call);
GRAPHOPT_PUBLIC const char* graphopt_cuda_matmul_dynamic(const struct GraphoptMatMulDynamic* call, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
