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
  Rounded rounded;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
    GRAPHOPT_RETURN_IF_ERROR(product.prepare(api, info));
    return read_rounding(product.node, info, &rounded);
  }

  OrtStatus* compute(OrtKernelContext* context) const { return product.run(context, rounded, nullptr); }
};

const Operators kRegistered(kProductOps<Kernel>);

}  // namespace
}  // namespace graphopt
