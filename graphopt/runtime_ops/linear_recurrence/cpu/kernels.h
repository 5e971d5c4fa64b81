// LinearRecurrence's kernels: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// A call; everything is float32 and dense, in the order of the definition.
struct Recurrence {
  const float *query, *key, *value, *decay, *beta;  // beta is null where there is none
  const int64_t* mask;                              // null where no token is padding
  float *output, *state;                            // the state changes in place
  size_t rows, tokens, heads, key_heads, channels, width;
  size_t decays;  // numbers of a head's decay: 0, 1 or channels
  bool delta;
  float scale;
};

struct RecurrenceKernels {
  void (*run)(const Recurrence&, size_t row, size_t head, float* scratch);
};

extern const RecurrenceKernels kRecurrenceScalar, kRecurrenceAvx2, kRecurrenceAvx512, kRecurrenceNeon;

// Numbers of a task's scratch.
inline size_t recurrence_scratch(const Recurrence& call) { return call.channels; }

}  // namespace graphopt
