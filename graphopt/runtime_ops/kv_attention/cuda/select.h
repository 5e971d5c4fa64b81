// Retrieval on the device: scores of pages from their summaries, and lists of the pages that queries read.
#pragma once

#include "kv_attention/cuda/attend.h"

namespace graphopt {

// Where the lists of one launch are made, [row][retrieving head][new token] each, and the most that any of them takes.
struct SelectRun {
  CudaCall call;
  int32_t first = 0, end = 0;  // new tokens of each row
  int32_t retrieving = 0;      // heads
  uint8_t heads[kMostHeads] = {};
  int64_t stride = 0;  // floats of a list's scores, with weights behind them where `mass` asks for them
  int32_t longest = 0;
  float* scores = nullptr;
  int32_t *entries = nullptr, *counts = nullptr;

  // For the heads of a plan of retrieval alone.
  SelectRun(const CudaCall& call, const CudaPlan& plan);
  size_t lists() const {
    return static_cast<size_t>(call.rows) * static_cast<size_t>(retrieving) * static_cast<size_t>(end - first);
  }
  // Bytes of scratch, and where its parts are; a multiple of 16.
  size_t bytes() const;
  void take(char* scratch);
  CudaLists made() const { return {entries, counts, longest}; }

  GRAPHOPT_BOTH int32_t tokens(int row) const {
    const int32_t last = call.fresh[row] < end ? call.fresh[row] : end;
    return last > first ? last - first : 0;
  }
};

const char* score_and_list(const SelectRun& run, void* stream);

}  // namespace graphopt
