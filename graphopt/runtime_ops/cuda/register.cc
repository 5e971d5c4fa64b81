// The entry point of the library for GPUs: its operators, and those of the CPU's library, so that a session has both.
#include "abi/cpu_operators.h"
#include "cuda/kernel.h"
#include "hadamard/cuda/op.h"
#include "kv_attention/cuda/op.h"
#include "matmul_table/cuda/op.h"

namespace graphopt {
namespace {

const Operators kLists[] = {operators(kCudaHadamardOps), operators(kCudaKVAttentionOps), operators(kCudaMatMulTableOps),
                            operators(kCudaMatMulDynamicOps)};

OrtCustomOpDomain* make_domain(const OrtApi* api) {
  device_api = api;
  OrtCustomOpDomain* domain = nullptr;
  bool added = add(api, kLists, sizeof kLists / sizeof kLists[0], &domain);
#if !defined(GRAPHOPT_INTERPRETED)
  size_t lists = 0;
  const Operators* const cpu = graphopt_cpu_operators(&lists);
  added = added && add(api, cpu, lists, &domain);
#endif
  return added ? domain : nullptr;
}

}  // namespace
}  // namespace graphopt

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  constexpr char kNeeds[] = "graphopt's operators for GPUs need onnxruntime 1.18 or newer";
  return register_operators(options, base, kScratchVersion, kNeeds, make_domain);
}
