// Vectors of 64 bytes, one cache line: whole registers of the width that GRAPHOPT_VECTOR_BYTES says, side by side.
//
// A line holds one value for each of the 16 columns of a tile. No function of the standard library is called: the
// linker could keep the copy that was compiled for wide vectors for a machine that has none.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// NEON is a part of every processor of 64 bits by ARM; kernels without vectors are compiled there too, for comparison.
#if defined(__aarch64__) && defined(GRAPHOPT_VECTOR_BYTES)
#define GRAPHOPT_NEON 1
#include <arm_neon.h>
#else
#define GRAPHOPT_NEON 0
#endif

#include "abi/convert.h"

// Small steps of a loop that would be calls where a file has very many such loops. With checks in them, a file of them
// takes minutes to compile: there they may be calls.
#if defined(__SANITIZE_ADDRESS__)
#define GRAPHOPT_UNCALLED inline
#else
#define GRAPHOPT_UNCALLED inline __attribute__((always_inline))
#endif

namespace graphopt {
namespace {

#if defined(GRAPHOPT_VECTOR_BYTES)
constexpr size_t kVectorBytes = GRAPHOPT_VECTOR_BYTES;
#else
constexpr size_t kVectorBytes = 16;
#endif
constexpr size_t kLine = 64, kColumns = 16, kParts = kLine / kVectorBytes;

template <typename T>
struct Line {
  typedef T Part __attribute__((vector_size(kVectorBytes)));
  Part part[kParts];
};
using Bytes = Line<uint8_t>;
using Integers = Line<int32_t>;
using Floats = Line<float>;

// The result of an operation on each part.
template <typename L, typename Operation>
GRAPHOPT_UNCALLED L by_parts(const Operation& operation) {
  L result;
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) result.part[i] = operation(i);
  return result;
}

// Part by part: a copy of the whole would use smaller pieces, and loads that span them stall.
template <typename L>
GRAPHOPT_UNCALLED L load_line(const void* from) {
  return by_parts<L>([&](size_t i) {
    typename L::Part part;
    __builtin_memcpy(&part, static_cast<const char*>(from) + i * kVectorBytes, sizeof part);
    return part;
  });
}

template <typename L>
GRAPHOPT_UNCALLED void store_line(void* to, const L& line) {
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) {
    __builtin_memcpy(static_cast<char*>(to) + i * kVectorBytes, &line.part[i], kVectorBytes);
  }
}

template <typename T>
inline Line<T> all_lanes(T value) {
  return by_parts<Line<T>>([&](size_t) { return typename Line<T>::Part{} + value; });
}

inline Floats operator+(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] + b.part[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] - b.part[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] * b.part[i]; });
}
inline Floats operator*(const Floats& a, float b) { return a * all_lanes(b); }

inline Floats to_floats(const Floats& a) { return a; }
GRAPHOPT_UNCALLED Floats to_floats(const Integers& a) {
  return by_parts<Floats>([&](size_t i) { return __builtin_convertvector(a.part[i], Floats::Part); });
}

// 16 numbers in float16.
inline Floats load_halves(const Half* from) {
#if defined(__AVX512F__)
  return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}};
#elif defined(__F16C__)
  const auto part = [&](size_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i));
  };
  return {{part(0), part(1)}};
#elif GRAPHOPT_NEON
  return by_parts<Floats>([&](size_t i) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * i);
    return reinterpret_cast<Floats::Part>(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
  });
#else
  float numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) numbers[i] = number<float>(from[i]);
  return load_line<Floats>(numbers);
#endif
}

// Whether products of bytes are summed up in 32 bits at once.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kSumsBytes = true;
#else
constexpr bool kSumsBytes = false;
#endif

// Whether products of bytes are made by way of numbers of 16 bits: `dot` of bytes up to 128 is cheap, as two products
// of them fit 16 bits, and anything else is better multiplied by `dot_pairs`.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define GRAPHOPT_BY_PAIRS 1
#else
#define GRAPHOPT_BY_PAIRS 0
#endif
constexpr bool kByPairs = GRAPHOPT_BY_PAIRS;

// Whether products of bytes are all that is compiled, and whether those of several rows at a time are; what such a file
// lacks is that of the set of instructions before it.
#if defined(__AVXVNNI__) || (GRAPHOPT_NEON && defined(__ARM_FEATURE_DOTPROD))
#define GRAPHOPT_BYTES_ALONE 1
#else
#define GRAPHOPT_BYTES_ALONE 0
#endif
#if GRAPHOPT_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define GRAPHOPT_MATRICES_ALONE 1
#else
#define GRAPHOPT_MATRICES_ALONE 0
#endif
constexpr bool kBytesAlone = GRAPHOPT_BYTES_ALONE;

// Whether codes become floats in registers. Then bfloat16 is multiplied as float, too.
#define GRAPHOPT_DECODES_FLOATS (GRAPHOPT_BY_PAIRS || GRAPHOPT_NEON)
constexpr bool kDecodesFloats = GRAPHOPT_DECODES_FLOATS;

// What is taken off the bytes that a product multiplies: ARM multiplies signed bytes, x86 unsigned ones.
constexpr int kByteBias = GRAPHOPT_NEON ? 128 : 0;

// sum + the products of the 4 numbers of each lane of `bytes`, less kByteBias, and the 4 signed ones of `word`, none of
// them -128; exact. `Small` promises bytes of 128 at most. With a bias they are given as signed bytes.
template <bool Small>
GRAPHOPT_UNCALLED Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
#if GRAPHOPT_NEON
  const int8x16_t x = vreinterpretq_s8_u32(vdupq_n_u32(word));
  return by_parts<Integers>([&](size_t i) {
    const int8x16_t w = reinterpret_cast<int8x16_t>(bytes.part[i]);
    const int32x4_t before = reinterpret_cast<int32x4_t>(sum.part[i]);
#if defined(__ARM_FEATURE_DOTPROD)
    return reinterpret_cast<Integers::Part>(vdotq_s32(before, w, x));
#else
    // two products fit 16 bits: 2 * 128 * 127
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return reinterpret_cast<Integers::Part>(vpadalq_s16(before, vpaddq_s16(low, high)));
#endif
  });
#elif defined(__AVX512VNNI__)
  return {{reinterpret_cast<Integers::Part>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum.part[0]), reinterpret_cast<__m512i>(bytes.part[0]),
                          _mm512_set1_epi32(static_cast<int>(word))))}};
#elif defined(__AVXVNNI__)
  const __m256i x = _mm256_set1_epi32(static_cast<int>(word));
  return by_parts<Integers>([&](size_t i) {
    return reinterpret_cast<Integers::Part>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(sum.part[i]), reinterpret_cast<__m256i>(bytes.part[i]), x));
  });
#elif defined(__AVX2__)
  const __m256i signed_bytes = _mm256_set1_epi32(static_cast<int>(word));
  if constexpr (Small) {
    return by_parts<Integers>([&](size_t i) {
      const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(bytes.part[i]), signed_bytes);
      return sum.part[i] + reinterpret_cast<Integers::Part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    });
  }
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8);
  const __m256i odd = _mm256_srai_epi16(signed_bytes, 8);
  return by_parts<Integers>([&](size_t i) {
    const __m256i u = reinterpret_cast<__m256i>(bytes.part[i]);
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), even),
                                              _mm256_madd_epi16(_mm256_srli_epi16(u, 8), odd));
    return sum.part[i] + reinterpret_cast<Integers::Part>(products);
  });
#else
  int8_t x[4];
  __builtin_memcpy(x, &word, sizeof x);
  uint8_t u[kLine];
  store_line(u, bytes);
  int32_t sums[kColumns];
  store_line(sums, sum);
  for (size_t r = 0; r < kColumns; ++r) {
    sums[r] += u[4 * r] * x[0] + u[4 * r + 1] * x[1] + u[4 * r + 2] * x[2] + u[4 * r + 3] * x[3];
  }
  return load_line<Integers>(sums);
#endif
}

#if GRAPHOPT_BY_PAIRS
// sum + the products of the 2 signed numbers of 16 bits of each lane of `pairs` and the 2 of `word`; exact.
GRAPHOPT_UNCALLED Integers dot_pairs(const Integers& sum, const Bytes& pairs, uint32_t word) {
  const __m256i x = _mm256_set1_epi32(static_cast<int>(word));
  return by_parts<Integers>([&](size_t i) {
    const __m256i numbers = reinterpret_cast<__m256i>(pairs.part[i]);
#if defined(__AVXVNNI__)
    return reinterpret_cast<Integers::Part>(
        _mm256_dpwssd_avx_epi32(reinterpret_cast<__m256i>(sum.part[i]), numbers, x));
#else
    return sum.part[i] + reinterpret_cast<Integers::Part>(_mm256_madd_epi16(numbers, x));
#endif
  });
}
#endif

// Ends a sum here. The compiler likes to put additions off until many products wait for them, in memory.
template <typename T>
GRAPHOPT_UNCALLED void settle(Line<T>& sum) {
#if GRAPHOPT_BY_PAIRS
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) asm("" : "+x"(sum.part[i]));
#elif GRAPHOPT_NEON
#pragma GCC unroll 4
  for (size_t i = 0; i < kParts; ++i) asm("" : "+w"(sum.part[i]));
#else
  (void)sum;
#endif
}

// sum + the products of the 2 bfloat16 of each lane of `pairs` and the 2 of `word`.
inline Floats dot_bfloat16(const Floats& sum, const Bytes& pairs, uint32_t word) {
#if defined(__AVX512BF16__)
  return {{_mm512_dpbf16_ps(sum.part[0], reinterpret_cast<__m512bh>(pairs.part[0]),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(word))))}};
#else
  // a bfloat16 is the upper half of a float
  typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
  const float low = bits_of<float>(word << 16), high = bits_of<float>(word & 0xffff0000u);
  return by_parts<Floats>([&](size_t i) {
    const Words w = reinterpret_cast<Words>(pairs.part[i]);
    return sum.part[i] + (reinterpret_cast<Floats::Part>(w << 16) * low +
                          reinterpret_cast<Floats::Part>(w & 0xffff0000u) * high);
  });
#endif
}

// a * b + c, rounded once, so that all sets of instructions give the same bits.
GRAPHOPT_UNCALLED Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
  return {{_mm512_fmadd_ps(a.part[0], b.part[0], c.part[0])}};
#elif defined(__FMA__)
  return by_parts<Floats>([&](size_t i) { return _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]); });
#elif GRAPHOPT_NEON
  return by_parts<Floats>([&](size_t i) {
    return reinterpret_cast<Floats::Part>(vfmaq_f32(reinterpret_cast<float32x4_t>(c.part[i]),
                                                    reinterpret_cast<float32x4_t>(a.part[i]),
                                                    reinterpret_cast<float32x4_t>(b.part[i])));
  });
#else
  return by_parts<Floats>([&](size_t i) {
    Floats::Part part;
    for (size_t lane = 0; lane < kVectorBytes / 4; ++lane) {
      part[lane] = __builtin_fmaf(a.part[i][lane], b.part[i][lane], c.part[i][lane]);
    }
    return part;
  });
#endif
}

GRAPHOPT_UNCALLED Floats dot_float(const Floats& sum, const Floats& line, uint32_t word) {
  const float x = bits_of<float>(word);
#if defined(__AVX512F__)
  return {{_mm512_fmadd_ps(line.part[0], _mm512_set1_ps(x), sum.part[0])}};
#elif defined(__FMA__)
  return by_parts<Floats>([&](size_t i) { return _mm256_fmadd_ps(line.part[i], _mm256_set1_ps(x), sum.part[i]); });
#elif GRAPHOPT_NEON
  return multiply_add(line, all_lanes(x), sum);
#else
  return sum + line * x;
#endif
}

}  // namespace
}  // namespace graphopt
