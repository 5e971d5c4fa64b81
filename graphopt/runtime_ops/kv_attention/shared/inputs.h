// Reading and checking the inputs of a KVAttention node: nothing is written before all of them are valid.
#pragma once

#include <memory>

#include "abi/tensor.h"
#include "kv_attention/cpu/kernels.h"

namespace graphopt {

enum KVInput : size_t {
  kQuery, kKey, kValue, kPast, kNew, kSinkLogits, kSinkQuery, kKeys, kValues, kScales, kRecent, kSummaries, kKVInputs
};
constexpr size_t kKeyFeedback = kKVInputs;  // behind them, of nodes with the attribute key_feedback
constexpr int64_t kMostSize = 256, kMostOfFloats = 512, kMostLatent = 1280;  // channels of a head
constexpr size_t kStates = 5;  // keys to summaries; output 1 + i is the updated input kKeys + i

// The types of a node's tensors, from that of queries, keys and values, and that of pages.
template <int Activations>
struct KVTypes {
  static constexpr const char* kName = "KVAttention";
  static constexpr size_t kInputs = kKVInputs + 1, kOptionalInputs = 1, kOutputs = 1 + kStates;
  static int input_type(size_t index, int pages) {
    switch (index) {
      case kQuery: case kKey: case kValue: case kSinkQuery: return Activations;
      case kPast: case kNew: return kInt64;
      case kKeys: case kValues: return pages;
      case kScales: case kKeyFeedback: return kFloat16;
      default: return kFloat;
    }
  }
  static int output_type(size_t index, int pages) { return index == 0 ? Activations : input_type(kKeys + index - 1, pages); }
};

// Slopes of query heads: each token j that a query at p reads scores slope (j - p) more (ALiBi).
struct Slopes {
  std::unique_ptr<float[]> numbers;
  size_t count = 0;  // 0: absent

  // Reads the attribute `slopes`, which goes with no soft cap; `chooses` says whether pages are chosen or compensated.
  OrtStatus* read(const Node& node, const OrtKernelInfo* info, const Layout& layout, bool chooses);
  // Hands them to a call, whose query heads are known.
  OrtStatus* give(const Node& node, Attention* call) const;
};

// The attributes of a node.
struct KVAttributes {
  Layout layout;  // without the fields that depend on shapes
  std::unique_ptr<Policy[]> policies;
  Slopes slopes;
  bool wraps = false;  // all of them may drop tokens

  bool uses(Policy policy) const {
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      if (policies[head] == policy) return true;
    }
    return false;
  }
  // Channels of a head, at most: kernels for codes and for the choice of pages have room for fewer.
  int64_t most_channels() const {
    if (layout.latent()) return kMostLatent;
    bool chooses = layout.integers() || layout.compensate;
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      chooses = chooses || makes_lists(policies[head]) || chooses_in_blocks(policies[head]);
    }
    return chooses ? kMostSize : kMostOfFloats;
  }

  OrtStatus* read(const Node& node, const OrtKernelInfo* info, int type);
};

// Reads the attribute `chunks`, and whether it fits the window that was read before it.
OrtStatus* read_chunked(const Node& node, const OrtKernelInfo* info, Layout* layout);

// A tensor of up to 4 axes; reading it takes no memory.
struct Given {
  void* data = nullptr;
  int type = 0;
  size_t rank = 0;
  int64_t shape[4] = {};

  OrtStatus* read(const Node& node, const OrtValue* value, const char* name);
  // Reads the input `feedback`, [kv_heads, size, size], into the call, whose sizes are known.
  OrtStatus* read_feedback(const Node& node, OrtKernelContext* context, size_t input, Attention* call);
  bool empty() const;
  size_t width() const;  // bytes of a number
  size_t bytes() const;
  size_t numbers() const { return bytes() / width(); }
};

// Reads the inputs of a call, all of which must be given, by their names.
template <size_t Count>
OrtStatus* read_given(const Node& node, OrtKernelContext* context, const char* const (&names)[Count],
                      Given (&tensors)[Count]) {
  for (size_t index = 0; index < Count; ++index) {
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, index, &value));
    if (!value) return node.error("%s must be given", names[index]);
    GRAPHOPT_RETURN_IF_ERROR(tensors[index].read(node, value, names[index]));
  }
  return nullptr;
}

struct KVInputs {
  static const char* const kNames[kKVInputs];
  Given tensors[kKVInputs];
  Given feedback;
  Given y;  // as the query, with heads of the size of values; without data

  // What an output is like: y, and each state like itself.
  const Given& of_output(size_t output) const {
    return output ? tensors[kKeys + output - 1] : y;
  }
  // Allocates the outputs; states are at multiples of at least `alignment` bytes. A state may be updated in place;
  // nothing else may be written where something is still read.
  OrtStatus* make_outputs(const Node& node, OrtKernelContext* context, size_t alignment, void** written) const;
  // Fills in everything of the call but y and the state.
  OrtStatus* read(const Node& node, const KVAttributes& attributes, OrtKernelContext* context, Attention* call);

 private:
  OrtStatus* check_memory(const Node& node, void* const* outputs) const;
  OrtStatus* check_state(const Node& node, const Attention& call) const;
  OrtStatus* check_lengths(const Node& node, const KVAttributes& attributes, const Attention& call) const;
};

}  // namespace graphopt
