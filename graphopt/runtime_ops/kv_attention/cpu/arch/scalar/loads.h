#pragma once

#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/cpu/float8.h"

namespace graphopt {
namespace {

inline Floats load_numbers(const BFloat16* from) {
  uint32_t numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) numbers[i] = static_cast<uint32_t>(from[i].bits) << 16;
  return load_line<Floats>(numbers);
}

inline Floats load_numbers(const Float8* from) {
  uint32_t numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) {
    const uint32_t code = from[i].bits & 0x7f;
    numbers[i] = static_cast<uint32_t>(kFloat8.upper[code] | (from[i].bits & 0x80)) << 24 |
                 static_cast<uint32_t>(kFloat8.lower[code]) << 16;
  }
  return load_line<Floats>(numbers);
}

inline Integers load_bytes(const void* from) {
  int32_t numbers[kColumns];
  for (size_t i = 0; i < kColumns; ++i) numbers[i] = static_cast<const uint8_t*>(from)[i];
  return load_line<Integers>(numbers);
}

}  // namespace
}  // namespace graphopt
