// Lists of the pages that queries read, from the scores of their candidates.
#include "cuda/launch.h"
#include "kv_attention/cuda/select.h"

namespace graphopt {
namespace {

constexpr unsigned kMostListThreads = 256;
constexpr int kHeldRanks = 16;  // of a thread

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

  // The highest rank that `wanted` are equal to or above, or any on the way to it of which exactly so many are. Scores that
  // fit are asked for once, and stay in registers.
  GRAPHOPT_DEVICE int32_t threshold(int32_t wanted) const {
    const int64_t threads = thread_count(), own = thread_index().x;
    if (count > kHeldRanks * threads) return search(wanted, [&](int32_t least) { return ranked(least); });
    int32_t held[kHeldRanks];
    GRAPHOPT_UNROLL
    for (int i = 0; i < kHeldRanks; ++i) {
      const int64_t index = own + i * threads;
      held[i] = index < count ? rank_of(scores[index]) : INT32_MIN;  // below every rank that is asked about
    }
    return search(wanted, [&](int32_t least) {
      int32_t found = 0;
      GRAPHOPT_UNROLL
      for (int i = 0; i < kHeldRanks; ++i) found += held[i] >= least;
      return sum(found);
    });
  }
  template <typename Ranked>
  GRAPHOPT_DEVICE int32_t search(int32_t wanted, const Ranked& ranked_from) const {
    int64_t low = INT32_MIN, high = INT32_MAX;
    while (low < high) {
      const int64_t middle = low + (high - low + 1) / 2;
      const int32_t found = ranked_from(static_cast<int32_t>(middle));
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
  const SelectTask task(run, static_cast<int>(block_index().x));
  if (!task.used) return;
  const Candidates candidates(layout, task.position);
  const int64_t count = candidates.end - candidates.first, all = layout.page_of(task.position) + 1;
  const int64_t fixed = layout.fixed_pages(), from = task.position - layout.recent + 1;
  const int64_t recent = from > 0 ? layout.page_of(from) : 0;
  float* const scores = run.scores + task.list * static_cast<size_t>(run.stride);
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

  int32_t* const entries = run.entries + task.list * static_cast<size_t>(run.longest);
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
  if (thread_index().x == 0) run.counts[task.list] = listed;
}

}  // namespace

const char* list(const SelectRun& run, int64_t most, void* stream) {
  const unsigned tokens = static_cast<unsigned>(run.end - run.first), heads = static_cast<unsigned>(run.retrieving);
  const unsigned rows = static_cast<unsigned>(run.call.rows);
  unsigned threads = kMostListThreads;
  while (threads > kWarp && static_cast<int64_t>(threads / 2) >= most) threads /= 2;
  return launch(list_pages, {tokens, heads, rows}, threads, BlockSum::kBytes, stream, run);
}

}  // namespace graphopt
