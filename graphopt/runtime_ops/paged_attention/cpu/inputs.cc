#include "paged_attention/cpu/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <new>

#include "kv_attention/shared/text.h"

namespace graphopt {
namespace {

// A page is what is read at a time: short blocks are read several together.
constexpr int64_t kPageTokens = 64;

struct Kept {
  const char* name;
  int type;
  Storage storage;
};
constexpr Kept kKept[] = {{"float32", kFloat, Storage::kFloat32},
                          {"float16", kFloat16, Storage::kFloat16},
                          {"bfloat16", kBFloat16, Storage::kBFloat16},
                          {"int8", kUint8, Storage::kToken8},
                          {"int6", kUint8, Storage::kToken6},
                          {"int4", kUint8, Storage::kToken4}};

}  // namespace

const char* const PagedGiven::kNames[kPagedInputs] = {
    "query",       "key",  "value",  "starts",     "past",        "block_table",
    "sink_logits", "keys", "values", "key_scales", "value_scales"};

OrtStatus* PagedAttributes::read(const Node& node, const OrtKernelInfo* info, int type) {
  int64_t heads = 0;
  char storage[16] = {};
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "kv_heads", &heads));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "window", &layout.window));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "scale", &layout.scale));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "softcap", &layout.softcap));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "storage", storage, sizeof storage));
  if (heads < 1 || heads > kMostHeads) {
    return node.error("its attribute kv_heads must be from 1 to %lld, it is %lld", print(kMostHeads), print(heads));
  }
  int64_t value_size = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "value_size", &value_size));
  if (value_size % 16 || value_size < 0 || value_size > kMostLatent) {
    return node.error("its attribute value_size must be a multiple of 16 up to %lld, it is %lld", print(kMostLatent),
                      print(value_size));
  }
  layout.value_size = static_cast<size_t>(value_size);
  if (layout.window < 0) return node.error("its attribute window must not be negative, it is %lld", print(layout.window));
  GRAPHOPT_RETURN_IF_ERROR(read_chunked(node, info, &layout));
  if (!std::isfinite(layout.scale) || !std::isfinite(layout.softcap) || layout.softcap < 0) {
    return node.error("its attributes scale and softcap must be finite, and softcap not below 0");
  }
  const auto* kept = std::find_if(std::begin(kKept), std::end(kKept),
                                  [&](const Kept& each) { return !std::strcmp(each.name, storage); });
  if (kept == std::end(kKept)) {
    return node.error("its attribute storage must be one of float32, float16, bfloat16, int8, int6, int4, not '%s'", storage);
  }
  if (kept->type != type) return node.error("keys and values have another type than %s is stored in", storage);
  layout.store_as(kept->storage);
  if (layout.latent() && layout.scales_tokens()) {
    return node.error("with a value_size its attribute storage must be one of float32, float16, bfloat16, not '%s'", storage);
  }
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "key_feedback", &layout.key_feedback));
  if (layout.key_feedback != 0 && !(layout.key_feedback == 1 && layout.scales_tokens())) {
    return node.error("its attribute key_feedback must be 0 or 1, and 0 for floats; it is %lld for %s",
                      print(layout.key_feedback), storage);
  }
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "residuals", &layout.residuals));
  if (layout.residuals != 0 && !(layout.residuals == 1 && layout.scales_tokens())) {
    return node.error("its attribute residuals must be 0 or 1, and 0 for floats; it is %lld for %s",
                      print(layout.residuals), storage);
  }
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "chooses", &layout.chooses));
  if (layout.chooses != 0 && !(layout.chooses == 1 && layout.latent() && !layout.window)) {
    return node.error("its attribute chooses must be 0, or 1 with a value_size and no window; it is %lld",
                      print(layout.chooses));
  }
  layout.window = std::min(layout.window, kMostTokens);
  layout.kv_heads = static_cast<size_t>(heads);
  GRAPHOPT_RETURN_IF_ERROR(slopes.read(node, info, layout, false));
  policies.reset(new (std::nothrow) Policy[layout.kv_heads]());
  return policies ? nullptr : node.error("no memory for %lld heads", print(heads));
}

OrtStatus* PagedGiven::read(const Node& node, const PagedAttributes& attributes, OrtKernelContext* context,
                            Attention* call) {
  GRAPHOPT_RETURN_IF_ERROR(read_given(node, context, kNames, tensors));
  call->layout = attributes.layout;
  call->policies = attributes.policies.get();
  size_t tokens = 0;
  GRAPHOPT_RETURN_IF_ERROR(check_pools(node, call));
  GRAPHOPT_RETURN_IF_ERROR(check_tokens(node, call, &tokens));
  GRAPHOPT_RETURN_IF_ERROR(attributes.slopes.give(node, call));
  if (call->layout.key_feedback) GRAPHOPT_RETURN_IF_ERROR(feedback.read_feedback(node, context, kPagedFeedback, call));
  GRAPHOPT_RETURN_IF_ERROR(check_lengths(node, call, tokens));
  if (call->layout.chooses) GRAPHOPT_RETURN_IF_ERROR(read_chosen(node, context, call, tokens));
  return check_blocks(node, *call, tokens);
}

OrtStatus* PagedGiven::check_pools(const Node& node, Attention* call) const {
  const Given &keys = tensors[kKeyBlocks], &values = tensors[kValueBlocks];
  Layout& layout = call->layout;
  const auto heads = static_cast<int64_t>(layout.kv_heads);
  // bits of a number in an element: of codes that a byte has a part of, or several of
  const int64_t bits = layout.scales_tokens() ? layout.bits : 8;
  const int64_t tokens = keys.rank == 4 ? keys.shape[1] : 0, width = keys.rank == 4 ? keys.shape[3] : 0;
  // half of a latent: half of a block's tokens lie among the values; 64 codes of 6 bits are packed together
  const int64_t step = layout.latent() ? 8 : bits == 6 ? 48 : 16,
                most = layout.latent() ? kMostLatent / 2
                       : layout.scales_tokens() ? kMostSize * bits / 8 : kMostOfFloats;
  const bool fits = keys.rank == 4 && values.rank == 4 && !std::memcmp(keys.shape, values.shape, sizeof keys.shape);
  if (!fits || keys.shape[2] != heads || width % step || width < step || width > most) {
    return node.error("keys and values must have the shape [blocks, tokens, %lld, n], n a multiple of %lld up to %lld; "
                      "they are %s and %s",
                      print(heads), print(step), print(most), Text(keys).characters, Text(values).characters);
  }
  if ((tokens != 16 || layout.latent()) && tokens != 32 && tokens != 64 && tokens != 128) {
    return node.error("a block must have %s32, 64 or 128 tokens, it has %lld", layout.latent() ? "" : "16, ", print(tokens));
  }
  layout.size = static_cast<size_t>(layout.latent() ? 2 * width : width * 8 / bits);
  if (layout.value_size > layout.size) {
    return node.error("its attribute value_size is %zu, and a token has %zu numbers", layout.value_size, layout.size);
  }
  layout.page = static_cast<size_t>(layout.latent() ? tokens / 2 : std::max(tokens, kPageTokens));
  call->blocks.tokens = static_cast<size_t>(tokens);
  const bool scaled = tensors[kKeyBlocks].type == kUint8;
  for (size_t index : {kKeyScales, kValueScales}) {
    const Given& scales = tensors[index];
    if (scaled && (scales.rank != 3 || std::memcmp(scales.shape, keys.shape, 3 * sizeof *keys.shape))) {
      return node.error("%s must have the shape [%lld, %lld, %lld]; it is %s", kNames[index], print(keys.shape[0]),
                        print(tokens), print(heads), Text(scales).characters);
    }
    if (!scaled && (scales.rank != 1 || scales.shape[0])) {
      return node.error("%s must have the shape [0], as blocks of floats have none; it is %s", kNames[index],
                        Text(scales).characters);
    }
  }
  return nullptr;
}

OrtStatus* PagedGiven::check_tokens(const Node& node, Attention* call, size_t* tokens) {
  const Given &query = tensors[kPagedQuery], &key = tensors[kPagedKey], &value = tensors[kPagedValue];
  Layout& layout = call->layout;
  const auto width = static_cast<int64_t>(layout.kv_heads * layout.size);
  bool fits = key.rank >= 1 && query.rank == key.rank;
  fits = fits && (layout.latent() ? value.rank == 1 && !value.shape[0] : value.rank == key.rank);
  for (size_t axis = 0; fits && axis < key.rank; ++axis) {
    const bool last = axis + 1 == key.rank;
    fits = (layout.latent() || value.shape[axis] == key.shape[axis]) && (last || query.shape[axis] == key.shape[axis]);
  }
  fits = fits && key.shape[key.rank - 1] == width && query.shape[key.rank - 1] >= width &&
         query.shape[key.rank - 1] % width == 0 && query.shape[key.rank - 1] / width <= kMostHeads;
  if (!fits) {
    return node.error("key%s must have the shape [tokens, %lld], %squery [tokens, a multiple of that]; they are "
                      "%s, %s and %s",
                      layout.latent() ? "" : " and value", print(width), layout.latent() ? "value [0], " : "",
                      Text(key).characters, Text(value).characters, Text(query).characters);
  }
  *tokens = 1;
  for (size_t axis = 0; axis + 1 < key.rank; ++axis) *tokens *= static_cast<size_t>(key.shape[axis]);
  layout.group = static_cast<size_t>(query.shape[key.rank - 1] / width);
  y = query, y.data = nullptr;
  y.shape[y.rank - 1] = static_cast<int64_t>(layout.query_heads() * layout.value_channels());
  const Given& logits = tensors[kPagedLogits];
  if (logits.rank != 1 || (logits.shape[0] && logits.shape[0] != static_cast<int64_t>(layout.query_heads()))) {
    return node.error("sink_logits must have the shape [%zu] or [0]; it is %s", layout.query_heads(),
                      Text(logits).characters);
  }
  call->sink_logits = logits.empty() ? nullptr : static_cast<const float*>(logits.data);
  return nullptr;
}

OrtStatus* PagedGiven::check_lengths(const Node& node, Attention* call, size_t tokens) {
  const Given &starts = tensors[kStarts], &past = tensors[kPagedPast], &table = tensors[kTable];
  if (past.rank != 1 || starts.rank != 1 || starts.shape[0] != past.shape[0] + 1 || table.rank != 2 ||
      table.shape[0] != past.shape[0]) {
    return node.error("past must have the shape [requests], starts [requests + 1] and block_table [requests, blocks]; "
                      "they are %s, %s and %s",
                      Text(past).characters, Text(starts).characters, Text(table).characters);
  }
  call->rows = static_cast<size_t>(past.shape[0]);
  call->blocks.columns = static_cast<size_t>(table.shape[1]);
  call->blocks.table = static_cast<const int32_t*>(table.data);
  const auto* const begins = static_cast<const int32_t*>(starts.data);
  const auto* const stored = static_cast<const int32_t*>(past.data);
  call->blocks.starts = begins;
  if (begins[0] != 0 || static_cast<int64_t>(begins[call->rows]) != static_cast<int64_t>(tokens)) {
    return node.error("starts must rise from 0 to %zu; it is %d to %d", tokens, begins[0], begins[call->rows]);
  }
  lengths.reset(new (std::nothrow) int64_t[2 * call->rows + 1]);
  if (!lengths) return node.error("no memory for the lengths of %zu requests", call->rows);
  for (size_t row = 0; row < call->rows; ++row) {
    if (begins[row] > begins[row + 1]) {
      return node.error("starts must rise; it falls from %d to %d", begins[row], begins[row + 1]);
    }
    if (stored[row] < 0) return node.error("past[%zu] must not be negative; it is %d", row, stored[row]);
    lengths[row] = stored[row], lengths[call->rows + row] = int64_t{begins[row + 1]} - begins[row];
  }
  call->past = lengths.get(), call->fresh = lengths.get() + call->rows;
  return nullptr;
}

OrtStatus* PagedGiven::read_chosen(const Node& node, OrtKernelContext* context, Attention* call, size_t tokens) {
  const OrtValue *empty = nullptr, *value = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kPagedFeedback, &empty));
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kPagedChosen, &value));
  if (!empty || !value) return node.error("feedback and choice must be given, as its attribute chooses is 1");
  GRAPHOPT_RETURN_IF_ERROR(feedback.read(node, empty, "feedback"));
  GRAPHOPT_RETURN_IF_ERROR(chosen.read(node, value, "choice"));
  if (feedback.rank != 1 || feedback.shape[0]) {
    return node.error("feedback must have the shape [0] where tokens are chosen; it is %s", Text(feedback).characters);
  }
  const Given& query = tensors[kPagedQuery];
  const size_t leading = (query.rank - 1) * sizeof *query.shape;
  if (chosen.rank != query.rank || std::memcmp(chosen.shape, query.shape, leading)) {
    return node.error("choice must have the leading dimensions of query %s; it is %s", Text(query).characters,
                      Text(chosen).characters);
  }
  counts.reset(new (std::nothrow) size_t[tokens + 1]);
  if (!counts) return node.error("no memory for what %zu tokens choose", tokens);
  const auto most = static_cast<size_t>(chosen.shape[chosen.rank - 1]);
  const auto* const all = static_cast<const int32_t*>(chosen.data);
  for (size_t row = 0; row < call->rows; ++row) {
    for (size_t column = 0; column < call->end_column(row); ++column) {
      const size_t token = call->token(row, column);
      const int32_t *const begin = all + token * most, *const end = std::find(begin, begin + most, -1);
      const bool rises = std::adjacent_find(begin, end, std::greater_equal<int32_t>()) == end;
      const bool ends = std::all_of(end, begin + most, [](int32_t position) { return position == -1; });
      if (begin == end || !rises || !ends || *begin < 0 || end[-1] > call->position(row, column)) {
        return node.error("token %zu must choose positions that rise from 0 to %lld at most, one at least, and -1 behind "
                          "them",
                          token, print(call->position(row, column)));
      }
      counts[token] = static_cast<size_t>(end - begin);
    }
  }
  call->chosen = all, call->most_chosen = most, call->chosen_counts = counts.get();
  return nullptr;
}

OrtStatus* PagedGiven::check_blocks(const Node& node, const Attention& call, size_t tokens) const {
  const Blocks& blocks = call.blocks;
  const int64_t count = tensors[kKeyBlocks].shape[0], capacity = static_cast<int64_t>(blocks.columns * blocks.tokens);
  // a request's new tokens lie in one block more than they fill
  const std::unique_ptr<int32_t[]> written(new (std::nothrow) int32_t[tokens / blocks.tokens + 2 * call.rows + 1]);
  if (!written) return node.error("no memory for the blocks of %zu tokens", tokens);
  int32_t* last = written.get();
  for (size_t row = 0; row < call.rows; ++row) {
    const int64_t total = call.past[row] + call.fresh[row];
    if (total > capacity) {
      return node.error("request %zu has %lld tokens, and %zu blocks of %zu", row, print(total), blocks.columns,
                        blocks.tokens);
    }
    const int32_t* const table = blocks.table + row * blocks.columns;
    for (size_t index = 0; index < call.blocks_in_use(row); ++index) {
      if (table[index] < 0 || table[index] >= count) {
        return node.error("request %zu needs block %d of %lld", row, table[index], print(count));
      }
    }
    if (!call.fresh[row]) continue;
    const int32_t *const first = table + static_cast<size_t>(call.past[row]) / blocks.tokens,
                  *const end = table + call.blocks_in_use(row);
    last = std::copy(first, end, last);
  }
  std::sort(written.get(), last);
  const int32_t* const twice = std::adjacent_find(written.get(), last);
  return twice == last ? nullptr : node.error("block %d is written for two requests, or twice for one", *twice);
}

}  // namespace graphopt
