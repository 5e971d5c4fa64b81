// Pages of 8-bit or 4-bit codes, multiplied by tensor cores, and the newest pages in their slots, as floats.
//
// key = low + step code, with a scale for each channel: q . key = sum q low + sum (q step) code. So for each page the
// queries are multiplied with the steps, counted in a power of two, and split into two numbers of float16, in which
// codes are exact. value = low + step code, with a scale for each token: the same with weights.
#pragma once

#include "kv_attention/cuda/reader.h"

namespace graphopt {

template <int Bits>
struct CodePages {
  static constexpr bool kCodes = true, kMultiplies = true, kNarrow = Bits == 4;
  static constexpr int kSums = 4;

  const Layout& layout;
  const State& state;
  size_t place = 0;           // of the page, among those of all heads; of its slot, where it is read from that
  bool in_slot = false;
  int folded = -1;            // whether the products are of the page and queries for sinks, 1, or others, 0
  float power = 1, lows = 0;  // of this lane's query: what its products are counted in, and that with the keys' lows
  float unit = 0, base = 0;   // what the sums of values are counted in, and the sum of their lows
  int g = lane() / 4, q = lane() % 4;

  GRAPHOPT_DEVICE CodePages(const Layout& layout, const State& state) : layout(layout), state(state) {}

  // Which four channels of a query a lane has in a step: those of a word of keys, or of its high halves.
  static GRAPHOPT_BOTH int steps(const Layout& layout) {
    return kNarrow ? static_cast<int>((layout.size + 31) / 32 * 2) : static_cast<int>(layout.size / 16);
  }
  static GRAPHOPT_DEVICE int channel(int step, int q, int i) {
    return (kNarrow ? 4 * (2 * (4 * (step / 2) + q) + step % 2) : 4 * (4 * step + q)) + i;
  }
  static GRAPHOPT_DEVICE int token(int q, int i) { return i / 8 * 32 + 8 * q + i % 8; }
  static GRAPHOPT_DEVICE int summed(int q, int i, int second) { return i / 4 * 32 + 8 * q + 4 * second + i % 4; }

  GRAPHOPT_DEVICE void open(uint32_t head, int64_t page, int64_t newest) {
    in_slot = layout.in_slot(page, newest);
    folded = -1;
    place = in_slot ? head * layout.slots() + layout.slot(page) : place_of(layout, head, page);
  }
  GRAPHOPT_DEVICE void score(const Desk& desk, const Tile& tile, bool sinks, int limit) {
    const float* const queries = desk.queries_of(sinks);
    if (in_slot) return score_slot(desk, queries, tile, limit);
    if (folded != sinks) fold(queries, desk.products), folded = sinks;
    GRAPHOPT_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sums[4][4] = {};
      score_codes(desk.products + lane(), tile, half, sums);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = token(q, 8 * half + i);
        desk.keep(at, limit, multiply_add(sums[i][0] + sums[i][2] * (1 / kRest), power, lows));
        desk.keep(at + 4, limit, multiply_add(sums[i][1] + sums[i][3] * (1 / kRest), power, lows));
      }
    }
  }

  template <int Count>
  GRAPHOPT_DEVICE void add(const Desk& desk, const Tile& tile, float factor, float (&sums)[Count][kSums]) {
    base *= factor;
    if (in_slot) {
      // weights are counted in the same unit, which must not be too small for them
      const float now = unit < 0x1p-40f ? 1.0f : unit;
      rescale(factor * (unit / now), sums);
      unit = now;
      return add_slot(desk, tile, sums);
    }
    float most = 0;
    GRAPHOPT_NO_UNROLL
    for (int four = 0; four < 4; ++four) {
      const int at = token(q, 4 * four);
      if (at >= tile.tokens) break;
      const float* const of_values = scales() + 2 * layout.size + tile.offset + at;
      const Four low = load_four(of_values), step = load_four(of_values + layout.page);
      Four weight = load_four(desk.weights_from(at));
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        float& number = weight.number[i];
        if (number == 0) continue;  // it is not read, and can have any scale
        base = multiply_add(number, low.number[i], base);
        number *= step.number[i];
        most = magnitude_of(number) > most ? magnitude_of(number) : most;
      }
      store_four(desk.weights_from(at), weight);
    }
    most = most_of_query(most);
    const float before = unit * factor;
    const float now = power_below(before > most ? before : most), inverse = inverse_of_power(now);
    rescale(before * inverse, sums);
    unit = now;
    GRAPHOPT_NO_UNROLL
    for (int half = 0; 32 * half < tile.tokens; ++half) {
      Word4 rows[2];
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const Four four = load_four(desk.weights_from(32 * half + 8 * q + 4 * i));
        rows[i] = rows_of(four.number[0] * inverse, four.number[1] * inverse, four.number[2] * inverse,
                          four.number[3] * inverse);
      }
      add_codes(rows, tile, half, sums);
    }
  }

  GRAPHOPT_DEVICE void finish() { base = sum_of_query(base); }
  GRAPHOPT_DEVICE float result(const float (&sums)[kSums], int second) const {
    return multiply_add(sums[second] + sums[2 + second] * (1 / kRest), unit, base);
  }

 private:
  GRAPHOPT_DEVICE const uint8_t* codes_at(const char* pages) const {
    return reinterpret_cast<const uint8_t*>(pages + place * layout.page_bytes());
  }
  GRAPHOPT_DEVICE const float* scales() const { return state.scales + place * layout.scales(); }
  GRAPHOPT_DEVICE const float* slot() const { return state.recent + place * layout.slot_floats(); }

  template <int Count>
  static GRAPHOPT_DEVICE void rescale(float factor, float (&sums)[Count][kSums]) {
    if (factor == 1) return;
    GRAPHOPT_UNROLL
    for (int i = 0; i < Count; ++i) {
      GRAPHOPT_UNROLL
      for (int j = 0; j < 4; ++j) sums[i][j] *= factor;
    }
  }

  // Codes are taken out of a word as its bytes 0 and 2, and 1 and 3: so pairs of rows are made the same way.
  static GRAPHOPT_DEVICE Word4 rows_of(float x0, float x1, float x2, float x3) {
    const Split even(x0, x2), odd(x1, x3);
    return {{even.high, even.low, odd.high, odd.low}};
  }
  // 1024 + code is a float16 whose low bits are those of the code.
  static GRAPHOPT_DEVICE uint32_t minus_1024(uint32_t pair) { return half2_add(pair, 0xe400e400u); }
  static GRAPHOPT_DEVICE void multiply(float (&sum)[4], const Word4& rows, uint32_t codes) {
    const uint32_t(&a)[4] = rows.words;
    if constexpr (kNarrow) {
      const uint32_t b[2] = {minus_1024(lop3<0xea>(codes, 0x000f000fu, 0x64006400u)),
                             minus_1024(lop3<0xea>(codes >> 8, 0x000f000fu, 0x64006400u))};
      multiply_f16(sum, a, b);
    } else {
      const uint32_t b[2] = {minus_1024(byte_permute(codes, 0x64u, 0x4240)),
                             minus_1024(byte_permute(codes, 0x64u, 0x4341))};
      multiply_f16(sum, a, b);
    }
  }

  // This lane's part of the queries times the steps of the page's keys.
  GRAPHOPT_DEVICE void fold(const float* queries, Word4* products) {
    float most = 0, sum = 0;
    GRAPHOPT_NO_UNROLL
    for (int step = 0; step < steps(layout); ++step) {
      const int c = channel(step, q, 0), at = step * kWarp + lane();
      Four product = {};
      if (c < static_cast<int>(layout.size)) {
        const float* const of_keys = scales() + c;
        const Four low = load_four(of_keys), size = load_four(of_keys + layout.size);
        const Four query = load_four(queries + 4 * at);
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          product.number[i] = query.number[i] * size.number[i];
          sum = multiply_add(query.number[i], low.number[i], sum);
          most = magnitude_of(product.number[i]) > most ? magnitude_of(product.number[i]) : most;
        }
      }
      store_four(reinterpret_cast<float*>(products + at), product);
    }
    lows = sum_of_query(sum);
    power = power_below(most_of_query(most));
    const float inverse = inverse_of_power(power);
    GRAPHOPT_NO_UNROLL
    for (int step = 0; step < steps(layout); ++step) {
      Word4* const at = products + step * kWarp + lane();
      const Four product = load_four(reinterpret_cast<const float*>(at));
      *at = rows_of(product.number[0] * inverse, product.number[1] * inverse, product.number[2] * inverse,
                    product.number[3] * inverse);
    }
  }

  // Keys [page / 16, size / 4 (or 8), 16, 4]: 16 bytes are four tokens, lane group g has 4 g to 4 g + 3 of 32.
  GRAPHOPT_DEVICE void score_codes(const Word4* products, const Tile& tile, int half, float (&sums)[4][4]) const {
    const int words = static_cast<int>(layout.size) / (kNarrow ? 8 : 4);
    const bool there = 32 * half + 4 * g < tile.tokens;
    const int block = (tile.offset + 32 * half) / 16 + g / 4;
    const uint8_t* const line = codes_at(state.keys) + (block * words * 16 + 4 * (g % 4)) * 4;
    GRAPHOPT_NO_UNROLL
    for (int word = 0; word < words; word += 16) {
      Word4 codes[4];
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        codes[i] = {};
        if (there && word + 4 * i + q < words) codes[i] = load16(line + (word + 4 * i + q) * 64);
      }
      GRAPHOPT_UNROLL
      for (int next = 0; next < 4; ++next) {
        if (word + 4 * next >= words) break;
        const Word4* const row = products + (word / 4 + next) * (kNarrow ? 2 : 1) * kWarp;
        GRAPHOPT_UNROLL
        for (int shift = 0; shift < (kNarrow ? 8 : 4); shift += 4) {
          const Word4 rows = row[shift / 4 * kWarp];
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) multiply(sums[i], rows, codes[next].words[i] >> shift);
        }
      }
    }
  }

  // Values [size / 16, page / 4 (or 8), 16, 4]: 16 bytes are four channels, lane group g has 4 g to 4 g + 3 of 32.
  template <int Count>
  GRAPHOPT_DEVICE void add_codes(const Word4 (&rows)[2], const Tile& tile, int half,
                                 float (&sums)[Count][kSums]) const {
    const int words = static_cast<int>(layout.page) / (kNarrow ? 8 : 4);
    const int word = tile.offset / (kNarrow ? 8 : 4) + (kNarrow ? 4 * half + q : 8 * half + 2 * q);
    const bool there = 32 * half + 8 * q < tile.tokens;
    const uint8_t* const line = codes_at(state.values) + (word * 16 + 4 * (g % 4)) * 4;
    GRAPHOPT_UNROLL
    for (int span = 0; span < Count / 4; ++span) {
      if (32 * span >= static_cast<int>(layout.size)) break;
      const bool loads = there && 32 * span + 4 * g < static_cast<int>(layout.size);
      const uint8_t* const at = line + (2 * span + g / 4) * words * 64;
      Word4 codes = {}, next = {};
      if (loads) codes = load16(at);
      if (loads && !kNarrow) next = load16(at + 64);
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        multiply(sums[4 * span + i], rows[0], codes.words[i]);
        multiply(sums[4 * span + i], rows[1], kNarrow ? codes.words[i] >> 4 : next.words[i]);
      }
    }
  }

  GRAPHOPT_DEVICE void score_slot(const Desk& desk, const float* queries, const Tile& tile, int limit) const {
    const int size = static_cast<int>(layout.size);
    GRAPHOPT_NO_UNROLL
    for (int four = 0; four < 4; ++four) {
      const int first = token(q, 4 * four);
      const float* const keys = slot() + static_cast<size_t>(tile.offset + first) * layout.size;
      float sums[4] = {};
      GRAPHOPT_NO_UNROLL
      for (int at = 0; first < tile.tokens && at < 4 * steps(layout); ++at) {
        const int c = channel(at / 4, at % 4, 0);
        if (c >= size) continue;
        const Four query = load_four(queries + (at / 4 * kWarp + 4 * g + at % 4) * 4);
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Four key = load_four(keys + i * size + c);
          GRAPHOPT_UNROLL
          for (int k = 0; k < 4; ++k) sums[i] = multiply_add(query.number[k], key.number[k], sums[i]);
        }
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) desk.keep(first + i, limit, sums[i]);
    }
  }

  template <int Count>
  GRAPHOPT_DEVICE void add_slot(const Desk& desk, const Tile& tile, float (&sums)[Count][kSums]) const {
    const float inverse = inverse_of_power(unit);
    const float* const own = desk.weights_from(0);
    GRAPHOPT_NO_UNROLL
    for (int t = 0; t < tile.tokens; ++t) {
      const float weight = own[t];
      if (weight == 0) continue;  // it is not read, and can hold any value
      const float* const value = slot() + (layout.page + static_cast<size_t>(tile.offset + t)) * layout.size;
      GRAPHOPT_UNROLL
      for (int i = 0; i < Count / 2; ++i) {
        const int c = summed(q, i / 2 * 4, i % 2);
        if (c >= static_cast<int>(layout.size)) continue;
        const Four number = load_four(value + c);
        GRAPHOPT_UNROLL
        for (int k = 0; k < 4; ++k) {
          float& sum = sums[i / 2 * 4 + k][i % 2];
          sum = multiply_add(weight * inverse, number.number[k], sum);
        }
      }
    }
  }
};

}  // namespace graphopt
