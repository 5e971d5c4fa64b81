// Sums over the tokens that a product reads. Raw pointers in, raw pointers out.
#pragma once

#include <cstddef>

namespace graphopt {

// Sums are taken in the order of moments.py, operation by operation: both give the same bits.
struct MomentsWork {
  const float* x;  // [tokens, rows], C-contiguous
  size_t tokens, rows;
  double* total;   // [rows], is added to: the sum of x
  float* largest;  // [rows], is raised to the largest magnitude
  double* fourth;  // [32], is added to: x^4 of the numbers at each place of a group of 32
  double* coarse;  // [32], likewise: the squared error of 16 codes for each group, whose range holds 0
};

using MomentsKernel = void (*)(const MomentsWork&);
extern const MomentsKernel kMomentsScalar, kMomentsAvx2, kMomentsAvx512, kMomentsNeon;

}  // namespace graphopt
