#include "matmul_table/cuda/wide.h"

#include "matmul_table/cuda/kernels.h"

namespace graphopt {
namespace {

template <typename Decode>
const char* launch_wide(const Product& p, void* stream) {
  const unsigned row_tiles = (p.rows + kWideRows - 1) / kWideRows, column_tiles = (p.tiles + 7) / 8;
  const Index3 grid = {row_tiles * column_tiles, p.splits, 1};
  return launch_early(multiply_wide<Decode>, grid, kWideThreads, kWideShared, stream, p);
}

}  // namespace

bool has_wide(const Product& p, Operands operands, Decoder decoder) {
  if (operands != Operands::kFloat16 || decoder == Decoder::kWide || p.with_sums) return false;
  return !(p.group_units % kBlockUnits && p.groups > 1) && runs_sm90a();
}

const char* start_wide(const Product& p, Operands, Decoder decoder, void* stream) {
  switch (decoder) {
    case Decoder::kInt4: return launch_wide<Int4ToHalf>(p, stream);
    case Decoder::kInt8: return launch_wide<Int8ToHalf>(p, stream);
    case Decoder::kTable4: return launch_wide<Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_wide<E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return launch_wide<E2M3ToHalf>(p, stream);
    default: return launch_wide<AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
