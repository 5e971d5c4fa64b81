// Pages of floats that are multiplied as floats: keys [page / 16, size, 16], values [page, size].
#pragma once

#include "kv_attention/cuda/reader.h"
#include "kv_attention/shared/float8.h"

namespace graphopt {

GRAPHOPT_DEVICE float number_of(float x) { return x; }
GRAPHOPT_DEVICE float number_of(BFloat16 x) { return to_float(x); }
GRAPHOPT_DEVICE float number_of(Float8 x) {
  // Shifted to where a float16 has exponent and fraction, it is 2^8 too small; that also takes in subnormal numbers.
  const uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 8;
  const Half half = {static_cast<uint16_t>(sign | (magnitude == 0x7f ? 0x7fffu : magnitude << 7))};
  return to_float(half) * 256.0f;
}

// Eight numbers that lie together.
template <typename Stored>
GRAPHOPT_DEVICE void load_eight(const Stored* from, float (&numbers)[8]) {
  union {
    uint32_t words[8];
    Stored stored[32 / sizeof(Stored)];
  } bits;
  constexpr int kWords = 2 * sizeof(Stored);
  if constexpr (kWords == 2) {
    const Word2 word = load8(from);
    bits.words[0] = word.words[0], bits.words[1] = word.words[1];
  } else {
    GRAPHOPT_UNROLL
    for (int i = 0; i < kWords; i += 4) {
      const Word4 word = load16(reinterpret_cast<const char*>(from) + 4 * i);
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) bits.words[i + j] = word.words[j];
    }
  }
  GRAPHOPT_UNROLL
  for (int i = 0; i < 8; ++i) numbers[i] = number_of(bits.stored[i]);
}

// Which channels a lane q has in its sums, and which tokens in its scores: of storages of floats.
struct FloatPlaces {
  static GRAPHOPT_BOTH int steps(const Layout& layout) { return static_cast<int>(layout.size / 16); }
  static GRAPHOPT_DEVICE int channel(int step, int q, int i) { return 16 * step + 4 * i + q; }  // of a query
  static GRAPHOPT_DEVICE int token(int q, int i) { return 16 * q + i; }
  // of sum `i` of 8 a span of 64 channels, and of a pair its first or second
  static GRAPHOPT_DEVICE int summed(int q, int i, int second) { return i / 8 * 64 + 16 * q + 8 * second + i % 8; }
};

template <typename Stored>
struct FloatPages : FloatPlaces {
  static constexpr bool kCodes = false, kMultiplies = false;
  static constexpr int kSums = 2;

  const Layout& layout;
  const State& state;
  size_t place = 0;  // of the page, among those of all heads
  int g = lane() / 4, q = lane() % 4;

  GRAPHOPT_DEVICE FloatPages(const Layout& layout, const State& state) : layout(layout), state(state) {}
  GRAPHOPT_DEVICE void open(uint32_t head, int64_t page, int64_t) { place = place_of(layout, head, page); }
  GRAPHOPT_DEVICE const Stored* page_of(const char* pages) const {
    return reinterpret_cast<const Stored*>(pages) + place * layout.page * layout.size;
  }

  GRAPHOPT_DEVICE void score(const Desk& desk, const Tile& tile, bool sinks, int limit) {
    float scores[kLaneTokens] = {};
    const float* const queries = desk.queries_of(sinks);
    const Stored* const block = page_of(state.keys) + static_cast<size_t>(tile.offset + 16 * q) * layout.size;
    GRAPHOPT_NO_UNROLL
    for (int step = 0; 16 * q < tile.tokens && step < steps(layout); ++step) {
      GRAPHOPT_NO_UNROLL
      for (int from = 0; from < 4; ++from) {
        const Four query = load_four(queries + (step * kWarp + 4 * g + from) * 4);
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Stored* const line = block + channel(step, from, i) * 16;
          GRAPHOPT_UNROLL
          for (int half = 0; half < 2; ++half) {
            float key[8];
            load_eight(line + 8 * half, key);
            GRAPHOPT_UNROLL
            for (int t = 0; t < 8; ++t) {
              scores[8 * half + t] = multiply_add(query.number[i], key[t], scores[8 * half + t]);
            }
          }
        }
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) desk.keep(token(q, i), limit, scores[i]);
  }

  template <int Count>
  GRAPHOPT_DEVICE void add(const Desk& desk, const Tile& tile, float factor, float (&sums)[Count][kSums]) {
    if (factor != 1) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < Count; ++i) sums[i][0] *= factor, sums[i][1] *= factor;
    }
    const float* const own = desk.weights_from(0);
    GRAPHOPT_NO_UNROLL
    for (int t = 0; t < tile.tokens; ++t) {
      const float weight = own[t];
      if (weight == 0) continue;  // it is not read, and can hold any value
      const Stored* const value = page_of(state.values) + static_cast<size_t>(tile.offset + t) * layout.size;
      GRAPHOPT_UNROLL
      for (int span = 0; span < Count / 8; ++span) {
        GRAPHOPT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int at = summed(q, 8 * span, half);
          if (at >= static_cast<int>(layout.size)) continue;
          float number[8];
          load_eight(value + at, number);
          GRAPHOPT_UNROLL
          for (int i = 0; i < 8; ++i) {
            float& sum = sums[8 * span + i][half];
            sum = multiply_add(weight, number[i], sum);
          }
        }
      }
    }
  }

  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int second) const { return sums[second]; }
  GRAPHOPT_DEVICE void finish() {}
};

}  // namespace graphopt
