#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/launches.h"

namespace graphopt {

bool has_streamed(const Product& p, Operands operands, Decoder decoder) {
  if (p.rows > kSmallMRows || p.with_sums || (p.group_units % kBlockUnits && p.groups > 1)) return false;
  if (operands == Operands::kFloat16) return decoder != Decoder::kTable;
  return operands == Operands::kInt8 &&
         (decoder == Decoder::kInt4 || decoder == Decoder::kInt8 || decoder == Decoder::kTable4 || is_trellis(decoder));
}

const char* start_streamed(const Product& p, Operands operands, Decoder decoder, void* stream) {
  if (is_trellis(decoder)) return start_streamed_of_trellis(p, operands, decoder, stream);
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
