// Reading and checking what a KVAttention node is given: nothing is written before all of it fits.
#pragma once

#include <memory>

#include "abi/tensor.h"
#include "kv_attention/cpu.h"

namespace graphopt {

enum KVInput : size_t {
  kQuery, kKey, kValue, kPast, kNew, kSinkLogits, kSinkQuery, kKeys, kValues, kScales, kRecent, kSummaries, kKVInputs
};
constexpr size_t kStates = 5;  // keys to summaries; output 1 + i is what became of input kKeys + i

// The attributes of a node.
struct KVAttributes {
  Layout layout;  // but for what shapes say
  std::unique_ptr<Policy[]> policies;
  bool retrieves = false, wraps = false;  // a head retrieves; all of them stream

  OrtStatus* read(const Node& node, const OrtKernelInfo* info, int type);
};

// A tensor of up to 4 axes; reading it takes no memory.
struct Given {
  void* data = nullptr;
  int type = 0;
  size_t rank = 0;
  int64_t shape[4] = {};

  OrtStatus* read(const Node& node, const OrtValue* value, const char* name);
  bool empty() const;
  size_t width() const;  // bytes of a number
  size_t bytes() const;
};

struct KVInputs {
  static const char* const kNames[kKVInputs];
  Given tensors[kKVInputs];

  // Fills in everything of the call but y and the state.
  OrtStatus* read(const Node& node, const KVAttributes& attributes, OrtKernelContext* context, Attention* call);

 private:
  OrtStatus* check_state(const Node& node, const Attention& call) const;
  OrtStatus* check_lengths(const Node& node, const KVAttributes& attributes, const Attention& call) const;
};

}  // namespace graphopt
