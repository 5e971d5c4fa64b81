// Arithmetic on packed numbers, with the same bits on a GPU and in the interpreter; device.h includes this.
#pragma once

#include "cuda/device.h"
#include "cuda/numbers.h"

namespace graphopt {

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
