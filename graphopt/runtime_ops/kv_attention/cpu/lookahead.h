// The pages that some queries read, and asking for them before they are read.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

struct Lookahead {
  const Attention& call;
  const Layout& layout;
  const Queries& queries;
  const HeadState state;
  size_t columns;
  int64_t newest;

  Lookahead(const Attention& call, const Queries& queries)
      : call(call), layout(call.layout), queries(queries), state(layout, call.state, queries.row, queries.head),
        columns(queries.columns()), newest(call.newest_page(queries.row)) {}

  int64_t position(size_t column) const {
    const Member member = queries.member(column);
    return call.position(member.row, member.column);
  }

  // Of the tokens of a page that are read, how many there are up to the last; of the newest page this can be a part.
  size_t tokens_read(PageEntry entry) const {
    const Visible seen = visible(layout, position(columns - 1), entry >> 1, entry & 1);
    const size_t end = static_cast<size_t>(seen.end[0] > seen.end[1] ? seen.end[0] : seen.end[1]);
    return (end + kColumns - 1) / kColumns * kColumns;
  }

  // Calls visit(run, tokens) for the runs of the first tokens of a page of numbers.
  template <typename Visit>
  void each_run(int64_t logical, size_t tokens, const Visit& visit) const {
    const size_t of_run = call.run_tokens(), first = static_cast<size_t>(logical) * (layout.page / of_run);
    const size_t in_use = call.runs_in_use(queries.row);
    for (size_t i = 0; i * of_run < tokens && first + i < in_use; ++i) {
      const size_t left = tokens - i * of_run;
      visit(TokenRun(call, call.place(queries.row, queries.head, first + i)), left < of_run ? left : of_run);
    }
  }

  // Adds what is read of a page of a storage of integers.
  void add(PageEntry entry, Ahead* ahead) const {
    const int64_t logical = entry >> 1;
    const size_t tokens = tokens_read(entry);
    if (!tokens) return;
    if (layout.in_slot(logical, newest)) {
      const float* const slot = state.recent + layout.slot(logical) * layout.slot_floats();
      const size_t bytes = tokens * layout.size * sizeof(float);
      ahead->add(slot, bytes);
      if (!layout.latent()) ahead->add(slot + layout.page * layout.size, bytes);
      return;
    }
    const size_t physical = layout.physical(logical), bytes = layout.key_bytes(), of_values = layout.value_bytes();
    // in the order in which they are needed
    ahead->add(state.scales + physical * layout.scales(), layout.scales() * sizeof(Half));
    ahead->add(state.keys + physical * bytes, bytes);
    if (!layout.latent()) ahead->add(state.values + physical * of_values, of_values);
  }

  // Prefetches a line of each 4 KB of a page well before the others. Pages lie far apart, so each address needs a walk
  // of page tables that are not in a cache: the first access waits for that, and all accesses behind it.
  void look_up(PageEntry entry) const {
    constexpr size_t kPageOfMemory = 4096;  // a virtual machine's host may use small pages whatever the guest uses
    if (!layout.integers()) {
      return each_run(entry >> 1, layout.page, [&](const TokenRun& run, size_t) {
        prefetch(run.keys, call.run_bytes(), kPageOfMemory);
        prefetch(run.values, run.values ? call.run_bytes() : 0, kPageOfMemory);
        prefetch(run.key_scales, run.key_scales ? 1 : 0), prefetch(run.value_scales, run.value_scales ? 1 : 0);
      });
    }
    const size_t physical = layout.physical(entry >> 1), of_keys = layout.key_bytes(), of_values = layout.value_bytes();
    prefetch(state.keys + physical * of_keys, of_keys, kPageOfMemory);
    prefetch(state.values + physical * of_values, of_values, kPageOfMemory);
    prefetch(state.scales + physical * layout.scales(), layout.scales() * sizeof(Half), kPageOfMemory);
  }

  static void prefetch(const void* from, size_t bytes, size_t step = kLine) {
    for (size_t i = 0; i < bytes; i += step) prefetch_line(static_cast<const char*>(from) + i, 0);
  }

  // For the first pages, which no earlier page prefetches.
  void ask_for(PageEntry entry) const {
    if (!layout.integers()) {
      return each_run(entry >> 1, tokens_read(entry), [&](const TokenRun& run, size_t tokens) {
        const size_t bytes = tokens * layout.size * layout.bits / 8;
        prefetch(run.keys, bytes), prefetch(run.values, run.values ? bytes : 0);
      });
    }
    Ahead ahead;
    add(entry, &ahead);
    ahead.ask_all();
  }
};

}  // namespace
}  // namespace graphopt
