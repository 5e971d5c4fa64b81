#include "matmul/cuda.h"

#include "matmul/cuda_round.h"

namespace graphopt {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t round_up(size_t number, size_t to) { return (number + to - 1) / to * to; }

// Blocks of threads that keep a large GPU busy. A constant, so that every GPU adds up in the same order.
constexpr size_t kBlocksWanted = 264, kMostSplits = 16;

size_t bytes_of_type(int type) { return type == GRAPHOPT_FLOAT32 ? 4 : 2; }

// How a call is cut into kernels, and where in the scratch they leave what others read.
struct Plan {
  Product product = {};
  Operands operands;
  Decoder decoder;
  bool rounds, converts, tiles;  // x to bytes; x to another type, or to rows that 16-byte loads may read
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
  p.half_scales = call.scale_type == GRAPHOPT_FLOAT16;
  p.zero_points = call.zero_points;
  p.scales = call.scales;
  p.bias = call.bias;
  p.codes = static_cast<const uint8_t*>(call.packed);
  p.table = reinterpret_cast<const uint32_t*>(p.codes + size_t{p.tiles} * p.blocks * block_bytes(static_cast<unsigned>(p.bits)));
  p.with_sums = p.zero_points || p.offset;
  p.y = call.y;
  p.y_type = call.x_type;

  rounds = operands == Operands::kInt8;
  const int wanted = operands == Operands::kFloat32 ? GRAPHOPT_FLOAT32
                     : operands == Operands::kFloat16 ? GRAPHOPT_FLOAT16 : GRAPHOPT_BFLOAT16;
  const size_t bytes_of_x = call.rows * bytes_of_type(wanted);
  const bool loads = operands == Operands::kFloat32 || bytes_of_x % 16 == 0;
  converts = !rounds && (call.x_type != wanted || !loads);
  p.x = static_cast<const uint8_t*>(call.x);
  p.x_pitch = rounds ? pitch : converts ? pitch * bytes_of_type(wanted) : bytes_of_x;
  p.x_bytes = static_cast<unsigned>(p.x_pitch);
  if (rounds || converts) operand_at = take(p.rows * p.x_pitch);
  if (rounds) {
    const bool one = call.activations == GRAPHOPT_TO_TOKEN;
    // kernels read scales of rows that are not there, 64 at most
    p.x_scale_pitch = one ? 0 : p.rows;
    scales_at = take(((one ? 1 : segments) * p.rows + 64) * sizeof(float));
  }

  tiles = p.rows > 16 && has_tiles(p, operands, decoder);
  const size_t in_grid = tiles ? round_up(p.tiles, 16) / 16 * (round_up(p.rows, 64) / 64)
                         : operands == Operands::kFloat32 ? size_t{p.tiles} * (round_up(p.rows, 8) / 8)
                                                          : size_t{(p.tiles + 1) / 2} * (round_up(p.rows, 16) / 16);
  // a part of K is worth its sums: 4 blocks for each of its warps
  const size_t most = p.blocks / (tiles ? 4 : 32);
  p.splits = 1;
  while (in_grid * p.splits < kBlocksWanted && p.splits * 2 <= most && p.splits < kMostSplits) p.splits *= 2;
  if (p.splits > 1) partials_at = take(p.splits * rows * p.columns * sizeof(float));
}

template <typename From>
const char* start_conversion(const Plan& plan, const GraphoptMatMul& call, void* to, void* stream) {
  const size_t bytes = bytes_of_type(plan.operands == Operands::kFloat32 ? GRAPHOPT_FLOAT32 : GRAPHOPT_FLOAT16);
  const Conversion c = {call.x, to, call.rows, plan.product.x_pitch / bytes};
  const Index3 grid = {static_cast<unsigned>(call.m), static_cast<unsigned>((c.pitch + 2047) / 2048), 1};
  if (plan.operands == Operands::kFloat16) return launch(convert<From, Half>, grid, kRoundThreads, 0, stream, c);
  return launch(convert<From, BFloat16>, grid, kRoundThreads, 0, stream, c);
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
  r.rows = p.rows;
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

const char* run(const GraphoptMatMul& call, void* stream) {
  if (!call.m) return nullptr;
  Plan plan(call);
  Product& p = plan.product;
  char* const scratch = static_cast<char*>(call.scratch);
  const char* failure = nullptr;
  if (plan.rounds) {
    float* const scales = reinterpret_cast<float*>(scratch + plan.scales_at);
    failure = start_rounding(plan, call, reinterpret_cast<int8_t*>(scratch + plan.operand_at), scales, stream);
    p.x_scales = scales;
  }
  if (plan.converts) {
    void* const to = scratch + plan.operand_at;
    failure = call.x_type == GRAPHOPT_FLOAT32   ? start_conversion<float>(plan, call, to, stream)
              : call.x_type == GRAPHOPT_FLOAT16 ? start_conversion<Half>(plan, call, to, stream)
                                                : start_conversion<BFloat16>(plan, call, to, stream);
  }
  if (failure) return failure;
  if (plan.rounds || plan.converts) p.x = reinterpret_cast<const uint8_t*>(scratch + plan.operand_at);
  if (p.splits > 1) p.partials = reinterpret_cast<float*>(scratch + plan.partials_at);
  failure = (plan.tiles ? start_tiles : start_few)(p, plan.operands, plan.decoder, stream);
  if (failure || p.splits == 1) return failure;
  const size_t count = call.m * call.columns;
  const Addition addition = {p.partials, p.bias, p.y, count, call.columns, p.splits, p.y_type};
  const Index3 grid = {static_cast<unsigned>((count + kRoundThreads - 1) / kRoundThreads), 1, 1};
  return launch(add_splits, grid, kRoundThreads, 0, stream, addition);
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

const char* graphopt_cuda_matmul_table(const GraphoptMatMul* call, void* stream) { return graphopt::run(*call, stream); }

}  // extern "C"
