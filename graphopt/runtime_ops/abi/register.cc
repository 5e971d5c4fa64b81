// The entry point that onnxruntime looks for.
#include "abi/cpu_operators.h"

const graphopt::Operators* graphopt_cpu_operators() { return graphopt::Operators::all(); }

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  const auto make = [](const OrtApi* api) { return make_domain(api, {Operators::all()}); };
  return register_operators(options, base, kApiVersion, "graphopt's operators need onnxruntime 1.17 or newer", make);
}
