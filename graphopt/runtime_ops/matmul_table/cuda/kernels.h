// The products with packed weights on a GPU: which kernels a call takes, and how much scratch.
#pragma once

#include "cuda/launch.h"
#include "matmul_table/cuda/interface.h"
#include "matmul_table/cuda/product.h"

namespace graphopt {

// Starts the product's kernel: small M in two ways, or GEMM in two. Returns null or an error. Kernels that decode
// trellises are in files of their own, which compile meanwhile; the others start them.
const char* start_small_m(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_small_m_of_trellis(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_streamed(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_streamed_of_trellis(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_gemm_sm90(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_gemm(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_gemm_of_trellis(const Product& product, Operands operands, Decoder decoder, void* stream);

// Whether there is such a kernel for these operands; start_small_m takes all others, 16 rows at a time.
bool has_streamed(const Product& product, Operands operands, Decoder decoder);
bool has_gemm_sm90(const Product& product, Operands operands, Decoder decoder);
bool has_gemm(const Product& product, Operands operands, Decoder decoder);

}  // namespace graphopt
