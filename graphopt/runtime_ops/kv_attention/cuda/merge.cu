// Merges the parts of a query, each block those of one: weights of parts first, then all parts at once.
#include "cuda/launch.h"
#include "kv_attention/cuda/merge.h"
#include "kv_attention/cuda/tile_queries.h"
#include "kv_attention/cuda/reader.h"

namespace graphopt {
namespace {

constexpr unsigned kMergeThreads = 256, kMergeWarps = kMergeThreads / kWarp;
constexpr int kTogether = 4;  // parts that a warp loads before it adds

// [part]: what its numbers count, then a sum of each warp, then the sums of values of each warp
struct MergeScratch {
  float *weights, *of_warps, *values;

  GRAPHOPT_BOTH MergeScratch(char* memory, int parts) {
    weights = reinterpret_cast<float*>(memory);
    of_warps = weights + rounded(parts), values = of_warps + kMergeWarps;
  }
  static GRAPHOPT_BOTH size_t rounded(int parts) { return static_cast<size_t>(parts + 31) / 32 * 32; }
  static size_t bytes(const Layout& layout, int parts) {
    return (rounded(parts) + kMergeWarps * (1 + layout.size)) * sizeof(float);
  }
};

GRAPHOPT_KERNEL(kMergeThreads, 4)
void merge(AttendRun run) {
  const CudaCall& call = run.call;
  const int32_t tile = static_cast<int32_t>(block_index().x) / kTileQueries;
  const int index = static_cast<int>(block_index().x) % kTileQueries, size = static_cast<int>(call.layout.size);
  const Segment& segment = run.plan.segment[run.plan.segment_of(&Segment::first_tile, tile)];
  const QueryTile query_tile(run.plan, segment, (tile - segment.first_tile) * segment.parts);
  const TileQueries query(run, query_tile, index);
  wait_for_previous();
  if (!query.used) return;
  const size_t first = static_cast<size_t>(segment.first_partial) +
                       static_cast<size_t>(tile - segment.first_tile) * static_cast<size_t>(segment.parts);
  const MergeScratch buffers(shared_memory(), segment.parts);
  const int thread = static_cast<int>(thread_index().x), threads = static_cast<int>(kMergeThreads);

  float largest = kNothing;
  for (int part = thread; part < segment.parts; part += threads) {
    const PartialResult result(run.partials, call.layout, first + static_cast<size_t>(part));
    const float of_part = result.largest[index];
    buffers.weights[part] = of_part;
    largest = of_part > largest ? of_part : largest;
  }
  largest = reduce_max(largest);
  if (lane() == 0) buffers.of_warps[warp()] = largest;
  sync_block();
  for (unsigned i = 0; i < kMergeWarps; ++i) largest = buffers.of_warps[i] > largest ? buffers.of_warps[i] : largest;
  sync_block();
  float sum = 0;
  for (int part = thread; part < segment.parts; part += threads) {
    const PartialResult result(run.partials, call.layout, first + static_cast<size_t>(part));
    const float of_part = buffers.weights[part], added = result.sums[index];
    const float weight = of_part == largest ? 1.0f : exp2_of(of_part - largest);
    sum = multiply_add(added, weight, sum);
    buffers.weights[part] = weight;
  }
  sum = reduce_sum(sum);
  if (lane() == 0) buffers.of_warps[warp()] = sum;
  sync_block();

  for (int span = 4 * lane(); span < size; span += 4 * kWarp) {
    Four total = {};
    GRAPHOPT_NO_UNROLL
    for (int part = warp(); part < segment.parts; part += kMergeWarps * kTogether) {
      Four values[kTogether];
      float weights[kTogether];
      GRAPHOPT_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int one = part + i * static_cast<int>(kMergeWarps);
        weights[i] = one < segment.parts ? buffers.weights[one] : 0.0f;
        const int some = one < segment.parts ? one : part;
        const PartialResult result(run.partials, call.layout, first + static_cast<size_t>(some));
        values[i] = load_four(result.values + index * size + span);
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        GRAPHOPT_UNROLL
        for (int k = 0; k < 4; ++k) {
          const float added = multiply_add(values[i].number[k], weights[i], total.number[k]);
          total.number[k] = part + i * static_cast<int>(kMergeWarps) < segment.parts ? added : total.number[k];
        }
      }
    }
    store_four(buffers.values + warp() * size + span, total);
  }
  sync_block();
  if (warp()) return;
  sum = 0;
  float values[kLaneChannels] = {};
  GRAPHOPT_UNROLL
  for (unsigned i = 0; i < kMergeWarps; ++i) {
    sum += buffers.of_warps[i];
    GRAPHOPT_UNROLL
    for (int k = 0; k < kLaneChannels; ++k) {
      const int c = lane() + k * kWarp;
      if (c < size) values[k] += buffers.values[static_cast<int>(i) * size + c];
    }
  }
  write_row(call, query_tile.row, query_tile.head, query.position, query.head, largest * kLn2, sum, values);
}

}  // namespace

const char* merge_parts(const AttendRun& run, void* stream) {
  if (!run.plan.tiles) return nullptr;
  int most = 0;
  for (int i = 0; i < run.plan.segments; ++i) {
    most = run.plan.segment[i].parts > most ? run.plan.segment[i].parts : most;
  }
  const unsigned blocks = static_cast<unsigned>(run.plan.tiles) * kTileQueries;
  return launch_early(merge, {blocks, 1, 1}, kMergeThreads, MergeScratch::bytes(run.call.layout, most), stream, run);
}

}  // namespace graphopt
