#include "abi/instructions.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace graphopt {
namespace {

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

const char* name_of(Instructions instructions) {
  constexpr const char* kNames[] = {"scalar", "avx2", "avxvnni", "avx512"};  // in the order of the enumeration
  return kNames[static_cast<int>(instructions)];
}

}  // namespace

bool choose_instructions(Instructions* chosen) {
  constexpr Instructions kFastestFirst[] = {Instructions::kAvx512, Instructions::kAvxVnni, Instructions::kAvx2,
                                            Instructions::kScalar};
  const char* wanted = std::getenv("GRAPHOPT_OPS_ISA");
  for (const Instructions each : kFastestFirst) {
    const bool asked = !wanted || !*wanted || !std::strcmp(wanted, name_of(each));
    if (asked && has(each)) {
      *chosen = each;
      return true;
    }
  }
  return false;
}

}  // namespace graphopt

// What graphopt/runtime_ops/instructions.py calls: the name of the chosen set, or null where there is none.
extern "C" __attribute__((visibility("default"))) const char* graphopt_instructions() {
  graphopt::Instructions chosen;
  return graphopt::choose_instructions(&chosen) ? graphopt::name_of(chosen) : nullptr;
}
