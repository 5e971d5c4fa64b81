// SwiGLU on a GPU. A thread computes 16 bytes of y where rows allow it, else one number.
#include "cuda/c_interface.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace graphopt {
namespace {

constexpr unsigned kSwiGLUThreads = 256;
constexpr size_t kMostRows = 65535;  // of blocks; each takes every so many rows

GRAPHOPT_DEVICE float swiglu_of(float gate, float up) {
  constexpr float kMinusLog2E = -1.44269504088896341f;
  return gate * (1.f / (1.f + exp2_of(gate * kMinusLog2E))) * up;
}

template <typename T, int Numbers>
GRAPHOPT_KERNEL(kSwiGLUThreads, 1) void swiglu(GraphoptSwiGLU call) {
  wait_for_previous();
  const size_t columns = static_cast<size_t>(call.columns);
  const size_t column = (size_t{block_index().x} * kSwiGLUThreads + thread_index().x) * Numbers;
  if (column >= columns) return;
  for (size_t row = block_index().y; row < static_cast<size_t>(call.rows); row += block_count().y) {
    const T* const gate = static_cast<const T*>(call.x) + 2 * row * columns + column;
    T* const y = static_cast<T*>(call.y) + row * columns + column;
    if constexpr (Numbers == 1) {
      *y = from_float<T>(swiglu_of(to_float(*gate), to_float(gate[columns])));
    } else {
      T gates[Numbers], ups[Numbers];
      const Word4 gate_words = load16(gate), up_words = load16(gate + columns);
      __builtin_memcpy(gates, &gate_words, sizeof gates);
      __builtin_memcpy(ups, &up_words, sizeof ups);
      GRAPHOPT_UNROLL
      for (int i = 0; i < Numbers; ++i) gates[i] = from_float<T>(swiglu_of(to_float(gates[i]), to_float(ups[i])));
      Word4 words;
      __builtin_memcpy(&words, gates, sizeof words);
      store16(y, words);
    }
  }
}

template <typename T>
const char* start(const GraphoptSwiGLU& call, void* stream) {
  constexpr int kNumbers = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(call.x) % 16 == 0 && reinterpret_cast<uintptr_t>(call.y) % 16 == 0;
  const bool wide = aligned && call.columns % kNumbers == 0;
  const unsigned items = static_cast<unsigned>(call.columns) / (wide ? kNumbers : 1);
  const size_t rows = static_cast<size_t>(call.rows);
  const Index3 grid{(items + kSwiGLUThreads - 1) / kSwiGLUThreads, static_cast<unsigned>(rows < kMostRows ? rows : kMostRows),
                    1};
  return launch_early(wide ? swiglu<T, kNumbers> : swiglu<T, 1>, grid, kSwiGLUThreads, 0, stream, call);
}

}  // namespace
}  // namespace graphopt

const char* graphopt_cuda_swiglu(const GraphoptSwiGLU* call, void* stream) {
  using namespace graphopt;
  if (!call->rows || !call->columns) return nullptr;
  if (call->type == GRAPHOPT_FLOAT32) return start<float>(*call, stream);
  if (call->type == GRAPHOPT_FLOAT16) return start<Half>(*call, stream);
  if (call->type == GRAPHOPT_BFLOAT16) return start<BFloat16>(*call, stream);
  return "SwiGLU takes float32, float16 and bfloat16";
}
