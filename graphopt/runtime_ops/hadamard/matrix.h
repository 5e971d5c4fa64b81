// A Hadamard matrix that a node is given.
#pragma once

#include "abi/tensor.h"
#include "hadamard/factor.h"

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

}  // namespace graphopt
