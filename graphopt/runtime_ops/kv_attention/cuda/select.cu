#include "kv_attention/cuda/policies/retrieval.h"

namespace graphopt {
namespace {

size_t round_up(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

SelectRun::SelectRun(const CudaCall& call, const CudaPlan& plan, Policy policy)
    : call(call), first(plan.first), end(plan.end), policy(policy) {
  const int number = static_cast<int>(policy);
  retrieving = plan.heads_of(number);
  for (int i = 0; i < retrieving; ++i) heads[i] = plan.heads[plan.first_head[number] + i];
  for (int row = 0; row < call.rows; ++row) {
    if (!tokens(row)) continue;
    const int64_t last = call.past[row] + first + tokens(row) - 1;
    // with a window the number of candidates does not always grow; their pages' indices do
    const Candidates candidates(call.layout, last);
    const int64_t most = candidates.end - candidates.first + 1;
    const auto floats = static_cast<int64_t>(list_floats(call.layout, static_cast<size_t>(most)));
    const auto list = static_cast<int32_t>(longest_list(policy, call.layout, last));
    stride = floats > stride ? floats : stride, longest = list > longest ? list : longest;
  }
}

size_t SelectRun::bytes() const {
  return lists() * (static_cast<size_t>(stride) * sizeof(float)) +
         round_up(lists() * static_cast<size_t>(longest) * 4) +
         round_up(lists() * 4);
}

void SelectRun::take(char* scratch) {
  scores = reinterpret_cast<float*>(scratch);
  entries = reinterpret_cast<int32_t*>(scratch + lists() * (static_cast<size_t>(stride) * sizeof(float)));
  counts = entries + round_up(lists() * static_cast<size_t>(longest) * 4) / 4;
}

const char* make_lists(const SelectRun& run, void* stream) {
  if (!run.lists()) return nullptr;
  int64_t most = 0;
  for (int row = 0; row < run.call.rows; ++row) {
    if (!run.tokens(row)) continue;
    const Candidates candidates(run.call.layout, run.call.past[row] + run.first + run.tokens(row) - 1);
    most = candidates.end - candidates.first + 1 > most ? candidates.end - candidates.first + 1 : most;
  }
  return with_policy(run.policy, [&](auto states) -> const char* {
    if constexpr (decltype(states)::kLists) return make_lists(states, run, most, stream);
    return nullptr;
  });
}

}  // namespace graphopt
