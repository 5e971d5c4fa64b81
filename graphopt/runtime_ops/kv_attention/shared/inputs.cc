#include "kv_attention/shared/inputs.h"

#include <cstring>
#include <initializer_list>

#include "kv_attention/shared/text.h"

namespace graphopt {

const char* const KVInputs::kNames[kKVInputs] = {"query", "key", "value", "past", "new", "sink_logits",
                                                 "sink_query", "keys", "values", "scales", "recent", "summaries"};

OrtStatus* Given::read(const Node& node, const OrtValue* value, const char* name) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(GetTensorTypeAndShape::call(node.api, value, &info));
  OrtStatus* status = GetTensorElementType::call(node.api, info, &type);
  if (!status) status = GetDimensionsCount::call(node.api, info, &rank);
  if (!status && rank <= 4) status = GetDimensions::call(node.api, info, shape, rank);
  ReleaseTensorTypeAndShapeInfo::call(node.api, info);
  // The function returns a mutable pointer but accepts any value; inputs are only read.
  if (!status) status = GetTensorMutableData::call(node.api, const_cast<OrtValue*>(value), &data);
  GRAPHOPT_RETURN_IF_ERROR(status);
  if (rank > 4) return node.error("%s has %zu axes", name, rank);
  if (reinterpret_cast<uintptr_t>(data) % width() == 0) return nullptr;
  return node.error("%s lies at no multiple of %zu bytes; if that is external data, save the file again", name,
                    width());
}

size_t Given::width() const {
  return type == kInt64 ? 8 : type == kFloat || type == kInt32 ? 4 : type == kFloat16 || type == kBFloat16 ? 2 : 1;
}

size_t Given::bytes() const {
  size_t bytes = width();
  for (size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<size_t>(shape[axis]);
  return bytes;
}

bool Given::empty() const {
  for (size_t axis = 0; axis < rank; ++axis) {
    if (!shape[axis]) return true;
  }
  return false;
}

OrtStatus* Given::read_feedback(const Node& node, OrtKernelContext* context, size_t input, Attention* call) {
  const OrtValue* value = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, input, &value));
  if (!value) return node.error("feedback must be given, as its attribute key_feedback is 1");
  GRAPHOPT_RETURN_IF_ERROR(read(node, value, "feedback"));
  const auto heads = static_cast<int64_t>(call->layout.kv_heads), size = static_cast<int64_t>(call->layout.size);
  if (rank != 3 || shape[0] != heads || shape[1] != size || shape[2] != size) {
    return node.error("feedback must have the shape [%lld, %lld, %lld]; it is %s", print(heads), print(size),
                      print(size), Text(*this).characters);
  }
  call->feedback = static_cast<const Half*>(static_cast<const void*>(data));
  return nullptr;
}

OrtStatus* KVInputs::read(const Node& node, const KVAttributes& attributes, OrtKernelContext* context,
                          Attention* call) {
  GRAPHOPT_RETURN_IF_ERROR(read_given(node, context, kNames, tensors));
  call->layout = attributes.layout;
  call->policies = attributes.policies.get();
  Layout& layout = call->layout;
  const Given &query = tensors[kQuery], &key = tensors[kKey], &value = tensors[kValue];
  const int64_t heads = static_cast<int64_t>(layout.kv_heads), most = attributes.most_channels();
  if (key.rank != 3 || key.shape[2] % heads || (key.shape[2] / heads) % 16 || key.shape[2] / heads < 16 ||
      key.shape[2] / heads > most) {
    return node.error("key must have the shape [batch, tokens, %lld heads x size], size a multiple of 16 up to %lld; "
                      "it is %s",
                      print(heads), print(most), Text(key).characters);
  }
  if (key.shape[2] / heads % static_cast<int64_t>(layout.unit())) {
    return node.error("key must have heads of a multiple of %lld numbers, as codes of %lld bits are packed; it is %s",
                      print(static_cast<int64_t>(layout.unit())), print(static_cast<int64_t>(layout.bits)),
                      Text(key).characters);
  }
  const int64_t size = key.shape[2] / heads, batch = key.shape[0], columns = key.shape[1];
  if (layout.latent()) {
    if (value.rank != 1 || value.shape[0]) {
      return node.error("value must have the shape [0], as values are numbers of key; it is %s", Text(value).characters);
    }
    if (static_cast<int64_t>(layout.value_size) > size) {
      return node.error("its attribute value_size is %lld, and a head of key has %lld numbers",
                        print(static_cast<int64_t>(layout.value_size)), print(size));
    }
  } else if (value.rank != 3 || std::memcmp(value.shape, key.shape, sizeof key.shape)) {
    return node.error("value must have the shape of key, %s; it is %s", Text(key).characters, Text(value).characters);
  }
  if (query.rank != 3 || query.shape[0] != batch || query.shape[1] != columns || query.shape[2] < 1 ||
      query.shape[2] % (heads * size) || query.shape[2] / (heads * size) > kMostHeads) {
    return node.error("query must have the shape [%lld, %lld, a multiple of %lld]; it is %s", print(batch),
                      print(columns), print(heads * size), Text(query).characters);
  }
  layout.size = static_cast<size_t>(size);
  layout.group = static_cast<size_t>(query.shape[2] / (heads * size));
  GRAPHOPT_RETURN_IF_ERROR(attributes.slopes.give(node, call));
  call->rows = static_cast<size_t>(batch);
  call->columns = static_cast<size_t>(columns);
  call->query = static_cast<const float*>(query.data);
  call->key = static_cast<const float*>(key.data);
  call->value = layout.latent() ? nullptr : static_cast<const float*>(value.data);
  y = query, y.data = nullptr;
  y.shape[2] = static_cast<int64_t>(layout.query_heads() * layout.value_channels());
  for (KVInput index : {kPast, kNew}) {
    if (tensors[index].rank != 1 || tensors[index].shape[0] != batch) {
      return node.error("%s must have the shape [%lld]; it is %s", kNames[index], print(batch),
                        Text(tensors[index]).characters);
    }
  }
  call->past = static_cast<const int64_t*>(tensors[kPast].data);
  call->fresh = static_cast<const int64_t*>(tensors[kNew].data);
  const Given &logits = tensors[kSinkLogits], &sink_query = tensors[kSinkQuery];
  if (logits.rank != 1 || logits.shape[0]) {
    if (logits.rank != 1 || logits.shape[0] != static_cast<int64_t>(layout.query_heads())) {
      return node.error("sink_logits must have the shape [%lld] or [0]; it is %s", print(layout.query_heads()),
                        Text(logits).characters);
    }
    call->sink_logits = static_cast<const float*>(logits.data);
  }
  if (sink_query.rank != 1 || sink_query.shape[0]) {
    if (sink_query.rank != 3 || std::memcmp(sink_query.shape, query.shape, sizeof query.shape)) {
      return node.error("sink_query must have the shape of query, %s, or [0]; it is %s", Text(query).characters,
                        Text(sink_query).characters);
    }
    call->sink_query = static_cast<const float*>(sink_query.data);
  }
  if (layout.key_feedback) GRAPHOPT_RETURN_IF_ERROR(feedback.read_feedback(node, context, kKeyFeedback, call));
  const Given& keys = tensors[kKeys];
  layout.pages = keys.rank == 4 ? static_cast<size_t>(keys.shape[2]) : 0;
  layout.complete([&](Policy policy) { return attributes.uses(policy); });
  GRAPHOPT_RETURN_IF_ERROR(check_state(node, *call));
  return check_lengths(node, attributes, *call);
}

OrtStatus* KVInputs::check_state(const Node& node, const Attention& call) const {
  const Layout& layout = call.layout;
  const auto batch = static_cast<int64_t>(call.rows), heads = static_cast<int64_t>(layout.kv_heads);
  const auto pages = static_cast<int64_t>(layout.pages);
  const auto of_page = static_cast<int64_t>(layout.key_bytes() / tensors[kKeys].width());
  const auto values_of_page = static_cast<int64_t>(layout.value_bytes() / tensors[kKeys].width());
  const bool integers = layout.integers();
  struct Wanted {
    KVInput index;
    int64_t third, last;
    bool used;
  };
  const Wanted all[kStates] = {{kKeys, pages, of_page, true},
                               {kValues, pages, values_of_page, !layout.latent()},
                               {kScales, pages, static_cast<int64_t>(layout.scales()), integers},
                               {kRecent, static_cast<int64_t>(layout.slots()), static_cast<int64_t>(layout.slot_floats()), integers},
                               {kSummaries, pages, static_cast<int64_t>(layout.summary), layout.summary > 0}};
  for (const Wanted& wanted : all) {
    const Given& tensor = tensors[wanted.index];
    if (wanted.used) {
      const int64_t shape[4] = {batch, heads, wanted.third, wanted.last};
      if (tensor.rank == 4 && !std::memcmp(tensor.shape, shape, sizeof shape)) continue;
      return node.error("%s must have the shape [%lld, %lld, %lld, %lld]; it is %s", kNames[wanted.index], print(batch),
                        print(heads), print(wanted.third), print(wanted.last), Text(tensor).characters);
    }
    if (tensor.rank == 4 && tensor.empty()) continue;
    return node.error("%s must have 4 axes and no numbers, as it is not used; it is %s", kNames[wanted.index],
                      Text(tensor).characters);
  }
  return nullptr;
}

OrtStatus* KVInputs::check_lengths(const Node& node, const KVAttributes& attributes, const Attention& call) const {
  const Layout& layout = call.layout;
  const auto columns = static_cast<int64_t>(call.columns), page = static_cast<int64_t>(layout.page);
  for (size_t row = 0; row < call.rows; ++row) {
    const int64_t past = call.past[row], fresh = call.fresh[row];
    if (past < 0 || fresh < 0 || fresh > columns || past > kMostTokens - fresh) {
      return node.error("row %lld has %lld tokens and gets %lld: past must be 0 or more, new from 0 to %lld, their sum "
                        "at most 2^62",
                        print(row), print(past), print(fresh), print(columns));
    }
    // keys are in memory, so their pages are few enough to count tokens
    const auto pages = static_cast<int64_t>(layout.pages), capacity = pages * page;
    if (past + fresh <= capacity) continue;
    if (!attributes.wraps) {
      return node.error("row %lld has %lld tokens and gets %lld, but its %lld pages hold %lld: give it more pages",
                        print(row), print(past), print(fresh), print(pages), print(capacity));
    }
    const int64_t fixed = layout.fixed_pages();
    const int64_t read = layout.window > layout.recent ? layout.window : layout.recent;
    const int64_t least = read + columns + (layout.compensate + 1) * page;
    if (pages <= fixed || (pages - fixed) * page < least) {
      return node.error("row %lld has %lld tokens and gets %lld, but its %lld pages hold %lld, and to be used again "
                        "they must hold the sinks, and besides them %lld tokens: give it more pages",
                        print(row), print(past), print(fresh), print(pages), print(capacity), print(least));
    }
  }
  return nullptr;
}

OrtStatus* KVInputs::make_outputs(const Node& node, OrtKernelContext* context, size_t alignment, void** written) const {
  for (size_t index = 0; index <= kStates; ++index) {
    const Given& like = of_output(index);
    OrtValue* output = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, index, like.shape, like.rank, &output));
    if (!output) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &written[index]));
    const size_t multiple = index && alignment > like.width() ? alignment : like.width();
    if (reinterpret_cast<uintptr_t>(written[index]) % multiple && !like.empty()) {
      return node.error("output %zu lies at no multiple of %zu bytes", index, multiple);
    }
  }
  return check_memory(node, written);
}

OrtStatus* KVInputs::check_memory(const Node& node, void* const* outputs) const {
  const auto meet = [](const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    const auto one = reinterpret_cast<uintptr_t>(a), other = reinterpret_cast<uintptr_t>(b);
    return a_bytes && b_bytes && one < other + b_bytes && other < one + a_bytes;
  };
  for (size_t output = 0; output <= kStates; ++output) {
    const size_t bytes = of_output(output).bytes();
    for (size_t input = 0; input < kKVInputs; ++input) {
      const Given& tensor = tensors[input];
      if (!meet(outputs[output], bytes, tensor.data, tensor.bytes())) continue;
      if (output && &tensor == &of_output(output) && tensor.data == outputs[output]) continue;
      return node.error("output %zu lies in the memory of %s: only a state may be changed in place, by its own output",
                        output, kNames[input]);
    }
    if (feedback.data && meet(outputs[output], bytes, feedback.data, feedback.bytes())) {
      return node.error("output %zu lies in the memory of feedback", output);
    }
    for (size_t other = 0; other < output; ++other) {
      if (!meet(outputs[output], bytes, outputs[other], of_output(other).bytes())) continue;
      return node.error("outputs %zu and %zu lie in the same memory", other, output);
    }
  }
  return nullptr;
}

}  // namespace graphopt
