#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/start.h"

namespace graphopt {

bool has_tiles(const Product& p, Operands operands, Decoder decoder) {
  return operands != Operands::kFloat32 && decoder != Decoder::kWide && !p.with_sums;
}

const char* start_tiles(const Product& p, Operands operands, Decoder decoder, void* stream) {
  if (operands == Operands::kBFloat16) return launch_tiles<BFloat16Kind, AnyTo16Bits>(p, stream);
  const bool bytes = operands == Operands::kInt8;
  switch (decoder) {
    case Decoder::kInt4:
      return bytes ? launch_tiles<ByteKind, Int4ToByte>(p, stream) : launch_tiles<Float16Kind, Int4ToHalf>(p, stream);
    case Decoder::kInt8:
      return bytes ? launch_tiles<ByteKind, Int8ToByte>(p, stream) : launch_tiles<Float16Kind, Int8ToHalf>(p, stream);
    case Decoder::kTable4:
      return bytes ? launch_tiles<ByteKind, Table4ToByte>(p, stream)
                   : launch_tiles<Float16Kind, Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_tiles<Float16Kind, E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return launch_tiles<Float16Kind, E2M3ToHalf>(p, stream);
    default:
      return bytes ? launch_tiles<ByteKind, AnyToByte>(p, stream) : launch_tiles<Float16Kind, AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
