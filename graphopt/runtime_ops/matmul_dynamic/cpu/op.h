// ai.graphopt::MatMulDynamic as onnxruntime sees it.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kMatMulDynamicOps[4];

}  // namespace graphopt
