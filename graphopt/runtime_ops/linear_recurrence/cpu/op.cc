// ai.graphopt::LinearRecurrence as onnxruntime sees it: one operator per type of activations.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/pool.h"
#include "abi/register.h"
#include "linear_recurrence/cpu/kernels.h"

namespace graphopt {
namespace {

enum Input : size_t { kQuery, kKey, kValue, kDecay, kBeta, kMask, kState, kInputCount };
constexpr const char* kNames[] = {"query", "key", "value", "decay", "beta", "mask", "state"};

struct Inputs {
  Tensor tensors[kInputCount];
  size_t counts[kInputCount];  // of numbers

  OrtStatus* read(const Node& node, OrtKernelContext* context);
  OrtStatus* check(const Node& node, Recurrence* call) const;

  size_t dim(Input input, size_t axis) const { return static_cast<size_t>(tensors[input].shape[axis]); }
};

OrtStatus* Inputs::read(const Node& node, OrtKernelContext* context) {
  for (size_t input = 0; input < kInputCount; ++input) {
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, input, &value));
    if (!value) return node.error("%s must not be left out", kNames[input]);
    const size_t rank = input == kMask ? 2 : 4;
    GRAPHOPT_RETURN_IF_ERROR(node.read_dense(value, kNames[input], rank, &tensors[input], &counts[input]));
  }
  return nullptr;
}

OrtStatus* Inputs::check(const Node& node, Recurrence* call) const {
  call->rows = dim(kValue, 0), call->tokens = dim(kValue, 1), call->heads = dim(kValue, 2), call->width = dim(kValue, 3);
  call->key_heads = dim(kQuery, 2), call->channels = dim(kQuery, 3), call->decays = dim(kDecay, 3);
  if (!call->channels) return node.error("query must have at least one number for each head");
  if (call->key_heads ? call->heads % call->key_heads : call->heads) {
    return node.error("%zu heads of values do not share %zu heads of keys", call->heads, call->key_heads);
  }
  for (size_t axis = 0; axis < 4; ++axis) {
    if (dim(kKey, axis) != dim(kQuery, axis)) return node.error("key must have the shape of query");
    const size_t of_state[] = {call->rows, call->heads, call->channels, call->width};
    if (dim(kState, axis) != of_state[axis]) {
      return node.error("state must be [%zu, %zu, %zu, %zu]", of_state[0], of_state[1], of_state[2], of_state[3]);
    }
  }
  for (Input input : {kQuery, kDecay, kBeta, kMask}) {
    if (dim(input, 0) != call->rows || (input != kMask && dim(input, 1) != call->tokens) ||
        (input != kMask && input != kQuery && dim(input, 2) != call->heads)) {
      return node.error("%s does not have the rows, tokens and heads of value", kNames[input]);
    }
  }
  if (dim(kMask, 1) && dim(kMask, 1) != call->tokens) {
    return node.error("mask must be [%zu, %zu] or [%zu, 0]", call->rows, call->tokens, call->rows);
  }
  if (dim(kBeta, 3) > 1) return node.error("beta has %zu numbers for each head, and must have 1 or 0", dim(kBeta, 3));
  if (call->decays > 1 && call->decays != call->channels) {
    return node.error("decay has %zu numbers for each head, and must have %zu, 1 or 0", call->decays, call->channels);
  }
  return nullptr;
}

struct Kernel {
  static constexpr const char* kName = "LinearRecurrence";
  static constexpr size_t kInputs = kInputCount, kOutputs = 2;
  static int input_type(size_t index, int type) { return index == kMask ? kInt64 : index == kState ? kFloat : type; }
  static int output_type(size_t index, int type) { return index ? static_cast<int>(kFloat) : type; }

  Node node;
  const RecurrenceKernels* kernels = nullptr;
  float scale = 1;
  int64_t delta = 0;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    kernels = &GRAPHOPT_OF(instructions, kRecurrence);
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "delta", &delta));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "scale", &scale));
    if (delta == 0 || delta == 1) return nullptr;
    return node.error("delta must be 0 or 1, and is %lld", static_cast<long long>(delta));
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* run(OrtKernelContext* context, const Recurrence& call) const;
};

// A call, cut into tasks of some heads each; tasks share nothing but the flag.
struct Call {
  const Kernel* kernel;
  const Recurrence* all;
  size_t of_row;  // tasks
  std::atomic<bool> no_memory{false};

  static void task(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Pool::Loan loan(self.kernel->pool, recurrence_scratch(*self.all) * sizeof(float));
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    self.kernel->kernels->run(*self.all, index / self.of_row, index % self.of_row * heads_together(*self.all),
                              reinterpret_cast<float*>(loan.memory));
  }
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  Inputs inputs;
  Recurrence call{};
  GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, context));
  GRAPHOPT_RETURN_IF_ERROR(inputs.check(node, &call));
  void* outputs[2];
  for (size_t index = 0; index < 2; ++index) {
    const Tensor& input = inputs.tensors[index ? kState : kValue];
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(
        KernelContextGetOutput::call(node.api, context, index, input.shape.get(), input.rank, &output));
    if (!output) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &outputs[index]));
  }
  const size_t states = inputs.counts[kState];
  call.before = static_cast<const float*>(inputs.tensors[kState].data);
  if (!inputs.counts[kValue]) {
    if (states && outputs[1] != call.before) std::memcpy(outputs[1], call.before, states * sizeof(float));
    return nullptr;
  }
  const bool is_half = inputs.tensors[kQuery].type == kFloat16;
  size_t numbers = inputs.counts[kValue];
  for (size_t input = kQuery; input <= kBeta; ++input) numbers += inputs.counts[input];
  const Pool::Loan loan(floats, is_half ? numbers * sizeof(float) : 1);
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", numbers);
  float* wide = reinterpret_cast<float*>(loan.memory);
  const float** const operands[] = {&call.query, &call.key, &call.value, &call.decay, &call.beta};
  for (size_t input = kQuery; input <= kBeta; ++input) {
    const Tensor& tensor = inputs.tensors[input];
    *operands[input] = is_half ? wide : static_cast<const float*>(tensor.data);
    if (!is_half) continue;
    widen(static_cast<const Half*>(tensor.data), inputs.counts[input], wide);
    wide += inputs.counts[input];
  }
  if (!inputs.dim(kBeta, 3)) call.beta = nullptr;
  call.mask = inputs.dim(kMask, 1) ? static_cast<const int64_t*>(inputs.tensors[kMask].data) : nullptr;
  call.output = is_half ? wide : static_cast<float*>(outputs[0]);
  call.state = static_cast<float*>(outputs[1]);
  call.delta = delta, call.scale = scale;
  GRAPHOPT_RETURN_IF_ERROR(run(context, call));
  if (is_half) narrow(call.output, inputs.counts[kValue], static_cast<Half*>(outputs[0]));
  return nullptr;
}

OrtStatus* Kernel::run(OrtKernelContext* context, const Recurrence& call) const {
  Call tasks{this, &call, (call.heads + heads_together(call) - 1) / heads_together(call)};
  const size_t count = call.rows * tasks.of_row;
  if (count == 1) {
    Call::task(&tasks, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(node.api, context, Call::task, count, 0, &tasks));
  }
  return tasks.no_memory ? node.error("no memory for the tokens of a head") : nullptr;
}

const OrtCustomOp kOps[2] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
