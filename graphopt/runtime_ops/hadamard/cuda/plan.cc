// The host's part of Hadamard on a GPU: taking matrices apart, and planning passes and stages.
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "hadamard/cuda/kernels.h"
#include "hadamard/shared/factor.h"

namespace graphopt {
namespace {

constexpr size_t kRunsTile = 4096;  // small runs share a tile of about so many numbers
constexpr int kColumnBytes = 64;    // of a row of a tile, where there is more than one row

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

int bytes_of(int type) { return type == GRAPHOPT_FLOAT32 ? 4 : 2; }

// Collects the stages of a pass. Butterflies that are not done on the way in are cut into as few stages as possible.
struct Stages {
  HadamardPass* pass;

  void butterflies(int log, unsigned stride) {
    const int count = (log + kMaxLog - 1) / kMaxLog;
    for (int stages_left = count; stages_left > 0; --stages_left) {
      const int stage_log = (log + stages_left - 1) / stages_left;
      pass->stage[pass->stages++] = {nullptr, 1 << stage_log, stride};
      stride <<= stage_log;
      log -= stage_log;
    }
  }

  // Adds a factor along `stride`; returns the stride behind it. Neighbours in memory are transformed while they are
  // loaded.
  unsigned add(const GraphoptFactor& factor, unsigned stride, int neighbours) {
    int log = log2_of(factor.inner);
    if (stride == 1) {
      pass->load_log = log < neighbours ? log : neighbours;
      log -= pass->load_log;
      stride <<= pass->load_log;
    }
    butterflies(log, stride);
    stride <<= log;
    // The last part is the innermost; its signs are the last.
    auto* signs = static_cast<const uint8_t*>(factor.signs);
    for (const int32_t part : factor.parts) signs += hadamard_signs(part);
    for (int i = GRAPHOPT_CORE_PARTS; i-- > 0;) {
      const int part = factor.parts[i];
      if (part <= 1) continue;
      signs -= hadamard_signs(part);
      pass->stage[pass->stages++] = {signs, part, stride};
      stride *= static_cast<unsigned>(part);
    }
    butterflies(log2_of(factor.outer), stride);
    return stride * static_cast<unsigned>(factor.outer);
  }

  // The last butterflies are done while the numbers are stored.
  void finish() {
    pass->last = {nullptr, 1, 1};
    for (int i = pass->stages; i-- > 0;) {
      if (pass->stage[i].signs) continue;
      pass->last = pass->stage[i];
      std::memmove(pass->stage + i, pass->stage + i + 1, static_cast<size_t>(pass->stages - i - 1) * sizeof pass->last);
      --pass->stages;
      return;
    }
  }
};

size_t order_of(const GraphoptFactor& factor) {
  return static_cast<size_t>(factor.outer) * static_cast<size_t>(factor.core) * static_cast<size_t>(factor.inner);
}

// Every `step`-th row and column of a matrix of signs, times a sign.
struct Core {
  const int8_t* matrix;
  size_t width;  // of that matrix
  size_t step;
  int order, sign;

  int operator()(int i, int j) const {
    return matrix[static_cast<size_t>(i) * step * width + static_cast<size_t>(j) * step] * sign;
  }

  // Output 16 * tile + g + 8 * (r % 2) and input 16 * k + 2 * t + 8 * (r / 2) + half, of lane 4 * g + t: bit
  // 4 * (k % 4) + r + 16 * half of the lane's word k / 4, so that a shift brings both halves to the signs of a pair.
  void pack(uint32_t* words) const {
    std::memset(words, 0, hadamard_signs(order));
    for (int out = 0; out < order; ++out) {
      for (int in = 0; in < order; ++in) {
        if ((*this)(in, out) > 0) continue;
        const int lane = out % 8 * 4 + in % 8 / 2, r = out % 16 / 8 + 2 * (in % 16 / 8), k = in / 16;
        words[(out / 16 * 32 + lane) * 4 + k / 4] |= uint32_t{1} << (4 * (k % 4) + r + 16 * (in % 2));
      }
    }
  }

  // Is it the Kronecker product of some matrix and its own first `inner` rows and columns?
  bool comes_apart(int inner) const {
    for (int i = 0; i < order; ++i) {
      const int row = i / inner * inner;
      for (int j = 0; j < order; ++j) {
        const int column = j / inner * inner;
        if ((*this)(i, j) != (*this)(row, column) * (*this)(0, 0) * (*this)(i - row, j - column)) return false;
      }
    }
    return true;
  }
};

// Splits a core into the parts of a Kronecker product, from the left; returns their number.
int take_apart(Core core, Core (&parts)[GRAPHOPT_CORE_PARTS]) {
  Core from_right[GRAPHOPT_CORE_PARTS];
  int count = 0;
  for (int inner = 2; inner * 2 <= core.order && count + 1 < GRAPHOPT_CORE_PARTS;) {
    if (core.order % inner || !core.comes_apart(inner)) {
      ++inner;
      continue;
    }
    from_right[count++] = {core.matrix, core.width, core.step, inner, core.sign};
    const size_t step = core.step * static_cast<size_t>(inner);
    core = {core.matrix, core.width, step, core.order / inner, core.sign * core(0, 0)};
    inner = 2;
  }
  from_right[count++] = core;
  for (int i = 0; i < count; ++i) parts[i] = from_right[count - 1 - i];
  return count;
}

bool is_power(int32_t n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

const char* HadamardPlan::make(const GraphoptHadamard& call) {
  if (call.type != GRAPHOPT_FLOAT32 && call.type != GRAPHOPT_FLOAT16 && call.type != GRAPHOPT_BFLOAT16) {
    return "Hadamard takes float32, float16 and bfloat16";
  }
  for (const GraphoptFactor* factor : {&call.left, &call.right}) {
    if (!is_power(factor->outer) || !is_power(factor->inner) || factor->core < 1) {
      return "a factor must be of orders 2^i, core and 2^j";
    }
    if (factor->sign != 1 && factor->sign != -1) return "the sign of a factor must be 1 or -1";
    int64_t product = 1;
    for (const int32_t part : factor->parts) {
      if (part > kMaxCore) return "Hadamard takes matrices whose core is of an order of at most 256 on a GPU";
      if (part > 1) product *= part;
      if (part > 1 && part > largest_part) largest_part = part;
    }
    if (product != factor->core) return "the orders of a core's parts must multiply to the order of the core";
  }
  const size_t left = order_of(call.left), right = order_of(call.right), order = left * right;
  const size_t numbers = static_cast<size_t>(call.runs) * order;
  const int sign = call.left.sign * call.right.sign;
  const float scale = static_cast<float>(sign / std::sqrt(static_cast<double>(order)));
  const int neighbours = call.type == GRAPHOPT_FLOAT32 ? 2 : 3;
  HadamardPass joint_pass = {};
  joint_pass.x = call.x;
  joint_pass.y = call.y;
  joint_pass.type_x = joint_pass.type_y = call.type;
  joint_pass.scale = scale;
  joint_pass.numbers = numbers;
  joint_pass.rows = 1;
  const auto is_aligned = [](const HadamardPass& pass) {
    const size_t bytes = static_cast<size_t>(bytes_of(pass.type_x));
    const bool starts = reinterpret_cast<uintptr_t>(pass.x) % 16 == 0;
    return starts && pass.width * bytes % 16 == 0 && pass.pitch * bytes % 16 == 0;
  };
  if (order <= kMaxTile) {
    joint_pass.width = static_cast<unsigned>(order < kRunsTile ? kRunsTile / order * order : order);
    Stages stages{&joint_pass};
    stages.add(call.left, stages.add(call.right, 1, neighbours), neighbours);
    stages.finish();
    joint_pass.aligned = is_aligned(joint_pass);
    pass[0] = joint_pass;
    passes = 1;
    return nullptr;
  }
  if (left > kMaxTile || right > kMaxTile) return "a Hadamard matrix is of an order beyond 40448";
  scratch = numbers * sizeof(float);
  passes = 2;
  HadamardPass& rows = pass[0] = joint_pass;
  rows.y = call.scratch;
  rows.type_y = GRAPHOPT_FLOAT32;
  rows.width = static_cast<unsigned>(right < kRunsTile ? kRunsTile / right * right : right);
  Stages of_rows{&rows};
  of_rows.add(call.right, 1, neighbours);
  of_rows.finish();
  rows.aligned = is_aligned(rows);
  HadamardPass& columns = pass[1] = joint_pass;
  columns.x = call.scratch;
  columns.type_x = GRAPHOPT_FLOAT32;
  columns.scale = 1;
  columns.rows = static_cast<unsigned>(left);
  columns.pitch = right;
  // As wide as one access to memory, if the tile may be that large, and a divisor of the number of rows.
  size_t width = kColumnBytes / sizeof(float);
  while (width * left > kMaxTile || right % width) --width;
  columns.width = static_cast<unsigned>(width);
  columns.tiles_of_run = static_cast<unsigned>(right / width);
  Stages of_columns{&columns};
  of_columns.add(call.left, columns.width, 0);
  of_columns.finish();
  columns.aligned = is_aligned(columns);
  return nullptr;
}

}  // namespace graphopt

size_t graphopt_cuda_hadamard_factor(const int8_t* matrix, int32_t order, GraphoptFactor* factor, void* signs,
                                     const char** failure) {
  using namespace graphopt;
  const size_t n = static_cast<size_t>(order);
  OwnedFactor parts;
  switch (parts.read(matrix, n)) {
    case OwnedFactor::Outcome::kOtherEntries:
      *failure = "the matrix has an entry that is neither 1 nor -1";
      return 0;
    case OwnedFactor::Outcome::kNoMemory:
      *failure = "no memory for a matrix";
      return 0;
    default:
      *failure = nullptr;
  }
  factor->outer = static_cast<int32_t>(parts.outer);
  factor->core = static_cast<int32_t>(parts.core);
  factor->inner = static_cast<int32_t>(parts.inner);
  const Core core{matrix, n, parts.inner, factor->core, 1};
  factor->sign = core.order > 1 ? 1 : matrix[0];
  std::memset(factor->parts, 0, sizeof factor->parts);
  Core cores[GRAPHOPT_CORE_PARTS];
  const int count = core.order > 1 ? take_apart(core, cores) : 0;
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) {
    factor->parts[i] = cores[i].order;
    auto* const words = reinterpret_cast<uint32_t*>(static_cast<char*>(signs) + bytes);
    if (signs && cores[i].order <= kMaxCore) cores[i].pack(words);
    bytes += hadamard_signs(cores[i].order);
  }
  return bytes;
}
