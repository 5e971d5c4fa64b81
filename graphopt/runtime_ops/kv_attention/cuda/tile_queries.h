// Where a unit of a plan has its queries and its results.
#pragma once

#include "kv_attention/cuda/attend.h"

namespace graphopt {

// A tile of queries of one head, and for a unit which part of its pages.
struct QueryTile {
  const Segment& segment;
  int row, head, tile, part;
  int of_policy;  // which of the heads with its policy
  Policy policy;

  GRAPHOPT_DEVICE QueryTile(const CudaPlan& plan, const Segment& segment, int32_t of_segment)
      : segment(segment), row(segment.row), tile(of_segment / segment.parts % segment.tiles),
        part(of_segment % segment.parts), of_policy(of_segment / segment.parts / segment.tiles),
        policy(static_cast<Policy>(segment.policy)) {
    head = plan.heads[plan.first_head[segment.policy] + of_policy];
  }
};

// The queries of a warp: each lane has its own, and the range that all of them read.
struct TileQueries {
  int64_t position, first, last;  // of this lane's query, and of all
  size_t at;                      // of its first number, where it is used
  int token, head;
  bool used;

  GRAPHOPT_DEVICE TileQueries(const AttendRun& run, const QueryTile& query_tile, int index) {
    const Layout& layout = run.call.layout;
    const int32_t tokens = run.plan.tokens(run.call, query_tile.row);
    const int64_t base = run.call.past[query_tile.row] + run.plan.first;
    const TileQuery own(layout, query_tile.policy, tokens, query_tile.tile, index);
    token = own.token, head = own.head, used = own.used;
    first = base + TileQuery(layout, query_tile.policy, tokens, query_tile.tile, 0).token;
    const int end = TileQuery(layout, query_tile.policy, tokens, query_tile.tile, kTileQueries - 1).token;
    last = makes_lists(query_tile.policy) ? first : base + (end < tokens ? end : tokens - 1);
    position = used ? base + token : last;
    at = run.call.queries_at(query_tile.row, query_tile.head, position) +
         static_cast<size_t>(used ? head : 0) * layout.size;
  }
};

// What is left of a part: [query][size] and then the largest score and the sum of each query.
struct PartialResult {
  float *values, *largest, *sums;

  GRAPHOPT_DEVICE PartialResult(float* partials, const Layout& layout, size_t index) {
    values = partials + index * CudaPlan::partial_floats(layout);
    largest = values + kTileQueries * layout.size, sums = largest + kTileQueries;
  }
};

}  // namespace graphopt
