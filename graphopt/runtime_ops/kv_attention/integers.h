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
inline __attribute__((always_inline)) void multiply_four(__m512i& sum, __m512i codes, __m512i factors) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(factors));
}

inline __m512i load_four(const int8_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm512_set1_epi32(word);
}

// Products of `Rows` rows of factors with `Lines` lines of 16 numbers, whose codes are [line][unit][16][4].
template <bool Narrow, size_t Rows, size_t Lines>
__attribute__((noinline)) void multiply_codes(const Factors& factors, const uint8_t* codes, ptrdiff_t to_next, size_t count,
                           Floats (&products)[Rows][Lines]) {
  const size_t bytes = count / 4 * kLine / (Narrow ? 2 : 1);
  __m512i upper[Rows][Lines], lower[Rows][Lines];
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) upper[r][i] = lower[r][i] = _mm512_setzero_si512();
  }
  constexpr size_t kFours = Narrow ? 2 : 1;
  for (size_t at = 0; at < bytes; at += kLine) {
    __m512i four[kFours][Lines];
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      const __m512i line = _mm512_loadu_si512(codes + i * bytes + at), low = _mm512_set1_epi8(15);
      prefetch_line(codes + i * bytes + at, to_next);
      four[0][i] = Narrow ? _mm512_and_si512(line, low) : line;
      if (Narrow) four[kFours - 1][i] = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
    }
    const size_t factor = at / kLine * 4 * kFours;
#pragma GCC unroll 2
    for (size_t half = 0; half < kFours; ++half) {
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const __m512i high_four = load_four(factors.upper[r] + factor + 4 * half);
        const __m512i low_four = load_four(factors.lower[r] + factor + 4 * half);
#pragma GCC unroll 8
        for (size_t i = 0; i < Lines; ++i) {
          multiply_four(upper[r][i], four[half][i], high_four);
          multiply_four(lower[r][i], four[half][i], low_four);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper[r][i], 8), lower[r][i]);
      products[r][i] = Floats{{_mm512_cvtepi32_ps(sum) * factors.steps[r]}};
    }
  }
}

// The same for any number of lines; finish(row, line, product) takes them.
template <bool Narrow, size_t Rows, typename Finish>
inline void multiply_codes(const Factors& factors, const uint8_t* codes, ptrdiff_t to_next, size_t count, size_t lines,
                           const Finish& finish) {
  constexpr size_t kLines = 8 / Rows < 4 ? 8 / Rows : 4;
  const size_t bytes = count / 4 * kLine / (Narrow ? 2 : 1);
  size_t line = 0;
  const auto run = [&](auto width) {
    constexpr size_t kWidth = decltype(width)::value;
    Floats products[Rows][kWidth];
    multiply_codes<Narrow, Rows, kWidth>(factors, codes + line * bytes, to_next, count, products);
    for (size_t r = 0; r < Rows; ++r) {
      for (size_t i = 0; i < kWidth; ++i) finish(r, line + i, products[r][i]);
    }
    line += kWidth;
  };
  while (line + kLines <= lines) run(std::integral_constant<size_t, kLines>());
  while (line < lines) run(std::integral_constant<size_t, 1>());
}

// Scores [rows, page] of a page of codes.
template <bool Narrow>
void multiply_key_codes(const float* queries, size_t rows, const uint8_t* codes, ptrdiff_t to_next,
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
        offset = fused(q, load_line<Floats>(scales + c), offset);
        store_line(scaled + c, q * load_line<Floats>(scales + size + c));
      }
      offsets[r] = sum_of(offset);
      factors.round(r, scaled, size);
    }
    multiply_codes<Narrow, kRows>(factors, codes, to_next, size, page / kColumns, [&](size_t r, size_t line, const Floats& x) {
      store_line(scores + (row + r) * page + line * kColumns, x + all_lanes(offsets[r]));
    });
  });
}

// sums = sums * factors + weights times the values of a page of codes; what is not visible has the weight 0.
template <bool Narrow>
void multiply_value_codes(const float* weights, const float* before, size_t rows, const uint8_t* codes,
                          ptrdiff_t to_next, const float* scales, const Visible& seen, size_t size, size_t page, float* sums) {
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
    multiply_codes<Narrow, kRows>(factors, codes, to_next, page, size / kColumns, [&](size_t r, size_t line, const Floats& x) {
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
