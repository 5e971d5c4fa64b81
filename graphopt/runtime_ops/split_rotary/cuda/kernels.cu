// SplitRotary on a GPU. A thread has neighbouring columns of x and goes over rows; a number that is turned reads the other of
// its pair.
#include <initializer_list>

#include "cuda/c_interface.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace graphopt {
namespace {

constexpr unsigned kRotaryThreads = 256;
constexpr size_t kMostRows = 65535;  // of blocks; each takes every so many tokens

// Numbers that a thread loads at a time: 16 bytes of them, or one.
template <typename T, unsigned Width>
struct alignas(Width * sizeof(T)) Piece {
  T of[Width];
};

template <typename T, unsigned Width>
GRAPHOPT_DEVICE Piece<T, Width> load(const void* from, size_t index) {
  return *reinterpret_cast<const Piece<T, Width>*>(static_cast<const T*>(from) + index);
}

template <typename T, unsigned Width>
GRAPHOPT_KERNEL(kRotaryThreads, 1) void split_rotary(GraphoptSplitRotary call) {
  wait_for_previous();
  const auto heads = static_cast<unsigned>(call.heads), kv_heads = static_cast<unsigned>(call.kv_heads);
  const auto size = static_cast<unsigned>(call.size), half = static_cast<unsigned>(call.rotary) / 2;
  const unsigned columns = (heads + 2 * kv_heads) * size;
  const unsigned column = (block_index().x * kRotaryThreads + thread_index().x) * Width;
  if (column >= columns) return;
  const unsigned head = column / size, place = column % size;
  const bool turns = head < heads + kv_heads && place < 2 * half;
  const bool second = call.interleaved ? place % 2 : place >= half;
  const unsigned pair = call.interleaved ? place / 2 : second ? place - half : place;
  const unsigned distance = call.interleaved ? 1 : half;
  const unsigned partner_column = second ? column - distance : column + distance;
  T* to = static_cast<T*>(call.queries);
  unsigned first = 0, width = heads * size;
  if (head >= heads) {
    to = static_cast<T*>(head < heads + kv_heads ? call.keys : call.values);
    first = head < heads + kv_heads ? width : width + kv_heads * size;
    width = kv_heads * size;
  }
  for (size_t token = block_index().y; token < static_cast<size_t>(call.tokens); token += block_count().y) {
    const size_t row = token * columns, factor = token * half + pair;
    Piece<T, Width> result = load<T, Width>(call.x, row + column);
    if (turns) {
      const auto cosines = load<T, Width>(call.cos, factor), sines = load<T, Width>(call.sin, factor);
      const auto partners = load<T, Width>(call.x, row + partner_column);
      GRAPHOPT_UNROLL
      for (unsigned i = 0; i < Width; ++i) {
        const float c = to_float(cosines.of[i]), s = to_float(sines.of[i]);
        const float number = to_float(result.of[i]), partner = to_float(partners.of[i]);
        result.of[i] = from_float<T>(second ? partner * s + number * c : number * c - partner * s);
      }
    }
    *reinterpret_cast<Piece<T, Width>*>(to + token * width + (column - first)) = result;
  }
}

template <typename T, unsigned Width>
const char* start(const GraphoptSplitRotary& call, void* stream) {
  const unsigned columns = static_cast<unsigned>((call.heads + 2 * call.kv_heads) * call.size);
  const auto tokens = static_cast<size_t>(call.tokens);
  const Index3 grid{(columns + kRotaryThreads * Width - 1) / (kRotaryThreads * Width),
                    static_cast<unsigned>(tokens < kMostRows ? tokens : kMostRows), 1};
  return launch_early(split_rotary<T, Width>, grid, kRotaryThreads, 0, stream, call);
}

// Of pairs that are neighbours a thread would have both; their numbers are taken one by one.
template <typename T>
const char* start(const GraphoptSplitRotary& call, void* stream) {
  constexpr unsigned kWidth = 16 / sizeof(T);
  bool is_wide = !call.interleaved && call.size % kWidth == 0 && call.rotary % (2 * kWidth) == 0;
  for (const void* tensor : {call.x, call.cos, call.sin, static_cast<const void*>(call.queries),
                             static_cast<const void*>(call.keys), static_cast<const void*>(call.values)}) {
    is_wide = is_wide && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
  }
  return is_wide ? start<T, kWidth>(call, stream) : start<T, 1>(call, stream);
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
