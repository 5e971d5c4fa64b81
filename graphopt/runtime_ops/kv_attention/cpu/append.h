// Writing new tokens into pages, rounding pages that leave their slot, and keeping summaries.
#pragma once

#include "abi/convert.h"
#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/compensate.h"
#include "kv_attention/cpu/float8.h"
#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/planes.h"
#include "kv_attention/cpu/residuals.h"
#include "kv_attention/cpu/scaled.h"
#include "kv_attention/cpu/steps.h"

namespace graphopt {
namespace {

inline Floats least_of(const Floats& a, const Floats& b) {  // NaN propagates
  return by_parts<Floats>([&](size_t i) {
    const auto kept = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
    return a.part[i] != a.part[i] ? a.part[i] : kept;
  });
}
inline Floats most_of(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) {
    const auto kept = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return a.part[i] != a.part[i] ? a.part[i] : kept;
  });
}

constexpr float kSquareSteps = 16384;  // of the square of the share that a key has of the largest in its channel

// How large the keys [page, size] of a page are beside one another, as spec/layout.py defines it, and the keys divided by
// that. `largest` has room for the channels.
inline void divide_keys(const float* keys, size_t size, size_t page, float* largest, Half* factors, float* divided) {
  Floats spoiled = all_lanes(0.f);
  for (size_t c = 0; c < size; c += kColumns) {
    Floats most = all_lanes(0.f);
    for (size_t t = 0; t < page; ++t) {
      const Floats x = load_line<Floats>(keys + t * size + c);
      most = larger(magnitude(x), most), spoiled = spoiled + (x - x);
    }
    store_line(largest + c, by_parts<Floats>([&](size_t i) {
      const Floats::Part zero = {}, one = zero + 1;
      return most.part[i] > zero ? most.part[i] : one;
    }));
  }
  const bool finite = sum_of(spoiled) == 0;
  for (size_t t = 0; t < page; ++t) {
    const float* const key = keys + t * size;
    Floats squares = all_lanes(0.f);
    for (size_t c = 0; finite && c < size; c += kColumns) {
      const Floats share = magnitude(load_line<Floats>(key + c)) / load_line<Floats>(largest + c);
      squares = squares + to_floats(nearest(share * share * kSquareSteps));
    }
    const float total = sum_of(squares), steps = kSquareSteps * static_cast<float>(size);
    factors[t] = stored<Half>(total > 0 ? __builtin_sqrtf(total / steps) : 1);
    const float factor = number<float>(factors[t]);
    for (size_t c = 0; c < size; c += kColumns) {
      store_line(divided + t * size + c, load_line<Floats>(key + c) / all_lanes(factor));
    }
  }
}

// Rounds the channels of keys [page, size] one after the other: what one is rounded by changes those behind it, by the
// weights of a head, [size, size]. `scratch` has room for these and for 16 tokens.
template <unsigned Bits>
inline void round_with_feedback(Codes<Bits>, const Layout& layout, const float* keys, const Half* weights,
                                const float* low, const float* step, const float* inverse, uint8_t* to, float* scratch) {
  const size_t size = layout.size;
  const float levels = static_cast<float>(layout.levels);
  float *const feedback = scratch, *const rest = feedback + size * size;  // [size, 16 tokens]
  widen(weights, size * size, feedback);
  uint8_t codes[kColumns];
  for (size_t first = 0; first < layout.page; first += kColumns) {
    for (size_t t = 0; t < kColumns; ++t) {
      for (size_t c = 0; c < size; ++c) rest[c * kColumns + t] = keys[(first + t) * size + c];
    }
    uint8_t* const block = to + first * size * Bits / 8;
    for (size_t c = 0; c < size; ++c) {
      const Floats x = load_line<Floats>(rest + c * kColumns);
      const Floats number = to_codes(x, all_lanes(low[c]), all_lanes(inverse[c]), levels, codes);
      for (size_t t = 0; t < kColumns; ++t) put_code<Bits>(block, c / 4, t, c % 4, codes[t]);
      const Floats error = by_parts<Floats>([&](size_t i) {
        const Floats::Part zero = {}, e = x.part[i] - (zero + low[c] + (zero + step[c]) * number.part[i]);
        return e - e == zero ? e : zero;
      });
      const float* const row = feedback + c * size;
      for (size_t i = c + 1; i < size; ++i) {
        float* const behind = rest + i * kColumns;
        store_line(behind, load_line<Floats>(behind) - error * all_lanes(row[i]));
      }
    }
  }
}

// Rounds the keys of a page of floats, [page, size].
template <unsigned Bits>
inline void round_keys(Codes<Bits> holds, const Layout& layout, const float* slot, const Half* feedback, uint8_t* keys,
                       Half* scales, float* scratch) {
  const size_t size = layout.size, page = layout.page;
  const float levels = static_cast<float>(layout.levels);
  float *const inverse = scratch, *const key_low = inverse + size, *const key_step = key_low + size;
  const float* from = slot;
  if (layout.token_factors) {
    float* const divided = scratch + 4 * size + 2 * page;
    divide_keys(slot, size, page, inverse, scales + layout.factors_at(), divided);
    from = divided;
  }
  for (size_t c = 0; c < size; c += kColumns) {
    Floats least = load_line<Floats>(from + c), most = least, spoiled = least - least;
    for (size_t t = 1; t < page; ++t) {
      const Floats x = load_line<Floats>(from + t * size + c);
      least = smaller(x, least), most = larger(x, most), spoiled = spoiled + (x - x);
    }
    // the places of what is made of them
    store_line(key_low + c, least), store_line(key_step + c, most), store_line(inverse + c, spoiled);
    for (size_t i = c; i < c + kColumns; ++i) {
      const PageScale scale(key_low[i], key_step[i], inverse[i], levels, layout.clip);
      scales[i] = scale.low_half, scales[size + i] = scale.step_half;
      key_low[i] = scale.low, key_step[i] = scale.step, inverse[i] = scale.inverse;
    }
  }
  uint8_t codes[kColumns];
  __builtin_memset(keys, 0, layout.key_bytes());
  if (feedback) {
    float* const rest = scratch + 4 * size + 2 * page + (layout.token_factors ? page * size : 0);
    round_with_feedback(holds, layout, from, feedback, key_low, key_step, inverse, keys, rest);
    return;
  }
  for (size_t t = 0; t < page; ++t) {
    uint8_t* const block = keys + t / kColumns * kColumns * size * Bits / 8;
    for (size_t c = 0; c < size; c += kColumns) {
      to_codes(load_line<Floats>(from + t * size + c), load_line<Floats>(key_low + c), load_line<Floats>(inverse + c),
               levels, codes);
      for (size_t i = 0; i < kColumns; ++i) put_code<Bits>(block, (c + i) / 4, t % kColumns, i % 4, codes[i]);
    }
  }
}

// Rounds the values of a page of floats, [page, size].
template <unsigned Bits>
inline void round_values(Codes<Bits>, const Layout& layout, const float* slot, uint8_t* values, Half* scales) {
  const size_t size = layout.size, page = layout.page;
  const float levels = static_cast<float>(layout.value_levels);
  Half *const value_low = scales + 2 * size, *const value_step = value_low + page;
  uint8_t codes[kColumns];
  __builtin_memset(values, 0, layout.value_bytes());
  for (size_t t = 0; t < page; ++t) {
    const float* const token = slot + t * size;
    Floats least = load_line<Floats>(token), most = least, spoiled = least - least;
    for (size_t c = kColumns; c < size; c += kColumns) {
      const Floats x = load_line<Floats>(token + c);
      least = smaller(x, least), most = larger(x, most), spoiled = spoiled + (x - x);
    }
    const float largest = largest_of(most), smallest = -largest_of(all_lanes(0.f) - least);
    const PageScale scale(smallest, largest, sum_of(spoiled), levels, layout.value_clip);
    value_low[t] = scale.low_half, value_step[t] = scale.step_half;
    for (size_t c = 0; c < size; c += kColumns) {
      to_codes(load_line<Floats>(token + c), all_lanes(scale.low), all_lanes(scale.inverse), levels, codes);
      uint8_t* const tile = values + c * page * Bits / 8;
      for (size_t lane = 0; lane < kColumns; ++lane) put_code<Bits>(tile, t / 4, lane, t % 4, codes[lane]);
    }
  }
}
// Floats stay.
template <typename Stored>
inline void round_keys(Numbers<Stored>, const Layout&, const float*, const Half*, uint8_t*, Half*, float*) {}
template <typename Stored>
inline void round_values(Numbers<Stored>, const Layout&, const float*, uint8_t*, Half*) {}

// Rounds a page of floats: keys, by the feedback of the head where there is some, and then values, which latents do not
// have.
inline void round_page(const Layout& layout, const float* slot, const Half* feedback, const HeadState& state, size_t to,
                       float* scratch) {
  Half* const scales = state.scales + to * layout.scales();
  with_any_storage(layout.storage, [&](auto holds) {
    round_keys(holds, layout, slot, feedback, reinterpret_cast<uint8_t*>(state.keys + to * layout.key_bytes()), scales, scratch);
  });
  if (layout.latent()) return;
  const float* const values = slot + layout.page * layout.size;
  with_any_storage(layout.value_storage, [&](auto holds) {
    round_values(holds, layout, values, reinterpret_cast<uint8_t*>(state.values + to * layout.value_bytes()), scales);
  });
}

inline void summarize(const Layout& layout, const float* key, size_t count_before, float* summary) {
  const size_t size = layout.size;
  const float count = static_cast<float>(count_before + 1);
  for (size_t c = 0; c < size; c += kColumns) {
    const Floats k = load_line<Floats>(key + c), before = load_line<Floats>(summary + c);
    if (!count_before) {
      store_line(summary + c, k);
      if (!layout.mean) store_line(summary + size + c, k);
    } else if (layout.mean) {
      store_line(summary + c, before + (k - before) / all_lanes(count));
    } else {
      store_line(summary + c, least_of(k, before));
      store_line(summary + size + c, most_of(k, load_line<Floats>(summary + size + c)));
    }
  }
}

inline void put_one(float x, float* to) { *to = x; }
inline void put_one(float x, Half* to) { *to = stored<Half>(x); }

inline void put(const float* token, float* to, size_t size) { __builtin_memcpy(to, token, size * sizeof(float)); }
template <typename Stored>
inline void put(const float* token, Stored* to, size_t size) {
  for (size_t c = 0; c < size; ++c) put_one(token[c], to + c);
}

// What keys of a head are rounded with: weights as floats and room for a key; null where there are none.
struct Feedback {
  const float* weights = nullptr;
  float* rest = nullptr;
};

template <typename Stored>
inline void put_token(Numbers<Stored>, const float* key, const float* value, size_t size, size_t offset,
                      const TokenRun& run, const Feedback&) {
  Stored* const lane = reinterpret_cast<Stored*>(run.keys) + offset / kColumns * size * kColumns + offset % kColumns;
  for (size_t c = 0; c < size; ++c) put_one(key[c], lane + c * kColumns);
  if (value) put(value, reinterpret_cast<Stored*>(run.values) + offset * size, size);
}
template <unsigned Bits>
inline void put_token(Numbers<Scaled<Bits>>, const float* key, const float* value, size_t size, size_t offset,
                      const TokenRun& run, const Feedback& feedback) {
  uint8_t codes[kMostFactors];
  run.key_scales[offset] = feedback.weights
                               ? round_token<Bits>(key, size, feedback.weights, feedback.rest, codes)
                               : round_token<Bits>(key, size, codes);
  put_codes(codes, size, offset, true, reinterpret_cast<Scaled<Bits>*>(run.keys));
  run.value_scales[offset] = round_token<Bits>(value, size, codes);
  put_codes(codes, size, offset, false, reinterpret_cast<Scaled<Bits>*>(run.values));
}
template <unsigned Bits>
inline void put_token(Codes<Bits>, const float*, const float*, size_t, size_t, const TokenRun&, const Feedback&) {}  // a slot is written

// Writes the key and the value of a token where a page of numbers has it.
inline void put_token(const Attention& call, const float* key, const float* value, size_t row, size_t head,
                      int64_t position, const Feedback& feedback) {
  const size_t tokens = call.run_tokens(), at = static_cast<size_t>(position);
  const TokenRun run(call, call.place(row, head, at / tokens));
  with_any_storage(call.layout.storage, [&](auto holds) {
    put_token(holds, key, value, call.layout.size, at % tokens, run, feedback);
  });
}

void append(const Attention& call, size_t row, size_t head, float* scratch) {
  const Layout& layout = call.layout;
  const size_t size = layout.size;
  const HeadState state(layout, call.state, row, head);
  const Half* const feedback = call.feedback ? call.feedback + head * size * size : nullptr;
  Feedback of_tokens;
  if (feedback && !layout.integers() && call.first_column(row) < call.end_column(row)) {
    widen(feedback, size * size, scratch);
    of_tokens = {scratch, scratch + size * size};
  }
  if (layout.residuals && call.fresh[row]) begin_refined(call, row, head);
  for (size_t column = call.first_column(row); column < call.end_column(row); ++column) {
    const int64_t position = call.position(row, column), page = layout.page_of(position);
    const size_t offset = static_cast<size_t>(position - page * static_cast<int64_t>(layout.page));
    const size_t at = (call.token(row, column) * layout.kv_heads + head) * size;
    const float *const key = call.key + at, *const value = layout.latent() ? nullptr : call.value + at;
    if (layout.known) summarize(layout, key, offset, state.summaries + layout.physical(page) * layout.summary);
    if (layout.compensate && position >= layout.sinks) follow(layout, key, value, position, state.summaries);
    if (!layout.integers()) {
      if (layout.residuals) {
        put_twice(call, key, value, row, head, position, of_tokens.weights, of_tokens.rest);
      } else {
        put_token(call, key, value, row, head, position, of_tokens);
      }
      continue;
    }
    float* const slot = state.recent + layout.slot(page) * layout.slot_floats();
    const int64_t leaves = page - layout.recent_pages - 1;
    if (offset == 0 && page >= layout.sink_pages && leaves >= layout.sink_pages) {
      round_page(layout, slot, feedback, state, layout.physical(leaves), scratch);
    }
    put(key, slot + offset * size, size);
    if (value) put(value, slot + (layout.page + offset) * size, size);
  }
}

}  // namespace
}  // namespace graphopt
