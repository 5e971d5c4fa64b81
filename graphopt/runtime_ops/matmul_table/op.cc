#include "matmul_table/op.h"

#include <cstring>

#include "abi/custom_op.h"
#include "matmul/product.h"

namespace graphopt {
namespace {

struct Kernel : ProductTypes {
  static constexpr const char* kName = "MatMulTable";
  static constexpr size_t kInputs = kMatMulInputs;
  static constexpr size_t kOutputs = 1;
  Product product;
  Rounded how;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(product.prepare(api, info));
    char text[16] = {};
    GRAPHOPT_RETURN_IF_ERROR(product.node.read_attribute(info, "activations", text, sizeof text));
    constexpr const char* kKinds[] = {"float32", "bfloat16", "int8", "int16"};
    for (int kind = 0; kind < 4; ++kind) {
      how.kind = static_cast<Activations>(kind);
      if (!std::strcmp(text, kKinds[kind])) return nullptr;
    }
    return product.node.error("activations must be float32, bfloat16, int8 or int16, not '%s'", text);
  }

  OrtStatus* compute(OrtKernelContext* context) const { return product.run(context, how, nullptr); }
};

const OrtCustomOp kOps[2] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>()};

}  // namespace

const OrtCustomOp* const kMatMulTableOps[2] = {&kOps[0], &kOps[1]};

}  // namespace graphopt
