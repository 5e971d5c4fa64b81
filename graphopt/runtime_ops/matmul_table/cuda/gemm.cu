#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/launches.h"

namespace graphopt {

bool has_gemm(const Product& p, Operands operands, Decoder decoder) {
  return operands != Operands::kFloat32 && decoder != Decoder::kWide && !p.with_sums;
}

const char* start_gemm(const Product& p, Operands operands, Decoder decoder, void* stream) {
  if (operands == Operands::kBFloat16) return launch_gemm<BFloat16Kind, AnyTo16Bits>(p, stream);
  if (is_trellis(decoder)) return start_gemm_of_trellis(p, operands, decoder, stream);
  const bool bytes = operands == Operands::kInt8;
  switch (decoder) {
    case Decoder::kInt4:
      return bytes ? launch_gemm<ByteKind, Int4ToByte>(p, stream) : launch_gemm<Float16Kind, Int4ToHalf>(p, stream);
    case Decoder::kInt8:
      return bytes ? launch_gemm<ByteKind, Int8ToByte>(p, stream) : launch_gemm<Float16Kind, Int8ToHalf>(p, stream);
    case Decoder::kTable4:
      return bytes ? launch_gemm<ByteKind, Table4ToByte>(p, stream)
                   : launch_gemm<Float16Kind, Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return launch_gemm<Float16Kind, E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return launch_gemm<Float16Kind, E2M3ToHalf>(p, stream);
    default:
      return bytes ? launch_gemm<ByteKind, AnyToByte>(p, stream) : launch_gemm<Float16Kind, AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
