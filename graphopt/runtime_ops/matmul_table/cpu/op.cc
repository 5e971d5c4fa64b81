#include "matmul_table/cpu/op.h"

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
    return read_activations(product.node, info, &how.kind);
  }

  OrtStatus* compute(OrtKernelContext* context) const { return product.run(context, how, nullptr); }
};

}  // namespace

const OrtCustomOp* const kMatMulTableOps[4] = {&kProductOps<Kernel>[0], &kProductOps<Kernel>[1], &kProductOps<Kernel>[2],
                                            &kProductOps<Kernel>[3]};

}  // namespace graphopt
