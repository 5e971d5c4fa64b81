// The channels of the queries that scores of pages use.
#pragma once

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// Which channels are the largest of a group of queries together: those with the highest sums of |q|. NaN counts as
// infinite; ties go to the lower channel.
struct Channels {
  alignas(kLine) int32_t used[256];

  Channels(const float* queries, size_t group, size_t size, size_t count) {
    alignas(kLine) float sums[256];
    for (size_t c = 0; c < size; c += kColumns) {
      Floats sum = magnitude(load_line<Floats>(queries + c));
      for (size_t r = 1; r < group; ++r) sum = sum + magnitude(load_line<Floats>(queries + r * size + c));
      store_line(sums + c, sum);
    }
    for (size_t c = 0; c < size; ++c) {
      if (sums[c] != sums[c]) sums[c] = __builtin_inff();
    }
    for (size_t c = 0; c < size; ++c) {
      size_t before = 0;
      for (size_t other = 0; other < size; ++other) {
        before += sums[other] > sums[c] || (sums[other] == sums[c] && other < c);
      }
      used[c] = before < count ? -1 : 0;
    }
  }

  // Queries with 0 in all other channels.
  void keep(const float* queries, size_t rows, size_t size, float* to) const {
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < size; c += kColumns) {
        store_line(to + r * size + c, only(c, load_line<Floats>(queries + r * size + c)));
      }
    }
  }

  // What is in other channels is 0.
  Floats only(size_t c, const Floats& line) const {
    return choose(load_line<Integers>(used + c), line, all_lanes(0.f));
  }
};

}  // namespace
}  // namespace graphopt
