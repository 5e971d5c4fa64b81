// The kernels of KVAttention and PagedAttention: raw pointers in, raw pointers out. kernels.cc is compiled once for each
// set of instructions.
#pragma once

#include "abi/half.h"
#include "kv_attention/shared/layout.h"

namespace graphopt {

// Requests that share a pool of blocks. A block holds some tokens of all KV heads, head by head, and a page consists of
// as many blocks as its tokens take. Of latents, which have no values, the first half of a block's tokens lies among the
// keys and the second half among the values: engines give both the same bytes. A page is such a half.
struct Blocks {
  const int32_t* table = nullptr;  // [rows, columns], the blocks of each row in order; null where rows have own pages
  size_t columns = 0, tokens = 0;  // of the table; of a block
  float *key_scales = nullptr, *value_scales = nullptr;  // [blocks, kv_heads, tokens]; null where numbers have none
  const int32_t* starts = nullptr;  // [rows + 1]: the tokens of the rows stand one behind the other
};

struct Group;

// One call, checked.
struct Attention {
  Layout layout;
  Blocks blocks;
  const Group* groups = nullptr;  // of rows that begin with the same pages; of two that share a row, the larger first
  size_t group_count = 0;
  const int64_t* grouped = nullptr;  // of each row, how many of its first pages groups read; null without groups
  const Policy* policies = nullptr;  // of each KV head
  size_t rows = 0, columns = 0;
  const float *query = nullptr, *key = nullptr, *value = nullptr;
  const float *sink_logits = nullptr, *sink_query = nullptr;  // null if absent
  const float* slopes = nullptr;                              // [query heads], of biases by distance; null if absent
  const Half* feedback = nullptr;                             // [kv_heads, size, size]; null if absent
  const int32_t* chosen = nullptr;  // [tokens, most_chosen], the positions that each reads, where the layout chooses
  size_t most_chosen = 0;
  const size_t* chosen_counts = nullptr;                      // [tokens], how many of them each reads
  const int64_t *past = nullptr, *fresh = nullptr;            // tokens stored, and tokens of this call, of each row
  State state = {};
  // Where tokens have residuals, the pages with new tokens as floats, keys [page / 16, size, 16] and values [page, size]
  // of each head of a row, and how many pages of a head those of a row come after; null elsewhere.
  float* refined = nullptr;
  const size_t* refined_before = nullptr;  // [rows + 1]
  float* y = nullptr;

  GRAPHOPT_INLINE size_t first_column(size_t row) const {
    return blocks.starts ? 0 : columns - static_cast<size_t>(fresh[row]);
  }
  GRAPHOPT_INLINE size_t end_column(size_t row) const {
    return blocks.starts ? static_cast<size_t>(fresh[row]) : columns;
  }
  // Which of all tokens of the call stands in a column of a row.
  GRAPHOPT_INLINE size_t token(size_t row, size_t column) const {
    return (blocks.starts ? static_cast<size_t>(blocks.starts[row]) : row * columns) + column;
  }
  GRAPHOPT_INLINE int64_t position(size_t row, size_t column) const {
    return past[row] + static_cast<int64_t>(column - first_column(row));
  }
  // The runs of a block: two of latents.
  GRAPHOPT_INLINE size_t runs_of_block() const { return layout.latent() ? 2 : 1; }
  // The tokens of a head that lie side by side: those of a page, or of a block of it.
  GRAPHOPT_INLINE size_t run_tokens() const { return blocks.table ? blocks.tokens / runs_of_block() : layout.page; }
  GRAPHOPT_INLINE size_t run_bytes() const { return run_tokens() * layout.size * layout.bits / 8; }
  // The runs of a row that have a token.
  GRAPHOPT_INLINE size_t runs_in_use(size_t row) const {
    return (static_cast<size_t>(past[row] + fresh[row]) + run_tokens() - 1) / run_tokens();
  }
  // The entries of the table of a row whose blocks have a token.
  GRAPHOPT_INLINE size_t blocks_in_use(size_t row) const {
    return (runs_in_use(row) + runs_of_block() - 1) / runs_of_block();
  }
  // Where run `index` of a row lies, counted in runs from the beginning of the keys or values; of latents in blocks, in
  // runs of keys and values by turns.
  GRAPHOPT_INLINE size_t place(size_t row, size_t head, size_t index) const {
    if (!blocks.table) return (row * layout.kv_heads + head) * layout.pages + layout.physical(static_cast<int64_t>(index));
    const size_t of_block = runs_of_block();
    const auto block = static_cast<size_t>(blocks.table[row * blocks.columns + index / of_block]);
    return (block * layout.kv_heads + head) * of_block + index % of_block;
  }
  GRAPHOPT_INLINE float* refined_page(size_t row, size_t head, int64_t logical) const {
    const size_t before = refined_before[row], count = refined_before[row + 1] - before;
    const size_t of_row = head * count + static_cast<size_t>(logical - layout.page_of(past[row]));
    return refined + (before * layout.kv_heads + of_row) * layout.slot_floats();
  }
  // The last page of a row that has a token; -1 if there is none.
  GRAPHOPT_INLINE int64_t newest_page(size_t row) const {
    const int64_t tokens = past[row] + fresh[row];
    return tokens ? layout.page_of(tokens - 1) : -1;
  }
};

// A run of tokens of a head: keys and values and, where they have some, their scales.
struct TokenRun {
  char *keys, *values;
  float *key_scales, *value_scales;

  GRAPHOPT_INLINE TokenRun(const Attention& call, size_t place)
      : keys(first(call, place)),
        values(call.layout.latent() ? nullptr : call.state.values + place * call.run_bytes()),
        key_scales(call.blocks.key_scales), value_scales(call.blocks.value_scales) {
    if (key_scales) key_scales += place * call.run_tokens(), value_scales += place * call.run_tokens();
  }
  // How many bytes behind the keys of this run those of another one lie.
  GRAPHOPT_INLINE ptrdiff_t to(const TokenRun& other) const {
    return static_cast<ptrdiff_t>(reinterpret_cast<uintptr_t>(other.keys) - reinterpret_cast<uintptr_t>(keys));
  }

 private:
  static GRAPHOPT_INLINE char* first(const Attention& call, size_t place) {
    if (!call.blocks.table || !call.layout.latent()) return call.state.keys + place * call.run_bytes();
    return (place % 2 ? call.state.values : call.state.keys) + place / 2 * call.run_bytes();
  }
};

// A page that is read, in one number: twice its index, and 1 where a policy chose the whole of it.
using PageEntry = int64_t;

// A token of a call.
struct Member {
  uint32_t row, column;
};

constexpr size_t kMostGroups = 4;  // that a row is in
constexpr size_t kMostHeadsTogether = 8;

// Tokens of several rows that all see the pages `begin` up to `end`, which are the same blocks for all of them.
struct Group {
  const Member* members;  // row by row
  size_t count;
  int64_t begin, end;
};

// Queries that read pages together: those of all query heads of a KV head, in a run of columns of a row, or of a group.
// Their rows are [column][query head].
struct Queries {
  size_t row, head, first_column, end_column;
  const Member* members;  // what the columns are, of a group: then `row` is any of its rows
  // The pages that they read: 0..`sinks`, then `begin` on, `pages` in all; or those of a list, where there is one.
  int64_t sinks, begin;
  size_t pages;
  const PageEntry* list;
  bool whole, has_list;

  GRAPHOPT_INLINE size_t columns() const { return end_column - first_column; }
  GRAPHOPT_INLINE Member member(size_t i) const {
    return members ? members[i] : Member{static_cast<uint32_t>(row), static_cast<uint32_t>(first_column + i)};
  }
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

// Partial results [count] of the same queries, or of some that these are among, from `first_row` on.
struct Source {
  const float* partials;
  size_t count, rows, first_row;

  GRAPHOPT_INLINE Partial part(size_t i, size_t size) const {
    return Partial(const_cast<float*>(partials) + i * Partial::floats(rows, size), rows, size);
  }
};

struct KVAttentionKernels {
  // Writes the new tokens of one head of a row into its pages, and brings its summaries up to date.
  void (*append)(const Attention&, size_t row, size_t head, float* scratch);
  // Bytes that `attend` needs, at a multiple of 64.
  size_t (*attend_scratch)(const Layout&, size_t rows);
  // Reads the pages `first` up to `end` of those that the queries read: `count` of them, at most kMostHeadsTogether, of
  // different heads and otherwise the same. They take turns page by page, as heads of a block lie side by side. `partials`
  // has memory for the Partial of each; `scratch` is for all of them.
  void (*attend)(const Attention&, const Queries*, size_t count, size_t first, size_t end, void* scratch,
                 float* const* partials);
  // Of queries that read a list: bytes that `score` needs, at a multiple of 64.
  size_t (*score_scratch)(const Attention&, const Queries&);
  // Scores pages first..end of those that can be in the list; `scores` is the memory for all of them.
  void (*score)(const Attention&, const Queries&, int64_t first, int64_t end, float* scores, void* scratch);
  // Lists the pages that the queries read, from the scores, which are overwritten. Returns how many there are.
  size_t (*list)(const Attention&, const Queries&, float* scores, PageEntry* list);
  // Merges partial results, in their order, and writes y.
  void (*merge)(const Attention&, const Queries&, const Source* sources, size_t count);
};

// Floats of scratch that `append` needs.
GRAPHOPT_INLINE size_t append_scratch(const Layout& layout) {
  if (!layout.integers()) return layout.key_feedback ? (layout.size + 1) * layout.size : 0;
  const size_t of_page = 4 * layout.size + 2 * layout.page;
  const size_t divided = layout.token_factors ? layout.page * layout.size : 0;
  return of_page + divided + (layout.key_feedback ? (layout.size + 16) * layout.size : 0);
}

extern const KVAttentionKernels kKVAttentionScalar, kKVAttentionAvx2, kKVAttentionAvx512, kKVAttentionNeon;

}  // namespace graphopt
