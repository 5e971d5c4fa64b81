// Which instructions the kernels of this process use.
#pragma once

// What is compiled once for each set of instructions has the name of the set behind its own: GRAPHOPT_NAME(kKernels).
#define GRAPHOPT_JOIN(first, second) first##second
#define GRAPHOPT_JOINED(first, second) GRAPHOPT_JOIN(first, second)
#define GRAPHOPT_NAME(name) GRAPHOPT_JOINED(name, GRAPHOPT_KERNELS)

namespace graphopt {

#if defined(__aarch64__)
// Each has what is before it. Products of bytes alone are compiled for the last two, others are those of kNeon:
// kDotprod sums four of them up at once, kI8mm multiplies matrices of 2 x 8 and 8 x 2.
enum class Instructions { kScalar, kNeon, kDotprod, kI8mm };
#define GRAPHOPT_INSTRUCTION_NAMES "scalar", "neon", "dotprod", "i8mm"
#else
// Each has what is before it. kAvxVnni is AVX2 with products of bytes that are summed up at once: only kernels that
// multiply bytes are compiled for it, others are those of kAvx2.
enum class Instructions { kScalar, kAvx2, kAvxVnni, kAvx512 };
#define GRAPHOPT_INSTRUCTION_NAMES "scalar", "avx2", "avxvnni", "avx512"
#endif

// What is compiled for each set, of the set that was chosen: GRAPHOPT_OF(chosen, kKernels).
#if defined(GRAPHOPT_AVX512)
#define GRAPHOPT_OF(chosen, name)                                   \
  ((chosen) == graphopt::Instructions::kAvx512 ? name##Avx512       \
   : (chosen) >= graphopt::Instructions::kAvx2 ? name##Avx2         \
                                               : name##Scalar)
#elif defined(__aarch64__)
#define GRAPHOPT_OF(chosen, name) ((chosen) >= graphopt::Instructions::kNeon ? name##Neon : name##Scalar)
#elif defined(__x86_64__)
#define GRAPHOPT_OF(chosen, name) ((chosen) >= graphopt::Instructions::kAvx2 ? name##Avx2 : name##Scalar)
#else
#define GRAPHOPT_OF(chosen, name) (name##Scalar)
#endif

// The fastest set that this machine supports, or the one that GRAPHOPT_OPS_ISA names.
// Returns false where that is unknown, or unsupported by this machine or this build.
bool choose_instructions(Instructions* instructions);

constexpr char kWrongInstructions[] =
#if defined(__aarch64__)
    "GRAPHOPT_OPS_ISA must be scalar, neon, dotprod or i8mm, and this machine must have it";
#else
    "GRAPHOPT_OPS_ISA must be scalar, avx2, avxvnni or avx512, and this machine must have it";
#endif

}  // namespace graphopt
