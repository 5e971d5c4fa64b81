// What graphopt/rounding/native.py calls.
#include "cpu/round.h"

#include "abi/instructions.h"

using graphopt::Instructions;
using graphopt::RoundWork;

// Returns 0 where GRAPHOPT_OPS_ISA is unknown or not of this machine.
extern "C" __attribute__((visibility("default"))) int graphopt_round_groups(const RoundWork* work) {
  Instructions chosen;
  if (!graphopt::choose_instructions(&chosen)) return 0;
  GRAPHOPT_OF(chosen, graphopt::kRound)(*work);
  return 1;
}
