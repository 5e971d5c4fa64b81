// The layout of a cache, and which tokens a query reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_attention/shared/policy.h"
#include "kv_attention/shared/storage.h"

namespace graphopt {

// The shape of pages, with the parameters of policies. Every attribute that counts tokens is at most 2^62, as positions
// are, so that a sum of two does not overflow.
struct Layout : PolicyParameters {
  Storage storage = Storage::kFloat32, value_storage = Storage::kFloat32;  // both floats, or both codes
  unsigned bits = 32, levels = 0;              // of keys: of a number, and the largest code; 0 for floats
  unsigned value_bits = 32, value_levels = 0;  // the same of values
  size_t kv_heads = 0, group = 0, size = 0;  // heads, query heads of each, channels
  size_t value_size = 0;                     // values are the first so many channels of keys; 0: they are stored too
  size_t page = 0, pages = 0;                // tokens of a page, pages of the cache
  size_t known = 0, summary = 0;             // floats of a page's summary: those to choose by come first; and all
  int64_t sink_pages = 0, recent_pages = 0;  // of the pages that integer storages keep in floats
  int64_t window = 0, sinks = 0, recent = 1;
  int64_t chunked = 0;  // whether the window of a token begins with its chunk of so many tokens, see first_seen
  float scale = 1, softcap = 0;
  int64_t token_factors = 0;  // whether keys of a page have factors by token
  int64_t key_feedback = 0;   // whether what a channel of keys is rounded by goes to the channels behind it
  int64_t residuals = 0;      // whether the newest tokens of a block have second codes, of what the first ones leave
  int64_t chooses = 0;        // whether the call says which tokens each query reads
  float clip = 1, value_clip = 1;  // of what the numbers of a set span, the share that codes of keys, of values span

  inline __attribute__((always_inline)) void store_as(Storage how) {
    storage = how, bits = bits_of_storage(how), levels = levels_of_storage(how);
    store_values_as(how);
  }
  inline __attribute__((always_inline)) void store_values_as(Storage how) {
    value_storage = how, value_bits = bits_of_storage(how), value_levels = levels_of_storage(how);
  }
  // Fills in what follows from the parameters of policies and the sizes; `uses` says which policies heads have.
  template <typename Uses>
  inline __attribute__((always_inline)) void complete(const Uses& uses) {
    known = 0;
    each_policy([&](Policy policy, auto states) __attribute__((always_inline)) {
      decltype(states)::complete(this);
      if (uses(policy)) known += decltype(states)::summary_floats(*this);
    });
    summary = known + (compensate ? 2 * size : 0);  // behind them are means of all tokens from the sinks on
  }
  GRAPHOPT_INLINE bool integers() const { return levels > 0; }
  // Queries that a block asks, of those that choose pages in blocks.
  GRAPHOPT_INLINE size_t sampled_queries() const { return static_cast<size_t>(query_block / query_stride); }
  GRAPHOPT_INLINE bool scales_tokens() const { return storage > Storage::kCount; }
  GRAPHOPT_INLINE size_t query_heads() const { return kv_heads * group; }
  // Whether a token is one row, of which values are a part: a latent that all query heads share.
  GRAPHOPT_INLINE bool latent() const { return value_size > 0; }
  GRAPHOPT_INLINE size_t value_channels() const { return latent() ? value_size : size; }
  // Bytes of the keys of a page, and of its values.
  GRAPHOPT_INLINE size_t key_bytes() const { return page * size * bits / 8; }
  GRAPHOPT_INLINE size_t value_bytes() const { return latent() ? 0 : page * size * value_bits / 8; }
  // Neighbouring codes that are packed together, see spec/layout.py.
  GRAPHOPT_INLINE size_t unit() const {
    const size_t of_keys = unit_of_bits(bits), of_values = unit_of_bits(value_bits);
    return of_keys > of_values ? of_keys : of_values;
  }
  // Numbers of a page of codes, float16: low and step of each channel of keys, of each token of values, and factors of
  // tokens.
  GRAPHOPT_INLINE size_t factors_at() const { return 2 * size + (latent() ? 0 : 2 * page); }
  GRAPHOPT_INLINE size_t scales() const { return integers() ? factors_at() + (token_factors ? page : 0) : 0; }
  GRAPHOPT_INLINE size_t slots() const { return integers() ? static_cast<size_t>(sink_pages + recent_pages + 1) : 0; }
  GRAPHOPT_INLINE size_t slot_floats() const { return (latent() ? 1 : 2) * page * size; }

  GRAPHOPT_INLINE int64_t page_of(int64_t position) const { return position / static_cast<int64_t>(page); }
  // The first position that the model's own window shows the query at `position`; it never decreases with that.
  GRAPHOPT_INLINE int64_t first_seen(int64_t position) const {
    if (!window || position < window) return 0;
    return chunked ? position - position % window : position - window + 1;
  }
  // Pages of sink tokens, which stay readable: they are not overwritten when a cache wraps.
  GRAPHOPT_INLINE int64_t fixed_pages() const {
    return (sinks + static_cast<int64_t>(page) - 1) / static_cast<int64_t>(page);
  }
  GRAPHOPT_INLINE size_t physical(int64_t logical) const {
    const int64_t fixed = fixed_pages();
    if (logical < static_cast<int64_t>(pages)) return static_cast<size_t>(logical);
    return static_cast<size_t>(fixed + (logical - fixed) % (static_cast<int64_t>(pages) - fixed));
  }
  GRAPHOPT_INLINE size_t slot(int64_t logical) const {
    const int64_t behind = logical - sink_pages;
    return static_cast<size_t>(behind < 0 ? logical : sink_pages + behind % (recent_pages + 1));
  }
  // Whether a page is read from its slot, where `newest` is the last page that has a token.
  GRAPHOPT_INLINE bool in_slot(int64_t logical, int64_t newest) const {
    return logical < sink_pages || logical + recent_pages + 1 > newest;
  }
};

// The state tensors, as they are written.
struct State {
  char *keys, *values;
  Half* scales;
  float *recent, *summaries;
};

// The parts of the state that belong to one head of one row.
struct HeadState {
  char *keys, *values;
  Half* scales;
  float *recent, *summaries;

  GRAPHOPT_INLINE HeadState(const Layout& layout, const State& state, size_t row, size_t head) {
    const size_t index = row * layout.kv_heads + head, pages = index * layout.pages;
    keys = state.keys + pages * layout.key_bytes();
    values = layout.latent() ? nullptr : state.values + pages * layout.value_bytes();
    scales = state.scales + pages * layout.scales();
    recent = state.recent + index * layout.slots() * layout.slot_floats();
    summaries = state.summaries + pages * layout.summary;
  }
};

// The tokens of a page that a query reads: offsets from `first[i]` up to `end[i]`, of two runs that do not meet.
struct Visible {
  int first[2] = {0, 0}, end[2] = {0, 0};

  GRAPHOPT_INLINE bool none() const { return first[0] >= end[0] && first[1] >= end[1]; }
  GRAPHOPT_INLINE bool all(size_t page) const { return first[0] == 0 && end[0] == static_cast<int>(page); }
};

// The tokens of page `logical` that the query at `position` reads; `whole` if the page was chosen or the policy is
// dense.
GRAPHOPT_INLINE Visible visible(const Layout& layout, int64_t position, int64_t logical, bool whole) {
  const int64_t page = static_cast<int64_t>(layout.page), base = logical * page;
  const auto offset = [&](int64_t token) __attribute__((always_inline)) {
    return static_cast<int>(token < base ? 0 : token > base + page ? page : token - base);
  };
  const int begin = offset(layout.first_seen(position)), end = offset(position + 1);
  Visible seen;
  if (begin >= end) return seen;
  const int sinks_end = offset(layout.sinks), recent_begin = offset(position - layout.recent + 1);
  if (whole || recent_begin <= sinks_end) {
    seen.first[0] = begin, seen.end[0] = end;
    return seen;
  }
  const auto least = [](int a, int b) __attribute__((always_inline)) { return a < b ? a : b; };
  if (begin < least(sinks_end, end)) seen.first[0] = begin, seen.end[0] = least(sinks_end, end);
  const int tail = recent_begin > begin ? recent_begin : begin;
  if (tail < end) seen.first[1] = tail, seen.end[1] = end;
  return seen;
}

}  // namespace graphopt
