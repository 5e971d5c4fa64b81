#include "matmul_table/cuda/gemm_sm90.h"

#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/trellis.h"

namespace graphopt {
namespace {

template <typename Decode>
const char* launch_gemm_sm90(const Product& p, void* stream) {
  const unsigned row_tiles = (p.rows + kGemm90Rows - 1) / kGemm90Rows, column_tiles = (p.tiles + 7) / 8;
  const Index3 grid = {row_tiles * column_tiles, p.splits, 1};
  return launch_early(multiply_gemm_sm90<Decode>, grid, kGemm90Threads, kGemm90Shared, stream, p);
}

}  // namespace

bool has_gemm_sm90(const Product& p, Operands operands, Decoder decoder) {
  if (operands != Operands::kFloat16 || decoder == Decoder::kWide || p.with_sums) return false;
  return !(p.group_units % kBlockUnits && p.groups > 1) && runs_sm90a();
}

const char* start_gemm_sm90(const Product& p, Operands, Decoder decoder, void* stream) {
  switch (decoder) {
    case Decoder::kInt4: return launch_gemm_sm90<Int4ToHalf>(p, stream);
    case Decoder::kInt8: return launch_gemm_sm90<Int8ToHalf>(p, stream);
    case Decoder::kTable4: return launch_gemm_sm90<Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_gemm_sm90<E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return launch_gemm_sm90<E2M3ToHalf>(p, stream);
    case Decoder::kTrellis2: return launch_gemm_sm90<TrellisToHalf<2>>(p, stream);
    case Decoder::kTrellis3: return launch_gemm_sm90<TrellisToHalf<3>>(p, stream);
    case Decoder::kTrellis4: return launch_gemm_sm90<TrellisToHalf<4>>(p, stream);
    default: return launch_gemm_sm90<AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
