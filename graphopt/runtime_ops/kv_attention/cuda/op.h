// ai.graphopt::KVAttention for onnxruntime's CUDA provider: one operator per type of activations, float and float16,
// and of keys and values.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

extern const OrtCustomOp* const kCudaKVAttentionOps[10];

}  // namespace graphopt
