// Registering a library's operators with onnxruntime.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

// Operators that some file states in an array.
struct Operators {
  const OrtCustomOp* const* first;
  size_t count;
};
template <size_t Count>
constexpr Operators operators(const OrtCustomOp* const (&ops)[Count]) {
  return {ops, Count};
}

// Adds operators to `domain`, creating it if null; false where onnxruntime refuses. onnxruntime reads a domain as long
// as any session lives whose options hold it, so there is one for the whole process, never released.
inline bool add(const OrtApi* api, const Operators* lists, size_t count, OrtCustomOpDomain** domain) {
  OrtStatus* failure = *domain ? nullptr : CreateCustomOpDomain::call(api, "ai.graphopt", domain);
  for (size_t list = 0; list < count; ++list) {
    for (size_t i = 0; i < lists[list].count && !failure; ++i) {
      failure = CustomOpDomainAdd::call(api, *domain, lists[list].first[i]);
    }
  }
  if (failure) ReleaseStatus::call(api, failure);
  return !failure;
}

// Adds the domain, created once by make(), to a session's options; make() returns null where onnxruntime refuses.
template <typename Make>
OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base, uint32_t version, const char* needs,
                              Make make) {
  const OrtApi* api = base->GetApi(version);
  // Every version has CreateStatus, at the same position.
  if (!api) return CreateStatus::call(base->GetApi(1), kFail, needs);
  static OrtCustomOpDomain* const domain = make(api);
  if (!domain) return CreateStatus::call(api, kFail, "onnxruntime does not take graphopt's operators");
  return AddCustomOpDomain::call(api, options, domain);
}

}  // namespace graphopt
