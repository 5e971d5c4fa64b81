// ai.graphopt::MatMulDynamic as onnxruntime sees it.
#include <cmath>

#include "abi/register.h"
#include "hadamard/shared/matrix.h"
#include "matmul_table/cpu/product.h"

namespace graphopt {
namespace {

enum Matrix : size_t { kLeft = kMatMulInputs, kRight, kAllInputs };

struct Rotation : RowTransform {
  OwnedFactor left, right;
  HadamardKernel kernel = nullptr;
  size_t width = 0;  // of a row

  size_t scratch() const override { return hadamard_scratch(left, right, sizeof(float)); }

  void run(const float* rows, size_t count, float* to, void* scratch) const override {
    const size_t order = left.order() * right.order();
    const double scale = 1 / std::sqrt(static_cast<double>(order));
    kernel({rows, to, count * (width / order), left, right, scale, scratch, false});
  }
};

struct Kernel : ProductTypes {
  static constexpr const char* kName = "MatMulDynamic";
  static constexpr size_t kInputs = kAllInputs;
  static constexpr size_t kOutputs = 1;
  Product product;
  Rounded rounded;
  Rotation rotation;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(product.prepare(api, info));
    const Node& node = product.node;
    GRAPHOPT_RETURN_IF_ERROR(read_token_rounding(node, info, &rounded.levels, &rounded.clip));
    rounded.kind = Activations::kInt8;
    rounded.whole_row = true;
    GRAPHOPT_RETURN_IF_ERROR(read_constant_matrix(info, kLeft, "left", &rotation.left));
    GRAPHOPT_RETURN_IF_ERROR(read_constant_matrix(info, kRight, "right", &rotation.right));
    rotation.width = product.weights.rows;
    GRAPHOPT_RETURN_IF_ERROR(check_rotation(node, product.weights, rotation.left.order(), rotation.right.order()));
    rotation.kernel = GRAPHOPT_OF(product.instructions, kHadamard).float32;
    return nullptr;
  }

  OrtStatus* read_constant_matrix(const OrtKernelInfo* info, size_t index, const char* name,
                                  OwnedFactor* factor) const {
    const Node& node = product.node;
    int is_constant = 0;
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(node.api, info, index, &is_constant, &value));
    if (!is_constant) return node.error("%s must be an initializer of the graph", name);
    return read_matrix(node, value, name, factor);
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    // [[-1]] is a Hadamard matrix of order 1 too
    const auto &left = rotation.left, &right = rotation.right;
    const bool is_identity = left.order() * right.order() == 1 && !left.codes && !right.codes;
    return product.run(context, rounded, is_identity ? nullptr : &rotation);
  }
};

const Operators kRegistered(kProductOps<Kernel>);

}  // namespace
}  // namespace graphopt
