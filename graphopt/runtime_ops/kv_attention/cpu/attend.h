// Attention of a few queries over a list of pages.
#pragma once

#include <initializer_list>

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/integers.h"
#include "kv_attention/cpu/softmax.h"

namespace graphopt {
namespace {

// The keys of a slot, [page, size], as [page / 16, size, 16].
inline void transpose_keys(const float* keys, size_t size, size_t lines, float* to) {
  for (size_t i = 0; i < lines; ++i) {
    for (size_t c = 0; c < size; c += kColumns) {
      const float* const from = keys + i * kColumns * size + c;
      float* const block = to + (i * size + c) * kColumns;
#if defined(__AVX512F__)
      __m512 row[kColumns], next[kColumns];
#pragma GCC unroll 16
      for (size_t t = 0; t < 16; ++t) row[t] = _mm512_loadu_ps(from + t * size);
      // rows that are 8, 4, 2 and 1 apart change halves
      const auto halves = [&](__m512* out, const __m512* in, size_t distance, __m512i low, __m512i high)
          __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (size_t t = 0; t < 16; ++t) {
          if (t & distance) continue;
          out[t] = _mm512_permutex2var_ps(in[t], low, in[t + distance]);
          out[t + distance] = _mm512_permutex2var_ps(in[t], high, in[t + distance]);
        }
      };
      const auto index = [](int distance, bool upper) __attribute__((always_inline)) {
        alignas(64) int lanes[16];
        for (int j = 0; j < 16; ++j) {
          const int from_second = j & distance, lane = upper ? j | distance : j & ~distance;
          lanes[j] = (from_second ? 16 : 0) + (upper ? lane : from_second ? j & ~distance : j);
        }
        return _mm512_load_si512(lanes);
      };
      halves(next, row, 8, index(8, false), index(8, true));
      halves(row, next, 4, index(4, false), index(4, true));
      halves(next, row, 2, index(2, false), index(2, true));
      halves(row, next, 1, index(1, false), index(1, true));
#pragma GCC unroll 16
      for (size_t t = 0; t < 16; ++t) _mm512_store_ps(block + t * kColumns, row[t]);
#else
      for (size_t k = 0; k < kColumns; ++k) {
        for (size_t t = 0; t < kColumns; ++t) block[k * kColumns + t] = from[t * size + k];
      }
#endif
    }
  }
}

// The memory of a task.
struct Desk {
  float *queries, *sink_queries, *scores, *sink_scores, *factors, *keys, *values;
  Visible* seen;

  // With `memory` null, only computes the size.
  size_t lay_out(const Layout& layout, size_t rows, char* memory) {
    size_t bytes = 0;
    const auto take = [&](auto** part, size_t count) {
      *part = reinterpret_cast<std::remove_reference_t<decltype(**part)>*>(memory + bytes);
      bytes += (count * sizeof(**part) + kLine - 1) / kLine * kLine;
    };
    take(&queries, rows * layout.size), take(&sink_queries, rows * layout.size);
    take(&scores, rows * layout.page), take(&sink_scores, rows * layout.page);
    take(&factors, rows), take(&seen, rows);
    take(&keys, layout.integers() ? layout.page * layout.size : 0);
    take(&values, layout.integers() && !kMultiplyCodes ? layout.page * layout.size : 0);
    return bytes;
  }
};

size_t attend_scratch(const Layout& layout, size_t rows) {
  Desk desk;
  return desk.lay_out(layout, rows, reinterpret_cast<char*>(kLine));
}

constexpr size_t kStepColumns = 16;

struct Reader {
  const Attention& call;
  const Layout& layout;
  const Queries& queries;
  const HeadState state;
  const Partial& partial;
  Desk desk;
  size_t columns, rows;
  bool step;  // few tokens behind a prompt, each of which must have the bits that it has alone
  int64_t newest;

  Reader(const Attention& call, const Queries& queries, void* scratch, const Partial& partial)
      : call(call), layout(call.layout), queries(queries), state(layout, call.state, queries.row, queries.head),
        partial(partial), columns(queries.end_column - queries.first_column), rows(columns * layout.group),
        step(call.columns <= kStepColumns), newest(call.newest_page(queries.row)) {
    desk.lay_out(layout, rows, static_cast<char*>(scratch));
    take_queries(call.query, desk.queries);
    if (call.sink_query) take_queries(call.sink_query, desk.sink_queries);
    for (size_t r = 0; r < rows; ++r) partial.largest[r] = kNothing, partial.sums[r] = 0;
    __builtin_memset(partial.values, 0, rows * layout.size * sizeof(float));
  }

  void take_queries(const float* from, float* to) const {
    const size_t floats = layout.group * layout.size;
    for (size_t i = 0; i < columns; ++i, to += floats) {
      const size_t column = queries.row * call.columns + queries.first_column + i;
      const float* const q = from + (column * layout.kv_heads + queries.head) * floats;
      for (size_t c = 0; c < floats; c += kColumns) store_line(to + c, load_line<Floats>(q + c) * layout.scale);
    }
  }

  // The scores of tokens below `sinks` come from queries of their own, where there are any.
  template <typename Score>
  void score(int64_t logical, size_t lines, const Score& of) const {
    const int64_t base = logical * static_cast<int64_t>(layout.page), left = layout.sinks - base;
    if (!call.sink_query || left <= 0) return of(desk.queries, desk.scores);
    if (left >= static_cast<int64_t>(layout.page)) return of(desk.sink_queries, desk.scores);
    of(desk.queries, desk.scores);
    of(desk.sink_queries, desk.sink_scores);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t i = 0; i < lines; ++i) {
        float* const scores = desk.scores + r * layout.page + i * kColumns;
        const Floats others = load_line<Floats>(desk.sink_scores + r * layout.page + i * kColumns);
        const Integers mask = lanes_between(static_cast<int>(i * kColumns), 0, static_cast<int>(left));
        store_line(scores, choose(mask, others, load_line<Floats>(scores)));
      }
    }
  }

  void weigh_rows(bool alike, size_t lines) const {
    by_columns(alike, [&](size_t first, size_t count, const Visible& seen) {
      for_rows<kMostWeighed>(count, [&](size_t row, auto together) {
        const size_t at = first + row;
        weigh<decltype(together)::value>(layout, seen, lines, desk.scores + at * layout.page, partial.largest + at,
                                         partial.sums + at, desk.factors + at);
      });
    });
  }

  // Calls sum(row, rows, seen) for rows that see the same.
  template <typename Sum>
  void by_columns(bool alike, const Sum& sum) const {
    if (alike) return sum(0, rows, desk.seen[0]);
    for (size_t i = 0; i < columns; ++i) {
      if (!desk.seen[i].none()) sum(i * layout.group, layout.group, desk.seen[i]);
    }
  }

  template <typename Keys, typename Values>
  void read(int64_t logical, bool alike, size_t lines, const Keys* keys, const Values* values,
            ptrdiff_t to_next) const {
    const size_t size = layout.size, page = layout.page;
    score(logical, lines, [&](const float* from, float* scores) {
      multiply_keys(from, rows, keys, to_next, size, lines, page, scores);
    });
    weigh_rows(alike, lines);
    by_columns(alike, [&](size_t row, size_t count, const Visible& seen) {
      for (int run = 0; run < 2; ++run) {
        if (seen.first[run] >= seen.end[run]) continue;
        const bool in_order = (step ? layout.group : count) <= kRowsInOrder<Values>;
        multiply_values(desk.scores + row * page, desk.factors + row, count, in_order, values, to_next, size, page,
                        static_cast<size_t>(seen.first[run]), static_cast<size_t>(seen.end[run]),
                        partial.values + row * size);
      }
    });
  }

  template <bool Narrow>
  void read_codes(int64_t logical, bool alike, const uint8_t* keys, const uint8_t* values, const float* scales,
                  Ahead ahead) const {
    const size_t size = layout.size, page = layout.page, lines = page / kColumns;
#if defined(__AVX512VNNI__)
    score(logical, lines, [&](const float* from, float* scores) {
      multiply_key_codes<Narrow>(from, rows, keys, ahead, scales, size, page, scores);
    });
    weigh_rows(alike, lines);
    by_columns(alike, [&](size_t row, size_t count, const Visible& seen) {
      multiply_value_codes<Narrow>(desk.scores + row * page, desk.factors + row, count, values, ahead,
                                   scales + 2 * size, seen, size, page, partial.values + row * size);
    });
#else
    decode_keys<Narrow>(keys, ahead, scales, size, page, desk.keys);
    decode_values<Narrow>(values, ahead, scales + 2 * size, size, page, desk.values);
    read(logical, alike, lines, desk.keys, desk.values, 0);
#endif
  }

  // Adds the tokens of a page that are read; of the newest and the first page this can be a part.
  void add(PageEntry entry, Ahead* ahead) const {
    const int64_t logical = entry >> 1;
    const Visible seen = visible(layout, call.position(queries.row, queries.end_column - 1), logical, entry & 1);
    const size_t end = static_cast<size_t>(seen.end[0] > seen.end[1] ? seen.end[0] : seen.end[1]);
    const size_t tokens = (end + kColumns - 1) / kColumns * kColumns;
    if (!tokens) return;
    if (layout.integers() && layout.in_slot(logical, newest)) {
      const float* const slot = state.recent + layout.slot(logical) * layout.slot_floats();
      const size_t bytes = tokens * layout.size * sizeof(float);
      return ahead->add(slot, bytes), ahead->add(slot + layout.page * layout.size, bytes);
    }
    const size_t physical = layout.physical(logical), of_page = layout.page_bytes();
    const size_t bytes = layout.integers() ? of_page : of_page / layout.page * tokens;
    // in the order in which they are needed
    if (layout.integers()) ahead->add(state.scales + physical * layout.scales(), layout.scales() * sizeof(float));
    ahead->add(state.keys + physical * of_page, bytes), ahead->add(state.values + physical * of_page, bytes);
  }

  // Prefetches a line of each 4 KB of a page well before the others. Pages lie far apart, so each address needs a walk
  // of page tables that are not in a cache: the first access waits for that, and all accesses behind it.
  void look_up(PageEntry entry) const {
    constexpr size_t kPageOfMemory = 4096;  // a virtual machine's host may use small pages whatever the guest uses
    const size_t physical = layout.physical(entry >> 1), of_page = layout.page_bytes();
    const auto touch = [&](const void* from, size_t bytes) {
      for (size_t i = 0; i < bytes; i += kPageOfMemory) prefetch_line(static_cast<const char*>(from) + i, 0);
    };
    touch(state.keys + physical * of_page, of_page), touch(state.values + physical * of_page, of_page);
    touch(state.scales + physical * layout.scales(), layout.scales() * sizeof(float));
  }

  // For the first pages, which no earlier page prefetches.
  void ask_for(PageEntry entry) const {
    Ahead ahead;
    add(entry, &ahead);
    ahead.ask_all();
  }

  // `next` is the page that is read then.
  void read_page(PageEntry entry, PageEntry next) const {
    const int64_t logical = entry >> 1;
    const bool whole = entry & 1;
    const auto see = [&](size_t i) {
      return visible(layout, call.position(queries.row, queries.first_column + i), logical, whole);
    };
    // if two columns see the whole page, all columns between them do
    const Visible first = see(0), last = see(columns - 1);
    const bool all = first.all(layout.page) && last.all(layout.page);
    int end = 0;
    for (size_t i = 0; i < columns; ++i) {
      desk.seen[i] = all ? first : see(i);
      for (int run_end : desk.seen[i].end) end = run_end > end ? run_end : end;
    }
    if (!end) return;
    const bool alike = all || columns == 1;
    const size_t lines = (static_cast<size_t>(end) + kColumns - 1) / kColumns;
    const size_t physical = layout.physical(logical), bytes = layout.page_bytes();
    const ptrdiff_t pages_on = static_cast<ptrdiff_t>(layout.physical(next >> 1)) - static_cast<ptrdiff_t>(physical);
    const ptrdiff_t to_next = pages_on * static_cast<ptrdiff_t>(bytes);
    const char *const keys = state.keys + physical * bytes, *const values = state.values + physical * bytes;
    with_storage(layout.storage, [&](auto holds) {
      if constexpr (is_codes(holds)) {
        read_rounded(holds, logical, alike, lines, keys, values, entry, next);
      } else {
        using Number = typename decltype(holds)::Number;
        read(logical, alike, lines, reinterpret_cast<const Number*>(keys), reinterpret_cast<const Number*>(values),
             to_next);
      }
    });
  }

  // Reads a page of a storage of integers: its codes, or its floats where it is in a slot still.
  template <unsigned Bits>
  void read_rounded(Codes<Bits>, int64_t logical, bool alike, size_t lines, const char* keys, const char* values,
                    PageEntry entry, PageEntry next) const {
    Ahead ahead;
    if (next != entry) add(next, &ahead);
    if (layout.in_slot(logical, newest)) {
      const float* const slot = state.recent + layout.slot(logical) * layout.slot_floats();
      ahead.ask_all();
      transpose_keys(slot, layout.size, lines, desk.keys);
      return read(logical, alike, lines, desk.keys, slot + layout.page * layout.size, 0);
    }
    read_codes<Bits == 4>(logical, alike, reinterpret_cast<const uint8_t*>(keys),
                          reinterpret_cast<const uint8_t*>(values),
                          state.scales + layout.physical(logical) * layout.scales(), ahead);
  }
};

constexpr size_t kLookedUp = 2;  // pages ahead

void attend(const Attention& call, const Queries& queries, size_t first, size_t end, void* scratch,
            const Partial& partial) {
  const Reader reader(call, queries, scratch, partial);
  if (first < end) reader.ask_for(queries.entry(first));
  for (size_t index = first; index < end; ++index) {
    const PageEntry entry = queries.entry(index);
    PageEntry next = queries.entry(index + 1 < end ? index + 1 : index);
    if (!call.layout.integers() && next != entry && next >> 1 == reader.newest) reader.ask_for(next), next = entry;
    if (index + kLookedUp < end) reader.look_up(queries.entry(index + kLookedUp));
    reader.read_page(entry, next);
  }
}

}  // namespace
}  // namespace graphopt
