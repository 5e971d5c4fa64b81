// How the products' kernels are cut into blocks of threads.
#pragma once

namespace graphopt {

// Small M: two tiles of columns, for which an operand is read once.
constexpr unsigned kSmallMWarps = 4, kSmallMTiles = 2, kSmallMRows = 16;

// The same, streamed, where codes are decoded by arithmetic: 128 columns, two tiles and a part of K for each warp.
constexpr unsigned kStreamedThreads = 256, kStreamedTiles = 8, kStreamedParts = 2;

// GEMM: 64 rows and 256 columns, two tiles of columns for each warp.
constexpr unsigned kTileWarps = 8, kTilesOfWarp = 2, kTileRows = 64;
constexpr unsigned kTileWidth = kTileWarps * kTilesOfWarp;

// GEMM on sm_90a: 128 rows and 8 tiles of columns, or twice as many columns; as many row tiles as kGemm90Group go through all
// columns together.
constexpr unsigned kGemm90Rows = 128, kGemm90Tiles = 8, kGemm90Group = 8;

// Floats: a tile of columns.
constexpr unsigned kFloatWarps = 8, kFloatRows = 8;

}  // namespace graphopt
