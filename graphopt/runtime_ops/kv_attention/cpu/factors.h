// Queries and weights as integers of 16 bits, for products with codes.
#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// The longest row of factors: the channels of a head.
constexpr size_t kMostFactors = 256;

// Where there are instructions for products of integers.
#if defined(__AVX512VNNI__) || defined(__AVX2__) || GRAPHOPT_NEON
#define GRAPHOPT_MULTIPLIES_CODES 1
#else
#define GRAPHOPT_MULTIPLIES_CODES 0
#endif
#if GRAPHOPT_MULTIPLIES_CODES
constexpr size_t kCodeRows = GRAPHOPT_NEON ? 2 : 4;
// The largest factor, 256 * upper + lower; so sums of 256 products with codes of 8 bits stay below 2^31.
constexpr float kLargestFactor = 32639;

// Rounded factors of one row as the instructions take them, 16 at a time.
struct FactorRow {
#if defined(__AVX512VNNI__)
  // 256 * upper + lower, both signed
  alignas(kLine) int8_t upper[kMostFactors], lower[kMostFactors];

  void put(size_t i, const Floats& numbers) {
    // bytes 1 of lanes, then bytes 0
    alignas(32) static constexpr uint8_t kBytes[32] = {1, 5, 9,  13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61,
                                                       0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
    const __m512i bytes = _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(kBytes)));
    const __m256i signs = _mm256_set_m128i(_mm_set1_epi8(-128), _mm_setzero_si128());
    const __m512i x = _mm512_cvtps_epi32(numbers.part[0]);
    // of x + 128 they are byte 1, and byte 0 less 128
    const __m512i both = _mm512_permutexvar_epi8(bytes, _mm512_add_epi32(x, _mm512_set1_epi32(128)));
    const __m256i parts = _mm256_xor_si256(_mm512_castsi512_si256(both), signs);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + i), _mm256_castsi256_si128(parts));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower + i), _mm256_extracti128_si256(parts, 1));
  }
#else
  // of each four the first and third, then the second and fourth, as bytes are taken apart
  alignas(kLine) int16_t pairs[kMostFactors];

  void put(size_t i, const Floats& numbers) {
#if GRAPHOPT_NEON
    for (size_t part = 0; part < kParts; ++part, i += 4) {
      const int32x4_t x = vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(numbers.part[part]));
      const int16x4_t four = vmovn_s32(vcombine_s32(vuzp1_s32(vget_low_s32(x), vget_high_s32(x)),
                                                    vuzp2_s32(vget_low_s32(x), vget_high_s32(x))));
      vst1_s16(pairs + i, four);
    }
#else
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    for (size_t part = 0; part < kParts; ++part, i += 8) {
      const __m256i x = _mm256_shuffle_epi8(_mm256_cvtps_epi32(numbers.part[part]), order);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(pairs + i), _mm256_castsi256_si128(x));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(pairs + i + 4), _mm256_extracti128_si256(x, 1));
    }
#endif
  }
#endif
};

inline int32_t largest_of(const Integers& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(a.part[0]));
#elif GRAPHOPT_NEON
  const auto part = [&](size_t i) { return reinterpret_cast<int32x4_t>(a.part[i]); };
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(part(0), part(1)), vmaxq_s32(part(2), part(3))));
#else
  const __m256i eight = _mm256_max_epi32(reinterpret_cast<__m256i>(a.part[0]), reinterpret_cast<__m256i>(a.part[1]));
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
#endif
}

// Factors of codes, rounded to 16 bits for each row. Rows go side by side: each waits for its largest.
template <size_t Rows>
struct Factors {
  alignas(kLine) float exact[Rows][kMostFactors];
  FactorRow rounded[Rows];
  float steps[Rows], offsets[Rows];

  // exact = of(row, i) times the steps, offsets = the sum of of(row, i) times the lows; take(i, &low, &step) reads
  // both.
  template <typename Of, typename Take>
  inline __attribute__((always_inline)) void round(size_t count, const Of& of, const Take& take) {
    Floats offset[Rows];
    Integers most[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) offset[r] = all_lanes(0.f), most[r] = Integers{};
    for (size_t i = 0; i < count; i += kColumns) {
      Floats low, step;
      take(i, &low, &step);
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) {
        const Floats x = of(r, i), scaled = x * step;
        offset[r] = fused(x, low, offset[r]);
        store_line(exact[r] + i, scaled);
        // The bits of magnitudes are in their order, and those of NaN come last, so a NaN is never lost.
        most[r] = by_parts<Integers>([&](size_t part) {
          const auto bits = reinterpret_cast<Integers::Part>(scaled.part[part]) & 0x7fffffff;
          return bits > most[r].part[part] ? bits : most[r].part[part];
        });
      }
    }
    float inverse[Rows];
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      const float largest = bits_of<float>(largest_of(most[r]));
      const bool none = largest < 1e-30f;
      inverse[r] = none ? 0 : kLargestFactor / largest;
      steps[r] = none ? 0 : largest / kLargestFactor;
      offsets[r] = sum_of(offset[r]);
    }
    for (size_t i = 0; i < count; i += kColumns) {
#pragma GCC unroll 8
      for (size_t r = 0; r < Rows; ++r) rounded[r].put(i, load_line<Floats>(exact[r] + i) * inverse[r]);
    }
  }
};
#endif

}  // namespace
}  // namespace graphopt
