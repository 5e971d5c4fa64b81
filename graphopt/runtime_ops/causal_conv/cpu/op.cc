// ai.graphopt::CausalConv as onnxruntime sees it: one operator per type of x.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/pool.h"
#include "abi/register.h"
#include "causal_conv/cpu/kernels.h"

namespace graphopt {
namespace {

enum Input : size_t { kX, kWeight, kBias, kMask, kState, kInputCount };
constexpr const char* kNames[] = {"x", "weight", "bias", "mask", "state"};
constexpr size_t kRanks[] = {3, 2, 1, 2, 3};

struct Inputs {
  Tensor tensors[kInputCount];
  size_t counts[kInputCount];  // of numbers

  OrtStatus* read(const Node& node, OrtKernelContext* context);
  OrtStatus* check(const Node& node, Convolution* call) const;

  size_t dim(Input input, size_t axis) const { return static_cast<size_t>(tensors[input].shape[axis]); }
};

OrtStatus* Inputs::read(const Node& node, OrtKernelContext* context) {
  for (size_t input = 0; input < kInputCount; ++input) {
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, input, &value));
    if (!value) return node.error("%s must not be left out", kNames[input]);
    GRAPHOPT_RETURN_IF_ERROR(node.read_dense(value, kNames[input], kRanks[input], &tensors[input], &counts[input]));
  }
  return nullptr;
}

OrtStatus* Inputs::check(const Node& node, Convolution* call) const {
  call->rows = dim(kX, 0), call->tokens = dim(kX, 1), call->channels = dim(kX, 2), call->taps = dim(kWeight, 1);
  if (dim(kWeight, 0) != call->channels || !call->taps) {
    return node.error("weight must be [%zu, L] with an L of at least 1", call->channels);
  }
  if (dim(kBias, 0) && dim(kBias, 0) != call->channels) {
    return node.error("bias must be [%zu] or [0]", call->channels);
  }
  if (dim(kMask, 0) != call->rows || (dim(kMask, 1) && dim(kMask, 1) != call->tokens)) {
    return node.error("mask must be [%zu, %zu] or [%zu, 0]", call->rows, call->tokens, call->rows);
  }
  const size_t of_state[] = {call->rows, call->channels, call->taps - 1};
  for (size_t axis = 0; axis < 3; ++axis) {
    if (dim(kState, axis) == of_state[axis]) continue;
    return node.error("state must be [%zu, %zu, %zu]", of_state[0], of_state[1], of_state[2]);
  }
  return nullptr;
}

struct Kernel {
  static constexpr const char* kName = "CausalConv";
  static constexpr size_t kInputs = kInputCount, kOutputs = 2;
  static int input_type(size_t index, int type) { return index == kMask ? static_cast<int>(kInt64) : type; }
  static int output_type(size_t, int type) { return type; }

  Node node;
  const ConvolutionKernels* kernels = nullptr;
  bool silu = false;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    kernels = &GRAPHOPT_OF(instructions, kConvolution);
    char activation[8];
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "activation", activation, sizeof activation));
    silu = !std::strcmp(activation, "silu");
    return silu || !std::strcmp(activation, "none") ? nullptr : node.error("activation must be none or silu");
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* run(OrtKernelContext* context, const Convolution& call) const;
};

// A call, cut into tasks of some channels each; tasks share nothing but the flag.
struct Call {
  const Kernel* kernel;
  const Convolution* all;
  size_t of_row;  // tasks
  std::atomic<bool> no_memory{false};

  static void task(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Pool::Loan loan(self.kernel->pool, convolution_scratch(*self.all));
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    self.kernel->kernels->run(*self.all, index / self.of_row, index % self.of_row * kConvolutionChannels,
                              reinterpret_cast<float*>(loan.memory));
  }
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  Inputs inputs;
  Convolution call{};
  GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, context));
  GRAPHOPT_RETURN_IF_ERROR(inputs.check(node, &call));
  void* outputs[2];
  for (size_t index = 0; index < 2; ++index) {
    const Tensor& input = inputs.tensors[index ? kState : kX];
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(
        KernelContextGetOutput::call(node.api, context, index, input.shape.get(), input.rank, &output));
    if (!output) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &outputs[index]));
  }
  const bool is_half = inputs.tensors[kX].type == kFloat16;
  const size_t of_y = inputs.counts[kX], of_state = inputs.counts[kState];
  if (!of_y && !of_state) return nullptr;
  size_t numbers = of_y + of_state;
  for (Input input : {kX, kWeight, kBias, kState}) numbers += inputs.counts[input];
  const Pool::Loan loan(floats, is_half ? numbers * sizeof(float) : 1);
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", numbers);
  float* wide = reinterpret_cast<float*>(loan.memory);
  const float** const operands[] = {&call.x, &call.weight, &call.bias, nullptr, &call.state};
  for (Input input : {kX, kWeight, kBias, kState}) {
    const Tensor& tensor = inputs.tensors[input];
    *operands[input] = is_half ? wide : static_cast<const float*>(tensor.data);
    if (!is_half) continue;
    widen(static_cast<const Half*>(tensor.data), inputs.counts[input], wide);
    wide += inputs.counts[input];
  }
  if (!inputs.counts[kBias]) call.bias = nullptr;
  call.mask = inputs.dim(kMask, 1) ? static_cast<const int64_t*>(inputs.tensors[kMask].data) : nullptr;
  call.y = is_half ? wide : static_cast<float*>(outputs[0]);
  call.new_state = is_half ? wide + of_y : static_cast<float*>(outputs[1]);
  call.silu = silu;
  GRAPHOPT_RETURN_IF_ERROR(run(context, call));
  if (!is_half) return nullptr;
  narrow(call.y, of_y, static_cast<Half*>(outputs[0]));
  narrow(call.new_state, of_state, static_cast<Half*>(outputs[1]));
  return nullptr;
}

OrtStatus* Kernel::run(OrtKernelContext* context, const Convolution& call) const {
  Call tasks{this, &call, (call.channels + kConvolutionChannels - 1) / kConvolutionChannels};
  const size_t count = call.rows * tasks.of_row;
  if (!count) return nullptr;
  if (count == 1) {
    Call::task(&tasks, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(node.api, context, Call::task, count, 0, &tasks));
  }
  return tasks.no_memory ? node.error("no memory for the taps of %zu channels", kConvolutionChannels) : nullptr;
}

const OrtCustomOp kOps[2] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
