// float16 and bfloat16, with the same bits on a GPU and on the host; device.h includes this, and so may sources of the
// host.
//
// The compiler contracts nothing (-fmad=false, -ffp-contract=off): use multiply_add for a single rounding.
#pragma once

#include <type_traits>

#include "abi/half.h"
#include "cuda/platform.h"

namespace graphopt {

struct BFloat16 {
  uint16_t bits;
};

GRAPHOPT_BOTH float float_of_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}
GRAPHOPT_BOTH uint32_t bits_of_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

GRAPHOPT_BOTH float to_float(float value) { return value; }
GRAPHOPT_BOTH float to_float(Half half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.bits));
  return value;
#else
  // Read as a float, its exponent is 112 too small; the product also gives subnormal numbers their value.
  const float magnitude = float_of_bits(static_cast<uint32_t>(half.bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (half.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return float_of_bits(bits_of_float(magnitude) | special | static_cast<uint32_t>(half.bits & 0x8000) << 16);
#endif
}
GRAPHOPT_BOTH float to_float(BFloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

// Rounds to the nearest float16 or bfloat16, ties to even; a NaN becomes the one with all bits set but the sign, as on
// a GPU.
GRAPHOPT_BOTH Half half_of(float value) {
#if defined(__CUDA_ARCH__)
  Half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
  return half;
#else
  const uint32_t bits = bits_of_float(value), sign = bits >> 31 << 15, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(0x7c00 | sign)};
  // Subnormal: adding 0.5 moves the last place to the end of a float's fraction, and the addition rounds.
  const uint32_t half = magnitude < 0x38800000u
                            ? bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u
                            : (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  return {static_cast<uint16_t>(half | sign)};
#endif
}
GRAPHOPT_BOTH BFloat16 bfloat16_of(float value) {
#if defined(__CUDA_ARCH__)
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

// value of type T: from_float<Half>(x).
template <typename T>
GRAPHOPT_BOTH T from_float(float value) {
  if constexpr (sizeof(T) == 4) return value;
  else if constexpr (std::is_same_v<T, Half>) return half_of(value);
  else return bfloat16_of(value);
}

// a * b + c, rounded once.
GRAPHOPT_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDACC__)
  return __fmaf_rn(a, b, c);
#else
  return std::fmaf(a, b, c);
#endif
}

// The larger one, or NaN if one of them is.
GRAPHOPT_DEVICE float max_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a != a || b != b ? __builtin_nanf("") : a > b ? a : b;
#endif
}

// The larger one; of a number and a NaN the number.
GRAPHOPT_DEVICE float larger(float a, float b) {
#if defined(__CUDACC__)
  return fmaxf(a, b);
#else
  return a != a || b > a ? b : a;
#endif
}

// Rounds to the nearest integer, ties to even; saturates to int32, and NaN becomes 0.
GRAPHOPT_DEVICE int32_t round_to_int(float value) {
#if defined(__CUDACC__)
  return __float2int_rn(value);
#else
  if (value != value) return 0;
  if (value >= 0x1p31f) return INT32_MAX;
  return value < -0x1p31f ? INT32_MIN : static_cast<int32_t>(std::nearbyintf(value));
#endif
}

// 2^value, off by at most 2 units in the last place, which differ between a GPU and the host; 0 below 2^-126.
GRAPHOPT_DEVICE float exp2_of(float value) {
#if defined(__CUDACC__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#else
  const float result = std::exp2f(value);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

// Pairs of 16-bit numbers, the first in the low half.
GRAPHOPT_BOTH uint32_t pair_of(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }
GRAPHOPT_BOTH uint32_t half2_of(Half low, Half high) { return pair_of(low.bits, high.bits); }
GRAPHOPT_BOTH uint32_t bfloat162_of(BFloat16 low, BFloat16 high) { return pair_of(low.bits, high.bits); }
GRAPHOPT_BOTH Half half_low(uint32_t pair) { return {static_cast<uint16_t>(pair)}; }
GRAPHOPT_BOTH Half half_high(uint32_t pair) { return {static_cast<uint16_t>(pair >> 16)}; }
GRAPHOPT_BOTH BFloat16 bfloat16_low(uint32_t pair) { return {static_cast<uint16_t>(pair)}; }
GRAPHOPT_BOTH BFloat16 bfloat16_high(uint32_t pair) { return {static_cast<uint16_t>(pair >> 16)}; }

// Both of two floats, rounded: the second argument is the high half.
GRAPHOPT_DEVICE uint32_t half2_of(float low, float high) {
#if defined(__CUDACC__)
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return half2_of(half_of(low), half_of(high));
#endif
}
GRAPHOPT_DEVICE uint32_t bfloat162_of(float low, float high) {
#if defined(__CUDACC__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bfloat162_of(bfloat16_of(low), bfloat16_of(high));
#endif
}

}  // namespace graphopt
