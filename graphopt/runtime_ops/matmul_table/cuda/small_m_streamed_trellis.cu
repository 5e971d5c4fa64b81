#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/launches.h"
#include "matmul_table/cuda/trellis.h"

namespace graphopt {

const char* start_streamed_of_trellis(const Product& p, Operands operands, Decoder decoder, void* stream) {
  const bool bytes = operands == Operands::kInt8;
  switch (decoder) {
    case Decoder::kTrellis2:
      return bytes ? launch_streamed<ByteKind, TrellisToByte<2>>(p, stream)
                   : launch_streamed<Float16Kind, TrellisFromShared<2>>(p, stream);
    case Decoder::kTrellis3:
      return bytes ? launch_streamed<ByteKind, TrellisToByte<3>>(p, stream)
                   : launch_streamed<Float16Kind, TrellisFromShared<3>>(p, stream);
    default:
      return bytes ? launch_streamed<ByteKind, TrellisToByte<4>>(p, stream)
                   : launch_streamed<Float16Kind, TrellisFromShared<4>>(p, stream);
  }
}

}  // namespace graphopt
