// Hadamard's kernels: raw pointers in, raw pointers out. cpu.cc is compiled once for each set of instructions.
#pragma once

#include "abi/half.h"
#include "hadamard/shared/factor.h"

namespace graphopt {

// Work on `runs` runs of left.order() * right.order() numbers, of x's own type.
struct HadamardWork {
  const void* x;
  void* y;
  size_t runs;
  Factor left, right;
  double scale;    // of each number, before anything is added
  void* scratch;   // hadamard_scratch() bytes, at a multiple of 64
  bool streaming;  // y is too large for the caches: do not fill them with it
};

using HadamardKernel = void (*)(const HadamardWork&);

struct HadamardKernels {
  HadamardKernel float16, float32, float64;  // float16 computes in float
};

extern const HadamardKernels kHadamardScalar, kHadamardAvx2, kHadamardAvx512, kHadamardNeon;

// So many bytes of numbers go through a core together, and looking up a code serves them all.
constexpr size_t kStrip = 128;

// Bytes for one run, and for what goes into the larger core and comes out of it.
inline size_t hadamard_scratch(const Factor& left, const Factor& right, size_t bytes_of_number) {
  const size_t order = left.coded() > right.coded() ? left.coded() : right.coded();
  return (left.order() * right.order() * bytes_of_number + 63) / 64 * 64 + (groups(order) * kGroup + order) * kStrip;
}

}  // namespace graphopt
