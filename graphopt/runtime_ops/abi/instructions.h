// Which instructions the kernels of this process use.
#pragma once

namespace graphopt {

enum class Instructions { kScalar, kAvx2, kAvx512 };

// The widest that this machine has, or what GRAPHOPT_OPS_ISA (scalar, avx2, avx512) asks for where the machine has it.
// Returns false where it asks for something else, or for what this machine or this build has not.
bool choose_instructions(Instructions* chosen);

}  // namespace graphopt
