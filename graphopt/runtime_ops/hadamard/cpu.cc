// The transform of one run after the other; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
//
// A run is y = x (left (x) right) / sqrt(a b), and a Kronecker product of matrices is one product after the other: each
// factor works along its own stride. What is Sylvester's is done by butterflies, the cores by adding.
#include "hadamard/cpu.h"

#include "abi/instructions.h"
#include "hadamard/half.h"
#include "hadamard/vector.h"

namespace graphopt {
namespace {

// One butterfly over Radix vectors that lie `stride` apart, at each column of each block; in place.
template <typename V, size_t Radix, typename T>
void butterfly_across(T* x, size_t size, size_t stride) {
  for (size_t block = 0; block < size; block += Radix * stride) {
    for (size_t column = 0; column < stride; column += lanes<V, T>) {
      T* const at = x + block + column;
      V v[Radix];
#pragma GCC unroll 16
      for (size_t i = 0; i < Radix; ++i) v[i] = load<V>(at + i * stride);
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

#if defined(GRAPHOPT_VECTOR_BYTES)
template <size_t Distance, typename T>
void butterfly_within(T* x, size_t size) {
  using V = typename Wide<T>::type;
  for (size_t at = 0; at < size; at += lanes<V, T>) store(x + at, butterfly_inside<Distance>(load<V>(x + at)));
}

// All the distances inside a vector at once.
template <typename T>
void butterflies_within(T* x, size_t size) {
  using V = typename Wide<T>::type;
  for (size_t at = 0; at < size; at += lanes<V, T>) {
    V v = butterfly_inside<2>(butterfly_inside<1>(load<V>(x + at)));
    if constexpr (lanes<V, T> >= 8) v = butterfly_inside<4>(v);
    if constexpr (lanes<V, T> >= 16) v = butterfly_inside<8>(v);
    store(x + at, v);
  }
}
#endif

// x times I (x) S(order) (x) I(stride), in place.
template <typename T>
void sylvester(T* x, size_t size, size_t stride, size_t order) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<V, T>;
#if defined(GRAPHOPT_VECTOR_BYTES)
  if (size % L == 0 && stride == 1 && order >= L) {
    butterflies_within(x, size);
    stride = L;
    order /= L;
  }
  for (; size % L == 0 && L % (2 * stride) == 0 && order > 1; stride *= 2, order /= 2) {
    if (stride == 1) butterfly_within<1>(x, size);
    if (stride == 2) butterfly_within<2>(x, size);
    if constexpr (L >= 8) {
      if (stride == 4) butterfly_within<4>(x, size);
    }
    if constexpr (L >= 16) {
      if (stride == 8) butterfly_within<8>(x, size);
    }
  }
#endif
  stride % L == 0 ? sylvester_across<V>(x, size, stride, order) : sylvester_across<T>(x, size, stride, order);
}

// out[k] = sum over i of C[i][k] in(i), for vectors. Any four inputs have 16 sums with signs: each is made once and
// serves all outputs, so an output costs a quarter of the additions. `kBlock` groups of four at a time stay in L1.
template <typename V, typename T, typename Input>
void core_product(const Factor& factor, V* out, Input in) {
  constexpr size_t kBlock = 16;
  V sums[kBlock][16];
  const size_t core = factor.core, all = groups(core);
  for (size_t first = 0; first < all; first += kBlock) {
    const size_t count = all - first < kBlock ? all - first : kBlock;
    for (size_t g = 0; g < count; ++g) {
      V row[kGroup];
      for (size_t r = 0; r < kGroup; ++r) {
        const size_t i = (first + g) * kGroup + r;
        row[r] = i < core ? in(i) : V{};
      }
      const V low[4] = {row[0] + row[1], row[1] - row[0], row[0] - row[1], -(row[0] + row[1])};
      const V high[4] = {row[2] + row[3], row[3] - row[2], row[2] - row[3], -(row[2] + row[3])};
#pragma GCC unroll 16
      for (size_t code = 0; code < 16; ++code) sums[g][code] = low[code % 4] + high[code / 4];
    }
    const auto outputs = [&](size_t k, auto together) {
      constexpr size_t K = decltype(together)::value;
      V sum[K];
      for (size_t j = 0; j < K; ++j) sum[j] = first ? out[k + j] : V{};
      for (size_t g = 0; g < count; ++g) {
        for (size_t j = 0; j < K; ++j) sum[j] += sums[g][factor.codes[(k + j) * all + first + g]];
      }
      for (size_t j = 0; j < K; ++j) out[k + j] = sum[j];
    };
    size_t k = 0;
    for (; k + 4 <= core; k += 4) outputs(k, std::integral_constant<size_t, 4>());
    for (; k < core; ++k) outputs(k, std::integral_constant<size_t, 1>());
  }
}

// x times I (x) C (x) I(stride), in place; `out` has room for one vector per row of C.
template <typename T>
void core(T* x, size_t size, size_t stride, const Factor& factor, void* room) {
  using V = typename Wide<T>::type;
  constexpr size_t L = lanes<V, T>;
  V* const out = static_cast<V*>(room);
  const size_t block = factor.core * stride, columns = size / factor.core;
  if (stride % L == 0) {
    for (size_t column = 0; column < columns; column += L) {
      T* const at = x + column / stride * block + column % stride;
      core_product<V, T>(factor, out, [&](size_t i) { return load<V>(at + i * stride); });
      for (size_t k = 0; k < factor.core; ++k) store(at + k * stride, out[k]);
    }
    return;
  }
  // Columns do not lie side by side: collect as many as a vector holds, and put them back.
  for (size_t column = 0; column < columns; column += L) {
    const size_t count = columns - column < L ? columns - column : L;
    T* at[L];
    for (size_t l = 0; l < count; ++l) at[l] = x + (column + l) / stride * block + (column + l) % stride;
    core_product<V, T>(factor, out, [&](size_t i) {
      T numbers[L] = {};
      for (size_t l = 0; l < count; ++l) numbers[l] = at[l][i * stride];
      return load<V>(numbers);
    });
    for (size_t k = 0; k < factor.core; ++k) {
      for (size_t l = 0; l < count; ++l) at[l][k * stride] = reinterpret_cast<const T*>(out + k)[l];
    }
  }
}

template <typename T>
void multiply(T* run, size_t size, size_t stride, const Factor& factor, void* room) {
  sylvester(run, size, stride, factor.inner);
  if (factor.codes) core(run, size, stride * factor.inner, factor, room);
  sylvester(run, size, stride * factor.inner * factor.core, factor.outer);
}

template <typename Stored, typename T>
void transform(const HadamardWork& work) {
  const size_t size = work.left.order() * work.right.order();
  T* const run = static_cast<T*>(work.scratch);
  void* const room = static_cast<char*>(work.scratch) + (size * sizeof(T) + 63) / 64 * 64;
  const T scale = static_cast<T>(work.scale);
  for (size_t i = 0; i < work.runs; ++i) {
    const Stored* const x = static_cast<const Stored*>(work.x) + i * size;
    Stored* const y = static_cast<Stored*>(work.y) + i * size;
    for (size_t j = 0; j < size; ++j) run[j] = number<T>(x[j]) * scale;
    multiply(run, size, 1, work.right, room);
    multiply(run, size, work.right.order(), work.left, room);
    const size_t bytes = size * sizeof(T);
    if constexpr (sizeof(Stored) != sizeof(T)) {
      for (size_t j = 0; j < size; ++j) y[j] = stored<Stored>(run[j]);
    } else if (work.streaming && bytes % 64 == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0) {
      stream(y, run, bytes);
    } else {
      __builtin_memcpy(y, run, bytes);
    }
  }
}

}  // namespace

const HadamardKernels GRAPHOPT_NAME(kHadamard) = {transform<Half, float>, transform<float, float>, transform<double, double>};

}  // namespace graphopt
