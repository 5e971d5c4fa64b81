// What graphopt/quantization/rounding/native.py calls. Functions return 0 where GRAPHOPT_OPS_ISA is unknown or not of
// this machine.
#include "cpu/round.h"

#include "abi/instructions.h"

using graphopt::Instructions;
using graphopt::RoundWork;
using graphopt::SearchWork;

extern "C" __attribute__((visibility("default"))) int graphopt_round_groups(const RoundWork* work) {
  Instructions chosen;
  if (!graphopt::choose_instructions(&chosen)) return 0;
  GRAPHOPT_OF(chosen, graphopt::kRound)(*work);
  return 1;
}

extern "C" __attribute__((visibility("default"))) int graphopt_search_groups(const SearchWork* work) {
  Instructions chosen;
  if (!graphopt::choose_instructions(&chosen)) return 0;
  GRAPHOPT_OF(chosen, graphopt::kSearch)(*work);
  return 1;
}
