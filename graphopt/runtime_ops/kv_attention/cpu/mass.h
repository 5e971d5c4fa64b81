// How many pages have a share of the softmax of the scores together.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// exp(scale (score - the highest)) of some pages, in whole lines; 1 for those of the highest score, 0 for the padding
// of the last line.
class Weights {
 public:
  Weights(const Layout& layout, const float* scores, size_t count, float* weights)
      : lines_((count + kColumns - 1) / kColumns), weights_(weights) {
    const auto line = [&](size_t i) {
      const int left = static_cast<int>(count - i * kColumns < kColumns ? count - i * kColumns : kColumns);
      return choose(lanes_between(0, 0, left), load_line<Floats>(scores + i * kColumns), all_lanes(kNothing));
    };
    Floats most = all_lanes(kNothing);
    for (size_t i = 0; i < lines_; ++i) most = larger(line(i), most);
    const Floats highest = all_lanes(largest_of(most));
    for (size_t i = 0; i < lines_; ++i) {
      const Floats of_line = line(i);
      // an infinite distance times a scale of 0 is NaN, and propagates
      const Floats weight = exponential(smaller(all_lanes(0.f), (of_line - highest) * layout.scale));
      store_line(weights + i * kColumns, by_parts<Floats>([&](size_t part) {
        const Floats::Part nothing = {};
        const auto counted = weight.part[part] == weight.part[part] ? weight.part[part] : nothing;
        return of_line.part[part] == highest.part[part] ? nothing + 1 : counted;
      }));
    }
    for (size_t i = count; i < lines_ * kColumns; ++i) weights[i] = 0;
  }

  // The sum of all that are `least` or more, and how many they are. A larger `least` has no larger sum: the same
  // numbers are added in the same order, with some left out.
  float sum(float least, size_t* count) const {
    Floats sums = all_lanes(0.f);
    Integers counts = all_lanes(0);
    for (size_t i = 0; i < lines_; ++i) {
      const Floats weights = load_line<Floats>(weights_ + i * kColumns);
      const Integers among = by_parts<Integers>([&](size_t part) { return weights.part[part] >= least; });
      sums = sums + choose(among, weights, all_lanes(0.f));
      counts = by_parts<Integers>([&](size_t part) { return counts.part[part] - among.part[part]; });
    }
    int32_t lanes[kColumns], all = 0;
    store_line(lanes, counts);
    for (int32_t lane : lanes) all += lane;
    *count = static_cast<size_t>(all);
    return sum_of(sums);
  }

 private:
  size_t lines_;
  const float* weights_;
};

// The fewest pages of the highest scores that have `layout.mass` of all the weights. `scores` are not changed, in whole
// lines; `weights` has as much room.
inline size_t pages_with_mass(const Layout& layout, const float* scores, size_t count, float* weights) {
  const Weights all(layout, scores, count, weights);
  // padding of the last line has weight 0 and is no page
  size_t found = 0, above = 0;
  const float wanted = layout.mass * all.sum(0, &found);
  // floats that are not negative are in the order of their bits
  int32_t low = 0, high = bits_of<int32_t>(1.f);
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (all.sum(bits_of<float>(middle), &found) >= wanted) low = middle;
    else high = middle - 1;
  }
  // all that weigh more are needed, and as many of those of this weight as make up for the rest
  const float weight = bits_of<float>(low);
  float sum = all.sum(bits_of<float>(low + 1), &above);
  all.sum(weight, &found);
  for (found = found < count ? found : count; above < found && sum < wanted; ++above) sum += weight;
  return above;
}

}  // namespace
}  // namespace graphopt
