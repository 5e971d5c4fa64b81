// ai.graphopt::SplitRotary for onnxruntime's CUDA provider: one operator per type of x, float and float16.
#include "abi/register.h"
#include "cuda/c_interface.h"
#include "cuda/kernel.h"
#include "split_rotary/shared/shapes.h"

namespace graphopt {
namespace {

struct Kernel : RotaryKernel {
  static bool host_input(size_t) { return false; }

  OrtStatus* compute(OrtKernelContext* context) const {
    RotaryTensors inputs;
    GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, heads, context));
    void* outputs[kRotaryOutputs];
    GRAPHOPT_RETURN_IF_ERROR(inputs.make(node, heads, context, outputs));
    if (!inputs.tokens) return nullptr;
    GraphoptSplitRotary call = {};
    call.x = inputs.tensors[kRotaryX].data;
    call.cos = inputs.tensors[kRotaryCos].data;
    call.sin = inputs.tensors[kRotarySin].data;
    call.queries = outputs[0], call.keys = outputs[1], call.values = outputs[2];
    call.tokens = static_cast<int64_t>(inputs.tokens);
    call.heads = static_cast<int32_t>(heads.heads), call.kv_heads = static_cast<int32_t>(heads.kv_heads);
    call.size = static_cast<int32_t>(inputs.size), call.rotary = static_cast<int32_t>(heads.rotary);
    call.interleaved = static_cast<int32_t>(heads.interleaved), call.type = inputs.tensors[kRotaryX].type;
    DeviceCall device;
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, inputs.values[kRotaryX], 0));
    GRAPHOPT_RETURN_IF_MESSAGE(node, graphopt_cuda_split_rotary(&call, device.stream()));
    return nullptr;
  }
};

const OrtCustomOp kOps[2] = {cuda_op<Kernel, kFloat>(), cuda_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
