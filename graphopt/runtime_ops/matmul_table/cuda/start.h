// Launches of the products' kernels; included by the files that hold some of them each.
#pragma once

#include "cuda/launch.h"
#include "matmul_table/cuda/few.h"
#include "matmul_table/cuda/tile.h"

namespace graphopt {

template <typename Kind, typename Decode>
const char* launch_few(const Product& p, void* stream) {
  const Index3 grid = {(p.tiles + kFewTiles - 1) / kFewTiles, p.splits, (p.rows + kFewRows - 1) / kFewRows};
  // the bytes of 16 bits always have an offset
  const auto kernel = p.with_sums ? multiply_few<Kind, Decode, true> : multiply_few<Kind, Decode, Decode::kWide>;
  return launch(kernel, grid, kFewWarps * kWarp, kFewShared, stream, p);
}

template <typename Kind, typename Decode>
const char* launch_tiles(const Product& p, void* stream) {
  const Index3 grid = {(p.rows + kTileRows - 1) / kTileRows, (p.tiles + kTileWidth - 1) / kTileWidth, p.splits};
  return launch(multiply_tiles<Kind, Decode>, grid, kTileWarps * kWarp, kTileShared<Kind>, stream, p);
}

}  // namespace graphopt
