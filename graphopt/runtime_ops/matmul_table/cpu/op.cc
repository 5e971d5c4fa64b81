// ai.graphopt::MatMulTable as onnxruntime sees it.
#include "abi/register.h"
#include "matmul_table/cpu/product.h"

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
    GRAPHOPT_RETURN_IF_ERROR(read_activations(product.node, info, &how.kind));
    if (how.kind != Activations::kUint4) return nullptr;
    how.kind = Activations::kInt8;  // codes without their zero points are small integers
    how.levels = 15;
    how.of_range = true;
    return nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const { return product.run(context, how, nullptr); }
};

const Operators kRegistered(kProductOps<Kernel>);

}  // namespace
}  // namespace graphopt
