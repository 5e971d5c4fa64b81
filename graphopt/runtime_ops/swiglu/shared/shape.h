// What SwiGLU's operators for the CPU and for GPUs check alike.
#pragma once

#include "abi/tensor.h"

namespace graphopt {

// Makes the shape of x that of y, and counts the rows of y and their numbers.
inline OrtStatus* halve_last_axis(const Node& node, Tensor* x, size_t* rows, size_t* columns) {
  if (!x->rank) return node.error("x must have a rank of 1 or more");
  int64_t& last = x->shape[x->rank - 1];
  if (last % 2) return node.error("the last axis of x is %lld, which has no two halves", static_cast<long long>(last));
  last /= 2;
  *rows = 1;
  *columns = static_cast<size_t>(last);
  // x fits into memory, but what is beside a 0 may be anything
  for (size_t axis = 0; axis < x->rank; ++axis) {
    if (!x->shape[axis]) return *rows = 0, nullptr;
  }
  for (size_t axis = 0; axis + 1 < x->rank; ++axis) *rows *= static_cast<size_t>(x->shape[axis]);
  return nullptr;
}

}  // namespace graphopt
