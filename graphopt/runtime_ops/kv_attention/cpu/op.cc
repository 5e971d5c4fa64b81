// ai.graphopt::KVAttention as onnxruntime sees it: one operator per type of activations, and of keys and values.
#include <cstring>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/large_pages.h"
#include "abi/register.h"
#include "kv_attention/cpu/call.h"
#include "kv_attention/shared/inputs.h"

namespace graphopt {
namespace {

template <int Activations>
struct Kernel : KVTypes<Activations> {
  Node node;
  KVAttributes attributes;
  const KVAttentionKernels* kernels = nullptr;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats
  mutable std::atomic<const void*> known[kStates] = {};  // the state of the call before

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(choose_kernels(node, &kernels));
    return attributes.read(node, info, type);
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* attend(OrtKernelContext* context, const Attention& attention) const;
};

template <int Activations>
OrtStatus* Kernel<Activations>::compute(OrtKernelContext* context) const {
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
  attention.state = {static_cast<char*>(written[1]), static_cast<char*>(written[2]), static_cast<Half*>(written[3]),
                     static_cast<float*>(written[4]), static_cast<float*>(written[5])};
  if (Activations == kFloat) {
    attention.y = static_cast<float*>(written[0]);
    return attend(context, attention);
  }
  const float** const pointers[] = {&attention.query, &attention.key, &attention.value, &attention.sink_query};
  constexpr KVInput kPlaces[] = {kQuery, kKey, kValue, kSinkQuery};
  const size_t of_y = inputs.of_output(0).numbers();
  size_t numbers = of_y;
  for (KVInput place : kPlaces) numbers += inputs.tensors[place].numbers();
  const Pool::Loan loan(floats, numbers * sizeof(float));
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", numbers);
  attention.y = reinterpret_cast<float*>(loan.memory);
  float* wide = attention.y + of_y;
  for (size_t i = 0; i < 4; ++i) {
    const Given& tensor = inputs.tensors[kPlaces[i]];
    if (!*pointers[i]) continue;
    widen(static_cast<const Half*>(tensor.data), tensor.numbers(), wide);
    *pointers[i] = wide;
    wide += tensor.numbers();
  }
  GRAPHOPT_RETURN_IF_ERROR(attend(context, attention));
  narrow(attention.y, of_y, static_cast<Half*>(written[0]));
  return nullptr;
}

template <int Activations>
OrtStatus* Kernel<Activations>::attend(OrtKernelContext* context, const Attention& attention) const {
  const size_t floats = attention.layout.query_heads() * attention.layout.value_channels();
  for (size_t row = 0; row < attention.rows; ++row) {
    const size_t padding = attention.first_column(row) * floats;
    if (padding) std::memset(attention.y + row * attention.columns * floats, 0, padding * sizeof(float));
  }
  return Call(node, *kernels, pool, context, attention).run();
}

template <int Activations>
const OrtCustomOp kOps[5] = {
    custom_op<Kernel<Activations>, kFloat>(), custom_op<Kernel<Activations>, kFloat16>(),
    custom_op<Kernel<Activations>, kBFloat16>(), custom_op<Kernel<Activations>, kFloat8>(),
    custom_op<Kernel<Activations>, kUint8>()};

const Operators kRegistered(kOps<kFloat>), kRegisteredHalves(kOps<kFloat16>);

}  // namespace
}  // namespace graphopt
