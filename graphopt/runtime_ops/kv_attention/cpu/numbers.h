// What attention needs of vectors beyond a product's: the largest, exponentials, choices by lane.
#pragma once

#include <initializer_list>

#include "kv_attention/shared/layout.h"
#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr float kNothing = -__builtin_inff();  // the score of tokens that are not read

// The comparison is false for NaN, and then the result is b: pass the operand whose NaN must propagate as b.
inline Floats larger(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return {{_mm512_max_ps(a.part[0], b.part[0])}};
#endif
  return by_parts<Floats>([&](size_t i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline Floats smaller(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
  return {{_mm512_min_ps(a.part[0], b.part[0])}};
#endif
  return by_parts<Floats>([&](size_t i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
inline Floats magnitude(const Floats& a) {
  return by_parts<Floats>([&](size_t i) {
    return reinterpret_cast<Floats::Part>(reinterpret_cast<Integers::Part>(a.part[i]) & 0x7fffffff);
  });
}
inline Floats operator/(const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return a.part[i] / b.part[i]; });
}
inline Integers operator&(const Integers& a, const Integers& b) {
  return by_parts<Integers>([&](size_t i) { return a.part[i] & b.part[i]; });
}
inline Integers operator|(const Integers& a, const Integers& b) {
  return by_parts<Integers>([&](size_t i) { return a.part[i] | b.part[i]; });
}

// a where a lane of the mask is set, b elsewhere.
inline Floats choose(const Integers& mask, const Floats& a, const Floats& b) {
  return by_parts<Floats>([&](size_t i) { return mask.part[i] ? a.part[i] : b.part[i]; });
}

// Lanes `first` up to `end`, counted from the lane that has the number `lane` as its own.
inline Integers lanes_between(int lane, int first, int end) {
  Integers mask;
  for (size_t i = 0; i < kParts; ++i) {
    Integers::Part index;
    for (size_t j = 0; j < kVectorBytes / 4; ++j) index[j] = lane + static_cast<int>(i * (kVectorBytes / 4) + j);
    mask.part[i] = (index >= first) & (index < end);
  }
  return mask;
}

// The lanes of the line at token `first` of a page that are visible.
inline Integers visible_lanes(const Visible& seen, size_t first) {
  const int lane = static_cast<int>(first);
  return lanes_between(lane, seen.first[0], seen.end[0]) | lanes_between(lane, seen.first[1], seen.end[1]);
}

// a * b + c, rounded once where that costs nothing.
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__FMA__) || GRAPHOPT_NEON
  return multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The lanes of a line joined by halves: 8 with 8, 4 with 4, 2 with 2, 1 with 1.
template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  const __m256 half = reinterpret_cast<__m256>(join(a.part[0], a.part[1]));
  typedef float Four __attribute__((vector_size(16)));
  const auto four = [](__m128 x) { return reinterpret_cast<Four>(x); };
  const Four quarter = join(four(_mm256_castps256_ps128(half)), four(_mm256_extractf128_ps(half, 1)));
  const __m128 two = reinterpret_cast<__m128>(join(quarter, four(_mm_movehl_ps(quarter, quarter))));
  return join(four(two), four(_mm_movehdup_ps(two)))[0];
}
#elif GRAPHOPT_NEON
// The same.
template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  const Floats::Part four = join(join(a.part[0], a.part[2]), join(a.part[1], a.part[3]));
  return join(join(four[0], four[2]), join(four[1], four[3]));
}
#endif

inline float sum_of(const Floats& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(a.part[0]);
#elif defined(__AVX2__) || GRAPHOPT_NEON
  return joined(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
#else
  float lane[kColumns];
  store_line(lane, a);
  for (size_t width = kColumns / 2; width; width /= 2) {
    for (size_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
#endif
}

// The sums of 16 vectors, each added up as by sum_of.
inline Floats sums_of(const Floats (&of)[kColumns]) {
#if defined(__AVX512F__)
  // Halves of two vectors are added at a time, so numbers end where their indices' bits are reversed in pairs.
  const auto at = [&](size_t i) __attribute__((always_inline)) {
    return of[(i & 4) << 1 | (i & 8) >> 1 | (i & 1) << 1 | (i & 2) >> 1].part[0];
  };
  __m512 eight[8], four[4], two[2];
#pragma GCC unroll 8
  for (size_t i = 0; i < 8; ++i) {
    const __m512 a = at(i), b = at(i + 8);
    eight[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    const __m512 a = eight[i], b = eight[i + 4];
    four[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  }
#pragma GCC unroll 2
  for (size_t i = 0; i < 2; ++i) {
    const __m512 a = four[i], b = four[i + 2];
    two[i] = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
  }
  return {{_mm512_shuffle_ps(two[0], two[1], 0x88) + _mm512_shuffle_ps(two[0], two[1], 0xdd)}};
#else
  float sums[kColumns];
  for (size_t i = 0; i < kColumns; ++i) sums[i] = sum_of(of[i]);
  return load_line<Floats>(sums);
#endif
}

// The largest number, ignoring NaN.
inline float largest_of(const Floats& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(larger(a, all_lanes(kNothing)).part[0]);
#elif defined(__AVX2__) || GRAPHOPT_NEON
  return joined(larger(a, all_lanes(kNothing)), [](auto x, auto y) __attribute__((always_inline)) {
    return x > y ? x : y;
  });
#else
  float lane[kColumns];
  store_line(lane, larger(a, all_lanes(kNothing)));
  for (size_t width = kColumns / 2; width; width /= 2) {
    for (size_t i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  }
  return lane[0];
#endif
}

// Adding this and taking it off again rounds to the nearest integer, to the even one of two, below 2^22.
constexpr float kRounder = 12582912;

// The nearest integers of numbers below 2^22, in the low bits of what they are plus kRounder.
inline Integers nearest(const Floats& a) {
  return by_parts<Integers>([&](size_t i) {
    return reinterpret_cast<Integers::Part>(a.part[i] + kRounder) - bits_of<int32_t>(kRounder);
  });
}

// e^x for x up to 88; the relative error is below 2e-7 (Cephes, expf). Less than -87 counts as -87.
inline Floats exponential(Floats x) {
  x = larger(all_lanes(-87.f), x);  // NaN propagates
  const Floats shifted = fused(x, all_lanes(1.44269504088896341f), all_lanes(kRounder));
  const Floats n = shifted - all_lanes(kRounder);
  Floats r = fused(n, all_lanes(-0.693359375f), x);
  r = fused(n, all_lanes(2.12194440e-4f), r);
  Floats p = all_lanes(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = fused(p, r, all_lanes(c));
  }
  p = fused(p, r * r, r) + all_lanes(1.f);
  return by_parts<Floats>([&](size_t i) {
    typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
    // A product, since adding to the bits of a NaN could make it a number.
    const Words power = (reinterpret_cast<Words>(shifted.part[i]) - (bits_of<uint32_t>(kRounder) - 127)) << 23;
    return p.part[i] * reinterpret_cast<Floats::Part>(power);
  });
}

inline float exponential(float x) {
  float lane[kColumns];
  store_line(lane, exponential(all_lanes(x)));
  return lane[0];
}

// tanh; the absolute error is below 1e-7, the relative one too where |x| is small (Cephes, tanhf).
inline Floats hyperbolic_tangent(const Floats& x) {
  const Floats size = magnitude(x);
  const Floats z = x * x;
  Floats p = all_lanes(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) {
    p = fused(p, z, all_lanes(c));
  }
  const Floats near = fused(p * z, x, x);
  const Floats doubled = exponential(smaller(all_lanes(20.f), size) * -2.f);  // anything for a NaN
  const Floats far = (all_lanes(1.f) - doubled) / (all_lanes(1.f) + doubled);
  return by_parts<Floats>([&](size_t i) {
    const auto signed_far = x.part[i] < 0 ? -far.part[i] : far.part[i];
    return size.part[i] > 0.625f ? signed_far : near.part[i];  // and here a NaN is itself again
  });
}

}  // namespace
}  // namespace graphopt
