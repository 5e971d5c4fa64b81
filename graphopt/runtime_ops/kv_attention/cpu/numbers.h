// What attention needs of vectors beyond a product's: the largest, exponentials, choices by lane. Each set of
// instructions has its own, in arch/<set>/:
//
//     floats.h    larger, smaller   by lane. The comparison is false for NaN, and then the result is b: pass the operand
//                                   whose NaN must propagate as b
//                 fused             a * b + c, rounded once where that costs nothing
//                 sum_of            the sum of the lanes: halves are added, 8 with 8, 4 with 4, 2 with 2, 1 with 1
//                 sums_of           the sums of 16 vectors, each added up as by sum_of
//                 largest_lane      the largest number of a line without NaN
//                 lanes_at_least    a bit for each lane that is `least` or more
//                 transpose_block   16 numbers of 16 rows, `size` numbers apart, as 16 columns
//                 kMostTogether, kSumLines   fits in registers: sums for that many rows by that many lines
//                 kFloatRowsInOrder          up to so many rows of floats are read line by line
//     loads.h     load_numbers      16 numbers in bfloat16 or float8 as floats
//                 load_bytes        16 bytes as integers
//     factors.h   FactorRow         factors of codes, rounded to 16 bits, as products with codes take them
//                 kCodeRows         rows of factors that go together
//     codes.h     CodeSums          sums of products of codes with factors, kCodeLines lines at a time; or decode_codes.h
//                                   where a set multiplies floats
#pragma once

#include <initializer_list>

#include "kv_attention/shared/layout.h"
#include "arch/vector.h"
#include GRAPHOPT_ARCH_HEADER(kv_attention/cpu/arch, floats.h)

namespace graphopt {
namespace {

constexpr float kNothing = -__builtin_inff();  // the score of tokens that are not read

// The longest row of factors: the channels of a head.
constexpr size_t kMostFactors = 256;
constexpr size_t kMostPage = 128;  // tokens

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

// The largest number, ignoring NaN.
inline float largest_of(const Floats& a) { return largest_lane(larger(a, all_lanes(kNothing))); }

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
