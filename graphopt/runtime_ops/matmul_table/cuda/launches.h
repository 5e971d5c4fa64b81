// Launches of the products' kernels; included by the files that hold some of them each.
#pragma once

#include "cuda/launch.h"
#include "matmul_table/cuda/small_m.h"
#include "matmul_table/cuda/gemm.h"
#include "matmul_table/cuda/small_m_streamed.h"

namespace graphopt {

template <typename Kind, typename Decode>
const char* launch_small_m(const Product& p, void* stream) {
  const Index3 grid = {(p.tiles + kSmallMTiles - 1) / kSmallMTiles, p.splits, (p.rows + kSmallMRows - 1) / kSmallMRows};
  // the bytes of 16 bits always have an offset
  const auto kernel = p.with_sums ? multiply_small_m<Kind, Decode, true>
                                  : multiply_small_m<Kind, Decode, Decode::kWide>;
  return launch(kernel, grid, kSmallMWarps * kWarp, kSmallMShared, stream, p);
}

template <typename Kind, typename Decode, int RowTiles>
const char* launch_rows(const Product& p, void* stream) {
  const Index3 grid = {(p.tiles + kStreamedTiles - 1) / kStreamedTiles, p.splits, 1};
  const auto kernel = multiply_streamed<Kind, Decode, RowTiles>;
  return launch_early(kernel, grid, kStreamedThreads, kStreamedShared<Kind, Decode, RowTiles>, stream, p);
}

template <typename Kind, typename Decode>
const char* launch_streamed(const Product& p, void* stream) {
  return p.rows > 8 ? launch_rows<Kind, Decode, 2>(p, stream) : launch_rows<Kind, Decode, 1>(p, stream);
}

template <typename Kind, typename Decode>
const char* launch_gemm(const Product& p, void* stream) {
  const Index3 grid = {(p.rows + kTileRows - 1) / kTileRows, (p.tiles + kTileWidth - 1) / kTileWidth, p.splits};
  return launch(multiply_gemm<Kind, Decode>, grid, kTileWarps * kWarp, kTileShared<Kind>, stream, p);
}

}  // namespace graphopt
