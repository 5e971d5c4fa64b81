// LinearRecurrence's kernels: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace graphopt {

// A call; everything is float32 and dense, in the order of the definition.
struct Recurrence {
  const float *query, *key, *value, *decay, *beta;  // beta is null where there is none
  const int64_t* mask;                              // null where no token is padding
  const float* before;                              // the state before the call
  float *output, *state;                            // the state after it, which may lie where it lay before
  size_t rows, tokens, heads, key_heads, channels, width;
  size_t decays;  // numbers of a head's decay: 0, 1 or channels
  bool delta;
  float scale;
};

// Numbers of a line, and tokens of a chunk, which is a line of them.
constexpr size_t kRecurrenceLine = 16, kChunk = kRecurrenceLine;

// So few tokens go one by one.
constexpr size_t kFewTokens = 3;

// How a call is cut: where values fill a line, each head by itself, or up to four that share a key where there are several
// chunks; and heads side by side where not.
inline size_t heads_together(const Recurrence& call) {
  if (call.width >= kRecurrenceLine) {
    const size_t of_key = call.heads / call.key_heads;
    return call.tokens <= kChunk ? 1 : of_key < 4 ? of_key : 4;
  }
  return call.width == 1 && call.channels == 1 ? 8 * kRecurrenceLine : kRecurrenceLine;
}

inline size_t in_lines(size_t count) { return (count + kRecurrenceLine - 1) / kRecurrenceLine * kRecurrenceLine; }

// Numbers of a task's scratch, in whole lines.
inline size_t recurrence_scratch(const Recurrence& call) {
  const size_t K = in_lines(call.channels), V = in_lines(call.width), t = kChunk;
  if (call.width < kRecurrenceLine) return kRecurrenceLine * K * (call.width + 1) + 8 * kRecurrenceLine * kRecurrenceLine;
  if (call.tokens <= kFewTokens) return K;
  // keys and queries by token and by channel; the state; pairs of tokens; what is written and read of a panel
  const size_t apart = call.decays > 1 ? t * K * 6 + 2 * K : 0;  // the same times factors, and the factors
  return t * K * 4 + K + V * (heads_together(call) * call.channels + 4 * t) + 5 * t * t + 2 * t * kRecurrenceLine + 3 * t + apart;
}

struct RecurrenceKernels {
  // The heads from `head`, heads_together() or as many as there are. The scratch lies at a multiple of 64 bytes.
  void (*run)(const Recurrence&, size_t row, size_t head, float* scratch);
};

extern const RecurrenceKernels kRecurrenceScalar, kRecurrenceAvx2, kRecurrenceAvx512, kRecurrenceNeon;

}  // namespace graphopt
