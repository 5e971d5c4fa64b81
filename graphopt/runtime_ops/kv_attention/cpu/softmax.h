// The running softmax over pages: scores become weights, and what was summed up so far is scaled to the new largest.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// Rows that go side by side.
constexpr size_t kMostWeighed = 4;

// A score that is not finite must make the result so, even if it would get no weight.
inline Floats spoil(const Floats& scores) { return scores + (scores - scores); }

// Turns scores [Rows, page] of the first 16 * `lines` tokens of a page into weights; invisible tokens get 0. Sets the
// factors of earlier pages. Several rows are processed together, since each has to wait for its largest score.
template <size_t Rows>
void weigh(const Layout& layout, const Visible& seen, size_t lines, float* scores, float* largest, float* sums,
           float* factors) {
  const bool all = seen.all(layout.page);
  Floats most[Rows], added[Rows], now[Rows];
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) most[r] = all_lanes(kNothing), added[r] = all_lanes(0.f);
  for (size_t i = 0; i < lines; ++i) {
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      float* const at = scores + r * layout.page + i * kColumns;
      Floats line = spoil(load_line<Floats>(at));
      if (layout.softcap != 0) line = hyperbolic_tangent(line / all_lanes(layout.softcap)) * layout.softcap;
      if (!all) line = choose(visible_lanes(seen, i * kColumns), line, all_lanes(kNothing));
      store_line(at, line);
      most[r] = larger(line, most[r]);
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) {
    const float before = largest[r], found = largest_of(most[r]);
    largest[r] = found > before ? found : before;
    factors[r] = largest[r] == before ? 1 : exponential(before - largest[r]);
    now[r] = all_lanes(largest[r]);
  }
  for (size_t i = 0; i < lines; ++i) {
#pragma GCC unroll 8
    for (size_t r = 0; r < Rows; ++r) {
      float* const at = scores + r * layout.page + i * kColumns;
      Floats weight = exponential(load_line<Floats>(at) - now[r]);
      if (!all) weight = choose(visible_lanes(seen, i * kColumns), weight, all_lanes(0.f));
      store_line(at, weight);
      added[r] = added[r] + weight;
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < Rows; ++r) sums[r] = sums[r] * factors[r] + sum_of(added[r]);
}

}  // namespace
}  // namespace graphopt
