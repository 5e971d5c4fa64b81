// The entry point that onnxruntime looks for, and the list of all operators.
#include "abi/onnxruntime.h"
#include "hadamard/op.h"
#include "kv_attention/op.h"
#include "matmul_dynamic/op.h"
#include "matmul_table/op.h"

namespace graphopt {
namespace {

// onnxruntime reads a domain as long as a session lives whose options have it: one for the whole process, never
// released.
OrtCustomOpDomain* make_domain(const OrtApi* api) {
  OrtCustomOpDomain* domain = nullptr;
  OrtStatus* failure = CreateCustomOpDomain::call(api, "ai.graphopt", &domain);
  const auto add = [&](const auto& ops) {
    for (const OrtCustomOp* op : ops) {
      if (!failure) failure = CustomOpDomainAdd::call(api, domain, op);
    }
  };
  add(kHadamardOps);
  add(kKVAttentionOps);
  add(kMatMulTableOps);
  add(kMatMulDynamicOps);
  if (!failure) return domain;
  ReleaseStatus::call(api, failure);
  return nullptr;
}

}  // namespace
}  // namespace graphopt

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (!api) {
    // Every version has CreateStatus, at the same position.
    return CreateStatus::call(base->GetApi(1), kFail, "graphopt's operators need onnxruntime 1.17 or newer");
  }
  static OrtCustomOpDomain* const domain = make_domain(api);
  if (!domain) return CreateStatus::call(api, kFail, "onnxruntime does not take graphopt's operators");
  return AddCustomOpDomain::call(api, options, domain);
}
