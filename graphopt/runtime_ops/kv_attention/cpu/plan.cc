#include "kv_attention/cpu/plan.h"

#include "kv_attention/shared/select.h"

namespace graphopt {
namespace {

// With this many blocks of queries the last one does not delay the call much; with fewer, their pages are split into
// runs of this many tokens, or into this many runs.
constexpr size_t kBytesOfCycle = 8;  // that one thread reads from memory
constexpr size_t kEnough = 64, kRunTokens = 2048, kRuns = 256;

}  // namespace

void find_pages(const Attention& call, Queries* queries) {
  const Layout& layout = call.layout;
  const int64_t first = call.position(queries->row, queries->first_column);
  const int64_t last = call.position(queries->row, queries->end_column - 1);
  const Policy policy = call.policies[queries->head];
  queries->whole = policy == Policy::kDense;
  if (policy == Policy::kRetrieval) {
    queries->pages = longest_list(layout, last);
    return;
  }
  const PageRange range(layout, policy, first, last);
  queries->sinks = range.sinks, queries->begin = range.begin, queries->pages = range.pages;
}

Plan::Plan(const Attention& call) {
  const Layout& layout = call.layout;
  each(call, [&](const Queries& block) {
    const size_t rows = (block.end_column - block.first_column) * layout.group;
    ++queries;
    pages += block.pages;
    most_pages = block.pages > most_pages ? block.pages : most_pages;
    most_rows = rows > most_rows ? rows : most_rows;
    // a page waits for memory where few queries share it
    const size_t of_page = rows * layout.page * layout.size / 8, read = 2 * layout.page_bytes() / kBytesOfCycle;
    cycles += static_cast<double>(of_page > read ? of_page : read) * static_cast<double>(block.pages);
    if (call.policies[block.head] == Policy::kRetrieval) {
      const int64_t last = call.position(block.row, block.end_column - 1);
      cycles += static_cast<double>(rows * layout.known / 4) * static_cast<double>(layout.page_of(last) + 1);
    }
  });
  split = queries < kEnough;
  const size_t tokens = kRunTokens / layout.page, share = (pages + kRuns - 1) / kRuns;
  run_pages = !split ? SIZE_MAX : share > tokens ? share : tokens;
}

}  // namespace graphopt
