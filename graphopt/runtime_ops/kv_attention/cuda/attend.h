// Attention of the new queries, once the state is up to date, and the scratch that it takes.
#pragma once

#include "kv_attention/cuda/call.h"
#include "kv_attention/cuda/plan.h"

namespace graphopt {

// Pages that retrieval chose: lists of `longest` entries, twice a page's index and 1 where the whole of it was chosen,
// and how many there are: [row][retrieving head][new token].
struct CudaLists {
  const int32_t* entries = nullptr;
  const int32_t* counts = nullptr;
  int32_t longest = 0;
};

// One launch: how it is cut into units, one for each warp.
struct AttendRun {
  CudaCall call;
  CudaPlan plan;
  CudaLists lists;
  float* partials = nullptr;
};

// Each starts kernels and returns null or an error: those of a plan, and of these the one that merges what is cut.
const char* attend_and_merge(const AttendRun& run, void* stream);
const char* merge_parts(const AttendRun& run, void* stream);

// Blocks that read for kWideTiles tiles of queries, of heads that make no lists; `tokens` are the most new ones of a row.
bool takes_wide(const CudaCall& call, int32_t tokens);
const char* start_wide(const AttendRun& run, void* stream);
const char* start_wide_codes(const AttendRun& run, void* stream);

// Those of prompts on sm_90a: of 128 queries, by products of groups of warps.
bool takes_prompt(const CudaCall& call);
const char* start_prompt(const AttendRun& run, void* stream);

}  // namespace graphopt
