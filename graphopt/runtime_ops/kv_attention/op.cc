#include "kv_attention/op.h"

#include <cstdlib>
#include <new>

#include "abi/instructions.h"
#include "abi/large_pages.h"
#include "kv_attention/inputs.h"
#include "kv_attention/plan.h"
#include "kv_attention/pool.h"
#include "kv_attention/select.h"

namespace graphopt {
namespace {

// In cycles or so: what takes less is not worth waking a thread.
constexpr double kLeastParallel = 30000;
// Pages that a task scores.
constexpr int64_t kScored = 256;

struct Kernel {
  Node node;
  KVAttributes attributes;
  const KVAttentionKernels* kernels = nullptr;
  mutable Pool pool;
  mutable std::atomic<const void*> known[kStates] = {};  // the state of the call before

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    kernels = &kKVAttentionScalar;
#if defined(__x86_64__)
    if (instructions == Instructions::kAvx2) kernels = &kKVAttentionAvx2;
    if (instructions == Instructions::kAvx512) kernels = &kKVAttentionAvx512;
#endif
    return attributes.read(node, info, type);
  }

  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* check_memory(const KVInputs& inputs, void* const* outputs) const;
};

// Retrieval of one block of queries: where its scores and its list are.
struct Retrieval {
  float* scores;
  PageEntry* list;
};

// One call. Tasks write to memory of their own; the last one to end of those that share queries merges their results.
struct Call {
  const Kernel* kernel;
  OrtKernelContext* context;
  Attention attention;
  Plan plan;
  Queries* queries = nullptr;
  Retrieval* retrievals = nullptr;
  Run *runs = nullptr, *scorings = nullptr;
  size_t run_count = 0, scoring_count = 0;
  std::atomic<uint32_t>* left = nullptr;  // runs of each block of queries that have not ended
  float* partials = nullptr;
  std::atomic<bool> no_memory{false};
  // Whether one task has all of what a head appends and reads: then it does both, while the page is at hand.
  bool together = false;

  Call(const Kernel* kernel, OrtKernelContext* context, const Attention& attention)
      : kernel(kernel), context(context), attention(attention), plan(attention) {}

  OrtStatus* for_each(void (Call::*task)(size_t), size_t tasks, bool parallel) {
    if (tasks > 1 && parallel) {
      struct Bound {
        Call* call;
        void (Call::*task)(size_t);
      } bound{this, task};
      const auto run = [](void* given, size_t index) {
        const Bound& bound = *static_cast<Bound*>(given);
        (bound.call->*bound.task)(index);
      };
      return KernelContextParallelFor::call(kernel->node.api, context, run, tasks, 0, &bound);
    }
    for (size_t index = 0; index < tasks; ++index) (this->*task)(index);
    return nullptr;
  }

  void append(size_t index) {
    const Pool::Loan loan(kernel->pool, append_scratch(attention.layout) * sizeof(float));
    if (!loan.memory) {
      no_memory = true;
      return;
    }
    const size_t heads = attention.layout.kv_heads;
    kernel->kernels->append(attention, index / heads, index % heads, reinterpret_cast<float*>(loan.memory));
  }

  void score(size_t index) {
    const Run& run = scorings[index];
    const Queries& block = queries[run.queries];
    const int64_t from = candidates(block).first, first = static_cast<int64_t>(run.first);
    kernel->kernels->score(attention, block.row, block.head, block.first_column, from + first,
                           from + static_cast<int64_t>(run.end), retrievals[run.queries].scores + first);
    if (last_of(run.queries)) list(&queries[run.queries], retrievals[run.queries]);
  }
  // Whether no other task of these queries is under way.
  bool last_of(size_t block) { return left[block].fetch_sub(1, std::memory_order_acq_rel) == 1; }

  void list(Queries* block, const Retrieval& retrieval) const {
    block->list = retrieval.list;
    block->pages = kernel->kernels->list(attention.layout, position(*block), retrieval.scores, retrieval.list);
  }

  bool retrieves(const Queries& block) const { return attention.policies[block.head] == Policy::kRetrieval; }
  int64_t position(const Queries& block) const { return attention.position(block.row, block.first_column); }
  Candidates candidates(const Queries& block) const { return Candidates(attention.layout, position(block)); }

  // Rows are long where they are late: they come first.
  void attend(size_t index) {
    const Run& run = runs[run_count - 1 - index];
    const Layout& layout = attention.layout;
    const KVAttentionKernels& cpu = *kernel->kernels;
    Queries block = queries[run.queries];
    if (together) append(block.row * layout.kv_heads + block.head);
    const size_t rows = (block.end_column - block.first_column) * layout.group;
    const size_t floats = Partial::floats(rows, layout.size) * sizeof(float);
    const size_t scratch = cpu.attend_scratch(layout, rows);
    size_t bytes = scratch + (partials ? 0 : floats), scores = 0, entries = 0;
    if (!partials && retrieves(block)) {
      const Candidates all = candidates(block);
      scores = (static_cast<size_t>(all.end - all.first) * sizeof(float) + 63) / 64 * 64;
      entries = block.pages * sizeof(PageEntry);
    }
    const Pool::Loan loan(kernel->pool, bytes + scores + entries);
    if (!loan.memory) {
      no_memory = true;
      return;
    }
    float* const own = partials ? partials + run.partial : reinterpret_cast<float*>(loan.memory + scratch);
    if (!partials && retrieves(block)) {
      const Retrieval retrieval = {reinterpret_cast<float*>(loan.memory + bytes),
                                   reinterpret_cast<PageEntry*>(loan.memory + bytes + scores)};
      const Candidates all = candidates(block);
      cpu.score(attention, block.row, block.head, block.first_column, all.first, all.end, retrieval.scores);
      list(&block, retrieval);
    }
    const size_t end = run.end < block.pages ? run.end : block.pages;
    cpu.attend(attention, block, run.first, end, loan.memory, Partial(own, rows, layout.size));
    if (!partials) return cpu.merge(attention, block, own, 1);
    if (last_of(run.queries)) cpu.merge(attention, block, first_partial(run.queries), block_runs(run.queries));
  }
  size_t *firsts = nullptr, *counts = nullptr;
  const float* first_partial(size_t block) const { return partials + firsts[block]; }
  size_t block_runs(size_t block) const { return counts[block]; }

  OrtStatus* append_all() {
    const Layout& layout = attention.layout;
    double work = 0;
    size_t growing = 0;
    together = plan.queries && plan.most_pages <= plan.run_pages;
    for (size_t head = 0; head < layout.kv_heads; ++head) {
      together = together && attention.policies[head] != Policy::kRetrieval;
    }
    for (size_t row = 0; row < attention.rows; ++row) {
      growing += attention.fresh[row] > 0;
      work += static_cast<double>(attention.fresh[row]) * static_cast<double>(layout.kv_heads * layout.size);
      const int64_t past = attention.past[row], end = past + attention.fresh[row];
      if (layout.integers() && end > past && layout.page_of(end - 1) != layout.page_of(past ? past - 1 : 0)) {
        work += static_cast<double>(layout.kv_heads * layout.page * layout.size) * 2;
      }
    }
    together = together && plan.queries == growing * layout.kv_heads;
    if (together) return nullptr;
    return for_each(&Call::append, attention.rows * layout.kv_heads, work > kLeastParallel);
  }

  // Calls lay_out(take) twice: to count bytes, and to take them.
  OrtStatus* attend_all();
};

OrtStatus* Call::attend_all() {
  const Layout& layout = attention.layout;
  if (!plan.queries) return nullptr;
  const Node& node = kernel->node;
  const bool parallel = plan.cycles > kLeastParallel;
  // what is needed for every block, run and page
  size_t run_bound = plan.queries, scored = 0, listed = 0, scoring_bound = 0, floats = 0;
  if (plan.split) {
    run_bound = 0;
    Plan::each(attention, [&](const Queries& block) {
      const size_t rows = (block.end_column - block.first_column) * layout.group;
      run_bound += plan.runs(block.pages);
      floats += plan.runs(block.pages) * Partial::floats(rows, layout.size);
      if (!retrieves(block)) return;
      const Candidates all = candidates(block);
      scored += static_cast<size_t>(all.end - all.first + 15) / 16 * 16;
      scoring_bound += static_cast<size_t>((all.end - all.first + kScored - 1) / kScored);
      listed += block.pages;
    });
  }
  float* scores = nullptr;
  PageEntry* lists = nullptr;
  size_t bytes = 0;
  char* memory = reinterpret_cast<char*>(Pool::kAlignment);
  const auto take = [&](auto** part, size_t count) {
    *part = reinterpret_cast<std::remove_reference_t<decltype(**part)>*>(memory + bytes);
    bytes += (count * sizeof(**part) + Pool::kAlignment - 1) / Pool::kAlignment * Pool::kAlignment;
  };
  const auto lay_out = [&] {
    bytes = 0;
    take(&queries, plan.queries), take(&runs, run_bound);
    if (!plan.split) return;
    take(&retrievals, plan.queries), take(&left, plan.queries), take(&firsts, plan.queries), take(&counts, plan.queries);
    take(&scorings, scoring_bound), take(&lists, listed), take(&scores, scored), take(&partials, floats);
  };
  lay_out();
  const Pool::Loan loan(kernel->pool, bytes);
  if (!loan.memory) return node.error("no memory to attend to %zu blocks of queries", plan.queries);
  memory = loan.memory;
  lay_out();

  size_t block = 0;
  Plan::each(attention, [&](const Queries& next) {
    queries[block] = next;
    if (plan.split && retrieves(next)) {
      const Candidates all = candidates(next);
      retrievals[block] = {scores, lists};
      const auto count = static_cast<size_t>(all.end - all.first);
      for (size_t first = 0; first < count; first += kScored) {
        scorings[scoring_count++] = {block, first, count - first < kScored ? count : first + kScored, 0};
      }
      new (&left[block]) std::atomic<uint32_t>(static_cast<uint32_t>((count + kScored - 1) / kScored));
      if (!count) list(&queries[block], retrievals[block]);
      scores += (count + 15) / 16 * 16, lists += next.pages;
    }
    ++block;
  });
  GRAPHOPT_RETURN_IF_ERROR(for_each(&Call::score, scoring_count, parallel));
  size_t partial = 0;
  for (block = 0; block < plan.queries; ++block) {
    const Queries& each = queries[block];
    const size_t parts = plan.runs(each.pages), rows = (each.end_column - each.first_column) * layout.group;
    const size_t part = (each.pages + parts - 1) / parts;  // tasks as long as one another end together
    if (plan.split) {
      firsts[block] = partial, counts[block] = parts;
      new (&left[block]) std::atomic<uint32_t>(static_cast<uint32_t>(parts));
    }
    for (size_t i = 0; i < parts; ++i) {
      const size_t end = (i + 1) * part;
      runs[run_count++] = {block, i * part, parts == 1 || end > each.pages ? each.pages : end, partial};
      partial += Partial::floats(rows, layout.size);
    }
  }
  return for_each(&Call::attend, run_count, parallel);
}

// A state may become that of the output in its own memory; nothing else may be written where something is still read.
OrtStatus* Kernel::check_memory(const KVInputs& inputs, void* const* outputs) const {
  const auto like = [&](size_t output) -> const Given& {
    return inputs.tensors[output ? kKeys + output - 1 : static_cast<size_t>(kQuery)];
  };
  const auto meet = [](const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    const auto one = reinterpret_cast<uintptr_t>(a), other = reinterpret_cast<uintptr_t>(b);
    return a_bytes && b_bytes && one < other + b_bytes && other < one + a_bytes;
  };
  for (size_t output = 0; output <= kStates; ++output) {
    const size_t bytes = like(output).bytes();
    for (size_t input = 0; input < kKVInputs; ++input) {
      const Given& tensor = inputs.tensors[input];
      if (!meet(outputs[output], bytes, tensor.data, tensor.bytes())) continue;
      if (output && &tensor == &like(output) && tensor.data == outputs[output]) continue;
      return node.error("output %zu lies in the memory of %s: only a state may be changed in place, by its own output", output,
                        KVInputs::kNames[input]);
    }
    for (size_t other = 0; other < output; ++other) {
      if (!meet(outputs[output], bytes, outputs[other], like(other).bytes())) continue;
      return node.error("outputs %zu and %zu lie in the same memory", other, output);
    }
  }
  return nullptr;
}

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  const OrtApi* api = node.api;
  KVInputs inputs;
  Attention attention;
  GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, attributes, context, &attention));
  OrtValue* outputs[1 + kStates] = {};
  void* written[1 + kStates] = {};
  for (size_t index = 0; index <= kStates; ++index) {
    const Given& like = inputs.tensors[index ? kKeys + index - 1 : static_cast<size_t>(kQuery)];
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, index, like.shape, like.rank, &outputs[index]));
    if (!outputs[index]) return node.error("all its outputs must have names, output %zu has none", index);
    GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(api, outputs[index], &written[index]));
    if (reinterpret_cast<uintptr_t>(written[index]) % like.width()) {
      return node.error("output %zu lies at no multiple of %zu bytes", index, like.width());
    }
  }
  GRAPHOPT_RETURN_IF_ERROR(check_memory(inputs, written));
  for (size_t index = 1; index <= kStates; ++index) {
    const Given& from = inputs.tensors[kKeys + index - 1];
    if (from.empty()) continue;
    const size_t bytes = from.bytes();
    if (from.data == written[index]) {
      // a cache that stays where it is is read call after call
      if (known[index - 1].exchange(from.data) != from.data) prefer_large_pages(from.data, bytes);
      continue;
    }
    std::memmove(written[index], from.data, bytes);
  }
  attention.y = static_cast<float*>(written[0]);
  attention.state = {static_cast<char*>(written[1]), static_cast<char*>(written[2]), static_cast<float*>(written[3]),
                     static_cast<float*>(written[4]), static_cast<float*>(written[5])};
  const size_t floats = attention.layout.query_heads() * attention.layout.size;
  for (size_t row = 0; row < attention.rows; ++row) {
    const size_t padding = attention.first_column(row) * floats;
    if (padding) std::memset(attention.y + row * attention.columns * floats, 0, padding * sizeof(float));
  }
  Call call(this, context, attention);
  GRAPHOPT_RETURN_IF_ERROR(call.append_all());
  if (!call.no_memory) GRAPHOPT_RETURN_IF_ERROR(call.attend_all());
  return call.no_memory ? node.error("no memory for attention to %zu pages", attention.layout.pages) : nullptr;
}

template <int Type>
OrtCustomOp op_for() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return "KVAttention"; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp*, size_t index) -> int {
    return index == kPast || index == kNew ? kInt64 : index == kKeys || index == kValues ? Type : kFloat;
  };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kKVInputs; };
  op.GetOutputType = [](const OrtCustomOp*, size_t index) -> int { return index == 1 || index == 2 ? Type : kFloat; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1 + kStates; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return kDefaultMemory; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** made) {
    std::unique_ptr<Kernel> kernel(new (std::nothrow) Kernel);
    if (!kernel) return CreateStatus::call(api, kFail, "no memory for a kernel of ai.graphopt::KVAttention");
    OrtStatus* failure = kernel->prepare(api, info, Type);
    *made = failure ? nullptr : kernel.release();
    return failure;
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return static_cast<Kernel*>(kernel)->compute(context);
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  return op;
}

const OrtCustomOp kOps[5] = {op_for<kFloat>(), op_for<kFloat16>(), op_for<kBFloat16>(), op_for<kFloat8>(), op_for<kUint8>()};

}  // namespace

const OrtCustomOp* const kKVAttentionOps[5] = {&kOps[0], &kOps[1], &kOps[2], &kOps[3], &kOps[4]};

}  // namespace graphopt
