// Numbers as integers of 16 bits in two bytes, and codes as bytes: what products of bytes multiply.
#pragma once

#include "cuda/device.h"
#include "kv_attention/cuda/call.h"

namespace graphopt {

// Four numbers as integers of 16 bits: their high bytes, rounded, and what is left, a byte with a sign too.
struct Bytes {
  uint32_t high, rest;

  static constexpr float kMost = 32512;  // rounds to 127 in the high byte, and the inverse of its unit errs a little

  GRAPHOPT_DEVICE Bytes(const float (&numbers)[4], float inverse) {
    uint32_t bits[4];
    // as a float from 2^23 on, a number ends with its integer; 128 rounds the high byte
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) bits[i] = bits_of_float(multiply_add(numbers[i], inverse, 0x1.8p23f + 128));
    const uint32_t first = byte_permute(bits[0], bits[1], 0x5410), second = byte_permute(bits[2], bits[3], 0x5410);
    high = byte_permute(first, second, 0x7531), rest = byte_permute(first, second, 0x6420) ^ 0x80808080u;
  }
  // What a number counts whose products were summed as both bytes.
  static GRAPHOPT_DEVICE float sum_of(int32_t high, int32_t rest) { return static_cast<float>(high * 256 + rest); }
};

// What integers are counted in where the largest number is `most`; NaN unless that is finite.
struct Unit {
  float unit, inverse;

  GRAPHOPT_DEVICE explicit Unit(float most) {
    const float some = most < 0x1p-110f ? 0x1p-110f : most;  // a NaN stays itself
    inverse = Bytes::kMost / some, unit = spoil(some * (1 / Bytes::kMost));
  }
};

// Codes of two rows, of what a lane has loaded, as an operand.
template <int Bits, int Loads>
GRAPHOPT_DEVICE void codes_of_rows(const Word4 (&loaded)[Loads], int row, uint32_t (&a)[4]) {
  const uint32_t first = loaded[0].words[2 * row], second = loaded[0].words[2 * row + 1];
  if constexpr (Bits == 4) {
    a[0] = first & 0x0f0f0f0fu, a[1] = second & 0x0f0f0f0fu;
    a[2] = first >> 4 & 0x0f0f0f0fu, a[3] = second >> 4 & 0x0f0f0f0fu;
  } else {
    a[0] = first, a[1] = second;
    a[2] = loaded[Loads - 1].words[2 * row], a[3] = loaded[Loads - 1].words[2 * row + 1];
  }
}

}  // namespace graphopt
