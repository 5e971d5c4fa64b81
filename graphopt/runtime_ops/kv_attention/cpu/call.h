// One call, as tasks. They write to memory of their own; the last one to end of those that share queries merges their
// results.
#pragma once

#include <atomic>

#include "abi/pool.h"
#include "abi/tensor.h"
#include "kv_attention/cpu/plan.h"
#include "kv_attention/shared/select.h"

namespace graphopt {

// The kernels for the instructions that this machine has, or that the environment asks for.
OrtStatus* choose_kernels(const Node& node, const KVAttentionKernels** kernels);

class Call {
 public:
  Call(const Node& node, const KVAttentionKernels& kernels, Pool& pool, OrtKernelContext* context,
       const Attention& attention)
      : node_(node), kernels_(kernels), pool_(pool), context_(context), attention_(attention), plan_(attention) {}

  // Appends the new tokens, then attends.
  OrtStatus* run();

 private:
  // Scores or attends to some of the pages of a block of queries.
  struct Step {
    enum Kind : uint32_t { kScore, kAttend } kind;
    Run run;  // of kAttend: the first of the blocks, the number of their run, how many blocks
  };
  // The list of a block: its scores, its list, and how many steps have not scored yet; -1 once the list is complete.
  struct Listing {
    float* scores;
    PageEntry* list;
    std::atomic<int64_t> left;
  };
  static constexpr size_t kFewRows = 32;

  // Where the partial results of a block lie, and how many steps have not ended.
  struct Parts {
    float* first;
    size_t count;
    std::atomic<size_t> left;
  };
  Source source(size_t block, size_t first_row = 0) const {
    return {parts_[block].first, parts_[block].count, rows(queries_[block]), first_row};
  }

  OrtStatus* append_all();
  OrtStatus* attend_all();
  OrtStatus* for_each(void (Call::*task)(size_t), size_t tasks, bool parallel);

  // Tasks.
  void append(size_t index);
  void attend_block(size_t index);  // all of a block, run by run
  void take_step(size_t index);     // the next step, if some wait for others
  void merge_block(size_t index);   // with what groups have read for it

  void score(const Run& run);
  void list(Queries* block, const Listing& listing) const;
  void attend(const Run& run);
  // Calls visit(step) in an order in which a list is ready, or nearly, when it is read.
  template <typename Visit>
  void each_step(const Visit& visit);

  // How many blocks from this one on a step attends to: those of several heads, where few queries wait for memory.
  size_t heads_together(const Queries& block) const {
    const bool whole = block.members || block.columns() == attention_.end_column(block.row);
    return whole && rows(block) <= kFewRows ? plan_.heads : 1;
  }
  size_t rows(const Queries& block) const { return block.columns() * attention_.layout.group; }

  const Node& node_;
  const KVAttentionKernels& kernels_;
  Pool& pool_;
  OrtKernelContext* context_;
  const Attention& attention_;
  const Plan plan_;
  Queries* queries_ = nullptr;
  Listing* listings_ = nullptr;
  Parts* parts_ = nullptr;
  Step* steps_ = nullptr;
  std::atomic<size_t> next_{0};
  bool ordered_ = false;  // some steps wait for others
  std::atomic<bool> no_memory_{false};
  // Whether one task has all of what a head appends and reads: then it does both, while the page is at hand.
  bool together_ = false;
};

}  // namespace graphopt
