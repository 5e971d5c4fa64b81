#include "matmul_table/cuda/small_m_streamed.h"

#include "matmul_table/cuda/kernels.h"

namespace graphopt {
namespace {

template <typename Kind, typename Decode, int RowTiles>
const char* launch_rows(const Product& p, void* stream) {
  const Index3 grid = {(p.tiles + kStreamedTiles - 1) / kStreamedTiles, p.splits, 1};
  const auto kernel = multiply_streamed<Kind, Decode, RowTiles>;
  return launch_early(kernel, grid, kStreamedThreads, kStreamedShared<Kind, RowTiles>, stream, p);
}

template <typename Kind, typename Decode>
const char* launch_streamed(const Product& p, void* stream) {
  return p.rows > 8 ? launch_rows<Kind, Decode, 2>(p, stream) : launch_rows<Kind, Decode, 1>(p, stream);
}

}  // namespace

bool has_streamed(const Product& p, Operands operands, Decoder decoder) {
  if (p.rows > kSmallMRows || p.with_sums || (p.group_units % kBlockUnits && p.groups > 1)) return false;
  if (operands == Operands::kFloat16) return decoder != Decoder::kTable;
  return operands == Operands::kInt8 &&
         (decoder == Decoder::kInt4 || decoder == Decoder::kInt8 || decoder == Decoder::kTable4);
}

const char* start_streamed(const Product& p, Operands operands, Decoder decoder, void* stream) {
  const bool bytes = operands == Operands::kInt8;
  switch (decoder) {
    case Decoder::kInt4:
      return bytes ? launch_streamed<ByteKind, Int4ToByte>(p, stream)
                   : launch_streamed<Float16Kind, Int4ToHalf>(p, stream);
    case Decoder::kInt8:
      return bytes ? launch_streamed<ByteKind, Int8ToByte>(p, stream)
                   : launch_streamed<Float16Kind, Int8ToHalf>(p, stream);
    case Decoder::kTable4:
      return bytes ? launch_streamed<ByteKind, Table4ToByte>(p, stream)
                   : launch_streamed<Float16Kind, Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_streamed<Float16Kind, E3M2ToHalf>(p, stream);
    default: return launch_streamed<Float16Kind, E2M3ToHalf>(p, stream);
  }
}

}  // namespace graphopt
