// ai.graphopt::MatMulTable as onnxruntime sees it.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kMatMulTableOps[4];

}  // namespace graphopt
