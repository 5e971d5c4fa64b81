// Requests that begin with the same blocks: their queries read these together, so that each block is read once.
#pragma once

#include "abi/pool.h"
#include "kv_attention/cpu/kernels.h"

namespace graphopt {

class Groups {
 public:
  explicit Groups(Pool& pool, const Attention& call);
  bool no_memory() const { return !loan_.memory; }
  // Lets the call read its common pages by groups, if there are any; valid as long as this object.
  void find(Attention* call);

 private:
  struct Row;
  static size_t bytes(const Attention& call);

  // Of the rows first..end, which have the first `page` pages in common.
  void split(size_t first, size_t end, int64_t page, size_t depth);
  // How many pages two rows have in common.
  int64_t common(const Row& a, const Row& b, int64_t from) const;

  const Attention& call_;
  const Pool::Loan loan_;
  Row* rows_ = nullptr;
  Member* members_ = nullptr;
  Group* groups_ = nullptr;
  int64_t* grouped_ = nullptr;
  size_t count_ = 0;
};

}  // namespace graphopt
