// Retrieval on the device: scores of pages from their summaries, and lists of the pages that queries read.
#pragma once

#include "kv_attention/cuda/attend.h"

namespace graphopt {

// Where the lists of one launch are made, [row][retrieving head][new token] each, and the most that any of them takes.
struct SelectRun {
  CudaCall call;
  int32_t first = 0, end = 0;  // new tokens of each row
  Policy policy = Policy::kDense;  // one that makes lists
  int32_t retrieving = 0;          // its heads
  uint8_t heads[kMostHeads] = {};
  int64_t stride = 0;  // floats of a list's scores, with weights behind them where `mass` asks for them
  int32_t longest = 0;
  float* scores = nullptr;
  int32_t *entries = nullptr, *counts = nullptr;

  // For the heads of a policy that makes lists.
  SelectRun(const CudaCall& call, const CudaPlan& plan, Policy policy);
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

// What a block scores or lists: x counts new tokens, y is the head among those that retrieve, z the row.
struct SelectTask {
  int row, head;
  int64_t position;
  size_t list;
  bool used;

  GRAPHOPT_DEVICE SelectTask(const SelectRun& run, int token) {
    row = static_cast<int>(block_index().z), head = run.heads[block_index().y];
    used = token < run.tokens(row);
    position = run.call.past[row] + run.first + token;
    list = (static_cast<size_t>(row) * static_cast<size_t>(run.retrieving) + block_index().y) *
               static_cast<size_t>(run.end - run.first) + static_cast<size_t>(token);
  }
};

// Scores the candidates of each list, of which none has more than `most`; then lists the pages. Null, or what went wrong.
const char* score(const SelectRun& run, int64_t most, void* stream);
const char* list(const SelectRun& run, int64_t most, void* stream);
// Makes the lists of a run as its policy does.
const char* make_lists(const SelectRun& run, void* stream);

}  // namespace graphopt
