// The entry point that onnxruntime looks for, and the list of all operators.
#include "abi/cpu_operators.h"
#include "hadamard/cpu/op.h"
#include "kv_attention/cpu/op.h"
#include "matmul_dynamic/cpu/op.h"
#include "matmul_table/cpu/op.h"

namespace graphopt {
namespace {

const Operators kLists[] = {operators(kHadamardOps), operators(kKVAttentionOps), operators(kMatMulTableOps),
                            operators(kMatMulDynamicOps)};

}  // namespace
}  // namespace graphopt

const graphopt::Operators* graphopt_cpu_operators(size_t* lists) {
  *lists = sizeof graphopt::kLists / sizeof graphopt::kLists[0];
  return graphopt::kLists;
}

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  const auto make = [](const OrtApi* api) {
    OrtCustomOpDomain* domain = nullptr;
    return add(api, kLists, sizeof kLists / sizeof kLists[0], &domain) ? domain : nullptr;
  };
  return register_operators(options, base, kApiVersion, "graphopt's operators need onnxruntime 1.17 or newer", make);
}
