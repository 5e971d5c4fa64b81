// A float16 in memory.
#pragma once

#include <cstdint>

namespace graphopt {

struct Half {
  uint16_t bits;
};

}  // namespace graphopt
