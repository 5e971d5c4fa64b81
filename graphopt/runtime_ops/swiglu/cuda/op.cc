// ai.graphopt::SwiGLU for onnxruntime's CUDA provider: one operator per type of x, float and float16.
#include "abi/register.h"
#include "cuda/c_interface.h"
#include "cuda/kernel.h"
#include "swiglu/shared/shape.h"

namespace graphopt {
namespace {

struct Kernel {
  static constexpr const char* kName = "SwiGLU";
  static constexpr size_t kInputs = 1, kOutputs = 1;
  static int input_type(size_t, int type) { return type; }
  static int output_type(size_t, int type) { return type; }
  static bool host_input(size_t) { return false; }

  Node node;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) { return node.read(api, info); }

  OrtStatus* compute(OrtKernelContext* context) const {
    const OrtApi* api = node.api;
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, 0, &value));
    Tensor x, y;
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "x", &x));
    size_t rows = 0, columns = 0;
    GRAPHOPT_RETURN_IF_ERROR(halve_last_axis(node, &x, &rows, &columns));
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
    if (!rows || !columns) return nullptr;
    if (columns > INT32_MAX) return node.error("y has %zu numbers in a row, and may have 2^31 - 1", columns);
    GRAPHOPT_RETURN_IF_ERROR(y.read(api, output));
    const GraphoptSwiGLU call{x.data, y.data, static_cast<int64_t>(rows), static_cast<int32_t>(columns), x.type};
    DeviceCall device;
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, value, 0));
    GRAPHOPT_RETURN_IF_MESSAGE(node, graphopt_cuda_swiglu(&call, device.stream()));
    return nullptr;
  }
};

const OrtCustomOp kOps[2] = {cuda_op<Kernel, kFloat>(), cuda_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
