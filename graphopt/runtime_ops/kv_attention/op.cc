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
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  KVInputs inputs;
  Attention attention;
  GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, attributes, context, &attention));
  void* written[1 + kStates] = {};
  GRAPHOPT_RETURN_IF_ERROR(inputs.make_outputs(node, context, 1, written));
  for (size_t index = 1; index <= kStates; ++index) {
    const Given& from = inputs.of_output(index);
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
