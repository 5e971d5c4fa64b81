#include "matmul_table/cuda/gemm_sm90_bytes.h"

#include "matmul_table/cuda/kernels.h"
#include "matmul_table/cuda/trellis.h"

namespace graphopt {
namespace {

// A wide tile reads the operand once for twice the columns. Where wide tiles leave half of the processors idle, narrow ones
// take half the time.
bool is_narrow(const Product& p) { return 2 * Gemm90Work<Gemm90Wide>::count(p) <= processors(); }

template <typename Warp>
const char* start(const Product& p, void* stream) {
  const unsigned count = Gemm90Work<typename Warp::Shape>::count(p), most = processors();
  const Index3 grid = {count < most ? count : most, 1, 1};
  return launch_early(multiply_gemm_sm90<Warp>, grid, kGemm90Threads, Warp::Shape::kShared, stream, p);
}
template <typename Decode>
const char* start_halves(const Product& p, void* stream) {
  if (is_narrow(p)) return start<Gemm90Warp<Gemm90Narrow, Decode>>(p, stream);
  return start<Gemm90Warp<Gemm90Wide, Decode>>(p, stream);
}

const char* start_gemm_sm90_of_bytes(const Product& p, Decoder decoder, void* stream) {
  switch (decoder) {
    case Decoder::kInt4: return start<Gemm90Bytes<Int4ToByte>>(p, stream);
    case Decoder::kInt8: return start<Gemm90Bytes<Int8ToByte>>(p, stream);
    case Decoder::kTable4: return start<Gemm90Bytes<Table4ToByte>>(p, stream);
    case Decoder::kTrellis2: return start<Gemm90Bytes<TrellisToByte<2>>>(p, stream);
    case Decoder::kTrellis3: return start<Gemm90Bytes<TrellisToByte<3>>>(p, stream);
    case Decoder::kTrellis4: return start<Gemm90Bytes<TrellisToByte<4>>>(p, stream);
    default: return start<Gemm90Bytes<AnyToByte>>(p, stream);
  }
}

}  // namespace

bool has_gemm_sm90(const Product& p, Operands operands, Decoder decoder) {
  if (operands != Operands::kInt8 && (operands != Operands::kFloat16 || p.y_type != GRAPHOPT_FLOAT16)) return false;
  if (decoder == Decoder::kWide || p.with_sums || p.two) return false;
  return !(p.group_units % kBlockUnits && p.groups > 1) && runs_sm90a();
}

const char* start_gemm_sm90(const Product& p, Operands operands, Decoder decoder, void* stream) {
  if (operands == Operands::kInt8) return start_gemm_sm90_of_bytes(p, decoder, stream);
  switch (decoder) {
    case Decoder::kInt4: return start_halves<Int4ToHalf>(p, stream);
    case Decoder::kInt8: return start_halves<Int8ToHalf>(p, stream);
    case Decoder::kTable4: return start_halves<Table4To16Bits>(p, stream);
    case Decoder::kE3M2: return start_halves<E3M2ToHalf>(p, stream);
    case Decoder::kE2M3: return start_halves<E2M3ToHalf>(p, stream);
    case Decoder::kTrellis2: return start_halves<TrellisToHalf<2>>(p, stream);
    case Decoder::kTrellis3: return start_halves<TrellisToHalf<3>>(p, stream);
    case Decoder::kTrellis4: return start_halves<TrellisToHalf<4>>(p, stream);
    default: return start_halves<AnyTo16Bits>(p, stream);
  }
}

}  // namespace graphopt
