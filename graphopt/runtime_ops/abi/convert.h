// float16 to float and back, by integer arithmetic that every compiler can turn into vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/half.h"

namespace graphopt {
namespace {

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
inline T number(T value) {
  return value;
}

template <typename T>
inline T number(Half half) {
  const uint32_t exponent_and_fraction = static_cast<uint32_t>(half.bits & 0x7fff) << 13;
  // Read as a float, its exponent is 112 too small; the product also gives subnormal numbers their value.
  const float magnitude = bits_of<float>(exponent_and_fraction) * 0x1p112f;
  const uint32_t special = (half.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // infinity or NaN
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  return bits_of<float>(bits_of<uint32_t>(magnitude) | special | sign);
}

// Rounds to the nearest float16, ties to even.
template <typename Stored>
inline Half stored(float value) {
  const uint32_t bits = bits_of<uint32_t>(value), sign = bits >> 31 << 15, magnitude = bits & 0x7fffffff;
  // Normal numbers: half of the last place that stays is added, a little less where that place is even already.
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  // Subnormal ones: adding 0.5 moves their last place to the end of a float's fraction, and the addition rounds.
  const uint32_t subnormal = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // overflow becomes infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return Half{static_cast<uint16_t>(half | sign)};
}

inline void widen(const Half* from, size_t count, float* to) {
  for (size_t i = 0; i < count; ++i) to[i] = number<float>(from[i]);
}
inline void narrow(const float* from, size_t count, Half* to) {
  for (size_t i = 0; i < count; ++i) to[i] = stored<Half>(from[i]);
}

}  // namespace
}  // namespace graphopt
