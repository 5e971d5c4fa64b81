// What graphopt/rounding/native.py calls.
#include "cpu/round.h"

#include "abi/instructions.h"

using graphopt::Instructions;
using graphopt::RoundWork;

// Returns 0 where GRAPHOPT_OPS_ISA is unknown or not of this machine.
extern "C" __attribute__((visibility("default"))) int graphopt_round_groups(const RoundWork* work) {
  Instructions chosen;
  if (!graphopt::choose_instructions(&chosen)) return 0;
  graphopt::RoundKernel kernel = graphopt::kRoundScalar;
#if defined(__x86_64__)
  if (chosen >= Instructions::kAvx2) kernel = graphopt::kRoundAvx2;
  if (chosen == Instructions::kAvx512) kernel = graphopt::kRoundAvx512;
#endif
  kernel(*work);
  return 1;
}
