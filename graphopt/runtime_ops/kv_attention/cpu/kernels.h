// KVAttention's kernels: raw pointers in, raw pointers out. cpu.cc is compiled once for each set of instructions.
#pragma once

#include "kv_attention/shared/layout.h"

namespace graphopt {

// One call, checked.
struct Attention {
  Layout layout;
  const Policy* policies = nullptr;  // of each KV head
  size_t rows = 0, columns = 0;
  const float *query = nullptr, *key = nullptr, *value = nullptr;
  const float *sink_logits = nullptr, *sink_query = nullptr;  // null if absent
  const int64_t *past = nullptr, *fresh = nullptr;            // tokens stored, and tokens of this call, of each row
  State state = {};
  float* y = nullptr;

  GRAPHOPT_INLINE size_t first_column(size_t row) const { return columns - static_cast<size_t>(fresh[row]); }
  GRAPHOPT_INLINE int64_t position(size_t row, size_t column) const {
    return past[row] + static_cast<int64_t>(column - first_column(row));
  }
  // The last page of a row that has a token; -1 if there is none.
  GRAPHOPT_INLINE int64_t newest_page(size_t row) const {
    const int64_t tokens = past[row] + fresh[row];
    return tokens ? layout.page_of(tokens - 1) : -1;
  }
};

// A page that is read, in one number: twice its index, and 1 where a policy chose the whole of it.
using PageEntry = int64_t;

// Queries that read pages together: those of all query heads of a KV head, in a run of columns of a row. Their rows are
// [column][query head].
struct Queries {
  size_t row, head, first_column, end_column;
  // The pages that they read: 0..`sinks`, then `begin` on, `pages` in all; or those of a list, where there is one.
  int64_t sinks, begin;
  size_t pages;
  const PageEntry* list;
  bool whole;

  GRAPHOPT_INLINE PageEntry entry(size_t index) const {
    if (list) return list[index];
    const int64_t i = static_cast<int64_t>(index);
    return 2 * (i < sinks ? i : begin + (i - sinks)) + whole;
  }
};

// The softmax of rows over some of the pages: for each row the largest score, the sum of the exponentials of what is
// less by, and the values weighted by them. Where the sum is 0 the row has read nothing.
struct Partial {
  float *values, *largest, *sums;  // [rows, size], [rows], [rows]

  GRAPHOPT_INLINE Partial(float* memory, size_t rows, size_t size)
      : values(memory), largest(memory + rows * size), sums(largest + rows) {}
  static GRAPHOPT_INLINE size_t floats(size_t rows, size_t size) { return (rows * (size + 2) + 15) / 16 * 16; }
};

struct KVAttentionKernels {
  // Writes the new tokens of one head of a row into its pages, and brings its summaries up to date.
  void (*append)(const Attention&, size_t row, size_t head, float* scratch);
  // Bytes that `attend` needs, at a multiple of 64.
  size_t (*attend_scratch)(const Layout&, size_t rows);
  // Reads the pages `first` up to `end` of those that the queries read.
  void (*attend)(const Attention&, const Queries&, size_t first, size_t end, void* scratch, const Partial&);
  // Scores of pages first..end of one column, over the query heads of a KV head; NaN counts as infinite.
  void (*score)(const Attention&, size_t row, size_t head, size_t column, int64_t first, int64_t end, float* scores);
  // Lists the pages that a query at `position` reads, from scores of its candidates, which are overwritten; they need
  // list_floats floats. Returns how many there are.
  size_t (*list)(const Layout&, int64_t position, float* scores, PageEntry* list);
  // Merges partial results, in their order, and writes y.
  void (*merge)(const Attention&, const Queries&, const float* partials, size_t count);
};

// Floats of scratch that `append` needs.
GRAPHOPT_INLINE size_t append_scratch(const Layout& layout) {
  return layout.integers() ? 4 * layout.size + 2 * layout.page : 0;
}

extern const KVAttentionKernels kKVAttentionScalar, kKVAttentionAvx2, kKVAttentionAvx512;

}  // namespace graphopt
