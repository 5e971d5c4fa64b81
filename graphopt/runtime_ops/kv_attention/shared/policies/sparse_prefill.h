// Sparse prefill: whole blocks of a prompt's queries read the pages that hold most of the attention of some of them; all
// other queries read everything.
#pragma once

#include "kv_attention/shared/policies/policy.h"

namespace graphopt {

constexpr int64_t kMostSamples = 1024;  // tokens of a block, and so its sampled queries

struct SparsePrefill : AnyPolicy {
  static constexpr bool kReadsAll = true;
  static constexpr bool kBlocks = true;
  struct Parameters {
    float prefill_mass = 0;    // of the sampled queries
    int64_t query_block = 0;   // tokens of a block; 0: all queries read everything
    int64_t query_stride = 0;  // of which each n-th is sampled
  };
  template <typename Reader>
  static auto read(Parameters* parameters, const Reader& reader) {
    auto failure = reader.share("prefill_mass", &parameters->prefill_mass);
    if (!failure) failure = reader.optional_count("query_block", &parameters->query_block);
    if (!failure) failure = reader.optional_count("query_stride", &parameters->query_stride);
    if (failure) return failure;
    return reader.multiple("query_block", parameters->query_block, "query_stride", parameters->query_stride, kMostSamples);
  }
};

}  // namespace graphopt
