// From the weights of a file to what the CUDA kernels read: on the host, once for each weight.
#pragma once

#include "matmul_table/cuda/interface.h"
#include "matmul_table/cuda/layout.h"
#include "matmul_table/shared/weights.h"

namespace graphopt {

// How the codes of a table are decoded to these operands; values: finite, entries of them, 1 to 2^bits.
GraphoptMatMulCodec codec_of(Operands operands, unsigned bits, const float* values, size_t entries);

// Bytes of packed codes with the table behind them.
size_t packed_bytes(const GraphoptMatMulCodec& codec, size_t rows, size_t columns);

// codes: as in a file, uint8 [T, U, 32 bits]; to: packed_bytes(). Returns the largest code.
unsigned pack_codes(const GraphoptMatMulCodec& codec, const uint8_t* codes, const float* values, size_t entries,
                    size_t rows, size_t columns, uint8_t* to);

}  // namespace graphopt
