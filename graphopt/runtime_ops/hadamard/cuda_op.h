// ai.graphopt::Hadamard for onnxruntime's CUDA provider: one operator per type of x, float and float16.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kCudaHadamardOps[2];

}  // namespace graphopt
