// Writing new tokens into pages, rounding pages that leave their slot, and keeping summaries.
#pragma once

#include "kv_attention/cuda/call.h"

namespace graphopt {

// Brings the state up to date by the new tokens of all rows; null, or what went wrong.
const char* append_tokens(const CudaCall& call, void* stream);

}  // namespace graphopt
