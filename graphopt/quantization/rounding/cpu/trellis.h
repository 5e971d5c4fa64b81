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
  const float* tables;       // [2, 2^(window / 2)], what values are sums of, in steps: integers
  double steps, farthest;    // of a unit; of the farthest number that is told from others
  double costs, worst;       // of the squared error of a step; steps that a path may cost more than the best
  size_t bits, window;
  uint8_t* codes;            // [groups, size, columns]; or null
  void* scratch;             // of trellis_scratch bytes, at a multiple of 64
};

// Bytes of scratch for a search: for 16 tiles their numbers, what costs are made of, and the costs of all states.
inline size_t trellis_scratch(size_t bits, size_t window) {
  const size_t states = size_t{1} << (window - bits), entries = size_t{1} << (window / 2), line = 16 * sizeof(float);
  return ((kTrellisTile + 2) * states + 3 * entries + 6 * kTrellisTile) * line;
}

// Rows of a matrix, one after the other: each is encoded plus the errors of those before it times `upper`. Of the
// search, groups and size are 1, and numbers, scales and codes are those of a row.
struct FeedbackWork {
  TrellisWork search;
  size_t rows;
  const double* targets;     // [rows, columns], with the errors of rows before these
  const double* upper;       // by columns: what row j adds to row k lies at j + k x upper_rows
  size_t upper_rows;
  const double* matrix;      // [rows of the matrix, columns]
  const int64_t* order;      // [rows], the places in the matrix
  const double* scales;      // [groups, scale_columns]
  size_t group, scale_columns;  // rows of the matrix that share scales
  uint8_t* codes;            // [rows of the matrix, code_columns]
  size_t code_columns;
  double* errors;            // [rows, columns], of each row against the matrix
};

// Bytes of scratch beside that of the search.
inline size_t feedback_scratch(size_t columns) { return columns * sizeof(double); }

constexpr size_t kTrialRows = 16;  // rows of a trial that are searched together

// What scales lead to, for a number x with its weight w and scale s, whose best path with free ends means v: sums over
// the rows of a group, one row after the other, in float32. Of the search, groups, size, columns and scales are read,
// and what the format is.
struct TrialWork {
  TrellisWork search;
  const float* numbers;  // x, [groups, size, columns]
  const float* steps;    // s, [groups, columns]: the scales in float32
  const float* weights;  // w, [groups, size]; or null
  float* errors;         // w (v s - x)^2, [groups, columns]
  float* products;       // w v x, likewise
  float* squares;        // w v^2, likewise
};

// Bytes of scratch beside that of the search.
inline size_t trial_scratch(size_t columns) { return kTrialRows * columns * sizeof(float); }

using TrialKernel = void (*)(const TrialWork&);
extern const TrialKernel kTrialScalar, kTrialAvx2, kTrialAvx512, kTrialNeon;

using FeedbackKernel = void (*)(const FeedbackWork&);
extern const FeedbackKernel kFeedbackScalar, kFeedbackAvx2, kFeedbackAvx512, kFeedbackNeon;

using TrellisKernel = void (*)(const TrellisWork&);
extern const TrellisKernel kTrellisScalar, kTrellisAvx2, kTrellisAvx512, kTrellisNeon;

}  // namespace graphopt
