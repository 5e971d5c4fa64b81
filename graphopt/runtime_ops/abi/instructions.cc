#include "abi/instructions.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace graphopt {
namespace {

#if defined(__aarch64__)
// Whether the system says that the processor has a feature: a bit of what Linux hands to processes, or a name that
// macOS knows. Other systems are asked for none.
[[maybe_unused]] bool has_feature(unsigned long entry, unsigned long bit, const char* name) {
#if defined(__linux__)
  (void)name;
  return getauxval(entry) & bit;
#elif defined(__APPLE__)
  (void)entry, (void)bit;
  int is_present = 0;
  size_t size = sizeof is_present;
  return !sysctlbyname(name, &is_present, &size, nullptr, 0) && is_present;
#else
  (void)entry, (void)bit, (void)name;
  return false;
#endif
}

// Each is true where this build has kernels for it and this machine can run them.
bool has_dotprod() {
#if defined(GRAPHOPT_DOTPROD)
  return has_feature(16, 1ul << 20, "hw.optional.arm.FEAT_DotProd");  // AT_HWCAP, HWCAP_ASIMDDP
#else
  return false;
#endif
}

bool has_i8mm() {
#if defined(GRAPHOPT_I8MM)
  return has_feature(26, 1ul << 13, "hw.optional.arm.FEAT_I8MM");  // AT_HWCAP2, HWCAP2_I8MM
#else
  return false;
#endif
}

// NEON is a part of the architecture.
bool has(Instructions instructions) {
  if (instructions <= Instructions::kNeon) return true;
  return has_dotprod() && (instructions == Instructions::kDotprod || has_i8mm());
}
#else
// Each is true where this build has kernels for it and this machine can run them.
bool has_avxvnni() {
#if defined(GRAPHOPT_AVXVNNI)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(GRAPHOPT_AVX512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has(Instructions instructions) {
  if (instructions == Instructions::kScalar) return true;
#if defined(__x86_64__)
  // these also check that the operating system saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (instructions == Instructions::kAvx2) return avx2;
  if (instructions == Instructions::kAvxVnni) return avx2 && has_avxvnni();
  return avx2 && has_avx512();
#else
  return false;
#endif
}
#endif

const char* name_of(Instructions instructions) {
  constexpr const char* kNames[] = {GRAPHOPT_INSTRUCTION_NAMES};  // in the order of the enumeration
  return kNames[static_cast<int>(instructions)];
}

}  // namespace

bool choose_instructions(Instructions* instructions) {
#if defined(__aarch64__)
  constexpr Instructions kFastestFirst[] = {Instructions::kI8mm, Instructions::kDotprod, Instructions::kNeon,
                                            Instructions::kScalar};
#else
  constexpr Instructions kFastestFirst[] = {Instructions::kAvx512, Instructions::kAvxVnni, Instructions::kAvx2,
                                            Instructions::kScalar};
#endif
  const char* name = std::getenv("GRAPHOPT_OPS_ISA");
  for (const Instructions candidate : kFastestFirst) {
    const bool is_named = !name || !*name || !std::strcmp(name, name_of(candidate));
    if (is_named && has(candidate)) {
      *instructions = candidate;
      return true;
    }
  }
  return false;
}

}  // namespace graphopt

// What graphopt/runtime_ops/instructions.py calls: the name of the chosen set, or null where there is none.
extern "C" __attribute__((visibility("default"))) const char* graphopt_instructions() {
  graphopt::Instructions instructions;
  return graphopt::choose_instructions(&instructions) ? graphopt::name_of(instructions) : nullptr;
}
