// From the weights of a file to what the CUDA kernels read: on the host, once for each weight.
#pragma once

#include "matmul_table/cuda/interface.h"
#include "matmul_table/cuda/layout.h"
#include "matmul_table/shared/weights.h"

namespace graphopt {

// How codes are decoded to these operands. The table is finite, of 1 to 2^bits entries or the two tables of a trellis.
GraphoptMatMulCodec codec_of(Operands operands, const GraphoptMatMulWeights& weights);

// Bytes of packed codes with the table behind them.
size_t packed_bytes(const GraphoptMatMulCodec& codec, size_t rows, size_t columns);

// to: packed_bytes(). Returns the largest code.
unsigned pack_codes(const GraphoptMatMulCodec& codec, const GraphoptMatMulWeights& weights, uint8_t* to);

}  // namespace graphopt
