// Pages of the lowest weights, as many as have less than a limit together.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// Pages are left out from the lowest weight on, of equal ones the later page first; where a weight is not finite, none
// is. `weights`, in whole lines, are none of them negative.
class LeftOut {
 public:
  LeftOut(float* weights, size_t count, float limit) : weights_(weights), lines_((count + kColumns - 1) / kColumns) {
    for (size_t i = count; i < lines_ * kColumns; ++i) weights[i] = __builtin_inff();
    for (size_t i = 0; i < count; ++i) {
      if (weights[i] - weights[i] != 0) return;
    }
    // The largest weight of which all below have less than the limit together. A larger one has no smaller sum: the same
    // numbers are added in the same order, with some more.
    int32_t low = 0, high = bits_of<int32_t>(__builtin_inff());
    if (!(limit > 0)) return;
    while (low < high) {
      const int32_t middle = low + (high - low + 1) / 2;
      if (sum_below(bits_of<float>(middle)) < limit) low = middle;
      else high = middle - 1;
    }
    below_ = bits_of<float>(low);
    first_equal_ = count;
    float sum = sum_below(below_);
    for (size_t i = count; i-- > 0;) {
      if (weights[i] != below_) continue;
      sum += below_;
      if (!(sum < limit)) break;
      first_equal_ = i;
    }
  }
  bool drops(size_t page) const {
    return weights_[page] < below_ || (weights_[page] == below_ && page >= first_equal_);
  }

 private:
  float sum_below(float weight) const {
    Floats sums = all_lanes(0.f);
    for (size_t i = 0; i < lines_; ++i) {
      const Floats line = load_line<Floats>(weights_ + i * kColumns);
      const Integers among = by_parts<Integers>([&](size_t part) { return line.part[part] < weight; });
      sums = sums + choose(among, line, all_lanes(0.f));
    }
    return sum_of(sums);
  }

  const float* weights_;
  size_t lines_, first_equal_ = SIZE_MAX;
  float below_ = -1;
};

}  // namespace
}  // namespace graphopt
