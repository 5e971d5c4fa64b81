// What graphopt/quantization/rounding/native.py calls. Functions return 0 where GRAPHOPT_OPS_ISA is unknown or not of
// this machine.
#include "cpu/round.h"
#include "cpu/trellis.h"

#include <cstdlib>

#include "abi/instructions.h"

using graphopt::FeedbackWork;
using graphopt::Instructions;
using graphopt::RoundWork;
using graphopt::SearchWork;
using graphopt::TrellisWork;
using graphopt::TrialWork;

extern "C" __attribute__((visibility("default"))) int graphopt_round_groups(const RoundWork* work) {
  Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  GRAPHOPT_OF(instructions, graphopt::kRound)(*work);
  return 1;
}

extern "C" __attribute__((visibility("default"))) int graphopt_search_groups(const SearchWork* work) {
  Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  GRAPHOPT_OF(instructions, graphopt::kSearch)(*work);
  return 1;
}

namespace {

constexpr size_t kAlignment = 64;

// Calls a kernel with scratch; false where there is no memory for it.
template <typename Call>
bool with_scratch(size_t bytes, const Call& call) {
  void* const memory = std::malloc(bytes + kAlignment);
  if (!memory) return false;
  call(static_cast<char*>(memory) + (kAlignment - reinterpret_cast<uintptr_t>(memory) % kAlignment));
  std::free(memory);
  return true;
}

}  // namespace

// Also 0 where there is no memory for the search.
extern "C" __attribute__((visibility("default"))) int graphopt_search_trellis(const TrellisWork* work) {
  Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  return with_scratch(graphopt::trellis_scratch(work->bits, work->window), [&](void* scratch) {
    TrellisWork aligned_work = *work;
    aligned_work.scratch = scratch;
    GRAPHOPT_OF(instructions, graphopt::kTrellis)(aligned_work);
  });
}

extern "C" __attribute__((visibility("default"))) int graphopt_try_scales(const TrialWork* work) {
  Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  const size_t bytes = graphopt::trial_scratch(work->search.columns) + kAlignment +
                       graphopt::trellis_scratch(work->search.bits, work->search.window);
  return with_scratch(bytes, [&](void* scratch) {
    TrialWork aligned_work = *work;
    aligned_work.search.scratch = scratch;
    GRAPHOPT_OF(instructions, graphopt::kTrial)(aligned_work);
  });
}

extern "C" __attribute__((visibility("default"))) int graphopt_feed_back(const FeedbackWork* work) {
  Instructions instructions;
  if (!graphopt::choose_instructions(&instructions)) return 0;
  const size_t bytes = graphopt::feedback_scratch(work->search.columns) + kAlignment +
                       graphopt::trellis_scratch(work->search.bits, work->search.window);
  return with_scratch(bytes, [&](void* scratch) {
    FeedbackWork aligned_work = *work;
    aligned_work.search.scratch = scratch;
    GRAPHOPT_OF(instructions, graphopt::kFeedback)(aligned_work);
  });
}
