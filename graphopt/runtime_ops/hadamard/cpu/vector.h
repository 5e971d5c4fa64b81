// Vectors of GRAPHOPT_VECTOR_BYTES bytes, or single numbers where it is undefined.
//
// Every operation here is exact or rounds each number by itself, in the same order for every width: so all widths give
// the same bits. No function of the standard library is called: the linker could keep the copy that was compiled for
// wide vectors for a machine that has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace graphopt {
namespace {

template <typename T>
struct Wide {
#if defined(GRAPHOPT_VECTOR_BYTES)
  typedef T type __attribute__((vector_size(GRAPHOPT_VECTOR_BYTES)));
#else
  typedef T type;
#endif
};

// Vectors of 16 bytes even without a set of instructions: the compiler splits them where it has to.
template <typename T>
struct Narrow {
#if defined(GRAPHOPT_VECTOR_BYTES)
  using type = typename Wide<T>::type;
#else
  typedef T type __attribute__((vector_size(16)));
#endif
};

template <typename V, typename T>
constexpr size_t lanes = sizeof(V) / sizeof(T);

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <typename V, typename T>
inline void store(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

#if defined(GRAPHOPT_VECTOR_BYTES)
template <size_t Distance, typename V, typename Integer, size_t... I>
inline V butterfly_inside(V v, Integer, std::index_sequence<I...>) {
  typedef Integer Mask __attribute__((vector_size(sizeof(V))));
#if defined(__clang__)
  const V partner = __builtin_shufflevector(v, v, (I ^ Distance)...);
#else
  const V partner = __builtin_shuffle(v, Mask{static_cast<Integer>(I ^ Distance)...});
#endif
#if defined(__AVX512F__)
  // The upper one of a pair gives partner - v: v times 1 or -1 is exact, so this rounds once, as an addition does.
  typedef decltype(v[0] + v[0]) Number;
  const V signs = {((I & Distance) ? Number(-1) : Number(1))...};
  if constexpr (sizeof(Number) == 4) return _mm512_fmadd_ps(v, signs, partner);
  else return _mm512_fmadd_pd(v, signs, partner);
#else
  // The upper one of a pair gives partner - v, as partner + (-v); its sign bit is flipped to get there.
  constexpr Integer sign = std::numeric_limits<Integer>::min();  // that bit alone
  const Mask flip = {((I & Distance) ? sign : Integer(0))...};
  return partner + reinterpret_cast<V>(reinterpret_cast<Mask>(v) ^ flip);
#endif
}

// Sums and differences of the lanes that are Distance apart, which is a power of two.
template <size_t Distance>
inline Wide<float>::type butterfly_inside(Wide<float>::type v) {
  return butterfly_inside<Distance>(v, int32_t(), std::make_index_sequence<lanes<Wide<float>::type, float>>());
}
template <size_t Distance>
inline Wide<double>::type butterfly_inside(Wide<double>::type v) {
  return butterfly_inside<Distance>(v, int64_t(), std::make_index_sequence<lanes<Wide<double>::type, double>>());
}
#endif

// Ones that the compiler cannot constant-fold.
template <typename V>
inline V ones() {
  V one = V{} + 1;
#if defined(__AVX2__)
  __asm__("" : "+x"(one));
#endif
  return one;
}

// total + x and total - x where `one` is ones, on the units for multiplications where there are some.
template <typename V>
inline V plus_times(V total, V x, [[maybe_unused]] V one) {
#if defined(__AVX512F__)
  if constexpr (sizeof(x[0]) == 4) return _mm512_fmadd_ps(x, one, total);
  else return _mm512_fmadd_pd(x, one, total);
#elif defined(__AVX2__)
  if constexpr (sizeof(x[0]) == 4) return _mm256_fmadd_ps(x, one, total);
  else return _mm256_fmadd_pd(x, one, total);
#else
  return total + x;
#endif
}

template <typename V>
inline V minus_times(V total, V x, [[maybe_unused]] V one) {
#if defined(__AVX512F__)
  if constexpr (sizeof(x[0]) == 4) return _mm512_fnmadd_ps(x, one, total);
  else return _mm512_fnmadd_pd(x, one, total);
#elif defined(__AVX2__)
  if constexpr (sizeof(x[0]) == 4) return _mm256_fnmadd_ps(x, one, total);
  else return _mm256_fnmadd_pd(x, one, total);
#else
  return total - x;
#endif
}

#if defined(__AVX512F__)
// Writes a line past the caches; fence() must follow the last one.
template <typename V>
inline void stream_line(void* to, V v) {
  _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret_cast<__m512i>(v));
}
#endif

#if defined(__AVX512F__)
// The last `ends` numbers of one vector and as many of the first ones of another as make a vector.
template <typename V>
inline V end_and_begin(V first, V second, size_t ends) {
  constexpr int L = sizeof(V) / sizeof(first[0]);
  if constexpr (L == 16) {
    const __m512i from_0 = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i from = _mm512_add_epi32(from_0, _mm512_set1_epi32(L - static_cast<int>(ends)));
    return _mm512_permutex2var_ps(first, from, second);
  } else {
    const __m512i from_0 = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i from = _mm512_add_epi64(from_0, _mm512_set1_epi64(L - static_cast<int>(ends)));
    return _mm512_permutex2var_pd(first, from, second);
  }
}
#endif

inline void fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// A copy that bypasses the caches, for data that is not read soon.
inline void stream(void* to, const void* from, size_t bytes) {
  char* t = static_cast<char*>(to);
  const char* f = static_cast<const char*>(from);
#if defined(__AVX2__)
  // Only whole lines go past the caches.
  size_t head = -reinterpret_cast<uintptr_t>(t) % 64;
  if (head > bytes) head = bytes;
  __builtin_memcpy(t, f, head);
  for (t += head, f += head, bytes -= head; bytes >= 64; t += 64, f += 64, bytes -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(t), _mm512_loadu_si512(f));
#else
    for (size_t half = 0; half < 64; half += 32) {
      const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(f + half));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(t + half), numbers);
    }
#endif
  }
#endif
  fence();
  __builtin_memcpy(t, f, bytes);
}

}  // namespace
}  // namespace graphopt
