// A call as launches: rows by rows, its dense and streaming heads together, and those that retrieve with as many
// tokens at a time as there is scratch to list pages for.
#include <algorithm>
#include <cstdio>

#include "cuda/launch.h"
#include "kv_attention/cuda/append.h"
#include "kv_attention/cuda/interface.h"
#include "kv_attention/cuda/select.h"

namespace graphopt {
namespace {

constexpr unsigned kClearThreads = 256;
constexpr size_t kListBytes = size_t{64} << 20;  // of scores and lists of pages of one launch, by default
constexpr int64_t kMostPages = int64_t{1} << 30, kMostTokens = int64_t{1} << 62;

// y of padding is 0: x counts columns, y is the row.
GRAPHOPT_KERNEL(kClearThreads, 4)
void clear_padding(CudaCall call) {
  const int row = static_cast<int>(block_index().y);
  const size_t column = block_index().x, floats = call.layout.query_heads() * call.layout.size;
  if (column >= call.columns - static_cast<size_t>(call.fresh[row])) return;
  const size_t at = ((call.first_row + static_cast<size_t>(row)) * call.columns + column) * floats;
  for (size_t i = thread_index().x; i < floats; i += kClearThreads) store_number(call.y, call.type, at + i, 0.0f);
}

const char* refuse(const char* name, long long is, const char* must) {
  static thread_local char text[160];
  std::snprintf(text, sizeof text, "KVAttention: %s is %lld, %s", name, is, must);
  return text;
}

const char* check(const GraphoptKVAttention& call) {
  if (call.type != GRAPHOPT_FLOAT32 && call.type != GRAPHOPT_FLOAT16 && call.type != GRAPHOPT_BFLOAT16) {
    return refuse("type", call.type, "it must be float32, float16 or bfloat16");
  }
  if (!known_to_gpus(static_cast<Storage>(call.storage))) {
    return refuse("storage", call.storage, "it must be the number of a storage that GPUs know");
  }
  if (call.kv_heads < 1 || call.kv_heads > kMostHeads) {
    return refuse("kv_heads", call.kv_heads, "on a GPU it must be from 1 to 256");
  }
  if (call.group < 1 || call.group > 1 << 20) return refuse("group", call.group, "it must be from 1 to 2^20");
  if (call.size < 16 || call.size > 256 || call.size % 16) {
    return refuse("size", call.size, "it must be a multiple of 16 up to 256");
  }
  if (call.page != 16 && call.page != 32 && call.page != 64 && call.page != 128) {
    return refuse("page", call.page, "it must be 16, 32, 64 or 128");
  }
  if (!(call.clip > 0 && call.clip <= 1)) {
    return "KVAttention: clip must be above 0 and at most 1";
  }
  for (int64_t head = 0; head < call.kv_heads; ++head) {
    const int policy = call.policies[head];
    if (policy >= kPolicies) return refuse("a policy", policy, "it must be the number of one");
    // without lists of pages for blocks the kernels would read all of them, which is another result
    if (chooses_in_blocks(static_cast<Policy>(policy))) {
      return refuse("a policy", policy, "whose blocks of queries choose pages together: GPUs have no kernels for it");
    }
  }
  if (call.pages < 0 || call.pages > kMostPages) return refuse("pages", call.pages, "on a GPU it must be 2^30 at most");
  if (call.rows < 0 || call.columns < 0 || call.columns > 1 << 30) {
    return refuse("columns", call.columns, "on a GPU a call must have 2^30 at most, and no fewer than no rows");
  }
  return nullptr;
}

// Rows from `first` on, as many as a launch takes.
CudaCall some_rows(const GraphoptKVAttention& from, int64_t first) {
  CudaCall call;
  Layout& layout = call.layout;
  const auto count = [](int64_t number) { return static_cast<size_t>(number); };
  layout.store_as(static_cast<Storage>(from.storage));
  layout.kv_heads = count(from.kv_heads), layout.group = count(from.group), layout.size = count(from.size);
  layout.page = count(from.page), layout.pages = count(from.pages);
  layout.sink_pages = from.sink_pages, layout.recent_pages = from.recent_pages;
  const auto tokens = [](int64_t number) { return std::min(number, kMostTokens); };
  layout.window = tokens(from.window), layout.sinks = tokens(from.sinks), layout.recent = tokens(from.recent);
  layout.budget = tokens(from.budget), layout.channels = from.channels, layout.mass = from.mass;
  layout.scale = from.scale, layout.softcap = from.softcap, layout.clip = from.clip;
  layout.mean = from.mean, layout.compensate = from.compensate, layout.chunked = from.chunked;
  bool uses[kPolicies] = {};
  for (int64_t head = 0; head < from.kv_heads; ++head) {
    call.policies[head] = static_cast<Policy>(from.policies[head]);
    uses[from.policies[head]] = true;
  }
  layout.complete([&](Policy policy) { return uses[static_cast<int>(policy)]; });
  call.type = from.type;
  call.query = from.query, call.key = from.key, call.value = from.value, call.sink_query = from.sink_query;
  call.sink_logits = from.sink_logits;
  call.state = {static_cast<char*>(from.keys), static_cast<char*>(from.values), static_cast<Half*>(from.scales),
                from.slots, from.summaries};
  call.y = from.y;
  call.columns = count(from.columns), call.first_row = count(first);
  call.rows = static_cast<int>(std::min<int64_t>(kMostRows, from.rows - first));
  for (int row = 0; row < call.rows; ++row) {
    call.past[row] = from.past[first + row], call.fresh[row] = static_cast<int32_t>(from.fresh[first + row]);
  }
  return call;
}

// The launches of the heads of a policy that makes lists, as many tokens at a time as there is scratch for.
template <typename Visit>
const char* each_listing(const CudaCall& call, Policy policy, int32_t tokens, size_t list_bytes, const Visit& visit) {
  bool takes[kPolicies] = {};
  takes[static_cast<int>(policy)] = true;
  CudaPlan plan;
  if (const char* failure = plan.make(call, 0, tokens, takes)) return failure;
  const SelectRun all(call, plan, policy);
  const size_t of_token = all.bytes() / static_cast<size_t>(tokens) + 1;
  const size_t bytes = list_bytes ? list_bytes : kListBytes;
  const size_t fit = std::min(std::max<size_t>(bytes / of_token, 1), static_cast<size_t>(tokens));
  const char* failure = nullptr;
  for (int32_t first = 0; first < tokens && !failure; first += static_cast<int32_t>(fit)) {
    failure = plan.make(call, first, std::min(tokens, first + static_cast<int32_t>(fit)), takes);
    const SelectRun selection(call, plan, policy);
    if (!failure) failure = visit(plan, &selection);
  }
  return failure;
}

// Calls visit(plan, selection) for each launch: one of all heads that read no lists, without a selection (null), and
// those of each policy that makes lists.
template <typename Visit>
const char* each_launch(const CudaCall& call, size_t list_bytes, const Visit& visit) {
  const int32_t tokens = *std::max_element(call.fresh, call.fresh + call.rows);
  if (!tokens) return nullptr;
  CudaPlan plan;
  bool takes[kPolicies];
  for (int i = 0; i < kPolicies; ++i) takes[i] = !makes_lists(static_cast<Policy>(i));
  const char* failure = plan.make(call, 0, tokens, takes, tiles_of_unit(call, tokens));
  if (!failure && plan.units) failure = visit(plan, nullptr);
  for (int i = 0; i < kPolicies && !failure; ++i) {
    if (!takes[i] && plan.heads_of(i)) failure = each_listing(call, static_cast<Policy>(i), tokens, list_bytes, visit);
  }
  return failure;
}

size_t partial_bytes(const CudaCall& call, const CudaPlan& plan) {
  return static_cast<size_t>(plan.partials) * CudaPlan::partial_floats(call.layout) * sizeof(float);
}

const char* run(const GraphoptKVAttention& whole, void* stream) {
  for (int64_t first = 0; first < whole.rows && whole.columns; first += kMostRows) {
    const CudaCall call = some_rows(whole, first);
    const char* failure = append_tokens(call, stream);
    const int32_t least = *std::min_element(call.fresh, call.fresh + call.rows);
    if (!failure && least < whole.columns) {
      const Index3 grid{static_cast<unsigned>(whole.columns - least), static_cast<unsigned>(call.rows), 1};
      failure = launch(clear_padding, grid, kClearThreads, 0, stream, call);
    }
    if (!failure) {
      failure = each_launch(call, whole.list_bytes, [&](const CudaPlan& plan, const SelectRun* given) -> const char* {
        AttendRun attention;
        attention.call = call, attention.plan = plan;
        char* scratch = static_cast<char*>(whole.scratch);
        if (given) {
          SelectRun selection = *given;
          selection.take(scratch);
          if (const char* refused = make_lists(selection, stream)) return refused;
          attention.lists = selection.made();
          scratch += selection.bytes();
        }
        attention.partials = reinterpret_cast<float*>(scratch);
        return attend_and_merge(attention, stream);
      });
    }
    if (failure) return failure;
  }
  return nullptr;
}

}  // namespace
}  // namespace graphopt

extern "C" size_t graphopt_cuda_kv_attention_scratch(const GraphoptKVAttention* whole) {
  using namespace graphopt;
  size_t most = 0;
  if (check(*whole)) return 0;
  for (int64_t first = 0; first < whole->rows && whole->columns; first += kMostRows) {
    const CudaCall call = some_rows(*whole, first);
    each_launch(call, whole->list_bytes, [&](const CudaPlan& plan, const SelectRun* selection) -> const char* {
      most = std::max(most, partial_bytes(call, plan) + (selection ? selection->bytes() : 0));
      return nullptr;
    });
  }
  return most;
}

extern "C" const char* graphopt_cuda_kv_attention(const GraphoptKVAttention* whole, void* stream) {
  if (const char* failure = graphopt::check(*whole)) return failure;
  return graphopt::run(*whole, stream);
}
