#include "kv_attention/cpu/plan.h"

#include <thread>

#include "kv_attention/shared/select.h"

namespace graphopt {
namespace {

constexpr size_t kBytesOfCycle = 8;  // that one thread reads from memory
// With this many blocks of queries, none of which has more than this share of the runs, the last one does not delay the
// call much; else their runs are shared out.
constexpr size_t kEnough = 64, kLargestShare = 16;
// Tokens of a run.
constexpr int64_t kRunTokens = 2048;
constexpr size_t kTasksOfThread = 4;  // so that threads end together
constexpr int64_t kUncut = INT64_MAX / 4;

}  // namespace

namespace {

// How many columns from this one on read pages together: those of a whole block, where they choose pages in blocks.
size_t columns_together(const Attention& call, Queries* queries) {
  const Layout& layout = call.layout;
  if (layout.chooses) return 1;
  const Policy policy = call.policies[queries->head];
  const size_t left = call.end_column(queries->row) - queries->first_column;
  queries->has_list = makes_lists(policy);
  size_t columns = queries->has_list || layout.group > kBlockRows / 2 ? 1 : kBlockRows / layout.group;
  if (chooses_in_blocks(policy) && layout.query_block) {
    const size_t block = static_cast<size_t>(layout.query_block);
    const auto behind = static_cast<size_t>(call.position(queries->row, queries->first_column) % layout.query_block);
    queries->has_list = !behind && left >= block;
    if (queries->has_list) return block;
    if (block - behind < columns) columns = block - behind;
  }
  return left < columns ? left : columns;
}

void find_pages(const Attention& call, Queries* queries) {
  const Layout& layout = call.layout;
  const int64_t first = call.position(queries->row, queries->first_column);
  const int64_t last = call.position(queries->row, queries->end_column - 1);
  const Policy policy = call.policies[queries->head];
  queries->whole = reads_all(policy);
  if (layout.chooses) {  // pages are of so many chosen tokens, one behind the other
    const size_t count = call.chosen_counts[call.token(queries->row, queries->first_column)];
    queries->pages = (count + layout.page - 1) / layout.page;
    return;
  }
  if (queries->has_list) {
    queries->pages = chooses_in_blocks(policy) ? static_cast<size_t>(layout.page_of(last)) + 1
                                               : longest_list(policy, layout, last);
    return;
  }
  const PageRange range(layout, policy, first, last);
  queries->sinks = range.sinks, queries->begin = range.begin, queries->pages = range.pages;
  if (!call.grouped || call.grouped[queries->row] <= range.begin) return;
  queries->begin = call.grouped[queries->row];
  queries->pages -= static_cast<size_t>(queries->begin - range.begin);
}

}  // namespace

Queries queries_from(const Attention& call, size_t row, size_t head, size_t column) {
  Queries queries = {};
  queries.row = row, queries.head = head, queries.first_column = column;
  queries.end_column = column + columns_together(call, &queries);
  find_pages(call, &queries);
  return queries;
}

Candidates scored_pages(const Attention& call, const Queries& queries) {
  if (chooses_in_blocks(call.policies[queries.head])) return pages_seen(call, queries);
  return Candidates(call.layout, call.position(queries.row, queries.first_column));
}

size_t list_floats(const Attention& call, const Queries& queries) {
  const Layout& layout = call.layout;
  const Candidates all = scored_pages(call, queries);
  const auto count = static_cast<size_t>(all.end - all.first);
  if (!chooses_in_blocks(call.policies[queries.head])) return list_floats(layout, count);
  return (3 * layout.sampled_queries() * layout.group + 1) * score_floats(count);
}

Plan::Plan(const Attention& call) {
  const Layout& layout = call.layout;
  each(call, [&](const Queries& block) {
    const size_t rows = block.columns() * layout.group, of_block = Cuts(call, block).count();
    ++queries, lists = lists || block.has_list;
    most_runs = of_block > most_runs ? of_block : most_runs, runs += of_block;
    // a page waits for memory where few queries share it
    const size_t of_page = rows * layout.page * layout.size / 8, bytes = layout.key_bytes() + layout.value_bytes();
    const size_t read = bytes / kBytesOfCycle;
    cycles += static_cast<double>(of_page > read ? of_page : read) * static_cast<double>(block.pages);
    if (makes_lists(call.policies[block.head])) {
      const int64_t last = call.position(block.row, block.end_column - 1);
      cycles += static_cast<double>(rows * layout.known / 4) * static_cast<double>(layout.page_of(last) + 1);
    }
  });
  split = queries < kEnough || most_runs > runs / kLargestShare || call.blocks.table;
  if (!call.blocks.table) return;
  const size_t threads = std::thread::hardware_concurrency();
  for (size_t together = 2; together <= kMostHeadsTogether; ++together) {
    if (layout.kv_heads % together == 0 && runs / together >= kTasksOfThread * threads) heads = together;
  }
}

Cuts::Cuts(const Attention& call, const Queries& queries) : queries_(queries) {
  const Layout& layout = call.layout;
  const Policy policy = call.policies[queries.head];
  listed_ = queries.has_list;
  const bool streams = may_drop(policy) && (!layout.window || layout.recent < layout.window);
  const int64_t reach = streams ? layout.recent : layout.window;  // 0: without end
  length_ = !listed_ && reach && reach <= kRunTokens ? kUncut : kRunTokens / static_cast<int64_t>(layout.page);
  const auto runs = [&](int64_t pages) { return pages / length_ + (pages % length_ != 0); };
  if (listed_) {
    count_ = queries.pages ? static_cast<size_t>(runs(static_cast<int64_t>(queries.pages))) : 1;
    return;
  }
  const int64_t last = queries.begin + static_cast<int64_t>(queries.pages) - queries.sinks - 1;
  of_sinks_ = runs(queries.sinks), begin_ = queries.begin / length_;
  if (of_sinks_ && begin_ == of_sinks_ - 1) --of_sinks_;  // they begin in the last run of the sinks
  count_ = static_cast<size_t>(of_sinks_ + last / length_ - begin_ + 1);
}

size_t Cuts::place_of(int64_t page) const {
  const int64_t behind = page - queries_.begin + queries_.sinks, pages = static_cast<int64_t>(queries_.pages);
  if (page <= queries_.sinks) return static_cast<size_t>(page);
  if (page < queries_.begin) return static_cast<size_t>(queries_.sinks);
  return static_cast<size_t>(behind < pages ? behind : pages);
}

void Cuts::run(size_t index, size_t* first, size_t* end) const {
  const int64_t i = static_cast<int64_t>(index);
  if (listed_) {
    const int64_t pages = static_cast<int64_t>(queries_.pages), from = i * length_, to = from + length_;
    *first = static_cast<size_t>(from < pages ? from : pages), *end = static_cast<size_t>(to < pages ? to : pages);
    return;
  }
  const int64_t run = i < of_sinks_ ? i : begin_ + i - of_sinks_;
  *first = place_of(run * length_), *end = place_of((run + 1) * length_);
}

}  // namespace graphopt
