// Registering a library's operators with onnxruntime.
#pragma once

#include "abi/onnxruntime.h"

namespace graphopt {

// The operators of one file, which adds them to the list of its library when that is loaded: a folder with a new
// operator is found without being named anywhere.
class Operators {
 public:
  template <size_t Count>
  explicit Operators(const OrtCustomOp (&ops)[Count]) : first_(ops), count_(Count), next_(all()) {
    all() = this;
  }

  static OrtStatus* add(const OrtApi* api, const Operators* list, OrtCustomOpDomain* domain) {
    for (; list; list = list->next_) {
      for (size_t i = 0; i < list->count_; ++i) {
        if (OrtStatus* failure = CustomOpDomainAdd::call(api, domain, list->first_ + i)) return failure;
      }
    }
    return nullptr;
  }

  // The last one that was made in this library; null before the first.
  static Operators*& all() {
    static Operators* last = nullptr;
    return last;
  }

 private:
  const OrtCustomOp* first_;
  size_t count_;
  Operators* next_;
};

// Makes a domain of the operators of some lists; null where onnxruntime does not take them. onnxruntime reads a domain
// as long as a session lives whose options have it: one for the whole process, never released.
template <size_t Count>
OrtCustomOpDomain* make_domain(const OrtApi* api, const Operators* const (&lists)[Count]) {
  OrtCustomOpDomain* domain = nullptr;
  OrtStatus* failure = CreateCustomOpDomain::call(api, "ai.graphopt", &domain);
  for (const Operators* list : lists) {
    if (!failure) failure = Operators::add(api, list, domain);
  }
  if (!failure) return domain;
  ReleaseStatus::call(api, failure);
  return nullptr;
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
