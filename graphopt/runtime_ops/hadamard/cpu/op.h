// ai.graphopt::Hadamard as onnxruntime sees it: one operator per type of x.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kHadamardOps[3];

}  // namespace graphopt
