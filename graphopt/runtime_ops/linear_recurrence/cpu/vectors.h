// What the recurrence needs of lines besides what attention does: parts of lines, and factors of decays.
#pragma once

#include "kv_attention/cpu/numbers.h"
#include "linear_recurrence/cpu/kernels.h"

namespace graphopt {
namespace {

static_assert(kColumns == kRecurrenceLine, "a line is a line");

// e^x: 0 where x is below -87, infinity where it is above 88.7.
inline Floats factor_of(const Floats& x) {
  const Floats power = exponential(smaller(all_lanes(88.7f), x));
  return by_parts<Floats>([&](size_t i) {
    const auto high = x.part[i] > 88.7f ? Floats::Part{} + __builtin_inff() : power.part[i];
    return x.part[i] < -87.f ? Floats::Part{} : high;
  });
}

// The first `count` numbers of a line; the others are 0. What is inlined lets sums stay in registers: parts of lines,
// which are rare, go by way of memory.
__attribute__((noinline)) inline Floats load_part(const float* from, size_t count) {
  float lanes[kColumns] = {};
  for (size_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load_line<Floats>(lanes);
}

GRAPHOPT_FORCE_INLINE Floats load_some(const float* from, size_t count) {
  return count >= kColumns ? load_line<Floats>(from) : load_part(from, count);
}

__attribute__((noinline)) inline void store_part(float* to, Floats line, size_t count) {
  float lanes[kColumns];
  store_line(lanes, line);
  for (size_t i = 0; i < count; ++i) to[i] = lanes[i];
}

GRAPHOPT_FORCE_INLINE void store_some(float* to, const Floats& line, size_t count) {
  if (count >= kColumns) store_line(to, line);
  else store_part(to, line, count);
}

inline void fill(float* to, size_t count, float number) {
  for (size_t i = 0; i < count; ++i) to[i] = number;
}

// Copies numbers, and zeros behind them, as whole lines.
inline void copy_lines(float* to, const float* from, size_t count, float factor) {
  for (size_t i = 0; i < count; i += kColumns) store_line(to + i, load_some(from + i, count - i) * factor);
}

}  // namespace
}  // namespace graphopt
