// A block turned number by number, of a set whose compiler makes what there is to make of it.
#pragma once

#include "arch/vector.h"

namespace graphopt {
namespace {

GRAPHOPT_FORCE_INLINE void transpose_block(const float* from, size_t size, float* block) {
  for (size_t k = 0; k < kColumns; ++k) {
    for (size_t t = 0; t < kColumns; ++t) block[k * kColumns + t] = from[t * size + k];
  }
}

}  // namespace
}  // namespace graphopt
