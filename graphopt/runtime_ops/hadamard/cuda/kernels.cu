// Hadamard on a GPU; see cuda.h for what a tile and a stage are.
//
// Butterflies are float additions in registers, between reads and writes of shared memory. A core is a product on
// tensor cores: a float is split exactly into three bfloat16 numbers, and each of them times +-1 is exact too. Parts
// below the precision of float16 and bfloat16 results are left out.
#include "hadamard/cuda/kernels.h"

#include "hadamard/cuda/halves.h"

#include "cuda/device.h"
#include "cuda/launch.h"
#include "cuda/matrix.h"

namespace graphopt {
namespace {

GRAPHOPT_DEVICE unsigned at(unsigned index) { return index + index / 32; }

template <int Size>
GRAPHOPT_DEVICE void butterfly(float (&v)[Size]) {
  GRAPHOPT_UNROLL
  for (int half = 1; half < Size; half *= 2) {
    GRAPHOPT_UNROLL
    for (int i = 0; i < Size; ++i) {
      if (i & half) continue;
      const float sum = v[i] + v[i + half], difference = v[i] - v[i + half];
      v[i] = sum;
      v[i + half] = difference;
    }
  }
}

GRAPHOPT_DEVICE float load_number(const void* x, int type, size_t index) {
  if (type == GRAPHOPT_FLOAT32) return static_cast<const float*>(x)[index];
  if (type == GRAPHOPT_FLOAT16) return to_float(static_cast<const Half*>(x)[index]);
  return to_float(static_cast<const BFloat16*>(x)[index]);
}
GRAPHOPT_DEVICE void store_number(void* y, int type, size_t index, float value) {
  if (type == GRAPHOPT_FLOAT32) static_cast<float*>(y)[index] = value;
  else if (type == GRAPHOPT_FLOAT16) static_cast<Half*>(y)[index] = half_of(value);
  else static_cast<BFloat16*>(y)[index] = bfloat16_of(value);
}

// Which numbers the block's tile holds.
struct TileRange {
  size_t first;    // number of x
  unsigned count;  // numbers of the tile
};
GRAPHOPT_DEVICE TileRange tile_range(const HadamardPass& pass) {
  const size_t index = block_index().x;
  if (pass.rows > 1) {
    const size_t run = index / pass.tiles_of_run, column = index % pass.tiles_of_run * pass.width;
    return {run * pass.pitch * pass.rows + column, pass.rows * pass.width};
  }
  const size_t first = index * pass.width, remaining = pass.numbers - first;
  return {first, remaining < pass.width ? static_cast<unsigned>(remaining) : pass.width};
}
GRAPHOPT_DEVICE size_t number_at(const HadamardPass& pass, size_t first, unsigned index) {
  return pass.rows > 1 ? first + index / pass.width * pass.pitch + index % pass.width : first + index;
}

// 16 bytes are Size neighbours, of which 2^load_log are transformed.
template <int Size>
GRAPHOPT_DEVICE void load_neighbours(const HadamardPass& pass, const TileRange& tile, float* shared) {
  for (unsigned index = thread_index().x * Size; index < tile.count; index += kHadamardThreads * Size) {
    const size_t from = number_at(pass, tile.first, index);
    float v[Size];
    // The end of a tile of small runs may be no multiple of 16 bytes.
    if (pass.aligned && index + Size <= tile.count) {
      const Word4 words = load16(static_cast<const char*>(pass.x) + from * (16 / Size));
      GRAPHOPT_UNROLL
      for (int i = 0; i < Size; ++i) {
        const uint32_t word = words.words[i * 4 / Size];
        if constexpr (Size == 4) {
          v[i] = float_of_bits(word);
        } else {
          const uint16_t bits = static_cast<uint16_t>(i % 2 ? word >> 16 : word);
          v[i] = pass.type_x == GRAPHOPT_FLOAT16 ? to_float(Half{bits}) : to_float(BFloat16{bits});
        }
      }
    } else {
      GRAPHOPT_UNROLL
      for (int i = 0; i < Size; ++i) {
        v[i] = index + i < tile.count ? load_number(pass.x, pass.type_x, number_at(pass, tile.first, index + i)) : 0;
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < Size; ++i) v[i] *= pass.scale;
    GRAPHOPT_UNROLL
    for (int half = 1; half < Size; half *= 2) {
      if (half >> pass.load_log) break;
      GRAPHOPT_UNROLL
      for (int i = 0; i < Size; ++i) {
        if (i & half) continue;
        const float sum = v[i] + v[i + half], difference = v[i] - v[i + half];
        v[i] = sum;
        v[i + half] = difference;
      }
    }
    GRAPHOPT_UNROLL
    for (int i = 0; i < Size; ++i) {
      if (index + i < tile.count) shared[at(index + i)] = v[i];
    }
  }
}

// Size numbers a stride apart, for each column; written back, or to y.
template <int Size, bool Leaves>
GRAPHOPT_DEVICE void butterflies(const HadamardPass& pass, const TileRange& tile, unsigned stride, float* shared) {
  for (unsigned item = thread_index().x; item < tile.count / Size; item += kHadamardThreads) {
    const unsigned base = item / stride * (stride * Size) + item % stride;
    float v[Size];
    GRAPHOPT_UNROLL
    for (int i = 0; i < Size; ++i) v[i] = shared[at(base + i * stride)];
    butterfly(v);
    GRAPHOPT_UNROLL
    for (int i = 0; i < Size; ++i) {
      if constexpr (Leaves) store_number(pass.y, pass.type_y, number_at(pass, tile.first, base + i * stride), v[i]);
      else shared[at(base + i * stride)] = v[i];
    }
  }
}
template <bool Leaves>
GRAPHOPT_DEVICE void butterflies(const HadamardPass& pass, const TileRange& tile, const HadamardStage& stage,
                                 float* shared) {
  if (stage.order == 32) butterflies<32, Leaves>(pass, tile, stage.stride, shared);
  else if (stage.order == 16) butterflies<16, Leaves>(pass, tile, stage.stride, shared);
  else if (stage.order == 8) butterflies<8, Leaves>(pass, tile, stage.stride, shared);
  else if (stage.order == 4) butterflies<4, Leaves>(pass, tile, stage.stride, shared);
  else if (stage.order == 2) butterflies<2, Leaves>(pass, tile, stage.stride, shared);
  else if (Leaves) butterflies<1, Leaves>(pass, tile, stage.stride, shared);
}

// The upper halves of two floats, and the remainders.
GRAPHOPT_DEVICE uint32_t cut(float& a, float& b) {
  const uint32_t pair = byte_permute(bits_of_float(a), bits_of_float(b), 0x7632);
  a = a - float_of_bits(pair << 16);
  b = b - float_of_bits(pair & 0xffff0000u);
  return pair;
}

// Vectors of `order` numbers a stride apart, times the core, in place. A warp does eight at a time: it has read all of
// their numbers when it writes the first sum.
template <int Tiles>
GRAPHOPT_DEVICE void core(const TileRange& tile, const HadamardStage& stage, bool all_parts, float* shared) {
  constexpr int kColumns = 8;
  const unsigned order = static_cast<unsigned>(stage.order), stride = stage.stride, vectors = tile.count / order;
  const unsigned g = static_cast<unsigned>(lane()) / 4, t = static_cast<unsigned>(lane()) % 4;
  const auto start = [&](unsigned vector) { return vector / stride * (stride * order) + vector % stride; };
  for (unsigned first = static_cast<unsigned>(warp()) * kColumns; first < vectors;
       first += kHadamardThreads / kWarp * kColumns) {
    uint32_t high[Tiles][2], middle[Tiles][2], low[Tiles][2];
    const bool is_inside = first + g < vectors;
    const unsigned from = start(first + g);
    GRAPHOPT_UNROLL
    for (int k = 0; k < Tiles; ++k) {
      GRAPHOPT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const unsigned row = 16 * k + 8 * i + 2 * t;
        float a = is_inside && row < order ? shared[at(from + row * stride)] : 0;
        float b = is_inside && row + 1 < order ? shared[at(from + (row + 1) * stride)] : 0;
        high[k][i] = cut(a, b);
        middle[k][i] = cut(a, b);
        low[k][i] = cut(a, b);
      }
    }
    sync_warp();
    for (unsigned out = 0; 16 * out < order; ++out) {
      const Word4 signs = load16(stage.signs + (out * kWarp + lane()) * 16);
      // The remainder is so small that its rounding does not matter; the upper halves of 16 inputs are summed
      // separately, since additions round where tensor cores truncate.
      float sum[4] = {}, rest[4] = {};
      GRAPHOPT_UNROLL
      for (int k = 0; k < Tiles; ++k) {
        if (16u * k >= order) break;
        uint32_t a[4];
        GRAPHOPT_UNROLL
        for (int r = 0; r < 4; ++r) {
          constexpr uint32_t kOnes = 0x3f803f80, kSigns = 0x80008000;
          a[r] = lop3<0xf8>(kOnes, signs.words[k / 4] << (15 - 4 * (k % 4) - r), kSigns);
        }
        float upper[4] = {};
        multiply_bf16(upper, a, high[k]);
        multiply_bf16(rest, a, middle[k]);
        if (all_parts) multiply_bf16(rest, a, low[k]);
        GRAPHOPT_UNROLL
        for (int i = 0; i < 4; ++i) sum[i] += upper[i];
      }
      GRAPHOPT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const unsigned vector = first + 2 * t + i % 2, row = 16 * out + g + 8 * (i / 2);
        if (vector < vectors && row < order) shared[at(start(vector) + row * stride)] = sum[i] + rest[i];
      }
    }
  }
}

// Tiles: of 16 inputs, at most, that a part of a core has; 0 where there is none.
template <int Tiles>
GRAPHOPT_KERNEL(kHadamardThreads, Tiles > 10 ? 1 : 2) void hadamard(HadamardPass pass) {
  auto* const shared = reinterpret_cast<float*>(shared_memory());
  const TileRange tile = tile_range(pass);
  if (pass.type_x == GRAPHOPT_FLOAT32) load_neighbours<4>(pass, tile, shared);
  else load_neighbours<8>(pass, tile, shared);
  sync_block();
  for (int i = 0; i < pass.stages; ++i) {
    const HadamardStage& stage = pass.stage[i];
    if constexpr (Tiles > 0) {
      if (stage.signs) core<Tiles>(tile, stage, pass.type_y == GRAPHOPT_FLOAT32, shared);
      else butterflies<false>(pass, tile, stage, shared);
    } else {
      butterflies<false>(pass, tile, stage, shared);
    }
    sync_block();
  }
  butterflies<true>(pass, tile, pass.last, shared);
}

}  // namespace
}  // namespace graphopt

size_t graphopt_cuda_hadamard_scratch(const GraphoptHadamard* call) {
  graphopt::HadamardPlan plan;
  return plan.make(*call) ? 0 : plan.scratch;
}

const char* graphopt_cuda_hadamard(const GraphoptHadamard* call, void* stream) {
  using namespace graphopt;
  HadamardPlan plan;
  if (const char* failure = plan.make(*call)) return failure;
  if (HadamardHalves halves; halves.make(*call)) return halves.start(stream);
  for (int i = 0; i < plan.passes && call->runs; ++i) {
    const HadamardPass& pass = plan.pass[i];
    const auto kernel = plan.largest_part > 160  ? hadamard<16>
                        : plan.largest_part > 64 ? hadamard<10>
                        : plan.largest_part > 1  ? hadamard<4>
                                                 : hadamard<0>;
    if (pass.tiles() > 0x7fffffff) return "Hadamard takes at most 2^31 - 1 tiles";
    const Index3 grid{static_cast<unsigned>(pass.tiles()), 1, 1};
    const char* const failure = launch(kernel, grid, kHadamardThreads, 4 * padded_index(pass.tile()), stream, pass);
    if (failure) return failure;
  }
  return nullptr;
}
