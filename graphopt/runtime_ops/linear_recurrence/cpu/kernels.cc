// The recurrence of one head, token by token; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
#include "linear_recurrence/cpu/kernels.h"

#include "abi/instructions.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

// e^x, rounded to 0 where it is below 1e-38, and to infinity above 3e38.
inline Floats factor_of(const Floats& x) {
  const Floats power = exponential(smaller(all_lanes(88.f), x));
  return by_parts<Floats>([&](size_t i) {
    const auto high = x.part[i] > 88.7f ? all_lanes(__builtin_inff()).part[i] : power.part[i];
    return x.part[i] < -87.f ? Floats::Part{} : high;
  });
}

inline Floats load_some(const float* from, size_t count) {
  float lanes[kColumns] = {};
  for (size_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load_line<Floats>(lanes);
}

inline void store_some(float* to, const Floats& line, size_t count) {
  float lanes[kColumns];
  store_line(lanes, line);
  for (size_t i = 0; i < count; ++i) to[i] = lanes[i];
}

struct Token {
  const float *query, *key, *factors;
  float beta, scale;
  bool delta;
};

// A token, for `Lines` lines of the state, the last of them of `last` numbers.
template <size_t Lines>
void step(const Token& token, size_t channels, size_t width, const float* value, float* output, float* state,
          size_t last) {
  const auto load = [&](const float* from, size_t i) {
    return i + 1 == Lines && last < kColumns ? load_some(from + i * kColumns, last)
                                             : load_line<Floats>(from + i * kColumns);
  };
  const auto store = [&](float* to, size_t i, const Floats& line) {
    if (i + 1 == Lines && last < kColumns) store_some(to + i * kColumns, line, last);
    else store_line(to + i * kColumns, line);
  };
  Floats written[Lines], sums[Lines];
  for (size_t i = 0; i < Lines; ++i) written[i] = sums[i] = all_lanes(0.f);
  if (token.delta) {
    for (size_t k = 0; k < channels; ++k) {
      const Floats key = all_lanes(token.key[k] * token.factors[k]);
      for (size_t i = 0; i < Lines; ++i) written[i] = fused(load(state + k * width, i), key, written[i]);
    }
  }
  for (size_t i = 0; i < Lines; ++i) written[i] = (load(value, i) - written[i]) * token.beta;
  for (size_t k = 0; k < channels; ++k) {
    const Floats key = all_lanes(token.key[k]), query = all_lanes(token.query[k]);
    for (size_t i = 0; i < Lines; ++i) {
      const Floats held = load(state + k * width, i) * token.factors[k];
      const Floats after = fused(key, written[i], held);
      store(state + k * width, i, after);
      sums[i] = fused(query, after, sums[i]);
    }
  }
  for (size_t i = 0; i < Lines; ++i) store(output, i, sums[i] * token.scale);
}

void run(const Recurrence& call, size_t row, size_t head, float* scratch) {
  const size_t key_head = head / (call.heads / call.key_heads), K = call.channels, V = call.width;
  float* const state = call.state + (row * call.heads + head) * K * V;
  for (size_t k = 0; k < K; ++k) scratch[k] = 1;
  for (size_t t = 0; t < call.tokens; ++t) {
    const size_t token = row * call.tokens + t, of_head = token * call.heads + head;
    float* const output = call.output + of_head * V;
    if (call.mask && !call.mask[token]) {
      for (size_t v = 0; v < V; ++v) output[v] = 0;
      continue;
    }
    const float* const decay = call.decay + of_head * call.decays;
    for (size_t k = 0; k < K && call.decays; k += kColumns) {
      const size_t count = K - k < kColumns ? K - k : kColumns;
      const Floats of_line = call.decays == 1 ? all_lanes(decay[0]) : load_some(decay + k, count);
      store_some(scratch + k, factor_of(of_line), count);
    }
    const size_t of_key = (token * call.key_heads + key_head) * K;
    const Token now{call.query + of_key, call.key + of_key, scratch, call.beta ? call.beta[of_head] : 1, call.scale,
                    call.delta};
    const float* const value = call.value + of_head * V;
    size_t v = 0;
    for (; v + 4 * kColumns <= V; v += 4 * kColumns) step<4>(now, K, V, value + v, output + v, state + v, kColumns);
    for (; v < V; v += kColumns) {
      step<1>(now, K, V, value + v, output + v, state + v, V - v < kColumns ? V - v : kColumns);
    }
  }
}

}  // namespace

const RecurrenceKernels GRAPHOPT_NAME(kRecurrence) = {run};

}  // namespace graphopt
