// ai.graphopt::KVAttention as onnxruntime sees it: one operator per type of the keys and values.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kKVAttentionOps[10];

}  // namespace graphopt
