// The running softmax over pages: scores become weights, and what was summed up so far is scaled to the new largest.
#pragma once

#include "kv_attention/cpu.h"
#include "kv_attention/numbers.h"

namespace graphopt {
namespace {

// What is not finite must make the result so, also a score that would get no weight.
inline Floats spoil(const Floats& scores) { return scores + (scores - scores); }

// Turns a row of scores of the first 16 * `lines` tokens of a page into weights; what is not visible weighs 0. Returns
// the factor of what came before.
inline float weigh(const Layout& layout, const Visible& seen, size_t lines, float* scores, float* largest, float* sum) {
  const bool all = seen.all(layout.page);
  const auto mask = [&](size_t i) {
    const int lane = static_cast<int>(i * kColumns);
    return lanes_between(lane, seen.first[0], seen.end[0]) | lanes_between(lane, seen.first[1], seen.end[1]);
  };
  Floats most = all_lanes(kNothing);
  for (size_t i = 0; i < lines; ++i) {
    Floats line = spoil(load_line<Floats>(scores + i * kColumns));
    if (layout.softcap != 0) line = hyperbolic_tangent(line / all_lanes(layout.softcap)) * layout.softcap;
    if (!all) line = choose(mask(i), line, all_lanes(kNothing));
    store_line(scores + i * kColumns, line);
    most = larger(line, most);
  }
  const float before = *largest, found = largest_of(most), now = found > before ? found : before;
  Floats added = all_lanes(0.f);
  for (size_t i = 0; i < lines; ++i) {
    Floats weight = exponential(load_line<Floats>(scores + i * kColumns) - all_lanes(now));
    if (!all) weight = choose(mask(i), weight, all_lanes(0.f));
    store_line(scores + i * kColumns, weight);
    added = added + weight;
  }
  const float factor = now == before ? 1 : exponential(before - now);
  *largest = now;
  *sum = *sum * factor + sum_of(added);
  return factor;
}

}  // namespace
}  // namespace graphopt
