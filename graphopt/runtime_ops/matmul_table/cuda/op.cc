// ai.graphopt::MatMulTable and MatMulDynamic for onnxruntime's CUDA provider: one operator for each type of x and of
// scales.
#include <cmath>
#include <limits>

#include "abi/register.h"
#include "cuda/kernel.h"
#include "cuda/numbers.h"
#include "hadamard/cuda/packed_factor.h"
#include "matmul_table/cuda/interface.h"
#include "matmul_table/shared/inputs.h"

namespace graphopt {
namespace {

enum Matrix : size_t { kLeft = kMatMulInputs, kRight, kAllInputs };

// The common part of both operators. All inputs but x stay on the host, which checks, packs and copies them.
struct Product {
  Node node;
  Weights weights;
  GraphoptMatMul call = {};
  DeviceMemory packed, scales, zero_points, bias;

  OrtStatus* prepare(const OrtKernelInfo* info, int types) {
    call.rows = weights.rows;
    call.columns = weights.columns;
    call.group = weights.group;
    call.x_type = ProductTypes::x_of(types);
    call.scale_type = ProductTypes::scales_of(types);
    if (weights.minimums) return node.error("minimums have no kernel on a GPU; lower the model for ort-cuda");
    GRAPHOPT_RETURN_IF_ERROR(pack(info));
    const size_t count = weights.tiles() * weights.groups() * 16, bytes = count * (weights.scales ? 4 : 2);
    const void* of_scales = weights.scales;
    if (!of_scales) of_scales = weights.half_scales;
    GRAPHOPT_RETURN_IF_ERROR(scales.copy_of(node, info, of_scales, bytes));
    call.scales = scales.data();
    call.largest_scale = largest_scale(count);
    const void* zeros = weights.zero_points;
    if (!zeros) zeros = weights.half_zero_points;
    if (zeros) GRAPHOPT_RETURN_IF_ERROR(zero_points.copy_of(node, info, zeros, bytes));
    call.zero_points = zero_points.data();
    if (weights.bias) GRAPHOPT_RETURN_IF_ERROR(bias.copy_of(node, info, weights.bias, weights.columns * sizeof(float)));
    call.bias = static_cast<const float*>(bias.data());
    return nullptr;
  }

  // Of finite scales alone: what is not finite reaches the product whatever the others are multiplied by.
  float largest_scale(size_t count) const {
    float largest = 0;
    for (size_t i = 0; i < count; ++i) {
      const float scale = weights.scales ? weights.scales[i] : to_float(weights.half_scales[i]);
      if (std::fabs(scale) <= std::numeric_limits<float>::max()) largest = std::fmax(largest, std::fabs(scale));
    }
    return largest;
  }

  OrtStatus* pack(const OrtKernelInfo* info) {
    if (weights.digits) return node.error("codes in base 3 have no kernel on a GPU: optimize again for ort-cuda");
    TableInput table = {};
    GRAPHOPT_RETURN_IF_ERROR(read_table(node, info, weights, &table));
    Table of_trellis;
    if (table.is_trellis) GRAPHOPT_RETURN_IF_ERROR(make_trellis(node, table, weights.bits, &of_trellis));
    const GraphoptMatMulWeights source = {weights.rows, weights.columns, weights.bits,
                                         static_cast<int32_t>(table.entries), table.is_trellis,
                                         weights.codes, table.values};
    const int32_t operands = graphopt_cuda_matmul_operands(call.x_type, call.activations);
    const size_t bytes = graphopt_cuda_matmul_codec(&source, operands, &call.codec);
    const std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[bytes]);
    if (!memory) return node.error("no memory to pack %zu bytes of weights for a GPU", bytes);
    GRAPHOPT_RETURN_IF_ERROR(check_codes(node, table, graphopt_cuda_matmul_pack(&source, &call.codec, memory.get())));
    GRAPHOPT_RETURN_IF_ERROR(packed.copy_of(node, info, memory.get(), bytes));
    call.packed = packed.data();
    return nullptr;
  }

  // x and y of a call; `near` is x. Without rows there is nothing to do.
  OrtStatus* begin(OrtKernelContext* context, GraphoptMatMul* of_call, const OrtValue** near) const {
    Tensor x, y;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kX, near));
    GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(*near, "x", &x));
    size_t rows = 0;
    GRAPHOPT_RETURN_IF_ERROR(count_rows(node, weights, x, &rows));
    x.shape[x.rank - 1] = static_cast<int64_t>(weights.columns);
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, 0, x.shape.get(), x.rank, &output));
    GRAPHOPT_RETURN_IF_ERROR(y.read(node.api, output));
    *of_call = call;
    of_call->x = x.data;
    of_call->y = y.data;
    of_call->m = rows;
    return nullptr;
  }
};

struct Types : ProductTypes {
  static bool host_input(size_t index) { return index != kX; }
};

struct TableKernel : Types {
  static constexpr const char* kName = "MatMulTable";
  static constexpr size_t kInputs = kMatMulInputs, kOutputs = 1;
  Product product;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int types) {
    const Node& node = product.node;
    GRAPHOPT_RETURN_IF_ERROR(product.node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(read_weights(node, info, &product.weights));
    Activations activations = Activations::kFloat;
    GRAPHOPT_RETURN_IF_ERROR(read_activations(node, info, &activations));
    if (activations == Activations::kUint4) return node.error("activations uint4 have no kernel on a GPU");
    product.call.activations = static_cast<int32_t>(activations);
    product.call.clip = 1;
    return product.prepare(info, types);
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    GraphoptMatMul call;
    const OrtValue* near = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(product.begin(context, &call, &near));
    if (!call.m) return nullptr;
    DeviceCall device;
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, near, graphopt_cuda_matmul_table_scratch(&call)));
    call.scratch = device.scratch();
    GRAPHOPT_RETURN_IF_MESSAGE(product.node, graphopt_cuda_matmul_table(&call, device.stream()));
    return nullptr;
  }
};

struct DynamicKernel : Types {
  static constexpr const char* kName = "MatMulDynamic";
  static constexpr size_t kInputs = kAllInputs, kOutputs = 1;
  Product product;
  PackedFactor left, right;
  DeviceMemory left_signs, right_signs;
  GraphoptMatMulDynamic call = {};

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int types) {
    const Node& node = product.node;
    GRAPHOPT_RETURN_IF_ERROR(product.node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(read_weights(node, info, &product.weights));
    product.call.activations = GRAPHOPT_TO_TOKEN;
    GRAPHOPT_RETURN_IF_ERROR(read_token_rounding(node, info, &product.call.levels, &product.call.clip));
    GRAPHOPT_RETURN_IF_ERROR(read_constant(info, kLeft, "left", &left, &left_signs, &call.left));
    GRAPHOPT_RETURN_IF_ERROR(read_constant(info, kRight, "right", &right, &right_signs, &call.right));
    GRAPHOPT_RETURN_IF_ERROR(check_rotation(node, product.weights, left.order(), right.order()));
    return product.prepare(info, types);
  }

  OrtStatus* read_constant(const OrtKernelInfo* info, size_t index, const char* name, PackedFactor* matrix,
                           DeviceMemory* signs, GraphoptFactor* factor) const {
    const Node& node = product.node;
    int is_initializer = 0;
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(node.api, info, index, &is_initializer, &value));
    if (!is_initializer) return node.error("%s must be an initializer of the graph", name);
    GRAPHOPT_RETURN_IF_ERROR(matrix->read(node, value, name));
    *factor = matrix->factor;
    if (!matrix->bytes) return nullptr;
    GRAPHOPT_RETURN_IF_ERROR(signs->copy_of(node, info, matrix->signs.get(), matrix->bytes));
    factor->signs = signs->data();
    return nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    GraphoptMatMulDynamic of_call = call;
    const OrtValue* near = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(product.begin(context, &of_call.product, &near));
    if (!of_call.product.m) return nullptr;
    DeviceCall device;
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, near, graphopt_cuda_matmul_dynamic_scratch(&of_call)));
    of_call.product.scratch = device.scratch();
    GRAPHOPT_RETURN_IF_MESSAGE(product.node, graphopt_cuda_matmul_dynamic(&of_call, device.stream()));
    return nullptr;
  }
};

template <typename Kernel>
const OrtCustomOp kOps[4] = {
    cuda_op<Kernel, Types::of(kFloat, kFloat)>(), cuda_op<Kernel, Types::of(kFloat, kFloat16)>(),
    cuda_op<Kernel, Types::of(kFloat16, kFloat)>(), cuda_op<Kernel, Types::of(kFloat16, kFloat16)>()};

const Operators kRegistered(kOps<TableKernel>), kRegisteredDynamic(kOps<DynamicKernel>);

}  // namespace
}  // namespace graphopt
