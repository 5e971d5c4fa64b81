// A Hadamard matrix that a node is given, as kernels for GPUs take it.
#pragma once

#include "cuda/c_interface.h"
#include "cuda/kernel.h"
#include "hadamard/shared/matrix.h"

namespace graphopt {

// A matrix as the kernel takes it, without the address of its signs on the device.
struct PackedFactor {
  GraphoptFactor factor = {};
  std::unique_ptr<uint8_t[]> signs;
  size_t bytes = 0;

  OrtStatus* read(const Node& node, const OrtValue* value, const char* name) {
    Tensor matrix;
    OwnedFactor owned_factor;
    GRAPHOPT_RETURN_IF_ERROR(read_matrix(node, value, name, &owned_factor));
    GRAPHOPT_RETURN_IF_ERROR(matrix.read(node.api, value));
    const auto* const entries = static_cast<const int8_t*>(matrix.data);
    const int32_t order = static_cast<int32_t>(matrix.shape[0]);
    const char* failure = nullptr;
    bytes = graphopt_cuda_hadamard_factor(entries, order, &factor, nullptr, &failure);
    GRAPHOPT_RETURN_IF_MESSAGE(node, failure);
    signs.reset(new (std::nothrow) uint8_t[bytes + 1]);
    if (!signs) return node.error("no memory for %s", name);
    graphopt_cuda_hadamard_factor(entries, order, &factor, signs.get(), &failure);
    GRAPHOPT_RETURN_IF_MESSAGE(node, failure);
    return nullptr;
  }

  size_t order() const {
    return static_cast<size_t>(factor.outer) * static_cast<size_t>(factor.core) * static_cast<size_t>(factor.inner);
  }
};

}  // namespace graphopt
