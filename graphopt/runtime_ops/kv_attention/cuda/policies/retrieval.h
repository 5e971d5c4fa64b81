// The lists of retrieval: pages are scored by their summaries, and those of the highest scores are read.
#pragma once

#include "kv_attention/cuda/select.h"

namespace graphopt {

inline const char* make_lists(Retrieval, const SelectRun& run, int64_t most, void* stream) {
  if (run.call.layout.budget) {
    if (const char* failure = score(run, most, stream)) return failure;
  }
  return list(run, most, stream);
}

}  // namespace graphopt
