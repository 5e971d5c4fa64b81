// Reading and checking a PagedAttention node and its inputs: nothing is written before all of them are valid.
#pragma once

#include <memory>

#include "kv_attention/cpu/kernels.h"
#include "kv_attention/shared/inputs.h"

namespace graphopt {

enum PagedInput : size_t {
  kPagedQuery, kPagedKey, kPagedValue, kStarts, kPagedPast, kTable, kPagedLogits, kKeyBlocks, kValueBlocks, kKeyScales,
  kValueScales, kPagedInputs
};
constexpr size_t kPagedFeedback = kPagedInputs, kPagedChosen = kPagedInputs + 1;  // of nodes that an attribute says
constexpr size_t kPools = 4;  // output 1 + i is the updated input kKeyBlocks + i

// The attributes of a node.
struct PagedAttributes {
  Layout layout;  // without the fields that depend on shapes
  std::unique_ptr<Policy[]> policies;
  Slopes slopes;

  OrtStatus* read(const Node& node, const OrtKernelInfo* info, int type);
};

struct PagedGiven {
  static const char* const kNames[kPagedInputs];
  Given tensors[kPagedInputs];
  Given feedback;                      // of nodes with the attribute key_feedback
  Given chosen;                        // of nodes with the attribute chooses
  std::unique_ptr<size_t[]> counts;    // positions that each token chooses
  std::unique_ptr<int64_t[]> lengths;  // past, then new tokens of each request
  Given y;                             // the output as it will be: only its type and its shape

  // Fills in all of the call but activations and memory that is written.
  OrtStatus* read(const Node& node, const PagedAttributes& attributes, OrtKernelContext* context, Attention* call);

 private:
  OrtStatus* check_pools(const Node& node, Attention* call) const;
  OrtStatus* check_tokens(const Node& node, Attention* call, size_t* tokens);
  OrtStatus* check_lengths(const Node& node, Attention* call, size_t tokens);
  OrtStatus* read_chosen(const Node& node, OrtKernelContext* context, Attention* call, size_t tokens);
  OrtStatus* check_blocks(const Node& node, const Attention& call, size_t tokens) const;
};

}  // namespace graphopt
