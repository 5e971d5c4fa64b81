// Attention of a few queries over a list of pages.
#pragma once

#include <new>

#include "kv_attention/cpu/decode_keys.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/lookahead.h"
#include "kv_attention/cpu/sampled_scores.h"
#include "kv_attention/cpu/scratch.h"
#include "kv_attention/cpu/softmax.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, codes.h)

namespace graphopt {
namespace {

constexpr size_t kStepColumns = 16;

struct Reader : Lookahead {
  const Partial partial;
  const SampledScores* samples = nullptr;  // where scores alone are made
  AttendScratch buffers;
  size_t rows;
  bool step;  // few tokens behind a prompt, each of which must have the bits that it has alone

  Reader(const Attention& call, const Queries& queries, void* scratch, const Partial& partial)
      : Lookahead(call, queries), partial(partial), rows(columns * layout.group),
        step(call.end_column(queries.row) <= kStepColumns) {
    buffers.lay_out(layout, rows, static_cast<char*>(scratch));
    take_queries(call.query, buffers.queries);
    if (call.sink_query) take_queries(call.sink_query, buffers.sink_queries);
    for (size_t r = 0; r < rows; ++r) partial.largest[r] = kNothing, partial.sums[r] = 0;
    __builtin_memset(partial.values, 0, rows * layout.value_channels() * sizeof(float));
  }

  void take_queries(const float* from, float* to) const {
    const size_t floats = layout.group * layout.size;
    for (size_t i = 0; i < columns; ++i, to += floats) {
      const Member member = queries.member(i);
      const float* const q = from + (call.token(member.row, member.column) * layout.kv_heads + queries.head) * floats;
      for (size_t c = 0; c < floats; c += kColumns) store_line(to + c, load_line<Floats>(q + c) * layout.scale);
    }
  }

  // The scores of tokens below `sinks` come from queries of their own, where there are any.
  template <typename Score>
  void score(int64_t logical, size_t lines, const Score& of) const {
    const int64_t base = logical * static_cast<int64_t>(layout.page), left = layout.sinks - base;
    if (!call.sink_query || left <= 0) return of(buffers.queries, buffers.scores);
    if (left >= static_cast<int64_t>(layout.page)) return of(buffers.sink_queries, buffers.scores);
    of(buffers.queries, buffers.scores);
    of(buffers.sink_queries, buffers.sink_scores);
    for (size_t r = 0; r < rows; ++r) {
      for (size_t i = 0; i < lines; ++i) {
        float* const scores = buffers.scores + r * layout.page + i * kColumns;
        const Floats others = load_line<Floats>(buffers.sink_scores + r * layout.page + i * kColumns);
        const Integers mask = lanes_between(static_cast<int>(i * kColumns), 0, static_cast<int>(left));
        store_line(scores, choose(mask, others, load_line<Floats>(scores)));
      }
    }
  }

  // Adds slope (j - p) to the scores of tokens j of a page, for queries at positions p.
  void add_biases(int64_t logical, size_t lines) const {
    alignas(kLine) static constexpr float kFirst[kColumns] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats first = load_line<Floats>(kFirst);
    const float* const slopes = call.slopes + queries.head * layout.group;
    for (size_t column = 0; column < columns; ++column) {
      const int64_t begin = logical * static_cast<int64_t>(layout.page) - position(column);
      for (size_t i = 0; i < lines; ++i) {
        const Floats distance = first + all_lanes(static_cast<float>(begin + static_cast<int64_t>(i * kColumns)));
        for (size_t head = 0; head < layout.group; ++head) {
          float* const at = buffers.scores + (column * layout.group + head) * layout.page + i * kColumns;
          store_line(at, fused(all_lanes(slopes[head]), distance, load_line<Floats>(at)));
        }
      }
    }
  }

  void weigh_rows(int64_t logical, bool alike, size_t lines) const {
    if (call.slopes) add_biases(logical, lines);
    by_columns(alike, [&](size_t first, size_t count, const Visible& seen) {
      for_rows<kMostWeighed>(count, [&](size_t row, auto together) {
        const size_t at = first + row;
        weigh<decltype(together)::value>(layout, seen, lines, buffers.scores + at * layout.page, partial.largest + at,
                                         partial.sums + at, buffers.factors + at);
      });
    });
  }

  // Takes the scores of a page where they alone are made; returns whether that is so.
  bool takes_scores(int64_t logical, size_t lines) const {
    for (size_t i = 0; samples && i < columns; ++i) {
      const Visible others = seen_besides(layout, position(i), logical);
      for (size_t r = i * layout.group; r < (i + 1) * layout.group; ++r) {
        samples->add(layout, logical, r, buffers.seen[i], others, lines, buffers.scores + r * layout.page);
      }
    }
    return samples;
  }

  // Calls sum(row, rows, seen) for rows that see the same.
  template <typename Sum>
  void by_columns(bool alike, const Sum& sum) const {
    if (alike) return sum(0, rows, buffers.seen[0]);
    for (size_t i = 0; i < columns; ++i) {
      if (!buffers.seen[i].none()) sum(i * layout.group, layout.group, buffers.seen[i]);
    }
  }

  // Scores or weights [rows, page] times the scales of 16 * `lines` tokens.
  void scale(const float* scales, size_t lines, float* numbers) const {
    for (size_t i = 0; scales && i < lines; ++i) {
      const Floats line = load_line<Floats>(scales + i * kColumns);
      for (size_t r = 0; r < rows; ++r) {
        float* const at = numbers + r * layout.page + i * kColumns;
        store_line(at, load_line<Floats>(at) * line);
      }
    }
  }

  // Reads the first lines of a page that consists of runs of so many tokens.
  template <typename Keys, typename Values>
  void read(int64_t logical, bool alike, size_t lines, size_t tokens, const Stretch<Keys, Values>* runs) const {
    read(logical, alike, lines, tokens, runs, runs, layout.size);
  }

  // The same where values come from elsewhere, in rows of `channels`: keys of the one and values of the other are read.
  template <typename Keys, typename Others, typename Nothing, typename Values>
  void read(int64_t logical, bool alike, size_t lines, size_t tokens, const Stretch<Keys, Others>* runs,
            const Stretch<Nothing, Values>* of_values, size_t channels) const {
    const size_t size = layout.size, page = layout.page, of_run = tokens / kColumns;
    const auto each_run = [&](const auto& visit) {
      for (size_t line = 0; line < lines; line += of_run) {
        visit(line * kColumns, lines - line < of_run ? lines - line : of_run, runs[line / of_run]);
      }
    };
    score(logical, lines, [&](const float* from, float* scores) {
      each_run([&](size_t first, size_t count, const auto& run) {
        multiply_keys(from, rows, run.keys, run.to_next, size, count, page, scores + first);
        scale(run.key_scales, count, scores + first);
      });
    });
    if (takes_scores(logical, lines)) return;
    weigh_rows(logical, alike, lines);
    each_run([&](size_t first, size_t count, const auto& run) { scale(run.value_scales, count, buffers.scores + first); });
    by_columns(alike, [&](size_t row, size_t count, const Visible& seen) {
      for (int part = 0; part < 2; ++part) {
        if (seen.first[part] >= seen.end[part]) continue;
        const bool in_order = (step ? layout.group : count) <= kRowsInOrder<Values>;
        multiply_values(buffers.scores + row * page, buffers.factors + row, count, in_order, of_values, tokens, channels,
                        page, static_cast<size_t>(seen.first[part]), static_cast<size_t>(seen.end[part]),
                        partial.values + row * channels);
      }
    });
  }

  // Reads a page of latents, keys [lines, size, 16]: the first of their channels become rows [tokens, channels] first.
  // `factors` of tokens, or null, multiply both.
  template <typename Number>
  void read_latent(int64_t logical, bool alike, size_t lines, const Number* keys, ptrdiff_t to_next,
                   const float* factors = nullptr) const {
    const size_t size = layout.size, channels = layout.value_channels();
    alignas(kLine) float block[kColumns * kColumns], rows_of_block[kColumns * kColumns];
    for (size_t i = 0; i < lines; ++i) {
      for (size_t c = 0; c < channels; c += kColumns) {
        for (size_t k = 0; k < kColumns; ++k) {
          store_line(block + k * kColumns, load_numbers(keys, (i * size + c + k) * kColumns));
        }
        transpose_block(block, kColumns, rows_of_block);
        for (size_t t = 0; t < kColumns; ++t) {
          store_line(buffers.values + (i * kColumns + t) * channels + c, load_line<Floats>(rows_of_block + t * kColumns));
        }
      }
    }
    const Stretch<Number, Number> run = {keys, nullptr, factors, factors, to_next};
    const Stretch<float, float> values = {nullptr, buffers.values, nullptr, nullptr, 0};
    read(logical, alike, lines, layout.page, &run, &values, channels);
  }

  // Reads a page of chosen tokens, whose latents are put side by side first: wherever they lie, [lines, size, 16].
  void read_chosen(int64_t logical) const {
    const Member member = queries.member(0);
    const size_t token = call.token(member.row, member.column), before = static_cast<size_t>(logical) * layout.page;
    const int32_t* const positions = call.chosen + token * call.most_chosen + before;
    const size_t left = call.chosen_counts[token] - before, count = left < layout.page ? left : layout.page;
    buffers.seen[0] = {};
    buffers.seen[0].end[0] = static_cast<int>(count);
    with_any_storage(layout.storage, [&](auto holds) {
      if constexpr (!is_codes(holds)) {
        using Number = typename decltype(holds)::Number;
        if constexpr (!is_scaled<Number>) gather_latents<Number>(positions, count);
      }
    });
    read_latent(logical, true, (count + kColumns - 1) / kColumns, static_cast<const float*>(buffers.keys), 0);
  }

  template <typename Number>
  void gather_latents(const int32_t* positions, size_t count) const {
    const size_t size = layout.size, of_run = call.run_tokens(), lines = (count + kColumns - 1) / kColumns;
    for (size_t c = 0; c < size; ++c) {  // what stands behind the last token is not seen, and must be a number
      store_line(buffers.keys + ((lines - 1) * size + c) * kColumns, all_lanes(0.f));
    }
    for (size_t t = 0, end = 0; t < count; t = end) {
      // tokens of one line of a run are read together
      const auto first = static_cast<size_t>(positions[t]);
      while (end < count && static_cast<size_t>(positions[end]) / kColumns == first / kColumns) ++end;
      const TokenRun run(call, call.place(queries.row, queries.head, first / of_run));
      const Number* const line = reinterpret_cast<const Number*>(run.keys) + first % of_run / kColumns * size * kColumns;
      for (size_t c = 0; c < size; ++c) {
        alignas(kLine) float numbers[kColumns];
        store_line(numbers, load_numbers(line, c * kColumns));
        for (size_t i = t; i < end; ++i) {
          buffers.keys[(i / kColumns * size + c) * kColumns + i % kColumns] =
              numbers[static_cast<size_t>(positions[i]) % kColumns];
        }
      }
    }
  }

  // `next` is the page that is read then.
  void read_page(PageEntry entry, PageEntry next) const {
    const int64_t logical = entry >> 1;
    const bool whole = entry & 1;
    const auto see = [&](size_t i) {
      return visible(layout, position(i), logical, whole);
    };
    // if two columns see the whole page, all columns between them do
    const Visible first = see(0), last = see(columns - 1);
    const bool all = first.all(layout.page) && last.all(layout.page);
    int end = 0;
    for (size_t i = 0; i < columns; ++i) {
      buffers.seen[i] = all ? first : see(i);
      for (int run_end : buffers.seen[i].end) end = run_end > end ? run_end : end;
    }
    const bool alike = all || columns == 1;
    if (layout.residuals && !all && !queries.members) end = leave_refined(logical);
    if (end) read_seen(logical, alike, end, entry, next);
    if (layout.residuals && !all && !queries.members) read_refined(logical, whole);
  }

  // Where a query reads tokens of its own block by both of their codes: a token of a page, from which on it does.
  int refined_from(size_t column, int64_t logical) const {
    const int64_t p = position(column), base = logical * static_cast<int64_t>(layout.page);
    if (layout.page_of(p) != logical) return static_cast<int>(layout.page);
    const size_t tokens = call.run_tokens(), offset = static_cast<size_t>(p - base), of_block = offset % tokens;
    return static_cast<int>(offset - of_block + first_with_residual(of_block + 1, tokens));
  }

  // Takes what is read by both codes away from what the columns see; returns where that ends.
  int leave_refined(int64_t logical) const {
    int end = 0;
    for (size_t i = 0; i < columns; ++i) {
      const int from = refined_from(i, logical);
      Visible& seen = buffers.seen[i];
      if (seen.end[0] > from) seen.end[0] = from;
      if (seen.first[0] >= seen.end[0]) seen.first[0] = seen.end[0] = 0;
      end = seen.end[0] > end ? seen.end[0] : end;
    }
    return end;
  }

  // Reads the tokens of a page that have two codes from their sums.
  void read_refined(int64_t logical, bool whole) const {
    int end = 0;
    for (size_t i = 0; i < columns; ++i) {
      const int from = refined_from(i, logical);
      Visible seen = visible(layout, position(i), logical, whole);
      if (seen.first[0] < from) seen.first[0] = from;
      if (seen.first[0] >= seen.end[0]) seen.first[0] = seen.end[0] = 0;
      end = seen.end[0] > end ? seen.end[0] : end;
      buffers.seen[i] = seen;
    }
    if (!end) return;
    const float* const page = call.refined_page(queries.row, queries.head, logical);
    const Stretch<float, float> floats = {page, page + layout.page * layout.size, nullptr, nullptr, 0};
    read(logical, columns == 1, (static_cast<size_t>(end) + kColumns - 1) / kColumns, layout.page, &floats);
  }

  // Reads the tokens of a page that the columns see, the last of which is before `end`.
  void read_seen(int64_t logical, bool alike, int end, PageEntry entry, PageEntry next) const {
    const size_t lines = (static_cast<size_t>(end) + kColumns - 1) / kColumns;
    with_any_storage(layout.storage, [&](auto holds) {
      if constexpr (is_codes(holds)) {
        read_rounded(holds, logical, alike, lines, entry, next);
      } else {
        read_numbers<typename decltype(holds)::Number>(logical, alike, lines, next >> 1);
      }
    });
  }

  static constexpr size_t kMostRuns = 4;  // of a page

  template <typename Number>
  void read_numbers(int64_t logical, bool alike, size_t lines, int64_t next) const {
    Stretch<Number, Number> runs[kMostRuns];
    const size_t tokens = call.run_tokens(), of_page = layout.page / tokens, in_use = call.runs_in_use(queries.row);
    for (size_t i = 0; i * tokens < lines * kColumns; ++i) {
      const size_t then = static_cast<size_t>(next) * of_page + i;
      const size_t here = call.place(queries.row, queries.head, static_cast<size_t>(logical) * of_page + i);
      const size_t there = then < in_use ? call.place(queries.row, queries.head, then) : here;
      const TokenRun run(call, here);
      runs[i] = {reinterpret_cast<const Number*>(run.keys), reinterpret_cast<const Number*>(run.values),
                 run.key_scales, run.value_scales, run.to(TokenRun(call, there))};
    }
    if constexpr (!is_scaled<Number>) {
      if (layout.latent()) return read_latent(logical, alike, lines, runs[0].keys, runs[0].to_next);
    }
    if constexpr (is_scaled<Number>) {
      if (rows > kMostTogether) return read_decoded(logical, alike, lines, tokens, runs);
    }
    read(logical, alike, lines, tokens, runs);
  }

  // Many queries read the codes of a page: they become floats once, still without their scales.
  template <typename Number>
  void read_decoded(int64_t logical, bool alike, size_t lines, size_t tokens, const Stretch<Number, Number>* runs) const {
    Stretch<float, float> floats[kMostRuns];
    for (size_t first = 0, i = 0; first < lines * kColumns; first += tokens, ++i) {
      float *const keys = buffers.keys + first * layout.size, *const values = buffers.values + first * layout.size;
      const size_t left = lines * kColumns - first, count = (left < tokens ? left : tokens) * layout.size;
      decode(runs[i].keys, runs[i].to_next, count, keys), decode(runs[i].values, runs[i].to_next, count, values);
      floats[i] = {keys, values, runs[i].key_scales, runs[i].value_scales, 0};
    }
    read(logical, alike, lines, tokens, floats);
  }

  template <typename Number>
  static void decode(const Number* from, ptrdiff_t to_next, size_t count, float* to) {
    for (size_t n = 0; n < count; n += kColumns) {
      prefetch_line(number_at(from, n), to_next);
      store_line(to + n, load_numbers(from, n));
    }
  }

  // Reads a page of a storage of integers: its codes, or its floats where it is in a slot still.
  template <unsigned Bits>
  void read_rounded(Codes<Bits>, int64_t logical, bool alike, size_t lines, PageEntry entry, PageEntry next) const {
    Ahead ahead;
    if (next != entry) add(next, &ahead);
    if (layout.in_slot(logical, newest)) {
      const float* const slot = state.recent + layout.slot(logical) * layout.slot_floats();
      ahead.ask_all();
      transpose_keys(slot, layout.size, lines, buffers.keys);
      if (layout.latent()) return read_latent(logical, alike, lines, static_cast<const float*>(buffers.keys), 0);
      const Stretch<float, float> floats = {buffers.keys, slot + layout.page * layout.size, nullptr, nullptr, 0};
      return read(logical, alike, lines, layout.page, &floats);
    }
    const size_t physical = layout.physical(logical);
    const auto* const keys = reinterpret_cast<const uint8_t*>(state.keys + physical * layout.key_bytes());
    if (layout.latent()) {
      const Half* const scales = state.scales + physical * layout.scales();
      float factors[kMostPage];
      decode_keys<Bits>(keys, ahead, scales, layout.size, lines * kColumns, buffers.keys);
      return read_latent(logical, alike, lines, static_cast<const float*>(buffers.keys), 0,
                         load_factors(layout, scales, factors));
    }
    const auto* const values = reinterpret_cast<const uint8_t*>(state.values + physical * layout.value_bytes());
    read_codes<Bits>(*this, logical, alike, keys, values, state.scales + physical * layout.scales(), ahead);
  }
};

constexpr size_t kLookedUp = 2;  // pages ahead

// Readers of different heads, and otherwise of the same pages, take turns.
inline void read_pages(const Attention& call, const Reader* readers, size_t count, size_t first, size_t end) {
  if (call.layout.chooses) {
    for (size_t index = first; index < end; ++index) {
      for (const Reader* reader = readers; reader != readers + count; ++reader) {
        reader->read_chosen(reader->queries.entry(index) >> 1);
      }
    }
    return;
  }
  for (const Reader* reader = readers; first < end && reader != readers + count; ++reader) {
    reader->ask_for(reader->queries.entry(first));
  }
  for (size_t index = first; index < end; ++index) {
    for (const Reader* reader = readers; reader != readers + count; ++reader) {
      const PageEntry entry = reader->queries.entry(index);
      PageEntry next = reader->queries.entry(index + 1 < end ? index + 1 : index);
      if (!call.layout.integers() && next != entry && next >> 1 == reader->newest) reader->ask_for(next), next = entry;
      if (index + kLookedUp < end) reader->look_up(reader->queries.entry(index + kLookedUp));
      reader->read_page(entry, next);
    }
  }
}

void attend(const Attention& call, const Queries* queries, size_t count, size_t first, size_t end, void* scratch,
            float* const* partials) {
  const size_t rows = queries->columns() * call.layout.group, bytes = attend_scratch(call.layout, rows);
  alignas(Reader) char memory[kMostHeadsTogether * sizeof(Reader)];
  Reader* const readers = reinterpret_cast<Reader*>(memory);
  for (size_t i = 0; i < count; ++i) {
    new (readers + i) Reader(call, queries[i], static_cast<char*>(scratch) + i * bytes,
                             Partial(partials[i], rows, call.layout.value_channels()));
  }
  read_pages(call, readers, count, first, end);
}

}  // namespace
}  // namespace graphopt
