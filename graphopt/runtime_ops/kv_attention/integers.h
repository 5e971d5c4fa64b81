// Products with codes: of integers where there are instructions for it, else of the floats that the codes stand for.
#pragma once

#include "kv_attention/cpu.h"
#include "kv_attention/products.h"

namespace graphopt {
namespace {

// The longest row of factors: the channels of a head.
constexpr size_t kMostFactors = 256;

#if defined(__AVX512VNNI__)
constexpr bool kMultiplyCodes = true;
constexpr size_t kCodeRows = 4;  // each has two sums, of high and of low bytes
// The largest factor, 256 * upper + lower; so sums of 256 products with codes of 8 bits stay below 2^31.
constexpr float kLargestFactor = 32639;

// Factors of codes, rounded to 16 bits for each row.
struct Factors {
  alignas(kLine) int8_t upper[kCodeRows][kMostFactors], lower[kCodeRows][kMostFactors];
  float steps[kCodeRows];

  void round(size_t row, const float* factors, size_t count) {
    // The bits of magnitudes are in their order, and those of what is no number come last: it must not get lost.
    __m512i most = _mm512_setzero_si512();
    for (size_t i = 0; i < count; i += kColumns) {
      const __m512i x = _mm512_castps_si512(load_line<Floats>(factors + i).part[0]);
      most = _mm512_max_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7fffffff)), most);
    }
    const float largest = bits_of<float>(_mm512_reduce_max_epi32(most));
    const bool none = largest < 1e-30f;
    const Floats inverse = all_lanes(none ? 0 : kLargestFactor / largest);
    steps[row] = none ? 0 : largest / kLargestFactor;
    for (size_t i = 0; i < count; i += kColumns) {
      const __m512i x = reinterpret_cast<__m512i>(nearest(load_line<Floats>(factors + i) * inverse).part[0]);
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(upper[row] + i), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(lower[row] + i), _mm512_cvtepi32_epi8(x));
    }
  }
};

// sum + the products of the 4 codes of each lane with 4 factors. Left to itself the compiler copies sums around.
inline __attribute__((always_inline)) void multiply_four(__m512i& sum, __m512i codes, const int8_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(_mm512_set1_epi32(word)));
}

// Products of `Rows` rows of factors with 16 numbers, whose codes are [unit][16][4].
template <bool Narrow, size_t Rows>
__attribute__((noinline)) void multiply_codes(const Factors& factors, const uint8_t* codes, Ahead& ahead, size_t count,
                           Floats (&products)[Rows]) {
  const size_t units = count / (Narrow ? 8 : 4);
  Ahead::Run asked = ahead.run;
  __m512i upper[Rows], lower[Rows];
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) upper[r] = lower[r] = _mm512_setzero_si512();
  const auto multiply = [&](__m512i four, size_t factor) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      multiply_four(upper[r], four, factors.upper[r] + factor);
      multiply_four(lower[r], four, factors.lower[r] + factor);
    }
  };
  for (size_t unit = 0; unit < units; ++unit, codes += kLine) {
    const __m512i line = _mm512_loadu_si512(codes);
    ahead.ask(&asked);
    if (Narrow) {
      const __m512i low = _mm512_set1_epi8(15);
      multiply(_mm512_and_si512(line, low), 8 * unit);
      multiply(_mm512_and_si512(_mm512_srli_epi16(line, 4), low), 8 * unit + 4);
    } else {
      multiply(line, 4 * unit);
    }
  }
  ahead.run = asked;
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper[r], 8), lower[r]);
    products[r] = Floats{{_mm512_cvtepi32_ps(sum) * factors.steps[r]}};
  }
}

// The same for any number of lines; finish(row, line, product) takes them. Lines go one by one, as they lie in memory:
// so the processor foresees them.
template <bool Narrow, size_t Rows, typename Finish>
inline void multiply_codes(const Factors& factors, const uint8_t* codes, Ahead& ahead, size_t count, size_t lines,
                           const Finish& finish) {
  for (size_t line = 0; line < lines; ++line, codes += count / 4 * kLine / (Narrow ? 2 : 1)) {
    Floats products[Rows];
    multiply_codes<Narrow, Rows>(factors, codes, ahead, count, products);
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) finish(r, line, products[r]);
  }
}

// Scores [rows, page] of a page of codes.
template <bool Narrow>
void multiply_key_codes(const float* queries, size_t rows, const uint8_t* codes, Ahead& ahead,
                        const float* scales, size_t size, size_t page, float* scores) {
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors factors;
    float offsets[kRows];
    alignas(kLine) float scaled[kMostFactors];
    for (size_t r = 0; r < kRows; ++r) {
      const float* const query = queries + (row + r) * size;
      Floats offset = all_lanes(0.f);
      for (size_t c = 0; c < size; c += kColumns) {
        const Floats q = load_line<Floats>(query + c);
        ahead.ask();
        offset = fused(q, load_line<Floats>(scales + c), offset);
        store_line(scaled + c, q * load_line<Floats>(scales + size + c));
      }
      offsets[r] = sum_of(offset);
      factors.round(r, scaled, size);
    }
    multiply_codes<Narrow, kRows>(factors, codes, ahead, size, page / kColumns, [&](size_t r, size_t line, const Floats& x) {
      store_line(scores + (row + r) * page + line * kColumns, x + all_lanes(offsets[r]));
    });
  });
}

// sums = sums * factors + weights times the values of a page of codes; what is not visible has the weight 0.
template <bool Narrow>
void multiply_value_codes(const float* weights, const float* before, size_t rows, const uint8_t* codes,
                          Ahead& ahead, const float* scales, const Visible& seen, size_t size, size_t page, float* sums) {
  const bool all = seen.all(page);
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors factors;
    float offsets[kRows];
    alignas(kLine) float scaled[kMostFactors];
    for (size_t r = 0; r < kRows; ++r) {
      Floats offset = all_lanes(0.f);
      for (size_t t = 0; t < page; t += kColumns) {
        const Floats weight = load_line<Floats>(weights + (row + r) * page + t);
        Floats low = load_line<Floats>(scales + t), step = load_line<Floats>(scales + page + t);
        ahead.ask();
        if (!all) {  // 0 times no number is no number
          const int lane = static_cast<int>(t);
          const Integers mask =
              lanes_between(lane, seen.first[0], seen.end[0]) | lanes_between(lane, seen.first[1], seen.end[1]);
          low = choose(mask, low, all_lanes(0.f)), step = choose(mask, step, all_lanes(0.f));
        }
        offset = fused(weight, low, offset);
        store_line(scaled + t, weight * step);
      }
      offsets[r] = sum_of(offset);
      factors.round(r, scaled, page);
    }
    multiply_codes<Narrow, kRows>(factors, codes, ahead, page, size / kColumns, [&](size_t r, size_t line, const Floats& x) {
      float* const to = sums + (row + r) * size + line * kColumns;
      store_line(to, fused(load_line<Floats>(to), all_lanes(before[row + r]), x + all_lanes(offsets[r])));
    });
  });
}
#else
constexpr bool kMultiplyCodes = false;
#endif

// 16 numbers of a line of codes: number `k` of the four in each lane.
template <bool Narrow>
inline Floats codes_to_floats(const uint8_t* codes, size_t unit, size_t k) {
  const uint8_t* const line = codes + (Narrow ? unit / 2 : unit) * kLine + k;
  float lane[kColumns];
  for (size_t i = 0; i < kColumns; ++i) {
    lane[i] = static_cast<float>(Narrow ? line[4 * i] >> (unit % 2 ? 4 : 0) & 15 : line[4 * i]);
  }
  return load_line<Floats>(lane);
}

// The keys of a page of codes, [page / 16, size, 16].
template <bool Narrow>
void decode_keys(const uint8_t* codes, const float* scales, size_t size, size_t page, float* keys) {
  for (size_t i = 0; i < page / kColumns; ++i, codes += size * kColumns / (Narrow ? 2 : 1)) {
    for (size_t c = 0; c < size; ++c) {
      const Floats code = codes_to_floats<Narrow>(codes, c / 4, c % 4);
      store_line(keys + (i * size + c) * kColumns, code * scales[size + c] + all_lanes(scales[c]));
    }
  }
}

// The values of a page of codes, [page, size].
template <bool Narrow>
void decode_values(const uint8_t* codes, const float* scales, size_t size, size_t page, float* values) {
  for (size_t c = 0; c < size; c += kColumns, codes += page * kColumns / (Narrow ? 2 : 1)) {
    for (size_t t = 0; t < page; ++t) {
      const Floats code = codes_to_floats<Narrow>(codes, t / 4, t % 4);
      store_line(values + t * size + c, code * scales[page + t] + all_lanes(scales[t]));
    }
  }
}

}  // namespace
}  // namespace graphopt
