// Codes of a trellis format: the best paths through tiles of 16 columns. Raw pointers in, raw pointers out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

constexpr size_t kTrellisTile = 16;  // columns whose codes are one circle

// Groups [groups, size, columns] of weights, one scale for each group and column. All arrays are C-contiguous.
// Either `numbers` become `codes`, or `units`, which are in units of their scales, what the best paths with free ends
// mean.
struct TrellisWork {
  const double* numbers;     // [groups, size, columns]; or null
  float* units;              // [groups, size, columns]; or null
  const double* scales;      // [groups, columns]; those of `units` are numbers in float32
  const double* importance;  // [groups, size], what a squared error counts; or null
  size_t groups, size, columns;
  const float* values;       // [2^window], the value of each window
  size_t bits, window;
  uint8_t* codes;            // [groups, size, columns]; or null
  void* scratch;             // of trellis_scratch bytes, at a multiple of 64
};

// Bytes of scratch for a search: the tables, and for 16 tiles their numbers and the costs of all states.
inline size_t trellis_scratch(size_t bits, size_t window) {
  const size_t states = size_t{1} << (window - bits), line = 16 * sizeof(float);
  return (size_t{2} << window) * sizeof(float) + ((kTrellisTile + 1) * states + 8 * kTrellisTile) * line;
}

using TrellisKernel = void (*)(const TrellisWork&);
extern const TrellisKernel kTrellisScalar, kTrellisAvx2, kTrellisAvx512, kTrellisNeon;

}  // namespace graphopt
