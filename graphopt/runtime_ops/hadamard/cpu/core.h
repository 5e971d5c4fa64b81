// Products with a core of any signs, by sums that are looked up.
#pragma once

#include "hadamard/cpu/kernels.h"
#include "hadamard/cpu/vector.h"

namespace graphopt {
namespace {

// Prefetches the next run's input into L2, a line at a time, while this one is summed.
struct Prefetcher {
  uintptr_t at = 0, end = 0;

  void fetch_line() {
    if (at >= end) return;
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    at += 64;
  }
};

// out[k] = sum over i of B[i][k] in[i], for strips. Any four inputs have 16 sums with signs: each is made once and
// serves all outputs, so an output costs a quarter of the additions. `kBlock` groups of four at a time stay in L1.
// Behind the last input there are zeros up to a whole group.
template <typename V>
void core_product(const uint8_t* codes, size_t order, const V* in, V* out, Prefetcher& prefetcher) {
  constexpr size_t kBlock = 10, W = kStrip / sizeof(V);
  V sums[kBlock][16][W];
  const size_t group_count = groups(order);
  for (size_t first = 0; first < group_count; first += kBlock) {
    const size_t count = group_count - first < kBlock ? group_count - first : kBlock;
    for (size_t g = 0; g < count; ++g) {
      const V* const row = in + (first + g) * kGroup * W;
      for (size_t w = 0; w < W; ++w) {
        const V a = row[w], b = row[W + w], c = row[2 * W + w], d = row[3 * W + w];
        const V low[4] = {a + b, b - a, a - b, -(a + b)}, high[4] = {c + d, d - c, c - d, -(c + d)};
#pragma GCC unroll 16
        for (size_t code = 0; code < 16; ++code) sums[g][code][w] = low[code % 4] + high[code / 4];
      }
    }
    const auto outputs = [&](size_t k, auto output_count) {
      constexpr size_t K = decltype(output_count)::value;
      V sum[K][W] = {};
      if (first) __builtin_memcpy(sum, out + k * W, sizeof sum);
      for (size_t j = 0; j < K; ++j) prefetcher.fetch_line();
      for (size_t g = 0; g < count; ++g) {
        for (size_t j = 0; j < K; ++j) {
          const V* const from = sums[g][codes[(k + j) * group_count + first + g]];
          for (size_t w = 0; w < W; ++w) sum[j][w] += from[w];
        }
      }
      for (size_t j = 0; j < K; ++j) {
        for (size_t w = 0; w < W; ++w) out[(k + j) * W + w] = sum[j][w];
      }
    };
    constexpr size_t kTogether = W < 8 ? 8 / W : 1;  // as many sums as there are registers for
    size_t k = 0;
    for (; k + kTogether <= order; k += kTogether) outputs(k, std::integral_constant<size_t, kTogether>());
    for (; k < order; ++k) outputs(k, std::integral_constant<size_t, 1>());
  }
}

// x times I (x) C (x) I(stride), in place. A strip is columns side by side, as units of U: vectors, or single numbers
// where columns that follow one another do not lie so.
template <typename U, typename T>
void core(T* x, size_t size, size_t stride, const Factor& factor, void* core_scratch, Prefetcher& prefetcher) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<U, T>, kUnits = kStrip / sizeof(U);
  const size_t order = factor.coded(), rows = groups(order) * kGroup, columns = size / factor.core;
  U* const in = static_cast<U*>(core_scratch);
  U* const out = in + rows * kUnits;
  // With a D, a strip holds half as many columns: their sums of two rows, and then the differences.
  const size_t in_strip = factor.diagonal ? kUnits / 2 : kUnits;
  __builtin_memset(in, 0, rows * kStrip);
  for (size_t first = 0; first < columns; first += in_strip * L) {
    T* at[kUnits];
    size_t count = 0;
    for (; count < in_strip && first + count * L < columns; ++count) {
      const size_t column = first + count * L;
      at[count] = x + column / stride * factor.core * stride + column % stride;
    }
    for (size_t i = 0; i < order; ++i) {
      U* const row = in + i * kUnits;
      for (size_t u = 0; u < count; ++u) {
        if (factor.diagonal) {
          const U even = load<U>(at[u] + 2 * i * stride), odd = load<U>(at[u] + (2 * i + 1) * stride);
          row[u] = even + odd;
          row[u + in_strip] = even - odd;
        } else {
          row[u] = load<U>(at[u] + i * stride);
        }
      }
    }
    core_product(factor.codes, order, reinterpret_cast<const V*>(in), reinterpret_cast<V*>(out), prefetcher);
    for (size_t k = 0; k < order; ++k) {
      const U* const row = out + k * kUnits;
      for (size_t u = 0; u < count; ++u) {
        if (factor.diagonal) {
          T *const even = at[u] + 2 * k * stride, *const odd = even + stride;
          const int8_t* const d = factor.diagonal + 2 * k;
          store(even, row[u] + static_cast<T>(d[0]) * load<U>(even));
          store(odd, row[u + in_strip] + static_cast<T>(d[1]) * load<U>(odd));
        } else {
          store(at[u] + k * stride, row[u]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace graphopt
