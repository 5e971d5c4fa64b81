// A Hadamard matrix that a node is given.
#pragma once

#include "abi/tensor.h"
#include "hadamard/shared/factor.h"

namespace graphopt {

inline OrtStatus* read_matrix(const Node& node, const OrtValue* value, const char* name, OwnedFactor* factor) {
  Tensor matrix;
  GRAPHOPT_RETURN_IF_ERROR(matrix.read(node.api, value));
  if (matrix.rank != 2 || matrix.shape[0] != matrix.shape[1] || matrix.shape[0] < 1) {
    return node.error("%s must be a square matrix, of order 1 or more", name);
  }
  switch (factor->read(static_cast<const int8_t*>(matrix.data), static_cast<size_t>(matrix.shape[0]))) {
    case OwnedFactor::Outcome::kOtherEntries:
      return node.error("%s has an entry that is neither 1 nor -1", name);
    case OwnedFactor::Outcome::kNoMemory:
      return node.error("no memory for %s", name);
    default:
      return nullptr;
  }
}

// How many runs of left x right numbers x has.
inline OrtStatus* count_runs(const Node& node, const Tensor& x, size_t left, size_t right, size_t* runs) {
  if (x.rank < 1) return node.error("x must have a rank of 1 or more");
  // Neither product overflows: the matrices are in memory, and so is x, of which no axis is negative.
  const size_t order = left * right, n = static_cast<size_t>(x.shape[x.rank - 1]);
  if (n % order) return node.error("the last axis of x is %zu, which is no multiple of %zu x %zu", n, left, right);
  size_t numbers = 1;
  for (size_t axis = 0; axis < x.rank; ++axis) numbers *= static_cast<size_t>(x.shape[axis]);
  *runs = numbers / order;
  return nullptr;
}

}  // namespace graphopt
