// The gated activation; GRAPHOPT_KERNELS is the name of the table that this compilation fills.
#include "swiglu/cpu/kernels.h"

#include "abi/convert.h"
#include "abi/instructions.h"
#include "kv_attention/cpu/numbers.h"

namespace graphopt {
namespace {

inline Floats swiglu_of(const Floats& gate, const Floats& up) {
  // NaN propagates through both
  const Floats power = exponential(smaller(all_lanes(88.f), gate * -1.f));
  return gate * (all_lanes(1.f) / (all_lanes(1.f) + power)) * up;
}

template <typename T>
inline void run_line(const T* gate, const T* up, T* y, size_t count) {
  float gates[kColumns] = {}, ups[kColumns] = {};
  for (size_t i = 0; i < count; ++i) gates[i] = number<float>(gate[i]), ups[i] = number<float>(up[i]);
  store_line(gates, swiglu_of(load_line<Floats>(gates), load_line<Floats>(ups)));
  for (size_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) y[i] = gates[i];
    else y[i] = stored<T>(gates[i]);
  }
}

template <typename T>
void run(const void* gate, const void* up, void* y, size_t count) {
  const auto *const gates = static_cast<const T*>(gate), *const ups = static_cast<const T*>(up);
  auto* const to = static_cast<T*>(y);
  size_t i = 0;
  for (; i + kColumns <= count; i += kColumns) run_line(gates + i, ups + i, to + i, kColumns);
  if (i < count) run_line(gates + i, ups + i, to + i, count - i);
}

}  // namespace

const SwiGLUKernels GRAPHOPT_NAME(kSwiGLU) = {run<float>, run<Half>};

}  // namespace graphopt
