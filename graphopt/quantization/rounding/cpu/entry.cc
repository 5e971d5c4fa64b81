// What graphopt/quantization/rounding/native.py calls. Functions return 0 where GRAPHOPT_OPS_ISA is unknown or not of
// this machine.
#include "cpu/round.h"
#include "cpu/trellis.h"

#include <cstdlib>

#include "abi/instructions.h"

using graphopt::Instructions;
using graphopt::RoundWork;
using graphopt::SearchWork;
using graphopt::TrellisWork;

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

// Also 0 where there is no memory for the search.
extern "C" __attribute__((visibility("default"))) int graphopt_search_trellis(const TrellisWork* work) {
  Instructions chosen;
  if (!graphopt::choose_instructions(&chosen)) return 0;
  constexpr size_t kAlignment = 64;
  void* const memory = std::malloc(graphopt::trellis_scratch(work->bits, work->window) + kAlignment);
  if (!memory) return 0;
  TrellisWork aligned = *work;
  aligned.scratch = static_cast<char*>(memory) + (kAlignment - reinterpret_cast<uintptr_t>(memory) % kAlignment);
  GRAPHOPT_OF(chosen, graphopt::kTrellis)(aligned);
  std::free(memory);
  return 1;
}
