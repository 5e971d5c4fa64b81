#include "kv_attention/cpu/call.h"

#include <sched.h>

#include <algorithm>
#include <new>
#include <type_traits>

#include "abi/instructions.h"

namespace graphopt {
namespace {

// In cycles, roughly: less work is not worth waking a thread.
constexpr double kLeastParallel = 30000;
// Pages that a step scores.
constexpr size_t kScored = 256;

constexpr size_t round_up(size_t count, size_t to) { return (count + to - 1) / to * to; }

}  // namespace

OrtStatus* choose_kernels(const Node& node, const KVAttentionKernels** kernels) {
  Instructions instructions;
  if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
  *kernels = &GRAPHOPT_OF(instructions, kKVAttention);
  return nullptr;
}

OrtStatus* Call::for_each(void (Call::*task)(size_t), size_t tasks, bool parallel) {
  if (tasks > 1 && parallel) {
    struct Bound {
      Call* call;
      void (Call::*task)(size_t);
    } bound{this, task};
    const auto run = [](void* given, size_t index) {
      const Bound& bound = *static_cast<Bound*>(given);
      (bound.call->*bound.task)(index);
    };
    return KernelContextParallelFor::call(node_.api, context_, run, tasks, 0, &bound);
  }
  for (size_t index = 0; index < tasks; ++index) (this->*task)(index);
  return nullptr;
}

OrtStatus* Call::run() {
  GRAPHOPT_RETURN_IF_ERROR(append_all());
  if (!no_memory_) GRAPHOPT_RETURN_IF_ERROR(attend_all());
  return no_memory_ ? node_.error("no memory for attention to %zu pages", attention_.layout.pages) : nullptr;
}

void Call::append(size_t index) {
  const Pool::Loan loan(pool_, append_scratch(attention_.layout) * sizeof(float));
  if (!loan.memory) {
    no_memory_ = true;
    return;
  }
  const size_t heads = attention_.layout.kv_heads;
  kernels_.append(attention_, index / heads, index % heads, reinterpret_cast<float*>(loan.memory));
}

OrtStatus* Call::append_all() {
  const Layout& layout = attention_.layout;
  double work = 0;
  size_t growing = 0;
  // a block may be written for one row and read for another one
  together_ = plan_.queries && (!plan_.split || plan_.most_runs == 1) && !attention_.blocks.table && !plan_.lists;
  for (size_t row = 0; row < attention_.rows; ++row) {
    growing += attention_.fresh[row] > 0;
    work += static_cast<double>(attention_.fresh[row]) * static_cast<double>(layout.kv_heads * layout.size);
    const int64_t past = attention_.past[row], end = past + attention_.fresh[row];
    if (layout.integers() && end > past && layout.page_of(end - 1) != layout.page_of(past ? past - 1 : 0)) {
      work += static_cast<double>(layout.kv_heads * layout.page * layout.size) * 2;
    }
  }
  together_ = together_ && plan_.queries == growing * layout.kv_heads;
  if (together_) return nullptr;
  return for_each(&Call::append, attention_.rows * layout.kv_heads, work > kLeastParallel);
}

void Call::list(Queries* block, const Listing& listing) const {
  block->list = listing.list;
  block->pages = kernels_.list(attention_, *block, listing.scores, listing.list);
}

// Rows are long where they are late: they come first.
void Call::attend_block(size_t index) {
  Queries block = queries_[plan_.queries - 1 - index];
  if (together_) append(block.row * attention_.layout.kv_heads + block.head);
  size_t scratch = kernels_.attend_scratch(attention_.layout, rows(block));
  if (block.has_list) scratch = std::max(scratch, kernels_.score_scratch(attention_, block));
  const size_t floats = Partial::floats(rows(block), attention_.layout.value_channels());
  const size_t partials = Cuts(attention_, block).count() * floats * sizeof(float);
  size_t scores = 0, entries = 0;
  if (block.has_list) {
    scores = list_floats(attention_, block) * sizeof(float);
    entries = block.pages * sizeof(PageEntry);
  }
  const Pool::Loan loan(pool_, scratch + partials + scores + entries);
  if (!loan.memory) {
    no_memory_ = true;
    return;
  }
  if (block.has_list) {
    char* const memory = loan.memory + scratch + partials;
    const Listing listing = {reinterpret_cast<float*>(memory), reinterpret_cast<PageEntry*>(memory + scores), {}};
    const Candidates all = scored_pages(attention_, block);
    kernels_.score(attention_, block, all.first, all.end, listing.scores, loan.memory);
    list(&block, listing);
  }
  float* const own = reinterpret_cast<float*>(loan.memory + scratch);
  const Cuts cuts(attention_, block);
  for (size_t index = 0; index < cuts.count(); ++index) {
    size_t first, end;
    cuts.run(index, &first, &end);
    float* const partial = own + index * floats;
    kernels_.attend(attention_, &block, 1, first, end, loan.memory, &partial);
  }
  const Source source = {own, cuts.count(), rows(block), 0};
  kernels_.merge(attention_, block, &source, 1);
}

void Call::take_step(size_t index) {
  // The runtime gives a thread neighbouring tasks, which are adjacent in memory: that is faster than keeping an order.
  const Step& step = steps_[ordered_ ? next_.fetch_add(1, std::memory_order_relaxed) : index];
  if (step.kind == Step::kScore) return score(step.run);
  // Earlier steps are already being worked on, and each waits only for steps before itself, so this cannot deadlock.
  if (queries_[step.run.queries].has_list) {
    while (listings_[step.run.queries].left.load(std::memory_order_acquire) >= 0) sched_yield();
  }
  attend(step.run);
}

void Call::score(const Run& run) {
  Queries& block = queries_[run.queries];
  Listing& listing = listings_[run.queries];
  const int64_t from = scored_pages(attention_, block).first;
  const size_t scratch = kernels_.score_scratch(attention_, block);
  if (run.first < run.end) {
    const Pool::Loan loan(pool_, scratch ? scratch : 1);
    if (loan.memory) {
      kernels_.score(attention_, block, from + static_cast<int64_t>(run.first), from + static_cast<int64_t>(run.end),
                     listing.scores, loan.memory);
    } else {
      no_memory_ = true;
    }
  }
  if (listing.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  list(&block, listing);
  listing.left.store(-1, std::memory_order_release);
}

void Call::attend(const Run& run) {
  const Queries& block = queries_[run.queries];
  const size_t index = run.first, heads = run.end, floats = Partial::floats(rows(block), attention_.layout.value_channels());
  size_t first, end;
  Cuts(attention_, block).run(index, &first, &end);
  const Pool::Loan loan(pool_, heads * kernels_.attend_scratch(attention_.layout, rows(block)));
  if (!loan.memory) {
    no_memory_ = true;
    return;
  }
  float* partials[kMostHeadsTogether];
  for (size_t head = 0; head < heads; ++head) partials[head] = parts_[run.queries + head].first + index * floats;
  kernels_.attend(attention_, &block, heads, first, end, loan.memory, partials);
  for (size_t at = run.queries; at < run.queries + heads && !attention_.group_count; ++at) {
    if (parts_[at].left.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    const Source all = source(at);
    kernels_.merge(attention_, queries_[at], &all, 1);
  }
}

void Call::merge_block(size_t index) {
  const size_t heads = attention_.layout.kv_heads, of_groups = attention_.group_count * heads;
  const Queries& block = queries_[of_groups + index];
  Source sources[kMostGroups + 1];
  size_t count = 0;
  for (size_t group = 0; group < attention_.group_count && count < kMostGroups; ++group) {
    const Group& each = attention_.groups[group];
    for (size_t i = 0; i < each.count; ++i) {
      if (each.members[i].row != block.row || each.members[i].column != block.first_column) continue;
      sources[count++] = source(group * heads + block.head, i * attention_.layout.group);
      break;
    }
  }
  sources[count++] = source(of_groups + index);
  kernels_.merge(attention_, block, sources, count);
}

template <typename Visit>
void Call::each_step(const Visit& visit) {
  const auto attend = [&](size_t block) {
    const size_t heads = heads_together(queries_[block]);
    if (queries_[block].head % heads) return;
    for (size_t i = 0; i < parts_[block].count; ++i) visit(Step{Step::kAttend, {block, i, heads}});
  };
  size_t waiting = plan_.queries;  // the block whose list is made
  for (size_t block = 0; block < plan_.queries; ++block) {
    if (!queries_[block].has_list) {
      attend(block);
      continue;
    }
    const Candidates all = scored_pages(attention_, queries_[block]);
    const auto count = static_cast<size_t>(all.end - all.first);
    for (size_t first = 0; first == 0 || first < count; first += kScored) {
      visit(Step{Step::kScore, {block, first, count - first < kScored ? count : first + kScored}});
    }
    // While one thread scores, which waits for memory, another one attends, which multiplies.
    if (waiting < plan_.queries) attend(waiting);
    waiting = block;
  }
  if (waiting < plan_.queries) attend(waiting);
}

OrtStatus* Call::attend_all() {
  const Layout& layout = attention_.layout;
  if (!plan_.queries) return nullptr;
  const bool split = plan_.split && !together_;
  size_t scored = 0, listed = 0, floats = 0, steps = 0, bytes = 0;
  if (split) {
    Plan::each(attention_, [&](const Queries& block) {
      const size_t parts = Cuts(attention_, block).count();
      steps += parts;
      floats += parts * Partial::floats(rows(block), layout.value_channels());
      if (!block.has_list) return;
      const Candidates all = scored_pages(attention_, block);
      const auto count = static_cast<size_t>(all.end - all.first);
      steps += count / kScored + 1, scored += list_floats(attention_, block), listed += block.pages;
    });
  }
  float *scores = nullptr, *partials = nullptr;
  PageEntry* lists = nullptr;
  char* memory = reinterpret_cast<char*>(Pool::kAlignment);
  const auto take = [&](auto** part, size_t count) {
    *part = reinterpret_cast<std::remove_reference_t<decltype(**part)>*>(memory + bytes);
    bytes += round_up(count * sizeof(**part), Pool::kAlignment);
  };
  // twice: to count the bytes, and to assign them
  const auto lay_out = [&] {
    bytes = 0;
    take(&queries_, plan_.queries);
    if (!split) return;
    take(&listings_, plan_.queries), take(&parts_, plan_.queries), take(&steps_, steps);
    take(&scores, scored), take(&lists, listed), take(&partials, floats);
  };
  lay_out();
  const Pool::Loan loan(pool_, bytes);
  if (!loan.memory) return node_.error("no memory to attend to %zu blocks of queries", plan_.queries);
  memory = loan.memory;
  lay_out();

  size_t block = 0;
  const bool parallel = plan_.cycles > kLeastParallel;
  Plan::each(attention_, [&](const Queries& next) { queries_[block++] = next; });
  if (!split) return for_each(&Call::attend_block, plan_.queries, parallel);
  for (block = 0; block < plan_.queries; ++block) {
    const Queries& each = queries_[block];
    const size_t count = Cuts(attention_, each).count();
    new (&parts_[block]) Parts{partials, count, {count}};
    partials += count * Partial::floats(rows(each), layout.value_channels());
    if (!each.has_list) continue;
    new (&listings_[block]) Listing{scores, lists, {0}};
    scores += list_floats(attention_, each), lists += each.pages;
  }
  steps = 0;
  each_step([&](const Step& step) {
    if (step.kind == Step::kScore) {
      ordered_ = true;
      listings_[step.run.queries].left.fetch_add(1, std::memory_order_relaxed);
    }
    steps_[steps++] = step;
  });
  GRAPHOPT_RETURN_IF_ERROR(for_each(&Call::take_step, steps, parallel));
  if (!attention_.group_count || no_memory_) return nullptr;
  const size_t blocks = plan_.queries - attention_.group_count * layout.kv_heads;
  return for_each(&Call::merge_block, blocks, parallel);
}

}  // namespace graphopt
