// Dense: a query reads all tokens that it sees.
#pragma once

#include "kv_attention/shared/policies/policy.h"

namespace graphopt {

struct Dense : AnyPolicy {
  static constexpr bool kReadsAll = true;
};

}  // namespace graphopt
