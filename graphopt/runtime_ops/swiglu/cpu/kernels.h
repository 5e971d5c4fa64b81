// SwiGLU's kernel: raw pointers in, raw pointers out. kernels.cc is compiled once for each set of instructions.
#pragma once

#include <cstddef>

namespace graphopt {

// `count` numbers: y = gate sigmoid(gate) up, in float32.
using SwiGLUKernel = void (*)(const void* gate, const void* up, void* y, size_t count);

struct SwiGLUKernels {
  SwiGLUKernel float32, float16;
};

extern const SwiGLUKernels kSwiGLUScalar, kSwiGLUAvx2, kSwiGLUAvx512, kSwiGLUNeon;

}  // namespace graphopt
