// Compiled once for each set of instructions. Arithmetic is that of graphopt/rounding/scales.py, operation by operation,
// so that both choose the same codes and scales, bit by bit.
#include "cpu/round.h"

#include <cmath>

#include "abi/instructions.h"

namespace graphopt {
namespace {

constexpr size_t kColumns = 128;  // that go through together: a strip of a group stays in the first cache

double clamped(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// The place of the value nearest to x. Where there are cells, each holds one halfway point at most; two are looked at,
// since where x lies is rounded.
size_t place_of(const RoundWork& work, const double* halfway, double x) {
  size_t place = 0;
  if (work.cells) {
    const double cell = clamped((x - work.origin) * work.per_unit, 0.0, static_cast<double>(work.cells + 3));
    place = static_cast<size_t>(work.first[static_cast<size_t>(cell)]);
    place += halfway[place] < x;
    place += halfway[place] < x;
  } else {
    for (size_t left = work.entries - 1; left > 0;) {
      const size_t half = left / 2;
      const bool above = halfway[place + half] < x;
      place += above ? half + 1 : 0;
      left = above ? left - half - 1 : half;
    }
  }
  return place + (work.ties[place] == x);
}

template <bool kCounting>
void round_strip(const RoundWork& work, const double* halfway, size_t group, size_t begin, size_t width) {
  const double* scales = work.scales + group * work.columns + begin;
  const double* shifts = work.shifts ? work.shifts + group * work.columns + begin : nullptr;
  const double low = work.values[0], high = static_cast<double>(work.entries - 1);
  double sums[kColumns] = {}, value[kColumns], number[kColumns];
  size_t place[kColumns];
  for (size_t row = 0; row < work.size; ++row) {
    const size_t at = (group * work.size + row) * work.columns + begin;
    const double* weights = work.weights + at;
    for (size_t c = 0; c < width; ++c) number[c] = weights[c] / scales[c];
    if (shifts) {
      for (size_t c = 0; c < width; ++c) number[c] = number[c] + shifts[c];
    }
    if (kCounting) {
      for (size_t c = 0; c < width; ++c) {
        const double counted = clamped(std::nearbyint(number[c] - low), 0.0, high);
        value[c] = counted + low;
        place[c] = static_cast<size_t>(static_cast<int>(counted));
      }
    } else {
      for (size_t c = 0; c < width; ++c) {
        place[c] = place_of(work, halfway, number[c]);
        value[c] = work.values[place[c]];
      }
    }
    if (work.rounded) {
      for (size_t c = 0; c < width; ++c) work.rounded[at + c] = work.codes[place[c]];
    }
    if (!work.errors) continue;
    if (shifts) {
      for (size_t c = 0; c < width; ++c) value[c] = value[c] - shifts[c];
    }
    const double counts = work.importance ? work.importance[group * work.size + row] : 1.0;
    for (size_t c = 0; c < width; ++c) {
      const double off = value[c] * scales[c] - weights[c];
      sums[c] += counts * (off * off);
    }
  }
  if (work.errors) {
    for (size_t c = 0; c < width; ++c) work.errors[group * work.columns + begin + c] = sums[c];
  }
}

void round_groups(const RoundWork& work) {
  double halfway[256];
  for (size_t i = 0; i + 1 < work.entries; ++i) halfway[i] = (work.values[i + 1] + work.values[i]) / 2;
  halfway[work.entries - 1] = INFINITY;
  for (size_t group = 0; group < work.groups; ++group) {
    for (size_t begin = 0; begin < work.columns; begin += kColumns) {
      const size_t left = work.columns - begin, width = left < kColumns ? left : kColumns;
      (work.counting ? round_strip<true> : round_strip<false>)(work, halfway, group, begin, width);
    }
  }
}

}  // namespace

extern const RoundKernel GRAPHOPT_NAME(kRound);
const RoundKernel GRAPHOPT_NAME(kRound) = round_groups;

}  // namespace graphopt
