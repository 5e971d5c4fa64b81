// ai.graphopt::PagedAttention as onnxruntime sees it: one operator per type of activations, and of blocks. Its kernels
// are those of KVAttention: a page lies in the blocks that a table names.
#include <cstring>
#include <memory>
#include <new>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/large_pages.h"
#include "abi/register.h"
#include "kv_attention/cpu/call.h"
#include "paged_attention/cpu/groups.h"
#include "paged_attention/cpu/inputs.h"

namespace graphopt {
namespace {

template <int Activations>
struct Kernel {
  static constexpr const char* kName = "PagedAttention";
  static constexpr size_t kInputs = kPagedInputs + 2, kOptionalInputs = 2, kOutputs = 1 + kPools;
  static int input_type(size_t index, int blocks) {
    if (index <= kPagedValue) return Activations;
    if (index <= kTable) return kInt32;
    if (index == kPagedFeedback) return kFloat16;
    if (index == kPagedChosen) return kInt32;
    return index == kKeyBlocks || index == kValueBlocks ? blocks : static_cast<int>(kFloat);
  }
  static int output_type(size_t index, int blocks) {
    return index == 0 ? Activations : index <= 2 ? blocks : static_cast<int>(kFloat);
  }

  Node node;
  PagedAttributes attributes;
  const KVAttentionKernels* kernels = nullptr;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats
  mutable std::atomic<const void*> known[kPools] = {};  // the pools of the call before

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(choose_kernels(node, &kernels));
    return attributes.read(node, info, type);
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* attend(OrtKernelContext* context, Attention* call) const;
};

template <int Activations>
OrtStatus* Kernel<Activations>::compute(OrtKernelContext* context) const {
  PagedGiven given;
  Attention call;
  GRAPHOPT_RETURN_IF_ERROR(given.read(node, attributes, context, &call));
  void* written[1 + kPools] = {};
  for (size_t index = 0; index <= kPools; ++index) {
    const Given& like = index ? given.tensors[kKeyBlocks + index - 1] : given.y;
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, index, like.shape, like.rank, &output));
    if (!output) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &written[index]));
    if (!index || like.empty()) continue;
    if (written[index] != like.data) {
      std::memmove(written[index], like.data, like.bytes());
    } else if (known[index - 1].exchange(like.data) != like.data) {
      // a pool that stays where it is is read call after call; most of it is empty at first
      prefer_large_pages(like.data, like.bytes(), LargePages::kLater);
    }
  }
  call.state.keys = static_cast<char*>(written[1]), call.state.values = static_cast<char*>(written[2]);
  if (given.tensors[kKeyBlocks].type == kUint8) {
    call.blocks.key_scales = static_cast<float*>(written[3]), call.blocks.value_scales = static_cast<float*>(written[4]);
  }
  const float** const activations[] = {&call.query, &call.key, &call.value};
  const size_t of_y = given.y.numbers(), of_query = given.tensors[kPagedQuery].numbers();
  const size_t numbers = Activations == kFloat ? 0 : of_query + of_y + 2 * given.tensors[kPagedKey].numbers();
  const Pool::Loan loan(floats, numbers * sizeof(float) + 1);
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", numbers);
  float* wide = reinterpret_cast<float*>(loan.memory);
  for (size_t index = kPagedQuery; index <= kPagedValue; ++index) {
    const Given& tensor = given.tensors[index];
    *activations[index] = static_cast<const float*>(tensor.data);
    if (Activations == kFloat) continue;
    widen(static_cast<const Half*>(tensor.data), tensor.numbers(), wide);
    *activations[index] = wide;
    wide += tensor.numbers();
  }
  if (call.layout.latent()) call.value = nullptr;
  call.y = Activations == kFloat ? static_cast<float*>(written[0]) : wide;
  GRAPHOPT_RETURN_IF_ERROR(attend(context, &call));
  if (Activations != kFloat) narrow(call.y, of_y, static_cast<Half*>(written[0]));
  return nullptr;
}

template <int Activations>
OrtStatus* Kernel<Activations>::attend(OrtKernelContext* context, Attention* call) const {
  Groups groups(pool, *call);
  if (groups.no_memory()) return node.error("no memory for what %zu requests share", call->rows);
  groups.find(call);
  if (!call->layout.residuals) return Call(node, *kernels, pool, context, *call).run();
  const std::unique_ptr<size_t[]> before(new (std::nothrow) size_t[call->rows + 1]);
  if (!before) return node.error("no memory for the pages of %zu requests", call->rows);
  before[0] = 0;
  for (size_t row = 0; row < call->rows; ++row) {
    const int64_t past = call->past[row], end = past + call->fresh[row];
    const auto first = static_cast<size_t>(past) / call->layout.page;
    before[row + 1] = before[row] + (end > past ? static_cast<size_t>(end - 1) / call->layout.page - first + 1 : 0);
  }
  const size_t pages = before[call->rows] * call->layout.kv_heads;
  const Pool::Loan refined(pool, pages * call->layout.slot_floats() * sizeof(float) + 1);
  if (!refined.memory) return node.error("no memory for %zu pages of floats", pages);
  call->refined = reinterpret_cast<float*>(refined.memory), call->refined_before = before.get();
  return Call(node, *kernels, pool, context, *call).run();
}

template <int Activations>
const OrtCustomOp kOps[4] = {custom_op<Kernel<Activations>, kFloat>(), custom_op<Kernel<Activations>, kFloat16>(),
                             custom_op<Kernel<Activations>, kBFloat16>(), custom_op<Kernel<Activations>, kUint8>()};

const Operators kRegistered(kOps<kFloat>), kRegisteredHalves(kOps<kFloat16>);

}  // namespace
}  // namespace graphopt
