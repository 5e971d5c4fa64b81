// Products with codes: of integers where there are instructions for it, else of the floats that the codes mean.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/factors.h"
#include "kv_attention/cpu/products.h"

namespace graphopt {
namespace {

#if GRAPHOPT_MULTIPLIES_CODES
constexpr bool kMultiplyCodes = true;

#if defined(__AVX512VNNI__)
constexpr size_t kCodeLines = 2;  // that share each load of factors

// sum + the products of the 4 codes of each lane with 4 factors. Left to itself the compiler copies sums around.
inline __attribute__((always_inline)) void multiply_four(__m512i& sum, __m512i codes, __m512i factors) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(factors));
}

inline __attribute__((always_inline)) __m512i four_factors(const int8_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm512_set1_epi32(word);
}

// Sums of products of lines of codes with rows of factors, of high and of low bytes.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  // Codes of one unit of each line, `to_line` bytes apart.
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t to_line,
                                                 size_t unit) {
    __m512i line[Lines];
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) line[i] = _mm512_loadu_si512(codes + i * to_line);
    if (!Narrow) return multiply(factors, line, 4 * unit);
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i half[Lines];
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) half[i] = _mm512_and_si512(line[i], mask);
    multiply(factors, half, 8 * unit);
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) half[i] = _mm512_and_si512(_mm512_srli_epi16(line[i], 4), mask);
    multiply(factors, half, 8 * unit + 4);
  }

  Floats of(size_t r, size_t i) const {
    return {{_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper_[r][i], 8), lower_[r][i]))}};
  }

 private:
  inline __attribute__((always_inline)) void multiply(const Factors<Rows>& factors, const __m512i (&four)[Lines],
                                                      size_t first) {
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const FactorRow& row = factors.rounded[r];
      const __m512i high = four_factors(row.upper + first), low = four_factors(row.lower + first);
#pragma GCC unroll 2
      for (size_t i = 0; i < Lines; ++i) {
        multiply_four(upper_[r][i], four[i], high);
        multiply_four(lower_[r][i], four[i], low);
      }
    }
  }

  __m512i upper_[Rows][Lines] = {}, lower_[Rows][Lines] = {};
};
#elif GRAPHOPT_NEON
constexpr size_t kCodeLines = 1;

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors: those of two codes of each number
// stay apart until the end.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    uint16x8_t pairs[kParts];
#pragma GCC unroll 4
    for (size_t i = 0; i < kParts; ++i) pairs[i] = vreinterpretq_u16_u8(vld1q_u8(codes + 16 * i));
    // codes of 4 bits: the lower ones of each byte are the first four of a unit, the upper ones the others
    const auto part = [&](auto shift) __attribute__((always_inline)) {
      constexpr int kShift = decltype(shift)::value;
      const size_t first = (Narrow ? 8 * unit + (kShift & 4) : 4 * unit) + (kShift & 8) / 4;
      int16x8_t numbers[kParts];
#pragma GCC unroll 4
      for (size_t i = 0; i < kParts; ++i) {
        const uint16x8_t moved = pairs[i] >> kShift;
        numbers[i] = vreinterpretq_s16_u16(vandq_u16(moved, vdupq_n_u16(Narrow ? 15 : 255)));
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        uint32_t two;
        __builtin_memcpy(&two, factors.rounded[r].pairs + first, sizeof two);
        const int16x8_t factor = vreinterpretq_s16_u32(vdupq_n_u32(two));
#pragma GCC unroll 4
        for (size_t i = 0; i < kParts; ++i) {
          sums_[r][2 * i] = vmlal_s16(sums_[r][2 * i], vget_low_s16(numbers[i]), vget_low_s16(factor));
          sums_[r][2 * i + 1] = vmlal_high_s16(sums_[r][2 * i + 1], numbers[i], factor);
        }
      }
    };
    part(std::integral_constant<int, 0>()), part(std::integral_constant<int, 8>());
    if (Narrow) part(std::integral_constant<int, 4>()), part(std::integral_constant<int, 12>());
  }

  Floats of(size_t r, size_t) const {
    return by_parts<Floats>([&](size_t i) {
      return reinterpret_cast<Floats::Part>(vcvtq_f32_s32(vpaddq_s32(sums_[r][2 * i], sums_[r][2 * i + 1])));
    });
  }

 private:
  int32x4_t sums_[Rows][2 * kParts] = {};
};
#else
constexpr size_t kCodeLines = 1;

inline __attribute__((always_inline)) __m256i two_factors(const int16_t* factors) {
  int32_t word;
  __builtin_memcpy(&word, factors, sizeof word);
  return _mm256_set1_epi32(word);
}

// Sums of products of a line of codes, as numbers of 16 bits, with rows of factors.
template <bool Narrow, size_t Rows, size_t Lines>
class CodeSums {
 public:
  inline __attribute__((always_inline)) void add(const Factors<Rows>& factors, const uint8_t* codes, size_t, size_t unit) {
    const __m256i* const line = reinterpret_cast<const __m256i*>(codes);
    const __m256i pairs[2] = {_mm256_loadu_si256(line), _mm256_loadu_si256(line + 1)};
    const auto part = [&](int shift) __attribute__((always_inline)) {
      const __m256i mask = _mm256_set1_epi16(Narrow ? 15 : 255);
      __m256i numbers[2];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) numbers[i] = _mm256_and_si256(_mm256_srli_epi16(pairs[i], shift), mask);
      // first and third of four codes come from the lower bytes
      const size_t first = (Narrow ? 8 * unit + (shift & 4) : 4 * unit) + (shift & 8) / 4;
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const __m256i factor = two_factors(factors.rounded[r].pairs + first);
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; ++i) {
          sums_[r][i] = _mm256_add_epi32(sums_[r][i], _mm256_madd_epi16(numbers[i], factor));
          asm("" : "+x"(sums_[r][i]));  // now: the compiler likes to put additions off
        }
      }
    };
    part(0), part(8);
    if (Narrow) part(4), part(12);
  }

  Floats of(size_t r, size_t) const {
    return by_parts<Floats>([&](size_t i) { return _mm256_cvtepi32_ps(sums_[r][i]); });
  }

 private:
  __m256i sums_[Rows][2] = {};
};
#endif

// Products of `Rows` rows of factors with `Lines` lines of 16 numbers each, whose codes are [line][unit][16][4].
template <bool Narrow, size_t Rows, size_t Lines>
__attribute__((noinline)) void multiply_codes(const Factors<Rows>& factors, const uint8_t* codes, Ahead& ahead,
                                              size_t count, Floats (&products)[Rows][Lines]) {
  const size_t units = count / (Narrow ? 8 : 4), to_line = units * kLine;
  Ahead::Run asked = ahead.run;
  CodeSums<Narrow, Rows, Lines> sums;
  for (size_t unit = 0; unit < units; ++unit, codes += kLine) {
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) ahead.ask(&asked);
    sums.add(factors, codes, to_line, unit);
  }
  ahead.run = asked;
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (size_t i = 0; i < Lines; ++i) {
      products[r][i] = sums.of(r, i) * factors.steps[r] + all_lanes(factors.offsets[r]);
    }
  }
}

// The same for any number of lines; finish(row, line, product) takes them.
template <bool Narrow, size_t Rows, typename Finish>
inline void multiply_lines(const Factors<Rows>& factors, const uint8_t* codes, Ahead& ahead, size_t count, size_t lines,
                           const Finish& finish) {
  size_t line = 0;
  const auto run = [&](auto width) {
    constexpr size_t kLines = decltype(width)::value;
    Floats products[Rows][kLines];
    multiply_codes<Narrow, Rows, kLines>(factors, codes + line * (count / (Narrow ? 8 : 4) * kLine), ahead, count,
                                         products);
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (size_t i = 0; i < kLines; ++i) finish(r, line + i, products[r][i]);
    }
    line += kLines;
  };
  while (line + kCodeLines <= lines) run(std::integral_constant<size_t, kCodeLines>());
  if (line < lines) run(std::integral_constant<size_t, 1>());
}

// Scores [rows, page] of a page of codes.
template <bool Narrow>
void multiply_key_codes(const float* queries, size_t rows, const uint8_t* codes, Ahead& ahead,
                        const float* scales, size_t size, size_t page, float* scores) {
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors<kRows> factors;
    const auto query = [&](size_t r, size_t i) { return load_line<Floats>(queries + (row + r) * size + i); };
    factors.round(size, query, [&](size_t i, Floats* low, Floats* step) {
      for (size_t r = 0; r < kRows; ++r) ahead.ask();
      *low = load_line<Floats>(scales + i), *step = load_line<Floats>(scales + size + i);
    });
    multiply_lines<Narrow>(factors, codes, ahead, size, page / kColumns, [&](size_t r, size_t line, const Floats& x) {
      store_line(scores + (row + r) * page + line * kColumns, x);
    });
  });
}

// sums = sums * factors + weights times the values of a page of codes; invisible tokens have weight 0.
template <bool Narrow>
void multiply_value_codes(const float* weights, const float* before, size_t rows, const uint8_t* codes, Ahead& ahead,
                          const float* scales, const Visible& seen, size_t size, size_t page, float* sums) {
  const bool all = seen.all(page);
  for_rows<kCodeRows>(rows, [&](size_t row, auto count) {
    constexpr size_t kRows = decltype(count)::value;
    Factors<kRows> factors;
    const auto weight = [&](size_t r, size_t i) { return load_line<Floats>(weights + (row + r) * page + i); };
    factors.round(page, weight, [&](size_t i, Floats* low, Floats* step) {
      for (size_t r = 0; r < kRows; ++r) ahead.ask();
      *low = load_line<Floats>(scales + i), *step = load_line<Floats>(scales + page + i);
      if (!all) {  // 0 times NaN is NaN
        const Integers mask = visible_lanes(seen, i);
        *low = choose(mask, *low, all_lanes(0.f)), *step = choose(mask, *step, all_lanes(0.f));
      }
    });
    multiply_lines<Narrow>(factors, codes, ahead, page, size / kColumns, [&](size_t r, size_t line, const Floats& x) {
      float* const to = sums + (row + r) * size + line * kColumns;
      store_line(to, fused(load_line<Floats>(to), all_lanes(before[row + r]), x));
    });
  });
}
#else
constexpr bool kMultiplyCodes = false;
#endif

// 16 numbers of a line of codes: number `k` of the four in each lane.
template <bool Narrow>
inline Floats codes_to_floats(const uint8_t* codes, size_t unit, size_t k) {
  const Integers line = load_line<Integers>(codes + (Narrow ? unit / 2 : unit) * kLine);
  const int shift = static_cast<int>(8 * k + (Narrow ? unit % 2 * 4 : 0));
  return to_floats(by_parts<Integers>([&](size_t i) { return line.part[i] >> shift & (Narrow ? 15 : 255); }));
}

// Calls take(i, number) for each 16 of `count` numbers in a line of codes.
template <bool Narrow, typename Take>
inline void decode_line(const uint8_t* codes, Ahead& ahead, size_t count, const Take& take) {
  constexpr size_t kOfUnit = Narrow ? 8 : 4;
  for (size_t i = 0; i < count; i += kOfUnit) {
    ahead.ask();
    for (size_t k = 0; k < kOfUnit; ++k) take(i + k, codes_to_floats<Narrow>(codes, (i + k) / 4, k % 4));
  }
}

// The keys of a page of codes, [page / 16, size, 16].
template <bool Narrow>
void decode_keys(const uint8_t* codes, Ahead& ahead, const float* scales, size_t size, size_t page, float* keys) {
  for (size_t i = 0; i < page / kColumns; ++i, codes += size * kColumns / (Narrow ? 2 : 1)) {
    decode_line<Narrow>(codes, ahead, size, [&](size_t c, const Floats& code) {
      store_line(keys + (i * size + c) * kColumns, code * scales[size + c] + all_lanes(scales[c]));
    });
  }
}

// The values of a page of codes, [page, size].
template <bool Narrow>
void decode_values(const uint8_t* codes, Ahead& ahead, const float* scales, size_t size, size_t page, float* values) {
  for (size_t c = 0; c < size; c += kColumns, codes += page * kColumns / (Narrow ? 2 : 1)) {
    decode_line<Narrow>(codes, ahead, page, [&](size_t t, const Floats& code) {
      store_line(values + t * size + c, code * scales[page + t] + all_lanes(scales[t]));
    });
  }
}

}  // namespace
}  // namespace graphopt
