// One call as its kernels take it: some of its rows, in one struct, with the host's lengths and policies.
#pragma once

#include "cuda/c_interface.h"
#include "cuda/device.h"
#include "kv_attention/shared/select.h"

namespace graphopt {

// Rows that fit a kernel's arguments; a call of more rows is several launches.
constexpr int kMostRows = 32, kMostHeads = 256;
constexpr float kNothing = -__builtin_inff();  // the score of tokens that are not read

struct CudaCall {
  Layout layout;
  int type = GRAPHOPT_FLOAT32;  // of query, key, value, sink_query and y
  const void *query = nullptr, *key = nullptr, *value = nullptr, *sink_query = nullptr;
  const float* sink_logits = nullptr;
  State state = {};
  void* y = nullptr;
  size_t columns = 0, first_row = 0;  // of the tensors; the row of the tensors that is row 0 here
  int rows = 0;
  int64_t past[kMostRows] = {};
  int32_t fresh[kMostRows] = {};
  Policy policies[kMostHeads] = {};

  GRAPHOPT_BOTH int64_t end(int row) const { return past[row] + fresh[row]; }
  // The last page of a row that has a token; -1 if there is none.
  GRAPHOPT_BOTH int64_t newest_page(int row) const { return end(row) ? layout.page_of(end(row) - 1) : -1; }
  GRAPHOPT_BOTH HeadState head_state(int row, int head) const {
    return HeadState(layout, state, first_row + static_cast<size_t>(row), static_cast<size_t>(head));
  }
  // Where the first number of a token's key or value is; the token lies at a position of this call.
  GRAPHOPT_BOTH size_t token_at(int row, int head, int64_t position) const {
    const size_t column = columns - static_cast<size_t>(fresh[row]) + static_cast<size_t>(position - past[row]);
    return (((first_row + static_cast<size_t>(row)) * columns + column) * layout.kv_heads + static_cast<size_t>(head)) *
           layout.size;
  }
  // Where the queries of a KV head begin, those of its query heads one behind the other.
  GRAPHOPT_BOTH size_t queries_at(int row, int head, int64_t position) const {
    return token_at(row, head, position) * layout.group;
  }
};

// Where a launch has its part of the work: a kernel takes the call and this, or a struct that begins with both.
struct CudaRun {
  int32_t first = 0, end = 0;  // the new tokens of each row whose queries take part
};

GRAPHOPT_DEVICE float load_number(const void* from, int type, size_t index) {
  if (type == GRAPHOPT_FLOAT32) return static_cast<const float*>(from)[index];
  if (type == GRAPHOPT_FLOAT16) return to_float(static_cast<const Half*>(from)[index]);
  return to_float(static_cast<const BFloat16*>(from)[index]);
}
GRAPHOPT_DEVICE void store_number(void* to, int type, size_t index, float number) {
  if (type == GRAPHOPT_FLOAT32) static_cast<float*>(to)[index] = number;
  else if (type == GRAPHOPT_FLOAT16) static_cast<Half*>(to)[index] = half_of(number);
  else static_cast<BFloat16*>(to)[index] = bfloat16_of(number);
}

struct Four {
  float number[4];
};
GRAPHOPT_DEVICE Four load_four(const float* from) {
  const Word4 word = load16(from);
  Four four;
  GRAPHOPT_UNROLL
  for (int i = 0; i < 4; ++i) four.number[i] = float_of_bits(word.words[i]);
  return four;
}
GRAPHOPT_DEVICE Four load_four(const Half* from) {
  const Word2 word = load8(from);
  Four four;
  GRAPHOPT_UNROLL
  for (int i = 0; i < 4; ++i) four.number[i] = to_float(Half{static_cast<uint16_t>(word.words[i / 2] >> 16 * (i % 2))});
  return four;
}
GRAPHOPT_DEVICE void store_four(float* to, const Four& four) {
  Word4 word;
  GRAPHOPT_UNROLL
  for (int i = 0; i < 4; ++i) word.words[i] = bits_of_float(four.number[i]);
  store16(to, word);
}

GRAPHOPT_DEVICE float magnitude_of(float x) { return float_of_bits(bits_of_float(x) & 0x7fffffffu); }

// e^x for x up to 0; less than -87 counts as -87, and NaN propagates. A product of x with log2(e) that is
// rounded once would err by more than x itself does.
GRAPHOPT_DEVICE float exponential(float x) {
  constexpr float kLog2 = 1.44269504088896341f, kRest = 1.925963033500e-8f, kLn2 = 0.693147180559945f;
  x = x < -87.0f ? -87.0f : x;
  const float whole = x * kLog2, rest = multiply_add(x, kRest, multiply_add(x, kLog2, -whole));
  return exp2_of(whole) * multiply_add(rest, kLn2, 1.0f);
}

// A score that is not finite must make the result so, even if it would get no weight.
GRAPHOPT_DEVICE float spoil(float score) { return score + (score - score); }

// tanh; the absolute error is below 3e-7 (Cephes, tanhf, where |x| is small).
GRAPHOPT_DEVICE float hyperbolic_tangent(float x) {
  const float size = magnitude_of(x), z = x * x;
  float p = -5.70498872745e-3f;
  p = multiply_add(p, z, 2.06390887954e-2f), p = multiply_add(p, z, -5.37397155531e-2f);
  p = multiply_add(p, z, 1.33314422036e-1f), p = multiply_add(p, z, -3.33332819422e-1f);
  const float doubled = exponential(size * -2.0f), far = (1.0f - doubled) / (1.0f + doubled);
  return size > 0.625f ? (x < 0 ? -far : far) : multiply_add(p * z, x, x);  // a NaN stays itself
}
GRAPHOPT_DEVICE float soften(const Layout& layout, float score) {
  return layout.softcap != 0 ? hyperbolic_tangent(score / layout.softcap) * layout.softcap : score;
}

}  // namespace graphopt
