#include "matmul_table/op.h"

#include <cstring>

#include "matmul/custom_op.h"

namespace graphopt {
namespace {

struct Kernel {
  static constexpr const char* kName = "MatMulTable";
  static constexpr size_t kInputs = kMatMulInputs;
  Product product;
  Rounded how;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info) {
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

const OrtCustomOp kOps[2] = {matmul_op<Kernel, kFloat>(), matmul_op<Kernel, kFloat16>()};

}  // namespace

const OrtCustomOp* const kMatMulTableOps[2] = {&kOps[0], &kOps[1]};

}  // namespace graphopt
