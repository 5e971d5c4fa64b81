#include "kv_attention/op.h"

#include <cstring>

#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/large_pages.h"
#include "kv_attention/call.h"
#include "kv_attention/inputs.h"

namespace graphopt {
namespace {

struct Kernel {
  static constexpr const char* kName = "KVAttention";
  static constexpr size_t kInputs = kKVInputs, kOutputs = 1 + kStates;
  static int input_type(size_t index, int type) {
    return index == kPast || index == kNew ? kInt64 : index == kKeys || index == kValues ? type : kFloat;
  }
  static int output_type(size_t index, int type) { return index == 1 || index == 2 ? type : kFloat; }

  Node node;
  KVAttributes attributes;
  const KVAttentionKernels* kernels = nullptr;
  mutable Pool pool;
  mutable std::atomic<const void*> known[kStates] = {};  // the state of the call before

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    kernels = &kKVAttentionScalar;
#if defined(__x86_64__)
    if (instructions == Instructions::kAvx2) kernels = &kKVAttentionAvx2;
    if (instructions == Instructions::kAvx512) kernels = &kKVAttentionAvx512;
#endif
    return attributes.read(node, info, type);
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* check_memory(const KVInputs& inputs, void* const* outputs) const;
};

// A state may become that of the output in its own memory; nothing else may be written where something is still read.
OrtStatus* Kernel::check_memory(const KVInputs& inputs, void* const* outputs) const {
  const auto like = [&](size_t output) -> const Given& {
    return inputs.tensors[output ? kKeys + output - 1 : static_cast<size_t>(kQuery)];
  };
  const auto meet = [](const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    const auto one = reinterpret_cast<uintptr_t>(a), other = reinterpret_cast<uintptr_t>(b);
    return a_bytes && b_bytes && one < other + b_bytes && other < one + a_bytes;
  };
  for (size_t output = 0; output <= kStates; ++output) {
    const size_t bytes = like(output).bytes();
    for (size_t input = 0; input < kKVInputs; ++input) {
      const Given& tensor = inputs.tensors[input];
      if (!meet(outputs[output], bytes, tensor.data, tensor.bytes())) continue;
      if (output && &tensor == &like(output) && tensor.data == outputs[output]) continue;
      return node.error("output %zu lies in the memory of %s: only a state may be changed in place, by its own output",
                        output, KVInputs::kNames[input]);
    }
    for (size_t other = 0; other < output; ++other) {
      if (!meet(outputs[output], bytes, outputs[other], like(other).bytes())) continue;
      return node.error("outputs %zu and %zu lie in the same memory", other, output);
    }
  }
  return nullptr;
}

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  const OrtApi* api = node.api;
  KVInputs inputs;
  Attention attention;
  GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, attributes, context, &attention));
  OrtValue* outputs[1 + kStates] = {};
  void* written[1 + kStates] = {};
  for (size_t index = 0; index <= kStates; ++index) {
    const Given& like = inputs.tensors[index ? kKeys + index - 1 : static_cast<size_t>(kQuery)];
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, index, like.shape, like.rank, &outputs[index]));
    if (!outputs[index]) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(api, outputs[index], &written[index]));
    if (reinterpret_cast<uintptr_t>(written[index]) % like.width()) {
      return node.error("output %zu lies at no multiple of %zu bytes", index, like.width());
    }
  }
  GRAPHOPT_RETURN_IF_ERROR(check_memory(inputs, written));
  for (size_t index = 1; index <= kStates; ++index) {
    const Given& from = inputs.tensors[kKeys + index - 1];
    if (from.empty()) continue;
    const size_t bytes = from.bytes();
    if (from.data == written[index]) {
      // a cache that stays where it is is read call after call
      if (known[index - 1].exchange(from.data) != from.data) prefer_large_pages(from.data, bytes);
      continue;
    }
    std::memmove(written[index], from.data, bytes);
  }
  attention.y = static_cast<float*>(written[0]);
  attention.state = {static_cast<char*>(written[1]), static_cast<char*>(written[2]), static_cast<float*>(written[3]),
                     static_cast<float*>(written[4]), static_cast<float*>(written[5])};
  const size_t floats = attention.layout.query_heads() * attention.layout.size;
  for (size_t row = 0; row < attention.rows; ++row) {
    const size_t padding = attention.first_column(row) * floats;
    if (padding) std::memset(attention.y + row * attention.columns * floats, 0, padding * sizeof(float));
  }
  return Call(node, *kernels, pool, context, attention).run();
}

const OrtCustomOp kOps[5] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>(), custom_op<Kernel, kBFloat16>(),
                             custom_op<Kernel, kFloat8>(), custom_op<Kernel, kUint8>()};

}  // namespace

const OrtCustomOp* const kKVAttentionOps[5] = {&kOps[0], &kOps[1], &kOps[2], &kOps[3], &kOps[4]};

}  // namespace graphopt
