#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

constexpr size_t kMostTogether = 4, kSumLines = 4;
constexpr size_t kFloatRowsInOrder = 0;

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return multiply_add(a, b, c); }

template <typename Join>
inline __attribute__((always_inline)) float joined(const Floats& a, const Join& join) {
  const Floats::Part four = join(join(a.part[0], a.part[2]), join(a.part[1], a.part[3]));
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

}  // namespace
}  // namespace graphopt

#include "kv_attention/cpu/arch/generic/floats.h"
#include "kv_attention/cpu/arch/generic/transpose.h"
