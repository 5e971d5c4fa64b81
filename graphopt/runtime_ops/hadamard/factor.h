// A matrix of +1 and -1, taken apart into what makes the product with it cheap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace graphopt {

// S(outer) (x) C (x) S(inner), where S is Sylvester's matrix of that order and C, the core, is what is left.
struct Factor {
  size_t outer = 1, core = 1, inner = 1;
  // How output k of the core's product sums up: bit r of codes[k * groups + g] is set where C[4 g + r][k] is -1. Null
  // where the core is the 1 x 1 matrix [1].
  const uint8_t* codes = nullptr;

  size_t order() const { return outer * core * inner; }
};

struct OwnedFactor : Factor {
  std::unique_ptr<uint8_t[]> memory;

  enum class Outcome { kDone, kOtherEntries, kNoMemory };
  // Reads a matrix [order, order], row by row; order is positive.
  Outcome read(const int8_t* matrix, size_t order);
};

// Four rows of the core share a code.
constexpr size_t kGroup = 4;
constexpr size_t groups(size_t core) { return (core + kGroup - 1) / kGroup; }

}  // namespace graphopt
