// The recurrence of some heads; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
#include "linear_recurrence/cpu/kernels.h"

#include "abi/instructions.h"
#include "linear_recurrence/cpu/chunks.h"
#include "linear_recurrence/cpu/narrow.h"

namespace graphopt {
namespace {

// Rows of the state that are fetched ahead of their use: it comes from memory where a model has many layers.
constexpr size_t kAhead = 16;

// One token, for `Lines` lines of the state, the last of them of `last` numbers.
template <size_t Lines>
void step(const Recurrence& call, const float* query, const float* key, const float* factors, float beta,
          const float* value, float* output, const float* before, float* state, size_t last) {
  const size_t K = call.channels, V = call.width;
  const auto load = [&](const float* from, size_t i) {
    return i + 1 == Lines ? load_some(from + i * kColumns, last) : load_line<Floats>(from + i * kColumns);
  };
  const auto store = [&](float* to, size_t i, const Floats& line) {
    if (i + 1 == Lines) store_some(to + i * kColumns, line, last);
    else store_line(to + i * kColumns, line);
  };
  Floats u[Lines], y[Lines];
#pragma GCC unroll 8
  for (size_t i = 0; i < Lines; ++i) u[i] = y[i] = all_lanes(0.f);
  const auto fetch = [&](size_t k) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      __builtin_prefetch(before + (k + kAhead) * V + i * kColumns);
      __builtin_prefetch(state + k * V + i * kColumns, 1);
    }
  };
  if (call.delta) {
    for (size_t k = 0; k < K; ++k) {
      fetch(k);
      const Floats of_key = all_lanes(key[k] * factors[k]);
#pragma GCC unroll 8
      for (size_t i = 0; i < Lines; ++i) u[i] = fused(load(before + k * V, i), of_key, u[i]);
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < Lines; ++i) u[i] = (load(value, i) - u[i]) * beta;
  for (size_t k = 0; k < K; ++k) {
    if (!call.delta) fetch(k);
    const Floats of_key = all_lanes(key[k]), of_query = all_lanes(query[k]);
#pragma GCC unroll 8
    for (size_t i = 0; i < Lines; ++i) {
      const Floats S = fused(of_key, u[i], load(before + k * V, i) * factors[k]);
      store(state + k * V, i, S);
      y[i] = fused(of_query, S, y[i]);
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < Lines; ++i) store(output, i, y[i] * call.scale);
}

// A few tokens, one after the other.
void run_tokens(const Recurrence& call, size_t row, size_t head, float* factors) {
  const size_t key_head = head / (call.heads / call.key_heads), K = call.channels, V = call.width;
  const float* before = call.before + (row * call.heads + head) * K * V;
  float* const state = call.state + (row * call.heads + head) * K * V;
  fill(factors, K, 1);
  for (size_t token = row * call.tokens; token < (row + 1) * call.tokens; ++token) {
    const size_t of_head = token * call.heads + head, of_key = (token * call.key_heads + key_head) * K;
    const float *const query = call.query + of_key, *const key = call.key + of_key, *const value = call.value + of_head * V;
    float* const output = call.output + of_head * V;
    if (call.mask && !call.mask[token]) {
      fill(output, V, 0);
      continue;
    }
    const float* const decay = call.decay + of_head * call.decays;
    for (size_t k = 0; k < K && call.decays; k += kColumns) {
      store_line(factors + k, factor_of(call.decays == 1 ? all_lanes(decay[0]) : load_some(decay + k, K - k)));
    }
    const float beta = call.beta ? call.beta[of_head] : 1;
    constexpr size_t kLines = kParts == 1 ? 8 : 2;
    size_t v = 0;
    for (; v + kLines * kColumns <= V; v += kLines * kColumns) {
      step<kLines>(call, query, key, factors, beta, value + v, output + v, before + v, state + v, kColumns);
    }
    for (; v + kLines / 2 * kColumns <= V; v += kLines / 2 * kColumns) {
      step<kLines / 2>(call, query, key, factors, beta, value + v, output + v, before + v, state + v, kColumns);
    }
    for (; v < V; v += kColumns) {
      step<1>(call, query, key, factors, beta, value + v, output + v, before + v, state + v, V - v);
    }
    before = state;
  }
  if (before != state) __builtin_memcpy(state, before, K * V * sizeof(float));  // all tokens are padding
}

void run(const Recurrence& call, size_t row, size_t head, float* scratch) {
  const size_t remaining_heads = call.heads - head, together = heads_together(call);
  const size_t heads = remaining_heads < together ? remaining_heads : together;
  if (call.width >= kColumns) {
    if (call.tokens <= kFewTokens) run_tokens(call, row, head, scratch);
    else Chunks(call, row, head, heads, scratch).run();
  } else if (call.width == 1 && call.channels == 1) {
    run_numbers(call, row, head, heads);
  } else if (call.channels == kColumns) {
    run_vectors<1>(call, row, head, heads, scratch);
  } else {
    run_vectors<0>(call, row, head, heads, scratch);
  }
}

}  // namespace

const RecurrenceKernels GRAPHOPT_NAME(kRecurrence) = {run};

}  // namespace graphopt
