// A matrix of +1 and -1, taken apart into what makes the product with it cheap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace graphopt {

// S(outer) (x) C (x) S(inner), where S is Sylvester's matrix of that order and C, the core, is what is left.
//
// Paley's second construction makes cores that would come apart further but for their diagonal: C = B (x) S(2) + D. The
// product with B takes half of the additions; D has 0, 2 and -2 on its diagonal, and nothing else.
struct Factor {
  size_t outer = 1, core = 1, inner = 1;
  // How output k of the product with B sums up, where there is a D, and with C where there is none: bit r of
  // codes[k * groups + g] is set where entry [4 g + r][k] is -1. Null where the core is the 1 x 1 matrix [1].
  const uint8_t* codes = nullptr;
  const int8_t* diagonal = nullptr;  // of D; null if there is none
  // q where C is what Paley's second construction makes of the integers modulo q, and q is one of PaleyPrimes; else 0.
  size_t paley = 0;

  size_t order() const { return outer * core * inner; }
  size_t coded() const { return diagonal ? core / 2 : core; }  // the order of B, or else of C
};

struct OwnedFactor : Factor {
  std::unique_ptr<uint8_t[]> memory;
  std::unique_ptr<int8_t[]> diagonal_memory;

  enum class Outcome { kDone, kOtherEntries, kNoMemory };
  // Reads a matrix [order, order], row by row; order is positive.
  Outcome read(const int8_t* matrix, size_t order);
};

// Four rows of the core share a code.
constexpr size_t kGroup = 4;
constexpr size_t groups(size_t core) { return (core + kGroup - 1) / kGroup; }

}  // namespace graphopt
