// The entry point of the library for GPUs: its operators, and those of the CPU's library, so that a session has both.
#include "abi/cpu_operators.h"
#include "cuda/kernel.h"

namespace graphopt {
namespace {

OrtCustomOpDomain* make(const OrtApi* api) {
  device_api = api;
#if defined(GRAPHOPT_INTERPRETED)
  return make_domain(api, {Operators::all()});
#else
  return make_domain(api, {Operators::all(), graphopt_cpu_operators()});
#endif
}

}  // namespace
}  // namespace graphopt

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  constexpr char kNeeds[] = "graphopt's operators for GPUs need onnxruntime 1.18 or newer";
  return register_operators(options, base, kScratchVersion, kNeeds, make);
}
