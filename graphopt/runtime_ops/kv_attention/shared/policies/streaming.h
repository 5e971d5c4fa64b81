// Streaming (StreamingLLM, Xiao et al. 2024): a query reads the first and the newest tokens alone.
#pragma once

#include "kv_attention/shared/policies/policy.h"

namespace graphopt {

struct Streaming : AnyPolicy {
  static constexpr bool kMayDrop = true;
  struct Parameters {
    bool compensate = false;  // a query reads one token more, the mean of those that it dropped
  };
  template <typename Reader>
  static auto read(Parameters* parameters, const Reader& reader) {
    return reader.flag("compensate", &parameters->compensate);
  }
};

}  // namespace graphopt
