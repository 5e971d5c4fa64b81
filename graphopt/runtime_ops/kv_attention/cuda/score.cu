// Scores of pages from their summaries.
#include "cuda/launch.h"
#include "kv_attention/cuda/select.h"

namespace graphopt {
namespace {

constexpr unsigned kScoreThreads = 256;
constexpr int kPageLanes = 8;      // that score a page
constexpr int kScoredPages = 64;  // of a block: two turns of its lanes, so that many blocks share what is read
constexpr int kHeadsTogether = 8;

// The channels that count: those of the largest sums of |q| over the query heads, where NaN counts as infinite;
// of equal ones the lower. All threads of the block.
GRAPHOPT_DEVICE void choose_channels(const CudaCall& call, size_t queries, float* sums, float* used) {
  const Layout& layout = call.layout;
  const int size = static_cast<int>(layout.size), thread = static_cast<int>(thread_index().x);
  for (int c = thread; c < size; c += static_cast<int>(kScoreThreads)) {
    float sum = 0;
    for (size_t r = 0; r < layout.group; ++r) {
      sum = sum + magnitude_of(load_number(call.query, call.type, queries + r * layout.size + static_cast<size_t>(c)));
    }
    sums[c] = sum != sum ? __builtin_inff() : sum;
  }
  sync_block();
  for (int c = thread; c < size; c += static_cast<int>(kScoreThreads)) {
    int before = 0;
    for (int other = 0; other < size; ++other) before += sums[other] > sums[c] || (sums[other] == sums[c] && other < c);
    used[c] = before < layout.channels ? 1.0f : 0.0f;
  }
  sync_block();
}

GRAPHOPT_DEVICE float bound_product(float q, float low, float high) {
  const float a = q * low, b = q * high;
  return a != a || a > b ? a : b;
}

// Scores kScoredPages candidates of one query; the largest of its heads counts, and NaN counts as
// infinite.
GRAPHOPT_KERNEL(kScoreThreads, 4)
void score_pages(SelectRun run) {
  const CudaCall& call = run.call;
  const Layout& layout = call.layout;
  const int64_t blocks = block_count().x / static_cast<unsigned>(run.end - run.first);
  const SelectTask task(run, static_cast<int>(block_index().x / blocks));
  if (!task.used) return;
  const Candidates candidates(layout, task.position);
  const int64_t begin = candidates.first + static_cast<int64_t>(block_index().x % blocks) * kScoredPages;
  const int64_t end = begin + kScoredPages < candidates.end ? begin + kScoredPages : candidates.end;
  if (begin >= end) return;

  float* const queries = reinterpret_cast<float*>(shared_memory());
  float *const sums = queries + kHeadsTogether * layout.size, *const used = sums + layout.size;
  const size_t at = call.queries_at(task.row, task.head, task.position);
  if (layout.channels) choose_channels(call, at, sums, used);
  const float* const summaries = call.head_state(task.row, task.head).summaries;
  float* const scores = run.scores + task.list * static_cast<size_t>(run.stride);
  const int size = static_cast<int>(layout.size);
  for (size_t head = 0; head < layout.group; head += kHeadsTogether) {
    const int heads = static_cast<int>(layout.group - head < kHeadsTogether ? layout.group - head : kHeadsTogether);
    sync_block();
    for (int i = static_cast<int>(thread_index().x); i < heads * size; i += static_cast<int>(kScoreThreads)) {
      queries[i] = load_number(call.query, call.type, at + head * layout.size + static_cast<size_t>(i));
    }
    sync_block();
    for (int64_t first = begin + warp() * (kWarp / kPageLanes); first < end; first += kScoreThreads / kPageLanes) {
      const int64_t page = first + lane() / kPageLanes;
      const float* const summary = summaries + layout.physical(page < end ? page : begin) * layout.summary;
      float of_head[kHeadsTogether] = {};
      for (int c = lane() % kPageLanes * 4; c < size; c += kPageLanes * 4) {
        const Four low = load_four(summary + c), high = layout.mean ? low : load_four(summary + size + c);
        GRAPHOPT_UNROLL
        for (int r = 0; r < kHeadsTogether; ++r) {
          if (r >= heads) break;
          const Four query = load_four(queries + r * size + c);
          GRAPHOPT_UNROLL
          for (int i = 0; i < 4; ++i) {
            const float product = bound_product(query.number[i], low.number[i], high.number[i]);
            of_head[r] += layout.channels && used[c + i] == 0 ? 0.0f : product;
          }
        }
      }
      float most = kNothing;
      GRAPHOPT_UNROLL
      for (int r = 0; r < kHeadsTogether; ++r) {
        if (r >= heads) break;
        const float score = reduce_sum<kPageLanes>(of_head[r]), counted = score != score ? __builtin_inff() : score;
        most = counted > most ? counted : most;
      }
      if (lane() % kPageLanes == 0 && page < end) {
        float* const score = scores + (page - candidates.first);
        *score = head && *score > most ? *score : most;
      }
    }
  }
}

}  // namespace

const char* score(const SelectRun& run, int64_t most, void* stream) {
  const Layout& layout = run.call.layout;
  const unsigned tokens = static_cast<unsigned>(run.end - run.first), heads = static_cast<unsigned>(run.retrieving);
  const unsigned rows = static_cast<unsigned>(run.call.rows);
  const unsigned blocks = static_cast<unsigned>((most + kScoredPages - 1) / kScoredPages);
  const size_t floats = (kHeadsTogether + 2) * layout.size;
  return launch(score_pages, {tokens * blocks, heads, rows}, kScoreThreads, floats * sizeof(float), stream, run);
}

}  // namespace graphopt
