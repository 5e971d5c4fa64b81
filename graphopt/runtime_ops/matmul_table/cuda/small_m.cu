#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/float.h"
#include "matmul_table/cuda/launches.h"

namespace graphopt {

const char* start_small_m(const Product& p, Operands operands, Decoder decoder, void* stream) {
  if (operands == Operands::kFloat32) {
    const Index3 grid = {p.tiles, p.splits, (p.rows + kFloatRows - 1) / kFloatRows};
    return launch(multiply_floats, grid, kFloatWarps * kWarp, kFloatShared, stream, p);
  }
  if (operands == Operands::kBFloat16) return launch_small_m<BFloat16Kind, AnyTo16Bits>(p, stream);
  if (is_trellis(decoder)) return start_small_m_of_trellis(p, operands, decoder, stream);
  const bool bytes = operands == Operands::kInt8;
  switch (decoder) {
    case Decoder::kWide: return launch_small_m<ByteKind, AnyToBytes>(p, stream);
    case Decoder::kInt4:
      return bytes ? launch_small_m<ByteKind, Int4ToByte>(p, stream)
                   : launch_small_m<Float16Kind, Int4ToHalf>(p, stream);
    case Decoder::kInt8:
      return bytes ? launch_small_m<ByteKind, Int8ToByte>(p, stream)
                   : launch_small_m<Float16Kind, Int8ToHalf>(p, stream);
    case Decoder::kTable4:
      return bytes ? launch_small_m<ByteKind, Table4ToByte>(p, stream)
                   : launch_small_m<Float16Kind, Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_small_m<Float16Kind, E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return launch_small_m<Float16Kind, E2M3ToHalf>(p, stream);
    default:
      return bytes ? launch_small_m<ByteKind, AnyToByte>(p, stream)
                   : launch_small_m<Float16Kind, AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
