#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "arch/neon/target.h"

namespace graphopt {
namespace {

template <typename T>
struct Wide {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Narrow = Wide<T>;

// As many totals of paley.h at a time as there are registers for, beside a pair and its sums.
constexpr size_t kPaleyTotals = 18;

// Whether memory can be written past the caches, and whether a vector that goes there is a whole line.
constexpr bool kStreams = false, kStreamsLines = false;

// partner + v, and partner - v in lanes that are an upper one of a pair.
template <typename Integer, bool... Upper, typename V>
inline V add_or_subtract(V v, V partner) {
  // partner + (-v): the sign bit is flipped to get there
  typedef Integer Mask __attribute__((vector_size(sizeof(V))));
  constexpr Integer sign = std::numeric_limits<Integer>::min();  // that bit alone
  const Mask flip = {(Upper ? sign : Integer(0))...};
  return partner + reinterpret_cast<V>(reinterpret_cast<Mask>(v) ^ flip);
}

// Without units of their own, multiplications by one would only take longer.
template <typename V>
inline V ones() {
  return V{} + 1;
}
template <typename V>
inline V plus_times(V total, V x, V) {
  return total + x;
}
template <typename V>
inline V minus_times(V total, V x, V) {
  return total - x;
}

inline void fence() {}
inline void stream_copy_of_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }

}  // namespace
}  // namespace graphopt
