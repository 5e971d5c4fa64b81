#pragma once

#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/float8.h"

namespace graphopt {
namespace {

inline Floats load_numbers(const BFloat16* from) {
  return by_parts<Floats>([&](size_t i) {
    const uint16x4_t halves = vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * i);
    return reinterpret_cast<Floats::Part>(vshll_n_u16(halves, 16));
  });
}

inline Floats load_numbers(const Float8* from) {
  // Shifted to where a half has exponent and fraction, they are 2^8 too small; that also takes in subnormal numbers.
  const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const uint8_t*>(from));
  return by_parts<Floats>([&](size_t i) __attribute__((always_inline)) {
    const int8x8_t eight = vreinterpret_s8_u8(i < 2 ? vget_low_u8(bytes) : vget_high_u8(bytes));
    const uint16x8_t codes = vreinterpretq_u16_s16(vmovl_s8(eight));
    const uint16x8_t halves = vandq_u16(vshlq_n_u16(codes, 7), vdupq_n_u16(0xbfff));
    const uint16x8_t magnitude = vandq_u16(halves, vdupq_n_u16(0x7fff));
    const uint16x8_t numbers = vorrq_u16(halves, vceqq_u16(magnitude, vdupq_n_u16(0x7f << 7)));
    const uint16x4_t four = i % 2 ? vget_high_u16(numbers) : vget_low_u16(numbers);
    return reinterpret_cast<Floats::Part>(vcvt_f32_f16(vreinterpret_f16_u16(four))) * 256;
  });
}

inline Integers load_bytes(const void* from) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(from));
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  const auto four = [](uint32x4_t numbers) { return reinterpret_cast<Integers::Part>(numbers); };
  return {{four(vmovl_u16(vget_low_u16(low))), four(vmovl_high_u16(low)), four(vmovl_u16(vget_low_u16(high))),
           four(vmovl_high_u16(high))}};
}

}  // namespace
}  // namespace graphopt
