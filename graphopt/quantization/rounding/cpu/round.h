// Rounding groups of weights to the nearest values of a table, and what that costs: raw pointers in, raw pointers out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// Groups [groups, size, columns] of weights, one scale for each group and column. All arrays are C-contiguous.
struct RoundWork {
  const double* weights;
  size_t groups, size, columns;
  const double* scales;      // [groups, columns]
  const double* shifts;      // [groups, columns], the value that means 0; or null
  const double* importance;  // [groups, size], what a squared error counts; or null
  const double* values;      // [entries], the different values of the table, in order
  const uint8_t* codes;      // [entries], the code of each
  const double* ties;        // [entries], where a tie with the next value goes up: the place of the tie, else NaN
  const int32_t* first;      // [cells + 4], how many halfway points lie below each cell
  size_t entries, cells;      // without cells places are found by halving
  double origin, per_unit;   // number x lies in cell (x - origin) * per_unit
  uint8_t counting;          // the values are consecutive integers, and ties go to the even one
  double* errors;            // [groups, columns]; or null
  uint8_t* rounded_codes;    // [groups, size, columns]; or null
};

// Several scales for each group and column: RoundWork's scales and shifts are [trials, groups, columns] then. Of those
// with the least error the first is chosen, and codes are those at it. Errors are not returned.
struct SearchWork {
  RoundWork round;
  size_t trials;
  uint32_t* best_trials;  // [groups, columns]
};

using RoundKernel = void (*)(const RoundWork&);
using SearchKernel = void (*)(const SearchWork&);
extern const RoundKernel kRoundScalar, kRoundAvx2, kRoundAvx512, kRoundNeon;
extern const SearchKernel kSearchScalar, kSearchAvx2, kSearchAvx512, kSearchNeon;

}  // namespace graphopt
