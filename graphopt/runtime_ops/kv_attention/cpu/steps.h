// Rounding to equal steps.
#pragma once

#include "abi/convert.h"
#include "kv_attention/cpu/numbers.h"
#include "kv_attention/shared/half_scale.h"

namespace graphopt {
namespace {

// low, step and inverse step of 16 sets, from the least and the largest of each; `spoiled` is NaN where a set has a
// number that is not finite, else 0.
struct Steps {
  Floats low, step, inverse;

  Steps(const Floats& least, const Floats& most, const Floats& spoiled, float levels) {
    const Floats span = (most - least) + spoiled, nan = span - span;
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

// The same of one set of a page, whose low is rounded down to float16 and whose step is rounded up. Codes span the share
// `clip` of what the numbers span.
struct PageScale {
  Half low_half, step_half;
  float low, step, inverse;

  PageScale(float least, float most, float spoiled, float levels, float clip) {
    const float whole = (most - least) + spoiled, nan = whole - whole, margin = whole * ((1 - clip) / 2);
    low_half = half_below(nan == 0 ? least + margin : nan);
    low = number<float>(low_half);
    const float exact = ((most - margin) - low) / levels;
    step_half = half_above(exact > 0 ? exact : 0);  // also for NaN
    step = number<float>(step_half);
    inverse = step > 0 ? 1 / step : 0;
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
