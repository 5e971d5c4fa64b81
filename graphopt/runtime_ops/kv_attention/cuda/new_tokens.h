// The new tokens of one page as the threads of a block write them: into pages of floats, slots, summaries and means.
#pragma once

#include <type_traits>

#include "kv_attention/cuda/append.h"
#include "kv_attention/shared/float8.h"

namespace graphopt {

constexpr unsigned kAppendThreads = 128;

GRAPHOPT_DEVICE void put(float x, float* to) { *to = x; }
GRAPHOPT_DEVICE void put(float x, Half* to) { *to = half_of(x); }
GRAPHOPT_DEVICE void put(float x, BFloat16* to) { *to = bfloat16_of(x); }
GRAPHOPT_DEVICE void put(float x, Float8* to) { *to = to_float8(x); }

// New tokens of one page, of one head.
struct NewTokens {
  const CudaCall& call;
  const HeadState& state;
  int row, head;
  int64_t page;
  size_t first, end;  // their offsets

  GRAPHOPT_DEVICE size_t at(size_t offset) const {
    return call.token_at(row, head, page * static_cast<int64_t>(call.layout.page) + static_cast<int64_t>(offset));
  }
  GRAPHOPT_DEVICE float key(size_t offset, size_t c) const {
    return load_number(call.key, call.type, at(offset) + c);
  }
  GRAPHOPT_DEVICE float value(size_t offset, size_t c) const {
    return load_number(call.value, call.type, at(offset) + c);
  }

  template <typename Stored>
  GRAPHOPT_DEVICE void store(Numbers<Stored>) const {
    const unsigned begin = static_cast<unsigned>(first), last = static_cast<unsigned>(end);
    const size_t place = call.layout.physical(page) * call.layout.page * call.layout.size;
    Stored* const keys = reinterpret_cast<Stored*>(state.keys) + place;
    Stored* const values = reinterpret_cast<Stored*>(state.values) + place;
    unsigned eights_begin = begin, eights_end = begin;
    if constexpr (std::is_same_v<Stored, Half>) {
      const bool aligned = reinterpret_cast<uintptr_t>(call.value) % sizeof(Word4) == 0 && call.layout.size % 8 == 0;
      if (call.type == GRAPHOPT_FLOAT16 && aligned && (begin + 7) / 8 * 8 < last / 8 * 8) {
        eights_begin = (begin + 7) / 8 * 8, eights_end = last / 8 * 8;
        store_eights(eights_begin, eights_end, keys, values);
      }
    }
    store_tokens(begin, eights_begin, keys, values);
    store_tokens(eights_end, last, keys, values);
  }

  template <typename Stored>
  GRAPHOPT_DEVICE void store_tokens(unsigned begin, unsigned last, Stored* keys, Stored* values) const {
    const unsigned size = static_cast<unsigned>(call.layout.size), count = last - begin;
    for (unsigned i = thread_index().x; i < count * size; i += kAppendThreads) {
      // neighbouring threads write neighbouring tokens of a channel, which are adjacent in memory
      const unsigned t = begin + i % count, c = i / count;
      put(key(t, c), keys + (t / 16 * size + c) * 16 + t % 16);
    }
    for (unsigned i = thread_index().x; i < count * size; i += kAppendThreads) {
      const unsigned t = begin + i / size, c = i % size;
      put(value(t, c), values + t * size + c);
    }
  }

  // Tokens of float16 by eights, both multiples of 8: eight tokens of a channel are 16 bytes of keys, and eight channels of a
  // token 16 bytes of values.
  GRAPHOPT_DEVICE void store_eights(unsigned begin, unsigned last, Half* keys, Half* values) const {
    const unsigned size = static_cast<unsigned>(call.layout.size), count = (last - begin) / 8 * size;
    const size_t apart = call.layout.kv_heads * size, from = at(begin);
    for (unsigned i = thread_index().x; i < count; i += kAppendThreads) {
      const unsigned eight = i / size, c = i % size, t = begin + 8 * eight;
      const Half* const given = static_cast<const Half*>(call.key) + from + 8 * eight * apart + c;
      Word4 word;
      GRAPHOPT_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t low = given[2 * k * apart].bits, high = given[(2 * k + 1) * apart].bits;
        word.words[k] = low | high << 16;
      }
      store16(keys + (t / 16 * size + c) * 16 + t % 16, word);
    }
    for (unsigned i = thread_index().x; i < count; i += kAppendThreads) {
      const unsigned token = i / (size / 8), c = i % (size / 8) * 8;
      store16(values + (begin + token) * size + c, load16(static_cast<const Half*>(call.value) + from + token * apart + c));
    }
  }

  // Floats of the newest page of a slot; elements that a later token of this call overwrites are left to that one.
  template <unsigned Bits>
  GRAPHOPT_DEVICE void store(Codes<Bits>) const {
    const Layout& layout = call.layout;
    float* const slot = state.recent + slot_of(layout, page);
    const int64_t tokens = static_cast<int64_t>(layout.page), next = page + layout.recent_pages + 1;
    const int64_t left = call.end(row) - next * tokens;  // tokens of the page that takes the slot
    const int64_t taken = page < layout.sink_pages || left <= 0 ? 0 : left < tokens ? left : tokens;
    const size_t kept = static_cast<size_t>(taken);
    const size_t from = kept > first ? kept : first;
    for (size_t i = thread_index().x + from * layout.size; i < end * layout.size; i += kAppendThreads) {
      const size_t t = i / layout.size, c = i % layout.size;
      slot[i] = key(t, c), slot[layout.page * layout.size + i] = value(t, c);
    }
  }

  // Each token after the other, as running means and bounds are defined.
  GRAPHOPT_DEVICE void summarize() const {
    const Layout& layout = call.layout;
    float* const summary = state.summaries + layout.physical(page) * layout.summary;
    for (size_t c = thread_index().x; c < layout.size; c += kAppendThreads) {
      float low = first ? summary[c] : 0, high = first && !layout.mean ? summary[layout.size + c] : 0;
      for (size_t t = first; t < end; ++t) {
        const float k = key(t, c);
        if (!t) {
          low = high = k;
        } else if (layout.mean) {
          low = low + (k - low) / static_cast<float>(t + 1);
        } else {  // NaN propagates
          low = k != k || k < low ? k : low, high = k != k || k > high ? k : high;
        }
      }
      summary[c] = low;
      if (!layout.mean) summary[layout.size + c] = high;
    }
  }

  GRAPHOPT_DEVICE float* mean_of(int64_t logical) const {
    return state.summaries + call.layout.physical(logical) * call.layout.summary + call.layout.known;
  }

  // The mean of all tokens from the sinks on, up to this page: m += (sum - n m) / count for n tokens at once. Of a page
  // whose predecessor is of this call too only the sum, which chain_means makes a mean.
  GRAPHOPT_DEVICE void follow(bool is_first) const {
    const Layout& layout = call.layout;
    const int64_t base = page * static_cast<int64_t>(layout.page), begin = base + static_cast<int64_t>(first);
    const int64_t from = begin > layout.sinks ? begin : layout.sinks, to = base + static_cast<int64_t>(end);
    if (from >= to) return;
    const double before = static_cast<double>(from - layout.sinks), added = static_cast<double>(to - from);
    const size_t size = layout.size;
    float* const mean = mean_of(page);
    const float* const known = from == layout.sinks ? nullptr : from == base ? mean_of(page - 1) : mean;
    for (size_t i = thread_index().x; i < 2 * size; i += kAppendThreads) {
      double sum = 0;
      for (int64_t position = from; position < to; ++position) {
        const size_t offset = static_cast<size_t>(position - base);
        sum += static_cast<double>(i < size ? key(offset, i) : value(offset, i - size));
      }
      if (is_first || !known) {
        const double last = known ? static_cast<double>(known[i]) : 0;
        sum = last + (sum - added * last) / (before + added);
      }
      mean[i] = static_cast<float>(sum);
    }
  }
};

}  // namespace graphopt
