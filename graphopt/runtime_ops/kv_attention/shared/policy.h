// The policies, one line each, in the order of their numbers in spec/policies. What a policy reads and which parameters
// it has is in policies/, how a CPU and a GPU make the lists of one that chooses pages in cpu/policies and
// cuda/policies; nothing else tells policies apart.
#pragma once

#include "kv_attention/shared/policies/dense.h"
#include "kv_attention/shared/policies/retrieval.h"
#include "kv_attention/shared/policies/sparse_prefill.h"
#include "kv_attention/shared/policies/streaming.h"

// POLICY(name in C++, name in a recipe, what it states)
#define GRAPHOPT_POLICIES(POLICY)            \
  POLICY(kDense, "dense", Dense)             \
  POLICY(kStreaming, "streaming", Streaming) \
  POLICY(kRetrieval, "retrieval", Retrieval) \
  POLICY(kSparsePrefill, "sparse_prefill", SparsePrefill)

namespace graphopt {

#define GRAPHOPT_POLICY_NAME(id, name, States) id,
enum class Policy : uint8_t { GRAPHOPT_POLICIES(GRAPHOPT_POLICY_NAME) kCount };
#undef GRAPHOPT_POLICY_NAME
constexpr int kPolicies = static_cast<int>(Policy::kCount);

// What policies state, a bit for each of them.
#define GRAPHOPT_POLICY_BIT(id, name, States) | (States::GRAPHOPT_FLAG ? 1u << static_cast<int>(Policy::id) : 0u)
GRAPHOPT_INLINE bool reads_all(Policy policy) {
#define GRAPHOPT_FLAG kReadsAll
  return (0u GRAPHOPT_POLICIES(GRAPHOPT_POLICY_BIT)) >> static_cast<int>(policy) & 1;
#undef GRAPHOPT_FLAG
}
GRAPHOPT_INLINE bool may_drop(Policy policy) {
#define GRAPHOPT_FLAG kMayDrop
  return (0u GRAPHOPT_POLICIES(GRAPHOPT_POLICY_BIT)) >> static_cast<int>(policy) & 1;
#undef GRAPHOPT_FLAG
}
GRAPHOPT_INLINE bool makes_lists(Policy policy) {
#define GRAPHOPT_FLAG kLists
  return (0u GRAPHOPT_POLICIES(GRAPHOPT_POLICY_BIT)) >> static_cast<int>(policy) & 1;
#undef GRAPHOPT_FLAG
}
GRAPHOPT_INLINE bool chooses_in_blocks(Policy policy) {
#define GRAPHOPT_FLAG kBlocks
  return (0u GRAPHOPT_POLICIES(GRAPHOPT_POLICY_BIT)) >> static_cast<int>(policy) & 1;
#undef GRAPHOPT_FLAG
}
#undef GRAPHOPT_POLICY_BIT

// The parameters of all policies. A policy without any has those of AnyPolicy, which would be a base more than once.
template <typename States>
struct ParametersOf : States::Parameters {};
template <typename... Each>
struct All : Each... {};
#define GRAPHOPT_POLICY_PARAMETERS(id, name, States) ParametersOf<States>,
struct PolicyParameters : All<GRAPHOPT_POLICIES(GRAPHOPT_POLICY_PARAMETERS) ParametersOf<AnyPolicy>> {};
#undef GRAPHOPT_POLICY_PARAMETERS

// Calls visit() with what a policy states.
#define GRAPHOPT_POLICY_CASE(id, name, States) \
  case Policy::id: return visit(States());
GRAPHOPT_CALLS_EITHER
template <typename Visit>
GRAPHOPT_INLINE auto with_policy(Policy policy, const Visit& visit) {
  switch (policy) {
    GRAPHOPT_POLICIES(GRAPHOPT_POLICY_CASE)
    default: __builtin_unreachable();  // it was checked where the attributes were read
  }
}
#undef GRAPHOPT_POLICY_CASE

// Calls visit() with what each policy states.
GRAPHOPT_CALLS_EITHER
template <typename Visit>
GRAPHOPT_INLINE void each_policy(const Visit& visit) {
#define GRAPHOPT_POLICY_VISIT(id, name, States) visit(Policy::id, States());
  GRAPHOPT_POLICIES(GRAPHOPT_POLICY_VISIT)
#undef GRAPHOPT_POLICY_VISIT
}

}  // namespace graphopt
