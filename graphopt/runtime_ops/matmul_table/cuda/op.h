// ai.graphopt::MatMulTable and MatMulDynamic for onnxruntime's CUDA provider: one operator for each type of x and of
// scales.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kCudaMatMulTableOps[4];
extern const OrtCustomOp* const kCudaMatMulDynamicOps[4];

}  // namespace graphopt
