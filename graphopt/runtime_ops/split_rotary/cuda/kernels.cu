// SplitRotary on a GPU. A thread has a column of x and goes over rows; a number that is turned reads the other of its pair.
#include "cuda/c_interface.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace graphopt {
namespace {

constexpr unsigned kRotaryThreads = 256;
constexpr size_t kMostRows = 65535;  // of blocks; each takes every so many tokens

template <typename T>
GRAPHOPT_KERNEL(kRotaryThreads, 1) void split_rotary(GraphoptSplitRotary call) {
  wait_for_previous();
  const auto heads = static_cast<unsigned>(call.heads), kv_heads = static_cast<unsigned>(call.kv_heads);
  const auto size = static_cast<unsigned>(call.size), half = static_cast<unsigned>(call.rotary) / 2;
  const unsigned columns = (heads + 2 * kv_heads) * size;
  const unsigned column = block_index().x * kRotaryThreads + thread_index().x;
  if (column >= columns) return;
  const unsigned head = column / size, place = column % size;
  const bool turns = head < heads + kv_heads && place < 2 * half;
  const bool second = call.interleaved ? place % 2 : place >= half;
  const unsigned pair = call.interleaved ? place / 2 : second ? place - half : place;
  const unsigned apart = call.interleaved ? 1 : half, other = second ? column - apart : column + apart;
  T* to = static_cast<T*>(call.queries);
  unsigned first = 0, width = heads * size;
  if (head >= heads) {
    to = static_cast<T*>(head < heads + kv_heads ? call.keys : call.values);
    first = head < heads + kv_heads ? width : width + kv_heads * size;
    width = kv_heads * size;
  }
  for (size_t token = block_index().y; token < static_cast<size_t>(call.tokens); token += block_count().y) {
    const T* const x = static_cast<const T*>(call.x) + token * columns;
    T result = x[column];
    if (turns) {
      const size_t factor = token * half + pair;
      const float c = to_float(static_cast<const T*>(call.cos)[factor]), mine = to_float(result);
      const float s = to_float(static_cast<const T*>(call.sin)[factor]), partner = to_float(x[other]);
      result = from_float<T>(second ? partner * s + mine * c : mine * c - partner * s);
    }
    to[token * width + (column - first)] = result;
  }
}

template <typename T>
const char* start(const GraphoptSplitRotary& call, void* stream) {
  const unsigned columns = static_cast<unsigned>((call.heads + 2 * call.kv_heads) * call.size);
  const auto tokens = static_cast<size_t>(call.tokens);
  const Index3 grid{(columns + kRotaryThreads - 1) / kRotaryThreads,
                    static_cast<unsigned>(tokens < kMostRows ? tokens : kMostRows), 1};
  return launch_early(split_rotary<T>, grid, kRotaryThreads, 0, stream, call);
}

}  // namespace
}  // namespace graphopt

const char* graphopt_cuda_split_rotary(const GraphoptSplitRotary* call, void* stream) {
  using namespace graphopt;
  if (!call->tokens) return nullptr;
  if (call->type == GRAPHOPT_FLOAT32) return start<float>(*call, stream);
  if (call->type == GRAPHOPT_FLOAT16) return start<Half>(*call, stream);
  if (call->type == GRAPHOPT_BFLOAT16) return start<BFloat16>(*call, stream);
  return "SplitRotary takes float32, float16 and bfloat16";
}
