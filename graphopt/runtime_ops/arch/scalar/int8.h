#pragma once

#include "arch/line.h"

namespace graphopt {
namespace {

constexpr bool kSumsBytes = false, kByPairs = false;
constexpr int kByteBias = 0;

template <bool Small>
GRAPHOPT_FORCE_INLINE Integers dot(const Integers& sum, const Bytes& bytes, uint32_t word) {
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
}

}  // namespace
}  // namespace graphopt
