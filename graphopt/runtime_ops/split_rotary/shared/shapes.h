// What SplitRotary's operators for the CPU and for GPUs read and check alike.
#pragma once

#include <initializer_list>

#include "abi/tensor.h"

namespace graphopt {

enum RotaryInput : size_t { kRotaryX, kRotaryCos, kRotarySin, kRotaryInputs };
constexpr size_t kRotaryOutputs = 3;  // queries, keys, values

// The attributes of a node.
struct RotaryHeads {
  int64_t heads, kv_heads, rotary, interleaved;

  OrtStatus* read(const Node& node, const OrtKernelInfo* info) {
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "heads", &heads));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "kv_heads", &kv_heads));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "rotary", &rotary));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "rotary_interleaved", &interleaved));
    constexpr int64_t kMost = INT32_MAX / 4;
    if (heads < 1 || heads > kMost || kv_heads < 1 || kv_heads > kMost) {
      return node.error("heads and kv_heads must be at least 1");
    }
    if (interleaved != 0 && interleaved != 1) return node.error("rotary_interleaved must be 0 or 1");
    return rotary >= 2 && rotary % 2 == 0 ? nullptr : node.error("rotary must be even, and at least 2");
  }
};

// What both operators have in common: x, cos, sin and all outputs are of one type.
struct RotaryKernel {
  static constexpr const char* kName = "SplitRotary";
  static constexpr size_t kInputs = kRotaryInputs, kOutputs = kRotaryOutputs;
  static int input_type(size_t, int type) { return type; }
  static int output_type(size_t, int type) { return type; }

  Node node;
  RotaryHeads heads;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    return heads.read(node, info);
  }
};

// The inputs of a call, and the size of a head.
struct RotaryTensors {
  Tensor tensors[kRotaryInputs];
  const OrtValue* values[kRotaryInputs];
  size_t tokens = 0, size = 0;

  OrtStatus* read(const Node& node, const RotaryHeads& heads, OrtKernelContext* context) {
    constexpr const char* kNames[] = {"x", "cos", "sin"};
    size_t counts[kRotaryInputs];
    for (size_t input = 0; input < kRotaryInputs; ++input) {
      GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, input, &values[input]));
      if (!values[input]) return node.error("%s must not be left out", kNames[input]);
      GRAPHOPT_RETURN_IF_ERROR(node.read_dense(values[input], kNames[input], 3, &tensors[input], &counts[input]));
    }
    const int64_t* const x = tensors[kRotaryX].shape.get();
    const int64_t all_heads = heads.heads + 2 * heads.kv_heads;
    if (x[2] % all_heads) {
      return node.error("the last axis of x is %lld, which is no multiple of %lld heads", static_cast<long long>(x[2]),
                        static_cast<long long>(all_heads));
    }
    if (x[2] / all_heads < heads.rotary) {
      return node.error("rotary is %lld, and a head has %lld numbers", static_cast<long long>(heads.rotary),
                        static_cast<long long>(x[2] / all_heads));
    }
    for (RotaryInput input : {kRotaryCos, kRotarySin}) {
      const int64_t* const shape = tensors[input].shape.get();
      if (shape[0] == x[0] && shape[1] == x[1] && shape[2] == heads.rotary / 2) continue;
      return node.error("%s must be [%lld, %lld, %lld]", kNames[input], static_cast<long long>(x[0]),
                        static_cast<long long>(x[1]), static_cast<long long>(heads.rotary / 2));
    }
    tokens = static_cast<size_t>(x[0]) * static_cast<size_t>(x[1]);
    size = static_cast<size_t>(x[2] / all_heads);
    return nullptr;
  }

  // Makes all outputs.
  OrtStatus* make(const Node& node, const RotaryHeads& heads, OrtKernelContext* context, void* (&to)[kRotaryOutputs]) const {
    const int64_t* const x = tensors[kRotaryX].shape.get();
    for (size_t index = 0; index < kRotaryOutputs; ++index) {
      const int64_t count = index ? heads.kv_heads : heads.heads;
      const int64_t shape[3] = {x[0], x[1], count * static_cast<int64_t>(size)};
      OrtValue* output = nullptr;
      GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, index, shape, 3, &output));
      if (!output) return node.error("all its outputs must have names, output %zu has none", index);
      GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &to[index]));
    }
    return nullptr;
  }
};

}  // namespace graphopt
