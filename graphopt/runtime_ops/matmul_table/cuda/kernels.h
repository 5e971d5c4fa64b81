// The products with packed weights on a GPU: which kernels a call takes, and how much scratch.
#pragma once

#include "cuda/launch.h"
#include "matmul_table/cuda/interface.h"
#include "matmul_table/cuda/product.h"

namespace graphopt {

// Starts the product's kernel: few rows of an operand in two ways, or tiles of rows. Returns null or an error.
const char* start_few(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_narrow(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_wide(const Product& product, Operands operands, Decoder decoder, void* stream);
const char* start_tiles(const Product& product, Operands operands, Decoder decoder, void* stream);

// Whether there is a kernel for up to 16 rows at once, for many on this GPU, or for tiles: others take few rows at a
// time.
bool has_narrow(const Product& product, Operands operands, Decoder decoder);
bool has_wide(const Product& product, Operands operands, Decoder decoder);
bool has_tiles(const Product& product, Operands operands, Decoder decoder);

}  // namespace graphopt
