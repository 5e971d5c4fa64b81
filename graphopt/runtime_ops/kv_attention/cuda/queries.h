// Queries as blocks keep them in shared memory.
#pragma once

#include "kv_attention/cuda/tile_queries.h"
#include "kv_attention/cuda/reader.h"

namespace graphopt {

// A query times the scale, and times what makes scores logarithms to base 2.
GRAPHOPT_DEVICE void take_query(const CudaCall& call, const TileQueries& query, const void* from, float* to) {
  const Layout& layout = call.layout;
  const int size = static_cast<int>(layout.size), stride = SharedQueries::stride_of(layout);
  const float factor = layout.softcap != 0 ? layout.scale : layout.scale * kLog2E;
  for (int c = lane(); c < stride; c += kWarp) {
    const bool there = query.used && c < size;
    to[c] = there ? load_number(from, call.type, query.at + static_cast<size_t>(c)) * factor : 0.0f;
  }
}

}  // namespace graphopt
