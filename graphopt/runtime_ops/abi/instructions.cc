#include "abi/instructions.h"

#include <cstdlib>
#include <cstring>

namespace graphopt {
namespace {

bool has(Instructions instructions) {
  if (instructions == Instructions::kScalar) return true;
#if defined(__x86_64__)
  // these also check that the operating system saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (instructions == Instructions::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

bool choose_instructions(Instructions* chosen) {
  constexpr Instructions kWidestFirst[] = {Instructions::kAvx512, Instructions::kAvx2, Instructions::kScalar};
  constexpr const char* kNames[] = {"avx512", "avx2", "scalar"};
  const char* wanted = std::getenv("GRAPHOPT_OPS_ISA");
  for (int i = 0; i < 3; ++i) {
    const bool asked = !wanted || !*wanted || !std::strcmp(wanted, kNames[i]);
    if (asked && has(kWidestFirst[i])) {
      *chosen = kWidestFirst[i];
      return true;
    }
  }
  return false;
}

}  // namespace graphopt
