// Pages of float16, multiplied by tensor cores: keys [page / 16, size, 16], values [page, size].
//
// A product has 16 rows: the high parts of 8 queries, or of their weights, and then the low ones, so that it has 22
// bits of them. The 8 numbers of 16 bytes that a lane loads are of 8 tokens, or of 8 channels; each goes to a product
// of its own, in which all lanes of a query hold neighbours in the direction that is summed over.
#pragma once

#include "kv_attention/cuda/floats.h"

namespace graphopt {

struct HalfPages : FloatPlaces {
  static constexpr bool kCodes = false, kMultiplies = true;
  static constexpr int kSums = 4;

  const Layout& layout;
  const State& state;
  size_t place = 0;  // of the page, among those of all heads
  int g = lane() / 4, q = lane() % 4;

  GRAPHOPT_DEVICE HalfPages(const Layout& layout, const State& state) : layout(layout), state(state) {}

  // Splits this lane's part of a query, which no other lane reads; returns the query's scale.
  GRAPHOPT_DEVICE float prepare(const float* queries, Word4* products) const {
    float most = 0;
    for (int step = 0; step < steps(layout); ++step) {
      const Four query = load_four(queries + (step * kWarp + lane()) * 4);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) most = magnitude_of(query.number[i]) > most ? magnitude_of(query.number[i]) : most;
    }
    const float unit = power_below(most_of_query(most)), inverse = inverse_of_power(unit);
    for (int step = 0; step < steps(layout); ++step) {
      const Four query = load_four(queries + (step * kWarp + lane()) * 4);
      const Split first(query.number[0] * inverse, query.number[1] * inverse);
      const Split second(query.number[2] * inverse, query.number[3] * inverse);
      products[step * kWarp + lane()] = {{first.high, first.low, second.high, second.low}};
    }
    return unit;
  }

  GRAPHOPT_DEVICE void open(uint32_t head, int64_t page, int64_t) { place = place_of(layout, head, page); }
  GRAPHOPT_DEVICE const Half* page_of(const char* pages) const {
    return reinterpret_cast<const Half*>(pages) + place * layout.page * layout.size;
  }

  GRAPHOPT_DEVICE void score(const Desk& desk, const Tile& tile, bool sinks, int limit) {
    float sums[8][4] = {};
    if (desk.reading->prepared != sinks) {
      *desk.note() = prepare(desk.queries_of(sinks), desk.products);
      sync_warp();
      if (lane() == 0) desk.reading->prepared = sinks;
      sync_warp();
    }
    const Word4* const products = desk.products + lane();
    // lane group g has tokens 8 g to 8 g + 7
    const bool there = 8 * g < tile.tokens;
    const size_t first = static_cast<size_t>(tile.offset + 16 * (g / 2));
    const Half* const block = page_of(state.keys) + first * layout.size + 8 * (g % 2);
    GRAPHOPT_NO_UNROLL
    for (int step = 0; step < steps(layout); ++step) {
      Word4 key[4] = {};
      if (there) {
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) key[i] = load16(block + channel(step, q, i) * 16);
      }
      const Word4 query = products[step * kWarp];
      multiply(query, key, sums);
    }
    const float power = *desk.note();
    GRAPHOPT_UNROLL
    for (int i = 0; i < 8; ++i) {
      desk.keep(token(q, i), limit, (sums[i][0] + sums[i][2] * (1 / kRest)) * power);
      desk.keep(token(q, 8 + i), limit, (sums[i][1] + sums[i][3] * (1 / kRest)) * power);
    }
  }

  // Adds products with the 8 numbers of four loads; pairs are of neighbouring loads.
  static GRAPHOPT_DEVICE void multiply(const Word4& rows, const Word4 (&loaded)[4], float (*sums)[4]) {
    const uint32_t(&a)[4] = rows.words;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto pairs = [&](uint32_t selector, float(&sum)[4]) {
        const uint32_t b[2] = {byte_permute(loaded[0].words[i], loaded[1].words[i], selector),
                               byte_permute(loaded[2].words[i], loaded[3].words[i], selector)};
        multiply_f16(sum, a, b);
      };
      pairs(0x5410, sums[2 * i]), pairs(0x7632, sums[2 * i + 1]);
    }
  }

  // Sets numbers to 0 that are not finite, and returns bits of which one is set if there were any.
  static GRAPHOPT_DEVICE uint32_t clear_bad(uint32_t& pair) {
    const uint32_t bad = ((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u;
    pair &= ~((bad >> 15) * 0xffffu);
    return bad;
  }

  template <int Count>
  GRAPHOPT_DEVICE void add(const Desk& desk, const Tile& tile, float factor, float (&sums)[Count][kSums]) {
    if (factor != 1) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < Count; ++i) {
        GRAPHOPT_UNROLL
        for (int j = 0; j < 4; ++j) sums[i][j] *= factor;
      }
    }
    uint32_t bad = 0;
    GRAPHOPT_NO_UNROLL
    for (int four = 0; four < 4; ++four) {
      const int first = 16 * q + 4 * four;
      const Four weight = load_four(desk.weights_from(first));
      // which tokens any query reads; others can hold NaN or infinity, and 0 times those is not 0
      uint32_t read = first < tile.tokens ? 15u : 0u;
      if (!tile.all) {
        const float(&number)[4] = weight.number;
        read = (number[0] != 0 ? 1u : 0u) | (number[1] != 0 ? 2u : 0u) | (number[2] != 0 ? 4u : 0u) |
               (number[3] != 0 ? 8u : 0u);
        GRAPHOPT_UNROLL
        for (int mask = 4; mask < kWarp; mask *= 2) read |= shuffle_xor(read, mask);
      }
      const Split even(weight.number[0], weight.number[1]), odd(weight.number[2], weight.number[3]);
      const Word4 rows = {{even.high, even.low, odd.high, odd.low}};
      const Half* const token = page_of(state.values) + static_cast<size_t>(tile.offset + first) * layout.size + 8 * g;
      GRAPHOPT_UNROLL
      for (int span = 0; span < Count / 8; ++span) {
        if (64 * span >= static_cast<int>(layout.size)) break;
        Word4 value[4] = {};
        if (64 * span + 8 * g < static_cast<int>(layout.size)) {
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            if (read >> i & 1) value[i] = load16(token + i * static_cast<int>(layout.size) + 64 * span);
          }
        }
        if (!tile.alike) {
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            uint32_t(&words)[4] = value[i].words;
            bad |= clear_bad(words[0]) | clear_bad(words[1]) | clear_bad(words[2]) | clear_bad(words[3]);
          }
        }
        multiply(rows, value, sums + 8 * span);
      }
    }
    if (!tile.alike && ballot(bad != 0)) spoil_sums(desk, tile, sums);
  }

  // A value that is not finite reaches the results of the queries that read it, and of no others.
  template <int Count>
  GRAPHOPT_DEVICE void spoil_sums(const Desk& desk, const Tile& tile, float (&sums)[Count][kSums]) const {
    uint64_t bad = 0;  // a bit for each sum
    GRAPHOPT_NO_UNROLL
    for (int t = 0; t < tile.tokens; ++t) {
      if (*desk.weights_from(t) == 0) continue;
      const Half* const value = page_of(state.values) + static_cast<size_t>(tile.offset + t) * layout.size;
      GRAPHOPT_NO_UNROLL
      for (int i = 0; i < 2 * Count; ++i) {
        const int c = summed(q, i / 2, i % 2);
        if (c < static_cast<int>(layout.size) && (value[c].bits & 0x7c00) == 0x7c00) bad |= uint64_t{1} << i;
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < 2 * Count; ++i) {
      if (bad >> i & 1) sums[i / 2][i % 2] = __builtin_nanf("");
    }
  }

  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int second) const {
    return sums[second] + sums[2 + second] * (1 / kRest);
  }
  GRAPHOPT_DEVICE void finish() {}
};

}  // namespace graphopt
