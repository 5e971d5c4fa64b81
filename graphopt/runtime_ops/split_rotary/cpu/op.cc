// ai.graphopt::SplitRotary as onnxruntime sees it: one operator per type of x. A number is read and written once, so plain
// code serves every set of instructions.
#include <initializer_list>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/register.h"
#include "split_rotary/shared/shapes.h"

namespace graphopt {
namespace {

// The smallest task worth running separately, in numbers of x.
constexpr size_t kTask = 16384;

template <typename T>
T rounded(float value) {
  if constexpr (sizeof(T) == sizeof(float)) return value;
  else return stored<T>(value);
}

// A call, cut into tasks of some tokens each; tasks share nothing.
struct Call {
  const void *x, *cos, *sin;
  void* outputs[kRotaryOutputs];
  size_t tokens, heads, kv_heads, size, rotary, tokens_of_task;
  bool interleaved;

  template <typename T>
  void turn(const T* from, const T* cos, const T* sin, T* to) const {
    const size_t half = rotary / 2, apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    for (size_t i = 0; i < half; ++i) {
      const float a = number<float>(from[i * step]), b = number<float>(from[i * step + apart]);
      const float c = number<float>(cos[i]), s = number<float>(sin[i]);
      to[i * step] = rounded<T>(a * c - b * s);
      to[i * step + apart] = rounded<T>(a * s + b * c);
    }
    std::memcpy(to + rotary, from + rotary, (size - rotary) * sizeof(T));
  }

  template <typename T>
  static void task(void* call, size_t index) {
    const Call& self = *static_cast<const Call*>(call);
    const size_t first = index * self.tokens_of_task, left = self.tokens - first, half = self.rotary / 2;
    const size_t end = first + (left < self.tokens_of_task ? left : self.tokens_of_task);
    for (size_t token = first; token < end; ++token) {
      const T* from = static_cast<const T*>(self.x) + token * (self.heads + 2 * self.kv_heads) * self.size;
      const T* const cos = static_cast<const T*>(self.cos) + token * half;
      const T* const sin = static_cast<const T*>(self.sin) + token * half;
      for (size_t output : {0, 1}) {
        const size_t count = output ? self.kv_heads : self.heads;
        T* to = static_cast<T*>(self.outputs[output]) + token * count * self.size;
        for (size_t head = 0; head < count; ++head, from += self.size, to += self.size) self.turn(from, cos, sin, to);
      }
      const size_t numbers = self.kv_heads * self.size;
      std::memcpy(static_cast<T*>(self.outputs[2]) + token * numbers, from, numbers * sizeof(T));
    }
  }
};

struct Kernel : RotaryKernel {
  OrtStatus* compute(OrtKernelContext* context) const {
    RotaryTensors inputs;
    GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, heads, context));
    Call call{};
    GRAPHOPT_RETURN_IF_ERROR(inputs.make(node, heads, context, call.outputs));
    if (!inputs.tokens) return nullptr;
    call.x = inputs.tensors[kRotaryX].data, call.cos = inputs.tensors[kRotaryCos].data;
    call.sin = inputs.tensors[kRotarySin].data;
    call.tokens = inputs.tokens, call.size = inputs.size;
    call.heads = static_cast<size_t>(heads.heads), call.kv_heads = static_cast<size_t>(heads.kv_heads);
    call.rotary = static_cast<size_t>(heads.rotary), call.interleaved = heads.interleaved;
    const size_t numbers = (call.heads + 2 * call.kv_heads) * call.size;
    call.tokens_of_task = (kTask + numbers - 1) / numbers;
    const size_t tasks = (call.tokens + call.tokens_of_task - 1) / call.tokens_of_task;
    const auto task = inputs.tensors[kRotaryX].type == kFloat ? Call::task<float> : Call::task<Half>;
    if (tasks == 1) {
      task(&call, 0);
      return nullptr;
    }
    return KernelContextParallelFor::call(node.api, context, task, tasks, 0, &call);
  }
};

const OrtCustomOp kOps[2] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
