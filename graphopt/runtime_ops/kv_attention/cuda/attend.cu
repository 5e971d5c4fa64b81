// Each warp reads pages for 8 queries by itself, with an online softmax, without waiting for other warps: so loads of
// one warp overlap with the arithmetic of others. Partial results of the same queries are merged by another kernel,
// in their order.
#include "kv_attention/cuda/attend.h"

#include "cuda/launch.h"
#include "kv_attention/cuda/codes.h"
#include "kv_attention/cuda/halves.h"
#include "kv_attention/cuda/merge.h"
#include "kv_attention/cuda/place.h"

namespace graphopt {
namespace {

constexpr unsigned kAttendThreads = 128;
static_assert(kQueries == kTileQueries, "a warp reads for a tile of queries");

template <typename Pages>
GRAPHOPT_DEVICE void take_queries(const CudaCall& call, const TileQueries& queries, const void* from, float* to) {
  const int q = lane() % 4, size = static_cast<int>(call.layout.size);
  for (int step = 0; step < Pages::steps(call.layout); ++step) {
    Four four;
    GRAPHOPT_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int c = Pages::channel(step, q, i);
      const bool there = queries.used && c < size;
      four.number[i] = there ? load_number(from, call.type, queries.at + c) * call.layout.scale : 0.0f;
    }
    store_four(to + (step * kWarp + lane()) * 4, four);
  }
}

GRAPHOPT_DEVICE size_t list_of(const AttendRun& run, const Place& place, const TileQueries& queries) {
  return static_cast<size_t>(place.row * run.plan.heads_of(static_cast<int>(Policy::kRetrieval)) + place.of_policy) *
             static_cast<size_t>(run.plan.end - run.plan.first) +
         static_cast<size_t>(queries.first - run.call.past[place.row] - run.plan.first);
}

GRAPHOPT_DEVICE Reading reading_of(const AttendRun& run, const Place& place, const TileQueries& queries) {
  const CudaCall& call = run.call;
  const size_t row = call.first_row + static_cast<size_t>(place.row);
  const size_t head = row * call.layout.kv_heads + static_cast<size_t>(place.head);
  const int32_t* list = nullptr;
  if (place.policy == Policy::kRetrieval) {
    list = run.lists.entries + list_of(run, place, queries) * static_cast<size_t>(run.lists.longest);
  }
  return {PageRange(call.layout, place.policy, queries.first, queries.last), list, queries.first, queries.last,
          call.newest_page(place.row), static_cast<uint32_t>(head), 0, 0, 0, -1, false};
}

// The scores of tokens below `sinks` come from queries of their own, where there are any.
template <typename Pages>
GRAPHOPT_DEVICE void score_tile(Pages& pages, const CudaCall& call, const Desk& desk, const Tile& tile) {
  const int64_t base = tile.page * static_cast<int64_t>(call.layout.page) + tile.offset;
  const int64_t left = call.sink_query ? call.layout.sinks - base : 0;
  const int limit = left > kTileTokens ? kTileTokens : left > 0 ? static_cast<int>(left) : 0;
  GRAPHOPT_NO_UNROLL
  for (int sinks = limit < tile.tokens ? 0 : 1; sinks < (limit > 0 ? 2 : 1); ++sinks) {
    pages.score(desk, tile, sinks, sinks && limit < tile.tokens ? limit : kTileTokens);
  }
}

template <typename Pages, int Spans>
GRAPHOPT_DEVICE void write_results(const AttendRun& run, const Desk& desk, const Softmax& softmax, const Pages& pages,
                                   const float (&sums)[8 * Spans][Pages::kSums]) {
  const CudaCall& call = run.call;
  const size_t size = call.layout.size;
  const int g = lane() / 4, q = lane() % 4;
  const float sum = sum_of_query(softmax.sum);
  float* const values = desk.queries;
  GRAPHOPT_UNROLL
  for (int i = 0; i < 16 * Spans; ++i) {
    const int c = Pages::summed(q, i / 2, i % 2);
    if (c < static_cast<int>(size)) values[g * size + c] = pages.result(sums[i / 2], i % 2);
  }
  sync_warp();
  const Segment& segment = run.plan.segment[desk.reading->segment];
  const Place place(run.plan, segment, desk.reading->of_segment);
  if (segment.parts > 1) {
    const size_t partial = static_cast<size_t>(segment.first_partial + desk.reading->of_segment);
    const PartialResult result(run.partials, call.layout, partial);
    for (size_t i = static_cast<size_t>(lane()) * 4; i < kQueries * size; i += 4 * kWarp) {
      store16(result.values + i, load16(values + i));
    }
    if (q == 0) result.largest[g] = softmax.largest, result.sums[g] = sum;
    return;
  }
  GRAPHOPT_NO_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    const TileQueries one(run, place, i);
    const float largest = shuffle(softmax.largest, 4 * i), of_row = shuffle(sum, 4 * i);
    if (!one.used) continue;
    float numbers[kLaneChannels] = {};
    GRAPHOPT_UNROLL
    for (int k = 0; k < kLaneChannels; ++k) {
      const size_t c = static_cast<size_t>(lane() + k * kWarp);
      if (c < size) numbers[k] = values[static_cast<size_t>(i) * size + c];
    }
    write_row(call, place.row, place.head, one.position, one.head, largest, of_row, numbers);
  }
}

template <typename Pages, int Spans>
GRAPHOPT_KERNEL(kAttendThreads, Spans == 2 && !Pages::kCodes ? 3 : 2)
void attend(AttendRun run) {
  const CudaCall& call = run.call;
  const CudaPlan& plan = run.plan;
  const Layout& layout = call.layout;
  const int32_t unit = static_cast<int32_t>(block_index().x * (kAttendThreads / kWarp)) + warp();
  if (unit >= plan.units) return;
  const int32_t which = plan.segment_of(&Segment::first_unit, unit);
  const Segment& segment = plan.segment[which];
  const Place place(plan, segment, unit - segment.first_unit);
  const TileQueries queries(run, place, lane() / 4);

  const bool sinks = call.sink_query != nullptr;
  const int steps = Pages::steps(layout);
  const size_t of_warp = Desk::bytes(steps, sinks, Pages::kMultiplies);
  const Desk desk(shared_memory() + static_cast<size_t>(warp()) * of_warp, steps, sinks, Pages::kMultiplies);
  take_queries<Pages>(call, queries, call.query, desk.queries);
  if (sinks) take_queries<Pages>(call, queries, call.sink_query, desk.queries_of(true));
  sync_warp();

  if (lane() == 0) {
    *desk.reading = reading_of(run, place, queries);
    desk.reading->segment = which, desk.reading->of_segment = unit - segment.first_unit;
    const int64_t pages = place.policy == Policy::kRetrieval ? run.lists.counts[list_of(run, place, queries)]
                                                             : static_cast<int64_t>(desk.reading->range.pages);
    const int64_t end = static_cast<int64_t>(place.part + 1) * plan.share;
    desk.reading->end = static_cast<int32_t>(place.part + 1 == segment.parts || end > pages ? pages : end);
    desk.reading->whole = place.policy == Policy::kDense;
  }
  sync_warp();
  Pages pages(layout, call.state);
  Softmax softmax;
  float sums[8 * Spans][Pages::kSums] = {};
  const int before_last = queries.used ? static_cast<int>(queries.last - queries.position) : -1;
  GRAPHOPT_NO_UNROLL
  for (int index = place.part * plan.share; index < desk.reading->end; ++index) {
    const Reading& reading = *desk.reading;
    Tile tile;
    bool whole = reading.whole;
    if (reading.list) tile.page = reading.list[index] >> 1, whole = reading.list[index] & 1;
    else tile.page = reading.range.page(static_cast<size_t>(index));
    const int tokens = static_cast<int>(layout.page);
    tile.tokens = tokens < kTileTokens ? tokens : kTileTokens;
    pages.open(reading.head, tile.page, reading.newest);
    GRAPHOPT_NO_UNROLL
    for (tile.offset = 0; tile.offset < tokens; tile.offset += kTileTokens) {
      const auto seen_at = [&](int64_t position) {
        return bits_of(visible(layout, position, tile.page, whole), tile.offset, tile.tokens);
      };
      const uint64_t every = ~uint64_t{0} >> (64 - tile.tokens);
      tile.seen = seen_at(reading.last);
      tile.alike = reading.first == reading.last;
      tile.all = tile.seen == every;
      if (!tile.alike) {
        // if two queries read all of it, all queries between them do
        tile.all = tile.alike = tile.all && seen_at(reading.first) == every;
        tile.seen = seen_at(reading.last - before_last);
      }
      if (before_last < 0) tile.seen = 0;
      score_tile(pages, call, desk, tile);
      const float factor = softmax.weigh(layout, tile, [](int i) { return Pages::token(lane() % 4, i); }, desk);
      sync_warp();
      pages.add(desk, tile, factor, sums);
      sync_warp();  // all lanes have read the weights
    }
  }
  pages.finish();
  write_results<Pages, Spans>(run, desk, softmax, pages, sums);
}

// How pages of a storage are read.
template <typename Holds>
struct PagesOf;
template <typename T>
struct PagesOf<Numbers<T>> {
  using Pages = FloatPages<T>;
};
template <>
struct PagesOf<Numbers<Half>> {
  using Pages = HalfPages;
};
template <unsigned Bits>
struct PagesOf<Codes<Bits>> {
  using Pages = CodePages<Bits>;
};

template <typename Pages, int Spans>
const char* start(const AttendRun& run, void* stream) {
  const size_t of_warp = Desk::bytes(Pages::steps(run.call.layout), run.call.sink_query != nullptr, Pages::kMultiplies);
  const unsigned warps = kAttendThreads / kWarp;
  const unsigned blocks = (static_cast<unsigned>(run.plan.units) + warps - 1) / warps;
  return launch(attend<Pages, Spans>, {blocks, 1, 1}, kAttendThreads, warps * of_warp, stream, run);
}

template <typename Pages>
const char* start(const AttendRun& run, void* stream) {
  // fewer sums leave registers for more loads; storages that are not optimized have one kernel for all sizes
  if constexpr (!Pages::kMultiplies) return start<Pages, 4>(run, stream);
  else return run.call.layout.size <= 128 ? start<Pages, 2>(run, stream) : start<Pages, 4>(run, stream);
}

const char* start_attend(const AttendRun& run, void* stream) {
  return with_storage(run.call.layout.storage, [&](auto holds) {
    return start<typename PagesOf<decltype(holds)>::Pages>(run, stream);
  });
}

}  // namespace

const char* attend_and_merge(const AttendRun& run, void* stream) {
  if (!run.plan.units) return nullptr;
  if (const char* failure = start_attend(run, stream)) return failure;
  return merge_parts(run, stream);
}

}  // namespace graphopt
