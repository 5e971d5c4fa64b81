// Compiled once for each set of instructions. Arithmetic is that of graphopt/quantization/rounding/scales.py, operation
// by operation, so that both choose the same codes and scales, bit by bit.
#include "cpu/round.h"

#include <algorithm>
#include <cmath>

#include "abi/instructions.h"

namespace graphopt {
namespace {

constexpr size_t kColumns = 128;  // that go through together: a strip of a group stays in the first cache

double clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// The place of the value nearest to x. Where there are cells, each holds one halfway point at most; two are looked at,
// since where x lies is rounded.
size_t index_of(const RoundWork& work, const double* halfway, double x) {
  size_t index = 0;
  if (work.cells) {
    const double cell = clamp((x - work.origin) * work.per_unit, 0.0, static_cast<double>(work.cells + 3));
    index = static_cast<size_t>(work.first[static_cast<size_t>(cell)]);
    index += halfway[index] < x;
    index += halfway[index] < x;
  } else {
    for (size_t entries = work.entries - 1; entries > 0;) {
      const size_t half = entries / 2;
      const bool is_above = halfway[index + half] < x;
      index += is_above ? half + 1 : 0;
      entries = is_above ? entries - half - 1 : half;
    }
  }
  return index + (work.ties[index] == x);
}

// A part of the columns of one group, with a scale for each column, and a shift where the format has zero points.
struct Strip {
  size_t group, begin, width;
  const double* scales;
  const double* shifts;
};

// Rounds a strip: sums becomes the error of each column, rounded_codes its codes; either may be null.
template <bool kCounting>
void round_strip(const RoundWork& work, const double* halfway, const Strip& strip, double* sums,
                 uint8_t* rounded_codes) {
  const size_t width = strip.width;
  const double *scales = strip.scales, *shifts = strip.shifts;
  const double low = work.values[0], high = static_cast<double>(work.entries - 1);
  double total[kColumns] = {}, value[kColumns], number[kColumns];
  size_t index[kColumns];
  for (size_t row = 0; row < work.size; ++row) {
    const size_t at = (strip.group * work.size + row) * work.columns + strip.begin;
    const double* weights = work.weights + at;
    for (size_t c = 0; c < width; ++c) number[c] = weights[c] / scales[c];
    if (shifts) {
      for (size_t c = 0; c < width; ++c) number[c] = number[c] + shifts[c];
    }
    if (kCounting) {
      for (size_t c = 0; c < width; ++c) {
        number[c] = clamp(std::nearbyint(number[c] - low), 0.0, high);
        value[c] = number[c] + low;
      }
      if (rounded_codes) {
        for (size_t c = 0; c < width; ++c) index[c] = static_cast<size_t>(static_cast<int>(number[c]));
      }
    } else {
      for (size_t c = 0; c < width; ++c) {
        index[c] = index_of(work, halfway, number[c]);
        value[c] = work.values[index[c]];
      }
    }
    if (rounded_codes) {
      for (size_t c = 0; c < width; ++c) rounded_codes[at + c] = work.codes[index[c]];
    }
    if (!sums) continue;
    if (shifts) {
      for (size_t c = 0; c < width; ++c) value[c] = value[c] - shifts[c];
    }
    const double weight_of_row = work.importance ? work.importance[strip.group * work.size + row] : 1.0;
    for (size_t c = 0; c < width; ++c) {
      const double error = value[c] * scales[c] - weights[c];
      total[c] += weight_of_row * (error * error);
    }
  }
  if (sums) std::copy_n(total, width, sums);
}

// The error of each column of a strip as round_strip<true> gives it, bit by bit, or false where that is not certain. It
// multiplies by 1 / scale: the quotient may be another in the last places, and the code is the same unless the quotient
// lies next to a tie. Of numbers so large that their last places are steps of the table, each is beyond its end.
template <bool kShift>
bool sum_errors(const RoundWork& work, const Strip& strip, double* sums) {
  const size_t width = strip.width;
  const double low = work.values[0], high = static_cast<double>(work.entries - 1), near = 0.5 - 1e-8;
  double total[kColumns] = {}, inverse[kColumns], scale[kColumns], shift[kColumns];
  for (size_t c = 0; c < width; ++c) {
    scale[c] = strip.scales[c];
    inverse[c] = 1.0 / scale[c];
    shift[c] = kShift ? strip.shifts[c] : 0.0;
  }
  int64_t uncertain = 0;
  for (size_t row = 0; row < work.size; ++row) {
    const double* weights = work.weights + (strip.group * work.size + row) * work.columns + strip.begin;
    const double weight_of_row = work.importance ? work.importance[strip.group * work.size + row] : 1.0;
    for (size_t c = 0; c < width; ++c) {
      double number = weights[c] * inverse[c];
      if (kShift) number = number + shift[c];
      number = number - low;
      const double nearest = std::nearbyint(number);
      uncertain |= std::fabs(number - nearest) < near ? int64_t{0} : int64_t{1};
      double value = clamp(nearest, 0.0, high) + low;
      if (kShift) value = value - shift[c];
      const double error = value * scale[c] - weights[c];
      total[c] += weight_of_row * (error * error);
    }
  }
  if (!uncertain) std::copy_n(total, width, sums);
  return !uncertain;
}

// Calls visit(halfway, group, begin, width) for each strip.
template <typename Visit>
void for_strips(const RoundWork& work, const Visit& visit) {
  double halfway[256];
  for (size_t i = 0; i + 1 < work.entries; ++i) halfway[i] = (work.values[i + 1] + work.values[i]) / 2;
  halfway[work.entries - 1] = INFINITY;
  for (size_t group = 0; group < work.groups; ++group) {
    for (size_t begin = 0; begin < work.columns; begin += kColumns) {
      const size_t remaining_columns = work.columns - begin;
      visit(halfway, group, begin, remaining_columns < kColumns ? remaining_columns : kColumns);
    }
  }
}

void round_groups(const RoundWork& work) {
  const auto kernel = work.counting ? round_strip<true> : round_strip<false>;
  for_strips(work, [&](const double* halfway, size_t group, size_t begin, size_t width) {
    const size_t at = group * work.columns + begin;
    const Strip strip{group, begin, width, work.scales + at, work.shifts ? work.shifts + at : nullptr};
    kernel(work, halfway, strip, work.errors ? work.errors + at : nullptr, work.rounded_codes);
  });
}

void search_groups(const SearchWork& search) {
  const RoundWork& work = search.round;
  const auto kernel = work.counting ? round_strip<true> : round_strip<false>;
  const auto sum_kernel = !work.counting ? nullptr : work.shifts ? sum_errors<true> : sum_errors<false>;
  for_strips(work, [&](const double* halfway, size_t group, size_t begin, size_t width) {
    const size_t at = group * work.columns + begin, next = work.groups * work.columns;
    double least_errors[kColumns], sums[kColumns], scales[kColumns], shifts[kColumns];
    uint32_t* best_trials = search.best_trials + at;
    for (size_t trial = 0; trial < search.trials; ++trial) {
      const size_t offset = trial * next + at;
      const Strip strip{group, begin, width, work.scales + offset, work.shifts ? work.shifts + offset : nullptr};
      double* trial_sums = trial ? sums : least_errors;
      if (!sum_kernel || !sum_kernel(work, strip, trial_sums)) kernel(work, halfway, strip, trial_sums, nullptr);
      for (size_t c = 0; c < width; ++c) {
        const bool better = !trial || sums[c] < least_errors[c];
        if (trial && better) least_errors[c] = sums[c];
        if (better) best_trials[c] = static_cast<uint32_t>(trial);
      }
    }
    for (size_t c = 0; c < width; ++c) {
      scales[c] = work.scales[best_trials[c] * next + at + c];
      shifts[c] = work.shifts ? work.shifts[best_trials[c] * next + at + c] : 0;
    }
    const Strip strip{group, begin, width, scales, work.shifts ? shifts : nullptr};
    kernel(work, halfway, strip, nullptr, work.rounded_codes);
  });
}

}  // namespace

extern const RoundKernel GRAPHOPT_NAME(kRound);
extern const SearchKernel GRAPHOPT_NAME(kSearch);
const RoundKernel GRAPHOPT_NAME(kRound) = round_groups;
const SearchKernel GRAPHOPT_NAME(kSearch) = search_groups;

}  // namespace graphopt
