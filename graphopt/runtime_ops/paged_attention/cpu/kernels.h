// PagedAttention's kernel: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// One call, checked; the new tokens are stored.
struct Requests {
  size_t kv_heads, group, size, page, columns;
  int64_t window;  // 0: none
  float scale, softcap;
  const float *query, *sink_logits;  // [tokens, heads, size], [heads] or null
  const int32_t *starts, *past, *table;
  const void *keys, *values;  // [blocks, page, kv_heads, size]
  int stored;                 // their type
  float* y;

  size_t heads() const { return kv_heads * group; }
  size_t padded_page() const { return (page + 15) / 16 * 16; }
  size_t scratch(size_t rows) const { return rows * (size + padded_page() + 2) + page * (2 * size + 1); }
};

// Queries of the tokens first..end of a request, of all query heads of a KV head.
struct Asked {
  size_t request, head, first, end;
};

struct PagedAttentionKernels {
  // Needs Requests::scratch floats for its rows, at a multiple of 64 bytes.
  void (*attend)(const Requests&, const Asked&, float* scratch);
};

extern const PagedAttentionKernels kPagedAttentionScalar, kPagedAttentionAvx2, kPagedAttentionAvx512;

}  // namespace graphopt
