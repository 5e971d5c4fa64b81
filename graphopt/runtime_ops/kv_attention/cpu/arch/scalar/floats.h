#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr size_t kMostTogether = 2, kSumLines = 2;
constexpr size_t kFloatRowsInOrder = 0;

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return a * b + c; }

template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  float lane[kColumns];
  store_line(lane, a);
  for (size_t width = kColumns / 2; width; width /= 2) {
    for (size_t i = 0; i < width; ++i) lane[i] = join(lane[i], lane[i + width]);
  }
  return lane[0];
}

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/arch/generic/floats.h"
#include "kv_attention/cpu/arch/generic/transpose.h"
