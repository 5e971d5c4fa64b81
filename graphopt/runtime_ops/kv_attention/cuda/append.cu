// A page that leaves its slot is rounded before a new token takes its place: by a launch of its own, as tokens of one
// call may fill a slot many times over. All other pages are written side by side.
#include "kv_attention/cuda/append.h"

#include "cuda/launch.h"
#include "kv_attention/cuda/new_tokens.h"

namespace graphopt {
namespace {

// The pages that new tokens of a row go to.
struct Touched {
  int64_t first = 0, end = 0;

  GRAPHOPT_BOTH Touched(const CudaCall& call, int row) {
    if (!call.fresh[row]) return;
    first = call.layout.page_of(call.past[row]), end = call.layout.page_of(call.end(row) - 1) + 1;
  }
};

// Writes the new tokens of one page, each block: x counts the pages of a row, y is the head, z the row.
template <typename Holds>
GRAPHOPT_KERNEL(kAppendThreads, 4)
void append_page(CudaCall call) {
  let_next_begin();
  wait_for_previous();
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const Touched touched(call, row);
  const int64_t page = touched.first + static_cast<int64_t>(block_index().x);
  if (page >= touched.end) return;
  const int64_t base = page * static_cast<int64_t>(layout.page), left = call.end(row) - base;
  const HeadState state = call.head_state(row, head);
  const NewTokens tokens{call, state, row, head, page,
                         call.past[row] > base ? static_cast<size_t>(call.past[row] - base) : 0,
                         left < static_cast<int64_t>(layout.page) ? static_cast<size_t>(left) : layout.page};
  if (layout.known) tokens.summarize();
  if (layout.compensate) tokens.follow(page == touched.first);
  tokens.store(Holds());
}

// Sums of pages behind the first one of a row become means, page after page: y is the head, z the row.
GRAPHOPT_KERNEL(kAppendThreads, 8)
void chain_means(CudaCall call) {
  const Layout& layout = call.layout;
  const int row = static_cast<int>(block_index().z), head = static_cast<int>(block_index().y);
  const HeadState state = call.head_state(row, head);
  const Touched touched(call, row);
  const int64_t tokens = static_cast<int64_t>(layout.page);
  int64_t page = layout.page_of(layout.sinks) + 1;  // the first whose mean continues that of another
  if (page <= touched.first) page = touched.first + 1;
  const auto mean_of = [&](int64_t logical) {
    return state.summaries + layout.physical(logical) * layout.summary + layout.known;
  };
  for (; page < touched.end; ++page) {
    const int64_t base = page * tokens, end = base + tokens < call.end(row) ? base + tokens : call.end(row);
    const double added = static_cast<double>(end - base), count = static_cast<double>(end - layout.sinks);
    for (size_t i = thread_index().x; i < 2 * layout.size; i += kAppendThreads) {
      const double last = static_cast<double>(mean_of(page - 1)[i]), sum = static_cast<double>(mean_of(page)[i]);
      mean_of(page)[i] = static_cast<float>(last + (sum - added * last) / count);
    }
  }
}

}  // namespace

const char* append_tokens(const CudaCall& call, void* stream) {
  const Layout& layout = call.layout;
  int64_t touched = 0;
  for (int row = 0; row < call.rows; ++row) {
    const Touched pages(call, row);
    touched = pages.end - pages.first > touched ? pages.end - pages.first : touched;
  }
  const auto grid = [&](int64_t pages) {
    return Index3{static_cast<unsigned>(pages), static_cast<unsigned>(layout.kv_heads),
                  static_cast<unsigned>(call.rows)};
  };
  const char* failure = round_leaving_pages(call, stream);
  if (!failure && touched) {
    failure = with_storage(layout.storage, [&](auto holds) {
      return launch_early(append_page<decltype(holds)>, grid(touched), kAppendThreads, 0, stream, call);
    });
  }
  if (!failure && layout.compensate && touched > 1) {
    failure = launch(chain_means, grid(1), kAppendThreads, 0, stream, call);
  }
  return failure;
}

}  // namespace graphopt
