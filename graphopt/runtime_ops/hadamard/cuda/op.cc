// ai.graphopt::Hadamard for onnxruntime's CUDA provider: one operator per type of x, float and float16.
#include "hadamard/cuda/packed_factor.h"

#include <initializer_list>

#include "abi/register.h"
#include "cuda/kernel.h"

namespace graphopt {
namespace {

enum Input : size_t { kX, kLeft, kRight };
constexpr const char* kNames[] = {"x", "left", "right"};

struct Kernel {
  static constexpr const char* kName = "Hadamard";
  static constexpr size_t kInputs = 3, kOutputs = 1;
  static int input_type(size_t index, int type) { return index == kX ? type : kInt8; }
  static int output_type(size_t, int type) { return type; }
  static bool host_input(size_t index) { return index != kX; }  // the host takes the matrices apart

  Node node;
  PackedFactor constant[3];  // at kLeft and kRight, where the graph holds the matrix
  DeviceMemory signs[3];
  bool is_constant[3] = {};

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    for (Input factor : {kLeft, kRight}) {
      int is_initializer = 0;
      const OrtValue* value = nullptr;
      GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(api, info, factor, &is_initializer, &value));
      is_constant[factor] = is_initializer;
      if (!is_initializer) continue;
      PackedFactor& matrix = constant[factor];
      GRAPHOPT_RETURN_IF_ERROR(matrix.read(node, value, kNames[factor]));
      if (!matrix.bytes) continue;
      GRAPHOPT_RETURN_IF_ERROR(signs[factor].copy_of(node, info, matrix.signs.get(), matrix.bytes));
      matrix.factor.signs = signs[factor].data();
    }
    return nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    const OrtApi* api = node.api;
    const OrtValue* values[3];
    for (Input input : {kX, kLeft, kRight}) {
      GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, input, &values[input]));
    }
    Tensor x, y;
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(values[kX], "x", &x));
    PackedFactor call_factors[3];
    GraphoptHadamard call = {};
    GraphoptFactor* const factors[3] = {nullptr, &call.left, &call.right};
    size_t orders[3] = {}, sign_bytes = 0;
    for (Input factor : {kLeft, kRight}) {
      if (!is_constant[factor]) {
        GRAPHOPT_RETURN_IF_ERROR(call_factors[factor].read(node, values[factor], kNames[factor]));
      }
      const PackedFactor& matrix = is_constant[factor] ? constant[factor] : call_factors[factor];
      *factors[factor] = matrix.factor;
      orders[factor] = matrix.order();
      sign_bytes += call_factors[factor].bytes;
    }
    size_t runs = 0;
    GRAPHOPT_RETURN_IF_ERROR(count_runs(node, x, orders[kLeft], orders[kRight], &runs));
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
    if (!runs) return nullptr;
    GRAPHOPT_RETURN_IF_ERROR(y.read(api, output));
    call.x = x.data;
    call.y = y.data;
    call.runs = static_cast<int64_t>(runs);
    call.type = x.type;
    DeviceCall device;
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, values[kX], sign_bytes + graphopt_cuda_hadamard_scratch(&call)));
    auto* scratch = static_cast<char*>(device.scratch());
    for (Input factor : {kLeft, kRight}) {
      const PackedFactor& matrix = call_factors[factor];
      if (!matrix.bytes) continue;
      GRAPHOPT_RETURN_IF_MESSAGE(node, copy_to_device(scratch, matrix.signs.get(), matrix.bytes, device.stream()));
      factors[factor]->signs = scratch;
      scratch += matrix.bytes;  // a multiple of 512
    }
    call.scratch = scratch;
    GRAPHOPT_RETURN_IF_MESSAGE(node, graphopt_cuda_hadamard(&call, device.stream()));
    return nullptr;
  }
};

const OrtCustomOp kOps[2] = {cuda_op<Kernel, kFloat>(), cuda_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
