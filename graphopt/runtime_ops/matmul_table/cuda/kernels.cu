#include "matmul_table/cuda/kernels.h"

#include <cmath>

#include "matmul_table/cuda/round.h"
#include "matmul_table/cuda/shapes.h"

namespace graphopt {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t round_up(size_t number, size_t to) { return (number + to - 1) / to * to; }

// Blocks of threads that keep a large GPU busy. A constant, so that every GPU adds up in the same order. Parts of K double,
// so 8192 columns are 256 blocks, all at once on an H100, which takes two on each of its 132 processors. Twice 132 as the
// wish made them 512, a second turn: int4 took 19.0 us for a row and 8192 rows of weights, and takes 17.5 (docs/cuda.md).
constexpr size_t kBlocksWanted = 256, kLeastBlocks = 4, kMostSplits = 16;
// Of streamed weights two parts of what is nearly a turn are two turns and an addition: 28672 columns, 224 blocks, take 23.7 us
// where they took 26.4 (docs/cuda.md).
constexpr size_t kStreamedEnough = 200;
// Bytes of a row are counted in 32 bits.
constexpr uint64_t kMostRows = uint64_t{1} << 27;

size_t bytes_of_type(int type) { return type == GRAPHOPT_FLOAT32 ? 4 : 2; }

size_t order_of(const GraphoptFactor& factor) {
  return static_cast<size_t>(factor.outer) * static_cast<size_t>(factor.core) * static_cast<size_t>(factor.inner);
}
bool turns(const GraphoptMatMulDynamic& call) {
  return order_of(call.left) * order_of(call.right) > 1 || call.left.sign != call.right.sign;
}

// A power of two by which scales are multiplied where weights are scaled in float16: the largest weight and the largest
// scale stay below 2^15, and the small ones keep their digits.
float gain_of(const GraphoptMatMul& call) {
  const float scale = call.largest_scale * std::fabs(call.codec.step), number = call.codec.largest > 1 ? call.codec.largest : 1;
  if (!(scale > 0)) return 1;
  int of_scale = 0, of_number = 0;
  std::frexp(scale, &of_scale);
  std::frexp(number, &of_number);
  const int exponent = 15 - of_scale - of_number;
  return std::ldexp(1.0f, exponent < -100 ? -100 : exponent > 100 ? 100 : exponent);
}

// How a call is cut into kernels, and where in the scratch they pass data on.
struct Plan {
  Product product = {};
  Operands operands;
  Decoder decoder;
  bool streamed, gemm_sm90, gemm;  // which kernel it is
  bool rounds, converts;           // x to bytes; x to another type, or to rows that 16-byte loads may read
  size_t operand_at = 0, scales_at = 0, partials_at = 0, bytes = 0;
  size_t segments = 0;

  explicit Plan(const GraphoptMatMul& call);
  size_t take(size_t size) {
    const size_t at = bytes;
    bytes += round_up(size, kAlignment);
    return at;
  }
};

Plan::Plan(const GraphoptMatMul& call) {
  Product& p = product;
  operands = static_cast<Operands>(call.codec.operands);
  decoder = static_cast<Decoder>(call.codec.decoder);
  const size_t rows = call.m, pitch = blocks_of(call.rows) * kBlockRows;
  p.two = call.activations == GRAPHOPT_TO_INT16;
  p.rows = static_cast<unsigned>(rows * (p.two ? 2 : 1));
  p.columns = static_cast<unsigned>(call.columns);
  p.tiles = static_cast<unsigned>((call.columns + kTileColumns - 1) / kTileColumns);
  p.blocks = static_cast<unsigned>(blocks_of(call.rows));
  p.units = static_cast<unsigned>((call.rows + kUnitRows - 1) / kUnitRows);
  p.group_units = static_cast<unsigned>((call.group < call.rows ? call.group : call.rows) + kUnitRows - 1) / kUnitRows;
  p.segments_of_group = (p.group_units + kSegmentUnits - 1) / kSegmentUnits;
  p.groups = (p.units + p.group_units - 1) / p.group_units;
  segments = size_t{p.groups - 1} * p.segments_of_group +
             (p.units - (p.groups - 1) * p.group_units + kSegmentUnits - 1) / kSegmentUnits;
  p.bits = call.codec.bits;
  p.offset = call.codec.offset;
  for (int i = 0; i < 8; ++i) p.lookup[i] = call.codec.lookup[i];
  p.step = call.codec.step;
  p.inverse_step = 1 / p.step;
  p.gain = gain_of(call);
  p.half_scales = call.scale_type == GRAPHOPT_FLOAT16;
  p.zero_points = call.zero_points;
  p.scales = call.scales;
  p.bias = call.bias;
  p.codes = static_cast<const uint8_t*>(call.packed);
  const size_t of_tile = p.blocks * block_bytes(static_cast<unsigned>(p.bits));
  p.table = reinterpret_cast<const uint32_t*>(p.codes + p.tiles * of_tile);
  p.with_sums = p.zero_points || p.offset;
  p.y = call.y;
  p.y_type = call.x_type;

  rounds = operands == Operands::kInt8;
  const int operand_type = operands == Operands::kFloat32 ? GRAPHOPT_FLOAT32
                     : operands == Operands::kFloat16 ? GRAPHOPT_FLOAT16 : GRAPHOPT_BFLOAT16;
  const size_t bytes_of_x = call.rows * bytes_of_type(operand_type);
  p.aligned = bytes_of_x % 16 == 0 && reinterpret_cast<uintptr_t>(call.x) % 16 == 0;
  const bool loads = operands == Operands::kFloat32 || p.aligned;
  converts = !rounds && (call.x_type != operand_type || !loads);
  p.x = static_cast<const uint8_t*>(call.x);
  p.x_pitch = rounds ? pitch : converts ? pitch * bytes_of_type(operand_type) : bytes_of_x;
  p.x_bytes = static_cast<unsigned>(p.x_pitch);
  gemm_sm90 = p.rows > kSmallMRows && has_gemm_sm90(p, operands, decoder);
  if (rounds || converts) operand_at = take(p.rows * p.x_pitch);
  if (rounds) {
    const bool one = call.activations == GRAPHOPT_TO_TOKEN;
    // 16-byte loads of scales, and of those of up to 127 missing rows
    const size_t scale_pitch = round_up(p.rows, 4);
    p.x_scale_pitch = one ? 0 : static_cast<unsigned>(scale_pitch);
    scales_at = take(((one ? 1 : segments) * scale_pitch + kGemm90Rows) * sizeof(float));
  }

  p.splits = 1;
  streamed = has_streamed(p, operands, decoder);
  gemm = !gemm_sm90 && p.rows > kSmallMRows && has_gemm(p, operands, decoder);
  const auto parts = [](size_t number, size_t of_part) { return round_up(number, of_part) / of_part; };
  const bool floats = operands == Operands::kFloat32;
  const size_t in_grid = gemm_sm90  ? parts(p.tiles, kGemm90Tiles) * parts(p.rows, kGemm90Rows)
                         : gemm     ? parts(p.tiles, kTileWidth) * parts(p.rows, kTileRows)
                         : streamed ? parts(p.tiles, kStreamedTiles)
                         : floats   ? size_t{p.tiles} * parts(p.rows, kFloatRows)
                                    : parts(p.tiles, kSmallMTiles) * parts(p.rows, kSmallMRows);
  // the smallest part of K per warp that is worth its sums
  const unsigned warps = gemm || gemm_sm90 || streamed ? 1 : floats ? kFloatWarps : kSmallMWarps;
  const size_t most_splits = p.blocks / (kLeastBlocks * warps);
  // a second turn of blocks that are alone on a processor would double the time
  const size_t enough_blocks = gemm_sm90  ? kBlocksWanted / 4 + 1
                        : gemm     ? kBlocksWanted / 2
                        : streamed ? kStreamedEnough
                                   : kBlocksWanted;
  while (in_grid * p.splits < enough_blocks && p.splits * 2 <= most_splits && p.splits < kMostSplits) p.splits *= 2;
  if (p.splits > 1) partials_at = take(p.splits * rows * p.columns * sizeof(float));
}

template <typename To>
const char* start_conversion(const GraphoptMatMul& call, void* to, size_t pitch, void* stream) {
  const Conversion c = {call.x, to, call.rows, pitch};
  constexpr size_t kNumbers = 8 * kRoundThreads;  // of a block of threads
  const Index3 grid = {static_cast<unsigned>(call.m), static_cast<unsigned>((pitch + kNumbers - 1) / kNumbers), 1};
  if (call.x_type == GRAPHOPT_FLOAT32) return launch(convert<float, To>, grid, kRoundThreads, 0, stream, c);
  if (call.x_type == GRAPHOPT_FLOAT16) return launch(convert<Half, To>, grid, kRoundThreads, 0, stream, c);
  return launch(convert<BFloat16, To>, grid, kRoundThreads, 0, stream, c);
}

const char* start_rounding(const Plan& plan, const GraphoptMatMul& call, int8_t* to, float* scales, void* stream) {
  const Product& p = plan.product;
  Rounding r = {};
  r.x = call.x;
  r.to = to;
  r.scales = scales;
  r.count = call.rows;
  r.pitch = p.x_pitch;
  r.group = p.group_units * kUnitRows;
  r.groups = p.groups;
  r.segments_of_group = p.segments_of_group;
  r.segments = static_cast<unsigned>(plan.segments);
  r.scale_pitch = p.x_scale_pitch;
  r.in_order = plan.gemm_sm90;
  r.whole_row = call.activations == GRAPHOPT_TO_TOKEN;
  r.two = p.two;
  r.levels = static_cast<float>(r.whole_row ? call.levels : p.two ? 127 * 128 : 127);
  r.clip = r.whole_row ? call.clip : 1.0f;
  r.step = p.step;
  const Index3 grid = {static_cast<unsigned>(call.m), 1, 1};
  constexpr size_t kShared = kRoundThreads / kWarp * sizeof(uint32_t);
  if (call.x_type == GRAPHOPT_FLOAT32) return launch(round_rows<float>, grid, kRoundThreads, kShared, stream, r);
  if (call.x_type == GRAPHOPT_FLOAT16) return launch(round_rows<Half>, grid, kRoundThreads, kShared, stream, r);
  return launch(round_rows<BFloat16>, grid, kRoundThreads, kShared, stream, r);
}

const char* refuse(const GraphoptMatMul& call) {
  return call.rows > kMostRows ? "a product on a GPU takes weights of at most 2^27 rows" : nullptr;
}

// turned: rows of floats in the place of x, or null.
const char* run(const GraphoptMatMul& call, void* stream, const void* turned = nullptr) {
  if (!call.m) return nullptr;
  if (const char* refusal = refuse(call)) return refusal;
  Plan plan(call);
  Product& p = plan.product;
  char* const scratch = static_cast<char*>(call.scratch);
  const char* failure = nullptr;
  if (plan.rounds) {
    float* const scales = reinterpret_cast<float*>(scratch + plan.scales_at);
    GraphoptMatMul of_x = call;
    if (turned) {
      of_x.x = turned;
      of_x.x_type = GRAPHOPT_FLOAT32;
    }
    failure = start_rounding(plan, of_x, reinterpret_cast<int8_t*>(scratch + plan.operand_at), scales, stream);
    p.x_scales = scales;
  }
  if (plan.converts) {
    void* const to = scratch + plan.operand_at;
    failure = plan.operands == Operands::kFloat16 ? start_conversion<Half>(call, to, p.x_pitch / 2, stream)
                                                  : start_conversion<BFloat16>(call, to, p.x_pitch / 2, stream);
  }
  if (failure) return failure;
  if (plan.rounds || plan.converts) p.x = reinterpret_cast<const uint8_t*>(scratch + plan.operand_at);
  if (p.splits > 1) p.partials = reinterpret_cast<float*>(scratch + plan.partials_at);
  const auto start = plan.gemm_sm90  ? start_gemm_sm90
                     : plan.gemm     ? start_gemm
                     : plan.streamed ? start_streamed
                                     : start_small_m;
  failure = start(p, plan.operands, plan.decoder, stream);
  if (failure || p.splits == 1) return failure;
  const size_t count = call.m * call.columns;
  const Addition addition = {p.partials, p.bias, p.y, count, call.columns, p.splits, p.y_type};
  const Index3 grid = {static_cast<unsigned>((count + kRoundThreads - 1) / kRoundThreads), 1, 1};
  return launch_early(add_splits, grid, kRoundThreads, 0, stream, addition);
}

// Rows in floats that are transformed, and behind them the transform's own scratch.
struct Turned {
  GraphoptHadamard hadamard = {};
  size_t rows = 0, scratch = 0;  // bytes

  explicit Turned(const GraphoptMatMulDynamic& call) {
    if (!turns(call)) return;
    const GraphoptMatMul& product = call.product;
    hadamard.x = product.x_type == GRAPHOPT_FLOAT32 ? product.x : nullptr;
    hadamard.runs = static_cast<int64_t>(product.m * product.rows / (order_of(call.left) * order_of(call.right)));
    hadamard.type = GRAPHOPT_FLOAT32;
    hadamard.left = call.left;
    hadamard.right = call.right;
    rows = round_up(product.m * product.rows * sizeof(float), kAlignment);
    scratch = round_up(graphopt_cuda_hadamard_scratch(&hadamard), kAlignment);
  }
};

const char* run_dynamic(const GraphoptMatMulDynamic& call, void* stream) {
  if (!call.product.m) return nullptr;
  GraphoptMatMul product = call.product;
  Turned turned(call);
  if (!turned.rows) return run(product, stream);
  char* const scratch = static_cast<char*>(product.scratch);
  turned.hadamard.y = scratch;
  turned.hadamard.scratch = scratch + turned.rows;
  if (product.x_type != GRAPHOPT_FLOAT32) {
    // the sums of a transform, and what they are rounded to, are of floats
    if (const char* failure = start_conversion<float>(product, scratch, product.rows, stream)) return failure;
    turned.hadamard.x = scratch;
  }
  if (const char* failure = graphopt_cuda_hadamard(&turned.hadamard, stream)) return failure;
  product.scratch = scratch + turned.rows + turned.scratch;
  return run(product, stream, scratch);
}

}  // namespace
}  // namespace graphopt

extern "C" {

int32_t graphopt_cuda_matmul_operands(int32_t x_type, int32_t activations) {
  if (activations == GRAPHOPT_TO_BFLOAT16) return GRAPHOPT_BY_BFLOAT16;
  if (activations != GRAPHOPT_TO_FLOAT32) return GRAPHOPT_BY_INT8;
  return x_type == GRAPHOPT_FLOAT32 ? GRAPHOPT_BY_FLOAT32
         : x_type == GRAPHOPT_FLOAT16 ? GRAPHOPT_BY_FLOAT16 : GRAPHOPT_BY_BFLOAT16;
}

size_t graphopt_cuda_matmul_table_scratch(const GraphoptMatMul* call) {
  return call->m ? graphopt::Plan(*call).bytes : 0;
}

const char* graphopt_cuda_matmul_table(const GraphoptMatMul* call, void* stream) {
  return graphopt::run(*call, stream);
}

size_t graphopt_cuda_matmul_dynamic_scratch(const GraphoptMatMulDynamic* call) {
  if (!call->product.m) return 0;
  const graphopt::Turned turned(*call);
  return turned.rows + turned.scratch + graphopt::Plan(call->product).bytes;
}

const char* graphopt_cuda_matmul_dynamic(const GraphoptMatMulDynamic* call, void* stream) {
  return graphopt::run_dynamic(*call, stream);
}

}  // extern "C"
