// Writing new tokens into pages, rounding pages that leave their slot, and keeping summaries.
#pragma once

#include "kv_attention/cuda/call.h"

namespace graphopt {

// Updates the state with the new tokens of all rows; returns null or an error.
const char* append_tokens(const CudaCall& call, void* stream);

}  // namespace graphopt
