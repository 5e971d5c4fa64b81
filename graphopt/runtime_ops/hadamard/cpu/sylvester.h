// Products with Sylvester's matrices by butterflies, in place.
#pragma once

#include "hadamard/cpu/vector.h"

namespace graphopt {
namespace {

// v times S(Radix).
template <size_t Radix, typename V>
inline void butterfly(V* v) {
#pragma GCC unroll 4
  for (size_t half = 1; half < Radix; half *= 2) {
#pragma GCC unroll 16
    for (size_t i = 0; i < Radix; ++i) {
      if (i & half) continue;
      const V sum = v[i] + v[i + half], difference = v[i] - v[i + half];
      v[i] = sum;
      v[i + half] = difference;
    }
  }
}

// Radix vectors that lie `stride` apart are one butterfly, at each column of each block; in place.
template <typename V, size_t Radix, typename T>
void butterfly_across(T* x, size_t size, size_t stride) {
  for (size_t block = 0; block < size; block += Radix * stride) {
    for (size_t column = 0; column < stride; column += lanes<V, T>) {
      T* const at = x + block + column;
      V v[Radix];
#pragma GCC unroll 16
      for (size_t i = 0; i < Radix; ++i) v[i] = load<V>(at + i * stride);
      butterfly<Radix>(v);
#pragma GCC unroll 16
      for (size_t i = 0; i < Radix; ++i) store(at + i * stride, v[i]);
    }
  }
}

template <typename V, typename T>
void sylvester_across(T* x, size_t size, size_t stride, size_t order) {
  for (; order >= 16 && sizeof(V) == 64; order /= 16, stride *= 16) butterfly_across<V, 16>(x, size, stride);
  for (; order >= 8; order /= 8, stride *= 8) butterfly_across<V, 8>(x, size, stride);
  if (order == 4) butterfly_across<V, 4>(x, size, stride);
  if (order == 2) butterfly_across<V, 2>(x, size, stride);
}

template <size_t Distance, typename T>
void butterfly_within(T* x, size_t size) {
  using V = typename Wide<T>::type;
  for (size_t at = 0; at < size; at += lanes<V, T>) store(x + at, butterfly_inside<Distance, T>(load<V>(x + at)));
}

// All the distances inside a vector at once, and then Radix of these vectors are one butterfly: S(Radix * lanes).
template <typename T, size_t Radix, typename V>
inline void butterflies(V* v) {
  constexpr size_t L = lanes<V, T>;
#pragma GCC unroll 8
  for (size_t i = 0; i < Radix; ++i) {
    if constexpr (L >= 4) {
      v[i] = butterfly_inside<2, T>(butterfly_inside<1, T>(v[i]));
    } else {
      v[i] = butterfly_inside<1, T>(v[i]);
    }
    if constexpr (L >= 8) v[i] = butterfly_inside<4, T>(v[i]);
    if constexpr (L >= 16) v[i] = butterfly_inside<8, T>(v[i]);
  }
  butterfly<Radix>(v);
}

template <size_t Radix, typename T>
void butterflies_within(T* x, size_t size) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<V, T>;
  for (size_t at = 0; at < size; at += Radix * L) {
    V v[Radix];
#pragma GCC unroll 8
    for (size_t i = 0; i < Radix; ++i) v[i] = load<V>(x + at + i * L);
    butterflies<T, Radix>(v);
#pragma GCC unroll 8
    for (size_t i = 0; i < Radix; ++i) store(x + at + i * L, v[i]);
  }
}

// x times I (x) S(order) (x) I(stride), in place.
template <typename T>
void sylvester(T* x, size_t size, size_t stride, size_t order) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<V, T>;
  if constexpr (kHasVectors<T>) {
    if (size % L == 0 && stride == 1 && order >= L) {
      const size_t radix = order / L < 8 ? order / L : 8;
      if (radix == 8) butterflies_within<8>(x, size);
      if (radix == 4) butterflies_within<4>(x, size);
      if (radix == 2) butterflies_within<2>(x, size);
      if (radix == 1) butterflies_within<1>(x, size);
      stride = radix * L;
      order /= stride;
    }
    for (; size % L == 0 && L % (2 * stride) == 0 && order > 1; stride *= 2, order /= 2) {
      if (stride == 1) butterfly_within<1>(x, size);
      if constexpr (L >= 4) {
        if (stride == 2) butterfly_within<2>(x, size);
      }
      if constexpr (L >= 8) {
        if (stride == 4) butterfly_within<4>(x, size);
      }
      if constexpr (L >= 16) {
        if (stride == 8) butterfly_within<8>(x, size);
      }
    }
  }
  stride % L == 0 ? sylvester_across<V>(x, size, stride, order) : sylvester_across<T>(x, size, stride, order);
}

}  // namespace
}  // namespace graphopt
