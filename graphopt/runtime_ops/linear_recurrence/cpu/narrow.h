// Heads whose values are narrower than a line, such as the channels of a selective scan: 16 heads side by side.
#pragma once

#include "linear_recurrence/cpu/vectors.h"

namespace graphopt {
namespace {

// Heads of one number each: a line is 16 heads.
inline void run_numbers(const Recurrence& call, size_t row, size_t head, size_t heads) {
  const size_t per_key = call.heads / call.key_heads;
  const auto of_keys = [&](const float* from, size_t first, size_t count) {
    if (call.key_heads == 1) return all_lanes(from[0]);
    if (per_key == 1) return load_some(from + first, count);
    float lanes[kColumns] = {};
    for (size_t i = 0; i < count; ++i) lanes[i] = from[(first + i) / per_key];
    return load_line<Floats>(lanes);
  };
  if (call.before != call.state) {
    const size_t at = row * call.heads + head;
    __builtin_memcpy(call.state + at, call.before + at, heads * sizeof(float));
  }
  for (size_t t = 0; t < call.tokens; ++t) {
    const size_t token = row * call.tokens + t, of_key = token * call.key_heads;
    float* const output = call.output + token * call.heads;
    if (call.mask && !call.mask[token]) {
      fill(output + head, heads, 0);
      continue;
    }
    for (size_t first = head; first < head + heads; first += kColumns) {
      const size_t count = head + heads - first, at = token * call.heads + first;
      float* const state = call.state + row * call.heads + first;
      Floats S = load_some(state, count);
      if (call.decays) S = S * factor_of(load_some(call.decay + at, count));
      const Floats key = of_keys(call.key + of_key, first, count), query = of_keys(call.query + of_key, first, count);
      Floats u = load_some(call.value + at, count);
      if (call.delta) u = u - S * key;
      if (call.beta) u = u * load_some(call.beta + at, count);
      S = fused(key, u, S);
      store_some(state, S, count);
      store_some(output + first, S * query * call.scale, count);
    }
  }
}

// Heads of few values: for each of them the numbers of its keys lie in lines. `Lines` is how many, 0 for any number.
template <size_t Lines>
void run_vectors(const Recurrence& call, size_t row, size_t head, size_t heads, float* scratch) {
  const size_t K = call.channels, V = call.width, lines = Lines ? Lines : in_lines(K) / kColumns, Kp = lines * kColumns;
  const size_t per_key = call.heads / call.key_heads;
  float *const factors = scratch, *const states = factors + kColumns * Kp;  // [16, Kp], [V, 16, Kp]
  const float* const before = call.before + (row * call.heads + head) * K * V;
  float* const state = call.state + (before - call.before);
  fill(states, V * kColumns * Kp, 0), fill(factors, kColumns * Kp, 1);
  for (size_t h = 0; h < heads; ++h) {
    for (size_t k = 0; k < K; ++k) {
      for (size_t v = 0; v < V; ++v) states[(v * kColumns + h) * Kp + k] = before[(h * K + k) * V + v];
    }
  }
  for (size_t t = 0; t < call.tokens; ++t) {
    const size_t token = row * call.tokens + t, of_heads = token * call.heads + head;
    if (call.mask && !call.mask[token]) {
      fill(call.output + of_heads * V, heads * V, 0);
      continue;
    }
    for (size_t h = 0; h < heads && call.decays; ++h) {
      const float* const decay = call.decay + (of_heads + h) * call.decays;
      for (size_t line = 0; line < lines; ++line) {
        const size_t k = line * kColumns;
        const Floats logarithms = call.decays == 1 ? all_lanes(decay[0]) : load_some(decay + k, K - k);
        store_line(factors + h * Kp + k, factor_of(logarithms));
      }
    }
    for (size_t v = 0; v < V; ++v) {
      float* const of_value = states + v * kColumns * Kp;
      float u[kColumns] = {}, y[kColumns];
      Floats sums[kColumns];
      const auto numbers_of = [&](const float* of, size_t h) {
        return of + (token * call.key_heads + (head + (h < heads ? h : 0)) / per_key) * K;
      };
      if (call.delta) {
#pragma GCC unroll 16
        for (size_t h = 0; h < kColumns; ++h) {
          const float* const key = numbers_of(call.key, h);
          sums[h] = all_lanes(0.f);
          for (size_t line = 0; line < lines; ++line) {
            const size_t k = line * kColumns, at = h * Kp + k;
            const Floats decayed = load_line<Floats>(of_value + at) * load_line<Floats>(factors + at);
            sums[h] = fused(decayed, load_some(key + k, K - k), sums[h]);
          }
        }
        store_line(u, sums_of(sums));
      }
      for (size_t h = 0; h < heads; ++h) {
        u[h] = call.value[(of_heads + h) * V + v] - u[h];
        if (call.beta) u[h] *= call.beta[of_heads + h];
      }
#pragma GCC unroll 16
      for (size_t h = 0; h < kColumns; ++h) {
        const float *const key = numbers_of(call.key, h), *const query = numbers_of(call.query, h);
        sums[h] = all_lanes(0.f);
        for (size_t line = 0; line < lines; ++line) {
          const size_t k = line * kColumns, at = h * Kp + k;
          const Floats decayed = load_line<Floats>(of_value + at) * load_line<Floats>(factors + at);
          const Floats S = fused(load_some(key + k, K - k), all_lanes(u[h]), decayed);
          store_line(of_value + at, S);
          sums[h] = fused(S, load_some(query + k, K - k), sums[h]);
        }
      }
      store_line(y, sums_of(sums) * call.scale);
      for (size_t h = 0; h < heads; ++h) call.output[(of_heads + h) * V + v] = y[h];
    }
  }
  for (size_t h = 0; h < heads; ++h) {
    for (size_t k = 0; k < K; ++k) {
      for (size_t v = 0; v < V; ++v) state[(h * K + k) * V + v] = states[(v * kColumns + h) * Kp + k];
    }
  }
}

}  // namespace
}  // namespace graphopt
