// Second codes of the newest tokens of a block that is not full, in its free slots, as spec/layout.py of PagedAttention
// defines them; and the pages with new tokens as floats, the sums of both codes.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/scaled.h"

namespace graphopt {
namespace {

// The first token whose residual a block keeps when it has `count`.
inline size_t first_with_residual(size_t count, size_t tokens) { return 2 * count > tokens ? 2 * count - tokens : 0; }

// Where the residual of a token lies in its block, of which it is not the last.
inline size_t residual_slot(size_t token, size_t tokens) {
  size_t odd = tokens - 1 - token;
  while (odd % 2 == 0) odd /= 2;
  return tokens - (odd + 1) / 2;
}

// Calls add(scaled) where blocks of this storage have codes with a scale for each token.
template <typename Add>
inline void with_scaled(Storage storage, const Add& add) {
  with_any_storage(storage, [&](auto holds) {
    if constexpr (!is_codes(holds)) {
      using Number = typename decltype(holds)::Number;
      if constexpr (is_scaled<Number>) add(Number());
    }
  });
}

// What 16 codes, one in each byte, stand for.
template <unsigned Bits>
inline Floats numbers_of(const uint8_t* codes, float scale) {
  return (to_floats(load_bytes(codes)) - all_lanes(kLargestCode<Bits> / 2)) * all_lanes(scale);
}

// Writes a key or a value with both of its codes, and their sum to `sum`, `step` floats apart. What has no residual has
// no sum.
template <unsigned Bits>
inline void put_twice(const float* token, size_t size, size_t offset, size_t tokens, bool is_key, const TokenRun& run,
                      const float* feedback, float* rest, float* sum, size_t step) {
  uint8_t codes[kMostFactors], second[kMostFactors];
  float left[kMostFactors];
  float* const scales = is_key ? run.key_scales : run.value_scales;
  auto* const numbers = reinterpret_cast<Scaled<Bits>*>(is_key ? run.keys : run.values);
  const float scale = feedback ? round_token<Bits>(token, size, feedback, rest, codes) : round_token<Bits>(token, size, codes);
  scales[offset] = scale;
  put_codes(codes, size, offset, is_key, numbers);
  if (offset + 1 == tokens) return;
  for (size_t c = 0; c < size; c += kColumns) {
    store_line(left + c, load_line<Floats>(token + c) - numbers_of<Bits>(codes + c, scale));
  }
  const size_t place = residual_slot(offset, tokens);
  const float second_scale = round_token<Bits>(left, size, second);
  scales[place] = second_scale;
  put_codes(second, size, place, is_key, numbers);
  for (size_t c = 0; c < size; c += kColumns) {
    store_line(left + c, numbers_of<Bits>(codes + c, scale) + numbers_of<Bits>(second + c, second_scale));
  }
  for (size_t c = 0; c < size; ++c) sum[c * step] = left[c];
}

// Writes the key and the value of a token, and their sums where the page of floats has them.
inline void put_twice(const Attention& call, const float* key, const float* value, size_t row, size_t head,
                      int64_t position, const float* feedback, float* rest) {
  const size_t tokens = call.run_tokens(), at = static_cast<size_t>(position), size = call.layout.size;
  const TokenRun run(call, call.place(row, head, at / tokens));
  float* const page = call.refined_page(row, head, call.layout.page_of(position));
  const size_t of_page = at % call.layout.page;
  float* const lane = page + of_page / kColumns * size * kColumns + of_page % kColumns;
  float* const values = page + (call.layout.page + of_page) * size;
  with_scaled(call.layout.storage, [&](auto number) {
    constexpr unsigned kBits = kBitsOf<decltype(number)>;
    put_twice<kBits>(key, size, at % tokens, tokens, true, run, feedback, rest, lane, kColumns);
    put_twice<kBits>(value, size, at % tokens, tokens, false, run, nullptr, nullptr, values, 1);
  });
}

// Adds up the codes of the keys `first` up to `end` of a run, in the lines of floats that have these.
template <unsigned Bits>
inline void add_up_keys(const TokenRun& run, size_t size, size_t tokens, size_t first, size_t end, float* lines) {
  const auto* const numbers = reinterpret_cast<const Scaled<Bits>*>(run.keys);
  for (size_t line = first / kColumns; line * kColumns < end; ++line) {
    const Floats scales = load_line<Floats>(run.key_scales + line * kColumns);
    for (size_t c = 0; c < size; ++c) {
      const size_t n = (line * size + c) * kColumns;
      store_line(lines + n, load_numbers(numbers, n) * scales);
    }
  }
  // by the lines that residuals lie in
  for (size_t line = end / kColumns; line * kColumns < tokens; ++line) {
    float* to[kColumns];
    size_t lane[kColumns], count = 0;
    for (size_t token = first; token < end; ++token) {
      const size_t place = residual_slot(token, tokens);
      if (place / kColumns != line) continue;
      to[count] = lines + token / kColumns * size * kColumns + token % kColumns, lane[count++] = place % kColumns;
    }
    const Floats scales = load_line<Floats>(run.key_scales + line * kColumns);
    for (size_t c = 0; count && c < size; ++c) {
      float added[kColumns];
      store_line(added, load_numbers(numbers, (line * size + c) * kColumns) * scales);
      for (size_t i = 0; i < count; ++i) to[i][c * kColumns] += added[lane[i]];
    }
  }
}

template <unsigned Bits>
inline void add_up_values(const TokenRun& run, size_t size, size_t tokens, size_t first, size_t end, float* values) {
  const auto* const numbers = reinterpret_cast<const Scaled<Bits>*>(run.values);
  for (size_t token = first; token < end; ++token) {
    const size_t place = residual_slot(token, tokens);
    const Floats scale = all_lanes(run.value_scales[token]), second_scale = all_lanes(run.value_scales[place]);
    for (size_t c = 0; c < size; c += kColumns) {
      const Floats added = load_numbers(numbers, place * size + c) * second_scale;
      store_line(values + token * size + c, load_numbers(numbers, token * size + c) * scale + added);
    }
  }
}

// Adds up the tokens with two codes of the block that a head of a row goes on with. What else the pages with new tokens
// have is 0: keys behind the last are multiplied with queries before they are hidden.
inline void begin_refined(const Attention& call, size_t row, size_t head) {
  const Layout& layout = call.layout;
  const int64_t past = call.past[row], end = past + call.fresh[row];
  for (int64_t page = layout.page_of(past); page * static_cast<int64_t>(layout.page) < end; ++page) {
    __builtin_memset(call.refined_page(row, head, page), 0, layout.page * layout.size * sizeof(float));
  }
  const size_t tokens = call.run_tokens(), at = static_cast<size_t>(past), stored = at % tokens;
  const size_t first = first_with_residual(stored + 1, tokens);
  if (first >= stored) return;
  const TokenRun run(call, call.place(row, head, at / tokens));
  const size_t before = (at % layout.page - stored) * layout.size;  // of the page, in front of the block
  float* const page = call.refined_page(row, head, layout.page_of(past));
  with_scaled(layout.storage, [&](auto number) {
    constexpr unsigned kBits = kBitsOf<decltype(number)>;
    add_up_keys<kBits>(run, layout.size, tokens, first, stored, page + before);
    add_up_values<kBits>(run, layout.size, tokens, first, stored, page + layout.page * layout.size + before);
  });
}

}  // namespace
}  // namespace graphopt
