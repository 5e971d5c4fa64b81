// float16, bfloat16 and arithmetic on packed numbers, with the same bits on a GPU and on the host; device.h includes
// this.
//
// The compiler contracts nothing (-fmad=false, -ffp-contract=off): use multiply_add for a single rounding.
#pragma once

#include <type_traits>

#include "abi/half.h"
#include "cuda/device.h"

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

// a * b + c of each half of a pair, rounded once. A product is one with -0 added, and a sum one with 1 as a factor,
// which changes no bit: sm_80 has no other arithmetic on pairs of bfloat16.
GRAPHOPT_DEVICE uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDACC__)
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return pair_of(host::half_fma(a & 0xffff, b & 0xffff, c & 0xffff), host::half_fma(a >> 16, b >> 16, c >> 16));
#endif
}
GRAPHOPT_DEVICE uint32_t bfloat162_fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDACC__)
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return pair_of(host::bfloat16_fma(a & 0xffff, b & 0xffff, c & 0xffff),
                 host::bfloat16_fma(a >> 16, b >> 16, c >> 16));
#endif
}
GRAPHOPT_DEVICE uint32_t half2_multiply(uint32_t a, uint32_t b) { return half2_fma(a, b, 0x80008000u); }
GRAPHOPT_DEVICE uint32_t half2_add(uint32_t a, uint32_t b) { return half2_fma(a, 0x3c003c00u, b); }
GRAPHOPT_DEVICE uint32_t bfloat162_multiply(uint32_t a, uint32_t b) { return bfloat162_fma(a, b, 0x80008000u); }
GRAPHOPT_DEVICE uint32_t bfloat162_add(uint32_t a, uint32_t b) { return bfloat162_fma(a, 0x3f803f80u, b); }

// Bit by bit, bit (4 a + 2 b + c) of the table: (a & b) | c is 0xea.
template <int Table>
GRAPHOPT_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(Table >= 0 && Table < 256, "a function of three bits has eight values");
#if defined(__CUDACC__)
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(Table));
  return d;
#else
  uint32_t d = 0;
  for (int i = 0; i < 8; ++i) {
    if (Table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return d;
#endif
}

// Byte i is byte s of b:a (a has bytes 0 to 3), where s are the low 3 bits of digit i of the selector; its bit 3 asks
// for eight copies of that byte's sign.
GRAPHOPT_DEVICE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDACC__)
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned digit = selector >> 4 * i & 15;
    const uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (digit & 7)) & 0xff;
    d |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return d;
#endif
}

// The low word of high:low >> (shift % 32).
GRAPHOPT_DEVICE uint32_t funnel_right(uint32_t low, uint32_t high, unsigned shift) {
#if defined(__CUDACC__)
  return __funnelshift_r(low, high, shift);
#else
  return static_cast<uint32_t>((low | static_cast<uint64_t>(high) << 32) >> shift % 32);
#endif
}

// c and the products of four signed bytes; it wraps.
GRAPHOPT_DEVICE int32_t dot4(int32_t a, int32_t b, int32_t c) {
#if defined(__CUDACC__)
  return __dp4a(a, b, c);
#else
  uint32_t sum = static_cast<uint32_t>(c);
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<uint32_t>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
  }
  return static_cast<int32_t>(sum);
#endif
}

}  // namespace graphopt
