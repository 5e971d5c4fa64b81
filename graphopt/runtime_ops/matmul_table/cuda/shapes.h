// How the products' kernels are cut into blocks of threads.
#pragma once

namespace graphopt {

// Few rows: two tiles of columns, for which an operand is read once.
constexpr unsigned kFewWarps = 4, kFewTiles = 2, kFewRows = 16;

// As few rows, where codes are decoded by arithmetic: 128 columns, two tiles and a part of K for each warp.
constexpr unsigned kNarrowThreads = 256, kNarrowTiles = 8, kNarrowParts = 2;

// Tiles: 64 rows and 256 columns, two tiles of columns for each warp.
constexpr unsigned kTileWarps = 8, kTilesOfWarp = 2, kTileRows = 64;
constexpr unsigned kTileWidth = kTileWarps * kTilesOfWarp;

// Tiles on sm_90a: 128 rows and 128 columns; as many row tiles as this go through all columns together.
constexpr unsigned kWideRows = 128, kWideGroup = 8;

// Floats: a tile of columns.
constexpr unsigned kFloatWarps = 8, kFloatRows = 8;

}  // namespace graphopt
