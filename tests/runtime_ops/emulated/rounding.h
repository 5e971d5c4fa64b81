// What the rounding of weights is given, as both sides know it: the arrays of a call.
#pragma once

#include "cpu/round.h"

namespace emulated {

// Calls visit(array, bytes, is_output) for each array of a search; of a call that rounds alone, `trials` is 1 and there
// are no choices.
template <typename Visit>
void each_array(graphopt::SearchWork& search, const Visit& visit) {
  graphopt::RoundWork& work = search.round;
  const size_t rows = work.groups * work.size, sets = work.groups * work.columns;
  visit(work.weights, rows * work.columns * sizeof(double), false);
  visit(work.scales, search.trials * sets * sizeof(double), false);
  visit(work.shifts, search.trials * sets * sizeof(double), false);
  visit(work.importance, rows * sizeof(double), false);
  visit(work.values, work.entries * sizeof(double), false);
  visit(work.codes, work.entries, false);
  visit(work.ties, work.entries * sizeof(double), false);
  visit(work.first, work.cells ? (work.cells + 4) * sizeof(int32_t) : 0, false);
  visit(work.errors, sets * sizeof(double), true);
  visit(work.rounded, rows * work.columns, true);
  visit(search.chosen, sets * sizeof(uint32_t), true);
}

}  // namespace emulated
