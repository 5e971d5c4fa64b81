#include "kv_attention/cuda/select.h"

#include "cuda/launch.h"

namespace graphopt {
namespace {

constexpr unsigned kScoreThreads = 256, kMostListThreads = 256;
constexpr int kPageLanes = 8;      // that score a page
constexpr int kScoredPages = 256;  // of a block
constexpr int kHeadsTogether = 8;

// What a block scores or lists: x counts new tokens, y is the head among those that retrieve, z the row.
struct Asked {
  int row, head;
  int64_t position;
  size_t list;
  bool used;

  GRAPHOPT_DEVICE Asked(const SelectRun& run, int token) {
    row = static_cast<int>(block_index().z), head = run.heads[block_index().y];
    used = token < run.tokens(row);
    position = run.call.past[row] + run.first + token;
    list = (static_cast<size_t>(row) * static_cast<size_t>(run.retrieving) + block_index().y) *
               static_cast<size_t>(run.end - run.first) + static_cast<size_t>(token);
  }
};

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

// Scores kScoredPages candidates of one query; the largest of its heads counts, and what is no number counts as
// infinite.
GRAPHOPT_KERNEL(kScoreThreads, 4)
void score_pages(SelectRun run) {
  const CudaCall& call = run.call;
  const Layout& layout = call.layout;
  const int64_t blocks = block_count().x / static_cast<unsigned>(run.end - run.first);
  const Asked asked(run, static_cast<int>(block_index().x / blocks));
  if (!asked.used) return;
  const Candidates candidates(layout, asked.position);
  const int64_t begin = candidates.first + static_cast<int64_t>(block_index().x % blocks) * kScoredPages;
  const int64_t end = begin + kScoredPages < candidates.end ? begin + kScoredPages : candidates.end;
  if (begin >= end) return;

  float* const queries = reinterpret_cast<float*>(shared_memory());
  float *const sums = queries + kHeadsTogether * layout.size, *const used = sums + layout.size;
  const size_t at = call.queries_at(asked.row, asked.head, asked.position);
  if (layout.channels) choose_channels(call, at, sums, used);
  const float* const summaries = call.head_state(asked.row, asked.head).summaries;
  float* const scores = run.scores + asked.list * static_cast<size_t>(run.stride);
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

// Sums over the threads of a block, always in the same order; all threads have the result.
class BlockSum {
 public:
  explicit GRAPHOPT_DEVICE BlockSum(char* memory) : memory_(memory) {}
  template <typename T>
  GRAPHOPT_DEVICE T operator()(T value) const {
    const T* const of_warps = of_each_warp(reduce_sum(value));
    T sum = 0;
    for (unsigned i = 0; i < thread_count() / kWarp; ++i) sum += of_warps[i];
    return sum;
  }
  GRAPHOPT_DEVICE float largest(float value) const {
    const float* const of_warps = of_each_warp(reduce_max(value));
    float most = of_warps[0];
    for (unsigned i = 1; i < thread_count() / kWarp; ++i) most = of_warps[i] > most ? of_warps[i] : most;
    return most;
  }
  static constexpr size_t kBytes = kMostListThreads / kWarp * sizeof(float);

 private:
  template <typename T>
  GRAPHOPT_DEVICE const T* of_each_warp(T value) const {
    T* const of_warps = reinterpret_cast<T*>(memory_);
    sync_block();
    if (lane() == 0) of_warps[warp()] = value;
    sync_block();
    return of_warps;
  }
  char* memory_;
};

// Integers in the order of floats; there must be no NaN.
GRAPHOPT_DEVICE int32_t rank_of(float score) {
  const int32_t bits = static_cast<int32_t>(bits_of_float(score + 0.0f));  // -0 is no less than 0
  return bits ^ (bits >> 31 & 0x7fffffff);
}

struct Lister {
  const Layout& layout;
  const float* scores;
  float* weights;
  int64_t count;
  const BlockSum sum;

  GRAPHOPT_DEVICE float highest() const {
    float own = kNothing;
    for (int64_t i = thread_index().x; i < count; i += thread_count()) own = scores[i] > own ? scores[i] : own;
    return sum.largest(own);
  }
  template <typename Value>
  GRAPHOPT_DEVICE auto sum_of(const Value& value) const {
    auto own = value(0);
    own = 0;
    for (int64_t i = thread_index().x; i < count; i += thread_count()) own += value(i);
    return sum(own);
  }
  GRAPHOPT_DEVICE int32_t ranked(int32_t least) const {
    return sum_of([&](int64_t i) { return static_cast<int32_t>(rank_of(scores[i]) >= least); });
  }

  // The highest rank that `wanted` are equal to or above, or any on the way to it of which exactly so many are.
  GRAPHOPT_DEVICE int32_t threshold(int32_t wanted) const {
    int64_t low = INT32_MIN, high = INT32_MAX;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      const int32_t found = ranked(static_cast<int32_t>(middle));
      if (found == wanted) return static_cast<int32_t>(middle);
      if (found > wanted) low = middle;
      else high = middle - 1;
    }
    return static_cast<int32_t>(low);
  }

  // The sum of all weights that are `least` or more: a larger `least` has no larger sum, as the same numbers are added
  // in the same order, with some left out.
  GRAPHOPT_DEVICE float weight_from(uint32_t least) const {
    return sum_of([&](int64_t i) { return bits_of_float(weights[i]) >= least ? weights[i] : 0.0f; });
  }
  GRAPHOPT_DEVICE int32_t weighing(uint32_t least) const {
    return sum_of([&](int64_t i) { return static_cast<int32_t>(bits_of_float(weights[i]) >= least); });
  }

  // The fewest pages of the highest scores that have `mass` of all the weights: exp(scale (score - the highest)), 1
  // for those of the highest score.
  GRAPHOPT_DEVICE int32_t with_mass() const {
    const float most = highest();
    for (int64_t i = thread_index().x; i < count; i += thread_count()) {
      // an infinite distance times a scale of 0 is NaN, and counts as 0
      const float below = (scores[i] - most) * layout.scale, weight = exponential(below > 0 ? 0.0f : below);
      weights[i] = scores[i] == most ? 1.0f : weight == weight ? weight : 0.0f;
    }
    sync_block();
    const float wanted = layout.mass * weight_from(0);
    uint32_t low = 0, high = bits_of_float(1.0f);  // floats that are not negative are in the order of their bits
    while (low < high) {
      const uint32_t middle = low + (high - low + 1) / 2;
      if (weight_from(middle) >= wanted) low = middle;
      else high = middle - 1;
    }
    // all that weigh more are needed, and as many of those of this weight as make up for the rest
    float sum = weight_from(low + 1);
    int32_t above = weighing(low + 1);
    const int32_t found = weighing(low);
    for (; above < found && sum < wanted; ++above) sum += float_of_bits(low);
    return above;
  }
};

// Lists the pages that one query reads, in their order: those of the sinks, of the recent tokens, and of the
// candidates those of the highest scores; of equal scores the lower page.
GRAPHOPT_KERNEL(kMostListThreads, 4)
void list_pages(SelectRun run) {
  const Layout& layout = run.call.layout;
  const Asked asked(run, static_cast<int>(block_index().x));
  if (!asked.used) return;
  const Candidates candidates(layout, asked.position);
  const int64_t count = candidates.end - candidates.first, all = layout.page_of(asked.position) + 1;
  const int64_t fixed = layout.fixed_pages(), from = asked.position - layout.recent + 1;
  const int64_t recent = from > 0 ? layout.page_of(from) : 0;
  float* const scores = run.scores + asked.list * static_cast<size_t>(run.stride);
  float* const weights = scores + score_floats(static_cast<size_t>(count));
  const Lister lister{layout, scores, weights, count, BlockSum(shared_memory())};
  int32_t budget = static_cast<int32_t>(layout.budget < count ? layout.budget : count);
  if (layout.mass > 0 && budget) {
    const int32_t needed = lister.with_mass();
    budget = needed < budget ? needed : budget;
  }
  const bool choosing = budget && budget < count;
  const int32_t least = choosing ? lister.threshold(budget) : INT32_MIN;
  // how many of those that are equal to it are chosen
  int32_t equal = choosing ? budget - lister.ranked(least + 1) : 0;

  int32_t* const entries = run.entries + asked.list * static_cast<size_t>(run.longest);
  int32_t listed = 0;
  const int threads = static_cast<int>(thread_count()), warps = threads / kWarp;
  int32_t* const of_warps = reinterpret_cast<int32_t*>(shared_memory());
  // how many threads before this one have the flag set, and how many in all
  const auto place = [&](bool yes, int32_t* in_all) {
    const uint32_t bits = ballot(yes);
    sync_block();
    if (lane() == 0) of_warps[warp()] = __builtin_popcount(bits);
    sync_block();
    int32_t before = __builtin_popcount(bits & ((1u << lane()) - 1));
    *in_all = 0;
    for (int i = 0; i < warps; ++i) {
      before += i < warp() ? of_warps[i] : 0;
      *in_all += of_warps[i];
    }
    return before;
  };
  for (int64_t first = 0; first < all; first += threads) {
    const int64_t page = first + thread_index().x;
    const bool candidate = budget && page >= candidates.first && page < candidates.end;
    const int32_t rank = candidate && choosing ? rank_of(scores[page - candidates.first]) : INT32_MAX;
    int32_t ties = 0, chosen = 0;
    const bool tie = candidate && choosing && rank == least;
    const int32_t tied = place(tie, &ties);
    const bool whole = candidate && (!choosing || rank > least || (tie && tied < equal));
    equal = equal > ties ? equal - ties : 0;
    const bool part = !whole && page < all && (page < fixed || page >= recent);
    const int32_t before = place(whole || part, &chosen);
    if (whole || part) entries[listed + before] = static_cast<int32_t>(2 * page + whole);
    listed += chosen;
  }
  if (thread_index().x == 0) run.counts[asked.list] = listed;
}

size_t round_up(size_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

SelectRun::SelectRun(const CudaCall& call, const CudaPlan& plan) : call(call), first(plan.first), end(plan.end) {
  const int policy = static_cast<int>(Policy::kRetrieval);
  retrieving = plan.heads_of(policy);
  for (int i = 0; i < retrieving; ++i) heads[i] = plan.heads[plan.first_head[policy] + i];
  for (int row = 0; row < call.rows; ++row) {
    if (!tokens(row)) continue;
    const int64_t last = call.past[row] + first + tokens(row) - 1;
    // with a window the number of candidates does not always grow; their pages' indices do
    const Candidates candidates(call.layout, last);
    const int64_t most = candidates.end - candidates.first + 1;
    const auto floats = static_cast<int64_t>(list_floats(call.layout, static_cast<size_t>(most)));
    const auto list = static_cast<int32_t>(longest_list(call.layout, last));
    stride = floats > stride ? floats : stride, longest = list > longest ? list : longest;
  }
}

size_t SelectRun::bytes() const {
  return lists() * (static_cast<size_t>(stride) * sizeof(float)) +
         round_up(lists() * static_cast<size_t>(longest) * 4) +
         round_up(lists() * 4);
}

void SelectRun::take(char* scratch) {
  scores = reinterpret_cast<float*>(scratch);
  entries = reinterpret_cast<int32_t*>(scratch + lists() * (static_cast<size_t>(stride) * sizeof(float)));
  counts = entries + round_up(lists() * static_cast<size_t>(longest) * 4) / 4;
}

const char* score_and_list(const SelectRun& run, void* stream) {
  const Layout& layout = run.call.layout;
  if (!run.lists()) return nullptr;
  int64_t most = 0;
  for (int row = 0; row < run.call.rows; ++row) {
    if (!run.tokens(row)) continue;
    const Candidates candidates(layout, run.call.past[row] + run.first + run.tokens(row) - 1);
    most = candidates.end - candidates.first + 1 > most ? candidates.end - candidates.first + 1 : most;
  }
  const unsigned tokens = static_cast<unsigned>(run.end - run.first), heads = static_cast<unsigned>(run.retrieving);
  const unsigned rows = static_cast<unsigned>(run.call.rows);
  const unsigned blocks = static_cast<unsigned>((most + kScoredPages - 1) / kScoredPages);
  const size_t floats = (kHeadsTogether + 2) * layout.size;
  const char* failure = nullptr;
  if (layout.budget) {
    failure = launch(score_pages, {tokens * blocks, heads, rows}, kScoreThreads, floats * sizeof(float), stream, run);
  }
  if (failure) return failure;
  unsigned threads = kMostListThreads;
  while (threads > kWarp && static_cast<int64_t>(threads / 2) >= most) threads /= 2;
  return launch(list_pages, {tokens, heads, rows}, threads, BlockSum::kBytes, stream, run);
}

}  // namespace graphopt
