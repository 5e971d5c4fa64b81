// Rounding to equal steps.
#pragma once

#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// low, step and inverse step of 16 sets, from the least and the largest of each; `spoiled` is NaN where a set has a
// number that is not finite, else 0. Codes span the share `clip` of what the numbers span.
struct Steps {
  Floats low, step, inverse;

  Steps(const Floats& first, const Floats& most, const Floats& spoiled, float levels, float clip = 1) {
    const Floats whole = (most - first) + spoiled, span = whole * clip, nan = span - span;
    const Floats least = first + whole * ((1 - clip) / 2);
    for (size_t i = 0; i < kParts; ++i) {
      const Floats::Part s = span.part[i], zero = {};
      const Floats::Part tiny = Floats::Part{} + 1e-30f;
      const auto used = (s >= tiny) & (nan.part[i] == zero);
      low.part[i] = nan.part[i] == zero ? least.part[i] : nan.part[i];
      const Floats::Part divisor = used ? s : zero + 1;
      step.part[i] = used ? s / levels : zero;
      inverse.part[i] = used ? levels / divisor : zero;
    }
  }
};

// Codes of 16 numbers, one in each byte; returned as numbers.
inline Floats to_codes(const Floats& x, const Floats& low, const Floats& inverse, float levels, uint8_t* codes) {
  const Floats scaled = (x - low) * inverse;
  // comparisons with NaN are false: it becomes 0
  const Floats clamped = by_parts<Floats>([&](size_t i) {
    const Floats::Part zero = {}, most = zero + levels;
    const auto above = scaled.part[i] > zero ? scaled.part[i] : zero;
    return above < most ? above : most;
  });
  int32_t lane[kColumns];
  const auto whole = nearest(clamped);
  store_line(lane, whole);
  for (size_t i = 0; i < kColumns; ++i) codes[i] = static_cast<uint8_t>(lane[i]);
  return to_floats(whole);
}

}  // namespace
}  // namespace graphopt
