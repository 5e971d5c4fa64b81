// ai.graphopt::PagedAttention as onnxruntime sees it: one operator per type of activations, and of blocks.
#include <algorithm>
#include <cstring>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/pool.h"
#include "abi/register.h"
#include "kv_attention/cpu/bfloat16.h"
#include "kv_attention/shared/inputs.h"
#include "kv_attention/shared/text.h"
#include "paged_attention/cpu/kernels.h"

namespace graphopt {
namespace {

enum Input : size_t { kQ, kK, kV, kStarts, kPastTokens, kTable, kLogits, kKeyBlocks, kValueBlocks, kPagedInputs };
constexpr const char* kInputNames[kPagedInputs] = {"query",       "key",         "value", "starts", "past",
                                                   "block_table", "sink_logits", "keys",  "values"};
constexpr size_t kRows = 32;  // queries of a task, about

template <typename Stored>
Stored as_stored(float value);
template <>
inline float as_stored(float value) { return value; }
template <>
inline Half as_stored(float value) { return stored<Half>(value); }
template <>
inline BFloat16 as_stored(float value) { return to_bfloat16(value); }

template <typename Stored>
void store_rows(const float* rows, const int64_t* places, size_t count, size_t width, void* pool) {
  for (size_t token = 0; token < count; ++token) {
    Stored* const to = static_cast<Stored*>(pool) + static_cast<size_t>(places[token]) * width;
    for (size_t i = 0; i < width; ++i) to[i] = as_stored<Stored>(rows[token * width + i]);
  }
}

struct Tasks {
  const Requests& call;
  const PagedAttentionKernels& kernels;
  const Asked* asked;
  Pool& pool;
  size_t floats;
  std::atomic<bool> no_memory{false};

  static void run(void* tasks, size_t index) {
    Tasks& self = *static_cast<Tasks*>(tasks);
    const Pool::Loan loan(self.pool, self.floats * sizeof(float));
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    self.kernels.attend(self.call, self.asked[index], reinterpret_cast<float*>(loan.memory));
  }
};

template <int Activations>
struct Kernel {
  static constexpr const char* kName = "PagedAttention";
  static constexpr size_t kInputs = kPagedInputs, kOutputs = 3;
  static int input_type(size_t index, int blocks) {
    if (index <= kV) return Activations;
    if (index <= kTable) return kInt32;
    return index == kLogits ? static_cast<int>(kFloat) : blocks;
  }
  static int output_type(size_t index, int blocks) { return index ? blocks : Activations; }

  Node node;
  int64_t kv_heads = 0, window = 0;
  float scale = 0, softcap = 0;
  int stored = 0;
  const PagedAttentionKernels* kernels = nullptr;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    kernels = &kPagedAttentionScalar;
#if defined(__x86_64__)
    if (instructions >= Instructions::kAvx2) kernels = &kPagedAttentionAvx2;
    if (instructions == Instructions::kAvx512) kernels = &kPagedAttentionAvx512;
#endif
    stored = type;
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "kv_heads", &kv_heads));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "window", &window));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "scale", &scale));
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "softcap", &softcap));
    if (kv_heads < 1 || kv_heads > INT32_MAX) return node.error("kv_heads is %lld", print(kv_heads));
    return window < 0 ? node.error("window is %lld", print(window)) : nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* check_shapes(const Given* given, Requests* call, size_t* tokens) const;
  // `places`: of each token, its block's number times P, and its slot; `sorted` is for as many numbers.
  OrtStatus* find_places(const Given* given, const Requests& call, size_t tokens, int64_t* places,
                         int64_t* sorted) const;
  OrtStatus* attend(OrtKernelContext* context, const Requests& call, size_t requests) const;
  OrtStatus* output(OrtKernelContext* context, size_t index, const Given& like, void** written) const;
};

template <int Activations>
OrtStatus* Kernel<Activations>::check_shapes(const Given* given, Requests* call, size_t* tokens) const {
  const Given &query = given[kQ], &key = given[kK], &keys = given[kKeyBlocks], &past = given[kPastTokens];
  if (keys.rank != 4 || keys.shape[2] != kv_heads || keys.shape[1] < 1 || keys.shape[3] % 16 || keys.shape[3] < 16 ||
      keys.shape[3] > 256 || std::memcmp(keys.shape, given[kValueBlocks].shape, sizeof keys.shape) ||
      given[kValueBlocks].rank != 4) {
    return node.error("keys and values must have the shape [blocks, tokens, %lld, size], size a multiple of 16 up to "
                      "256; they are %s and %s",
                      print(kv_heads), Text(keys).characters, Text(given[kValueBlocks]).characters);
  }
  const int64_t width = kv_heads * keys.shape[3];
  bool fits = key.rank >= 1 && query.rank == key.rank && given[kV].rank == key.rank;
  for (size_t axis = 0; fits && axis < key.rank; ++axis) {
    const bool last = axis + 1 == key.rank;
    fits = given[kV].shape[axis] == key.shape[axis] && (last || query.shape[axis] == key.shape[axis]);
  }
  fits = fits && key.shape[key.rank - 1] == width && query.shape[key.rank - 1] >= width &&
         query.shape[key.rank - 1] % width == 0;
  if (!fits) {
    return node.error("key and value must have the shape [tokens, %lld], query [tokens, a multiple of that]; they are "
                      "%s, %s and %s",
                      print(width), Text(key).characters, Text(given[kV]).characters, Text(query).characters);
  }
  *tokens = 1;
  for (size_t axis = 0; axis + 1 < key.rank; ++axis) *tokens *= static_cast<size_t>(key.shape[axis]);
  call->kv_heads = static_cast<size_t>(kv_heads);
  call->size = static_cast<size_t>(keys.shape[3]);
  call->group = static_cast<size_t>(query.shape[key.rank - 1] / width);
  call->page = static_cast<size_t>(keys.shape[1]);
  call->columns = static_cast<size_t>(given[kTable].shape[1]);
  const Given &starts = given[kStarts], &table = given[kTable], &logits = given[kLogits];
  if (past.rank != 1 || starts.rank != 1 || starts.shape[0] != past.shape[0] + 1 || table.rank != 2 ||
      table.shape[0] != past.shape[0]) {
    return node.error("past must have the shape [requests], starts [requests + 1] and block_table [requests, blocks]; "
                      "they are %s, %s and %s",
                      Text(past).characters, Text(starts).characters, Text(table).characters);
  }
  if (logits.rank != 1 || (logits.shape[0] && logits.shape[0] != static_cast<int64_t>(call->heads()))) {
    return node.error("sink_logits must have the shape [%zu] or [0]; it is %s", call->heads(), Text(logits).characters);
  }
  return nullptr;
}

template <int Activations>
OrtStatus* Kernel<Activations>::find_places(const Given* given, const Requests& call, size_t tokens, int64_t* places,
                                            int64_t* sorted) const {
  const auto requests = static_cast<size_t>(given[kPastTokens].shape[0]);
  const auto page = static_cast<int64_t>(call.page), blocks = given[kKeyBlocks].shape[0];
  if (call.starts[0] != 0 || static_cast<int64_t>(call.starts[requests]) != static_cast<int64_t>(tokens)) {
    return node.error("starts must rise from 0 to %zu; it is %d to %d", tokens, call.starts[0], call.starts[requests]);
  }
  for (size_t row = 0; row < requests; ++row) {
    if (call.starts[row] > call.starts[row + 1]) {
      return node.error("starts falls from %d to %d", call.starts[row], call.starts[row + 1]);
    }
  }
  size_t token = 0;
  for (size_t row = 0; row < requests; ++row) {
    const int64_t before = call.past[row], total = before + call.starts[row + 1] - call.starts[row];
    if (before < 0) return node.error("past[%zu] is %lld", row, print(before));
    if (total > static_cast<int64_t>(call.columns) * page) {
      return node.error("request %zu has %lld tokens, and %zu blocks of %lld", row, print(total), call.columns,
                        print(page));
    }
    const int32_t* const table = call.table + row * call.columns;
    for (int64_t number = 0; number * page < total; ++number) {
      if (table[number] < 0 || table[number] >= blocks) {
        return node.error("request %zu needs block %d of %lld", row, table[number], print(blocks));
      }
    }
    for (int64_t position = before; position < total; ++position) {
      places[token++] = table[position / page] * page + position % page;
    }
  }
  std::memcpy(sorted, places, tokens * sizeof *places);
  std::sort(sorted, sorted + tokens);
  for (size_t i = 1; i < tokens; ++i) {
    if (sorted[i] == sorted[i - 1]) {
      return node.error("two new tokens have the same place: slot %lld of block %lld", print(sorted[i] % page),
                        print(sorted[i] / page));
    }
  }
  return nullptr;
}

template <int Activations>
OrtStatus* Kernel<Activations>::output(OrtKernelContext* context, size_t index, const Given& like,
                                       void** written) const {
  OrtValue* value = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, index, like.shape, like.rank, &value));
  return GetTensorMutableData::call(node.api, value, written);
}

template <int Activations>
OrtStatus* Kernel<Activations>::compute(OrtKernelContext* context) const {
  Given given[kPagedInputs];
  for (size_t index = 0; index < kPagedInputs; ++index) {
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, index, &value));
    if (!value) return node.error("%s must be given", kInputNames[index]);
    GRAPHOPT_RETURN_IF_ERROR(given[index].read(node, value, kInputNames[index]));
  }
  Requests call = {};
  size_t tokens = 0;
  GRAPHOPT_RETURN_IF_ERROR(check_shapes(given, &call, &tokens));
  call.window = window, call.scale = scale, call.softcap = softcap, call.stored = stored;
  call.starts = static_cast<const int32_t*>(given[kStarts].data);
  call.past = static_cast<const int32_t*>(given[kPastTokens].data);
  call.table = static_cast<const int32_t*>(given[kTable].data);
  call.sink_logits = given[kLogits].empty() ? nullptr : static_cast<const float*>(given[kLogits].data);
  const std::unique_ptr<int64_t[]> places(new (std::nothrow) int64_t[2 * tokens + 1]);
  if (!places) return node.error("no memory for the places of %zu tokens", tokens);
  GRAPHOPT_RETURN_IF_ERROR(find_places(given, call, tokens, places.get(), places.get() + tokens));
  void *y = nullptr, *pools[2] = {};
  GRAPHOPT_RETURN_IF_ERROR(output(context, 0, given[kQ], &y));
  const size_t width = call.kv_heads * call.size, of_query = given[kQ].numbers(), of_key = given[kK].numbers();
  const bool narrow_type = Activations != kFloat;
  const Pool::Loan loan(floats, narrow_type ? (2 * of_query + 2 * of_key) * sizeof(float) : 1);
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", of_query);
  const float* numbers[3];
  float* wide = reinterpret_cast<float*>(loan.memory);
  for (size_t index = kQ; index <= kV; ++index) {
    numbers[index] = static_cast<const float*>(given[index].data);
    if (!narrow_type) continue;
    widen(static_cast<const Half*>(given[index].data), given[index].numbers(), wide);
    numbers[index] = wide;
    wide += given[index].numbers();
  }
  for (size_t index = 0; index < 2; ++index) {
    const Given& from = given[kKeyBlocks + index];
    GRAPHOPT_RETURN_IF_ERROR(output(context, 1 + index, from, &pools[index]));
    if (pools[index] != from.data) std::memmove(pools[index], from.data, from.bytes());
    auto* const store = stored == kFloat     ? store_rows<float>
                        : stored == kFloat16 ? store_rows<Half>
                                             : store_rows<BFloat16>;
    store(numbers[kK + index], places.get(), tokens, width, pools[index]);
  }
  call.query = numbers[kQ], call.keys = pools[0], call.values = pools[1];
  call.y = narrow_type ? wide : static_cast<float*>(y);
  GRAPHOPT_RETURN_IF_ERROR(attend(context, call, static_cast<size_t>(given[kPastTokens].shape[0])));
  if (narrow_type) narrow(call.y, of_query, static_cast<Half*>(y));
  return nullptr;
}

template <int Activations>
OrtStatus* Kernel<Activations>::attend(OrtKernelContext* context, const Requests& call, size_t requests) const {
  const size_t each = call.group < kRows ? kRows / call.group : 1;
  size_t count = 0;
  const auto fresh = [&](size_t row) { return static_cast<size_t>(call.starts[row + 1] - call.starts[row]); };
  for (size_t row = 0; row < requests; ++row) count += (fresh(row) + each - 1) / each * call.kv_heads;
  if (!count) return nullptr;
  const std::unique_ptr<Asked[]> asked(new (std::nothrow) Asked[count]);
  if (!asked) return node.error("no memory for %zu tasks", count);
  size_t at = 0;
  for (size_t row = 0; row < requests; ++row) {
    for (size_t first = 0; first < fresh(row); first += each) {
      const size_t end = first + each < fresh(row) ? first + each : fresh(row);
      for (size_t head = 0; head < call.kv_heads; ++head) asked[at++] = {row, head, first, end};
    }
  }
  Tasks tasks{call, *kernels, asked.get(), pool, call.scratch(each * call.group)};
  if (count == 1) {
    Tasks::run(&tasks, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(node.api, context, Tasks::run, count, 0, &tasks));
  }
  return tasks.no_memory ? node.error("no memory for a task of %zu floats", tasks.floats) : nullptr;
}

template <int Activations>
const OrtCustomOp kOps[3] = {custom_op<Kernel<Activations>, kFloat>(), custom_op<Kernel<Activations>, kFloat16>(),
                             custom_op<Kernel<Activations>, kBFloat16>()};

const Operators kRegistered(kOps<kFloat>), kRegisteredHalves(kOps<kFloat16>);

}  // namespace
}  // namespace graphopt
