// The transform of one run after the other; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
//
// A run is y = x (left (x) right) / sqrt(a b), and a Kronecker product of matrices is one product after the other: each
// factor works along its own stride. What is Sylvester's is done by butterflies, Paley's cores as in paley.h, others by
// sums that are looked up.
#include "hadamard/cpu/kernels.h"

#include "abi/instructions.h"
#include "abi/convert.h"
#include "hadamard/cpu/core.h"
#include "hadamard/cpu/paley.h"
#include "hadamard/cpu/sylvester.h"
#include "hadamard/cpu/vector.h"

namespace graphopt {
namespace {

// Writes rows of a strip to memory, and prefetches as many lines.
template <typename V, typename T>
struct StoreRows {
  T* to;
  size_t stride;
  Prefetcher* prefetcher;

  void operator()(size_t row, V v) const {
    store(to + row * stride, v);
    prefetcher->fetch_line();
  }
};

// x times I (x) C (x) I(stride) for Paley's core over the integers modulo q, in place.
template <size_t q, typename T>
void paley(T* x, size_t size, size_t stride, void* core_scratch, Prefetcher& prefetcher) {
  using V = typename Narrow<T>::type;
  constexpr size_t core = 2 * (q + 1), L = lanes<V, T>;
  auto* const strip = static_cast<PaleyStrip<q, V>*>(core_scratch);
  for (size_t block = 0; block < size; block += core * stride) {
    for (size_t column = block; column < block + stride; column += L) {
      paley_read<q, 1>(strip, [&](size_t i, V* v) { *v = load<V>(x + column + i * stride); });
      paley_product<q>(*strip, reinterpret_cast<V*>(strip + 1), StoreRows<V, T>{x + column, stride, &prefetcher});
    }
  }
}

// Paley's cores are written out for floats alone: they take the compiler long, and doubles are rare.
template <typename T>
constexpr bool kHasPaley = sizeof(T) == sizeof(float);

// Whether columns fill a vector, whatever the instructions: another order of additions gives other bits.
bool fills_paley(const Factor& factor, size_t of_core) { return factor.paley && of_core % 16 == 0; }

template <typename T, size_t... q>
void paley(T* x, size_t size, size_t stride, const Factor& factor, void* core_scratch, Prefetcher& prefetcher,
           std::index_sequence<q...>) {
  ((factor.paley == q ? paley<q>(x, size, stride, core_scratch, prefetcher) : void()), ...);
}

template <typename T>
void multiply(T* run, size_t size, size_t stride, const Factor& factor, void* core_scratch, Prefetcher& prefetcher) {
  using V = typename Wide<T>::type;
  sylvester(run, size, stride, factor.inner);
  const size_t of_core = stride * factor.inner;
  if (kHasPaley<T> && fills_paley(factor, of_core)) {
    if constexpr (kHasPaley<T>) paley(run, size, of_core, factor, core_scratch, prefetcher, PaleyPrimes());
  } else if (factor.codes && of_core % lanes<V, T> == 0) {
    core<V>(run, size, of_core, factor, core_scratch, prefetcher);
  } else if (factor.codes) {
    core<T>(run, size, of_core, factor, core_scratch, prefetcher);
  }
  sylvester(run, size, of_core * factor.core, factor.outer);
}

constexpr size_t kStrips = 8;

// Takes rows of a strip, which are whole lines, past the caches.
template <typename V, typename T>
struct StreamRows {
  T* to;
  size_t stride;
  Prefetcher* prefetcher;

  void operator()(size_t row, V v) const {
    stream_line(to + row * stride, v);
    prefetcher->fetch_line();
  }
};

// The same where a line is the end of a row of the strip before and the beginning of one of this strip, which is kept.
template <typename V, typename T>
struct StreamShiftedRows {
  T* to;  // a line
  size_t stride, ends;
  const V* before;
  V* rows;
  Prefetcher* prefetcher;

  void operator()(size_t row, V v) const {
    stream_line(to + row * stride, end_and_begin(before[row], v, ends));
    rows[row] = v;
    prefetcher->fetch_line();
  }
};

// The strips' products, past the caches while others are computed. The room behind `even` is for one strip more.
template <size_t q, typename V, typename T>
void paley_lines(PaleyStrip<q, V>* strips, T* y, V* even, Prefetcher& prefetcher) {
  constexpr size_t L = lanes<V, T>, stride = kStrips * L, core = 2 * (q + 1);
  const size_t ends = reinterpret_cast<uintptr_t>(y) % 64 / sizeof(T);
  if (!ends) {
    for (size_t s = 0; s < kStrips; ++s) {
      paley_product<q>(strips[s], even, StreamRows<V, T>{y + s * L, stride, &prefetcher});
    }
  } else {
    // A strip's rows are kept where the strip before it was.
    const V* rows_of_strip[kStrips];
    V* free = even + (q - 1) / 2;
    for (size_t s = 0; s < kStrips; ++s) {
      T* const to = y + s * L - ends;
      if (s) {
        const StreamShiftedRows<V, T> store{to, stride, ends, rows_of_strip[s - 1], free, &prefetcher};
        paley_product<q>(strips[s], even, store);
      } else {
        paley_product<q>(strips[s], even, StoreRows<V, T>{reinterpret_cast<T*>(free), L, &prefetcher});
      }
      rows_of_strip[s] = free;
      free = reinterpret_cast<V*>(strips + s);
    }
    const V *const first = rows_of_strip[0], *const last = rows_of_strip[kStrips - 1];
    __builtin_memcpy(y, first, (L - ends) * sizeof(T));
    for (size_t row = 1; row < core; ++row) {
      stream_line(y + row * stride - ends, end_and_begin(last[row - 1], first[row], ends));
    }
    const T* const end = reinterpret_cast<const T*>(last + core);
    __builtin_memcpy(y + core * stride - ends, end - ends, ends * sizeof(T));
  }
  fence();
}

// A whole run where Sylvester's matrix of kStrips vectors stands behind Paley's core: rows go into strips as they are
// made, which saves a way to memory and back. What is added, and in which order, is what multiply() adds.
template <size_t q, typename T>
void paley_run(const T* x, T* y, T scale, void* scratch, void* core_scratch, [[maybe_unused]] bool streaming,
               Prefetcher& prefetcher) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<V, T>;
  auto* const strips = static_cast<PaleyStrip<q, V>*>(scratch);
  V* const even = static_cast<V*>(core_scratch);
  paley_read<q, kStrips>(strips, [&](size_t i, V* v) {
#pragma GCC unroll 8
    for (size_t s = 0; s < kStrips; ++s) v[s] = load<V>(x + (i * kStrips + s) * L) * scale;
    butterflies<T, kStrips>(v);
  });
  if constexpr (kStreamsLines) {
    if (streaming) return paley_lines<q>(strips, y, even, prefetcher);
  }
  for (size_t s = 0; s < kStrips; ++s) {
    paley_product<q>(strips[s], even, StoreRows<V, T>{y + s * L, kStrips * L, &prefetcher});
  }
}

template <typename T, size_t... q>
void paley_run(const T* x, T* y, const HadamardWork& work, void* core_scratch, Prefetcher& prefetcher,
               std::index_sequence<q...>) {
  const T scale = static_cast<T>(work.scale);
  const auto run = [&](auto prime) {
    paley_run<decltype(prime)::value>(x, y, scale, work.scratch, core_scratch, work.streaming, prefetcher);
  };
  ((work.left.paley == q ? run(std::integral_constant<size_t, q>()) : void()), ...);
}

template <typename T>
bool is_paley_run(const HadamardWork& work) {
  using V = typename Wide<T>::type;
  if (work.streaming && sizeof(V) != 64) return false;  // vectors are no lines, which stream() makes of them
  return work.left.outer == 1 && work.left.inner == 1 && !work.right.codes &&
         work.right.order() == kStrips * lanes<V, T> && fills_paley(work.left, work.right.order());
}

template <typename Stored, typename T>
void transform(const HadamardWork& work) {
  const size_t size = work.left.order() * work.right.order();
  T* const run = static_cast<T*>(work.scratch);
  void* const core_scratch = static_cast<char*>(work.scratch) + (size * sizeof(T) + 63) / 64 * 64;
  const T scale = static_cast<T>(work.scale);
  // What a pass wrote is still in L1 when the next one reads it.
  constexpr size_t kPart = 8192 / sizeof(T);
  const size_t order = work.right.order(), in_part = order < kPart ? kPart / order * order : order;
  for (size_t i = 0; i < work.runs; ++i) {
    const Stored* const x = static_cast<const Stored*>(work.x) + i * size;
    Stored* const y = static_cast<Stored*>(work.y) + i * size;
    Prefetcher prefetcher;
    if (work.streaming) {
      prefetcher.at = reinterpret_cast<uintptr_t>(x) + size * sizeof(Stored);
      prefetcher.end = prefetcher.at + size * sizeof(Stored);
    }
    if constexpr (kHasVectors<T> && kHasPaley<T> && sizeof(Stored) == sizeof(T)) {
      if (is_paley_run<T>(work)) {
        paley_run(x, y, work, core_scratch, prefetcher, PaleyPrimes());
        continue;
      }
    }
    for (size_t j = 0; j < size; j += in_part) {
      const size_t count = size - j < in_part ? size - j : in_part;
      for (size_t l = 0; l < count; ++l) run[j + l] = number<T>(x[j + l]) * scale;
      multiply(run + j, count, 1, work.right, core_scratch, prefetcher);
    }
    const size_t bytes = size * sizeof(T);
    multiply(run, size, order, work.left, core_scratch, prefetcher);
    if constexpr (sizeof(Stored) != sizeof(T)) {
      for (size_t j = 0; j < size; ++j) y[j] = stored<Stored>(run[j]);
    } else if (work.streaming) {
      stream(y, run, bytes);
    } else {
      __builtin_memcpy(y, run, bytes);
    }
  }
}

}  // namespace

const HadamardKernels GRAPHOPT_NAME(kHadamard) = {transform<Half, float>, transform<float, float>,
                                                  transform<double, double>};

}  // namespace graphopt
