// Writing new tokens into pages, rounding pages that leave their slot, and keeping summaries.
#pragma once

#include "kv_attention/cuda/call.h"

namespace graphopt {

// Where the floats of a page lie among those of all slots.
GRAPHOPT_DEVICE size_t slot_of(const Layout& layout, int64_t page) { return layout.slot(page) * layout.slot_floats(); }

// Rounds the pages that leave their slot in this call; null, or what went wrong.
const char* round_leaving_pages(const CudaCall& call, void* stream);

// Updates the state with the new tokens of all rows; returns null or an error.
const char* append_tokens(const CudaCall& call, void* stream);

}  // namespace graphopt
