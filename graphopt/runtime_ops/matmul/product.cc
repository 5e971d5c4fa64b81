#include "matmul/product.h"

#include <cmath>
#include <cstdlib>

#include "abi/large_pages.h"

namespace graphopt {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A task that waits for memory: long stretches are handed over faster, but all threads should have a part of a small
// weight.
constexpr size_t kTasks = 8, kLeastBytes = size_t{64} << 10, kMostBytes = size_t{512} << 10;
// The least numbers of x that are worth a task of their own.
constexpr size_t kTaskNumbers = 16384;
constexpr int64_t kLargestSize = int64_t{1} << 31;

}  // namespace

struct Scratch::Piece {
  size_t bytes;
};

char* Scratch::memory(Piece* piece) { return reinterpret_cast<char*>(piece) + kAlignment; }

Scratch::Piece* Scratch::take(size_t bytes) {
  Piece* piece = left_.exchange(nullptr);
  if (piece && piece->bytes >= bytes) return piece;
  std::free(piece);
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes + kAlignment)) return nullptr;
  piece = static_cast<Piece*>(memory);
  piece->bytes = bytes;
  return piece;
}

void Scratch::give_back(Piece* piece) { std::free(left_.exchange(piece)); }

Scratch::~Scratch() { std::free(left_.load()); }

OrtStatus* Product::read_sizes(const OrtKernelInfo* info) {
  int64_t rows = 0, columns = 0, group = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "rows", &rows));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "columns", &columns));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "group", &group));
  if (rows < 1 || rows > kLargestSize || columns < 1 || columns > kLargestSize) {
    return node.error("rows and columns must be from 1 to 2^31, they are %lld and %lld", static_cast<long long>(rows),
                      static_cast<long long>(columns));
  }
  if (group < 1 || group > kLargestSize || (group % 16 && group != rows)) {
    return node.error("group must be a multiple of 16, or all %lld rows, it is %lld", static_cast<long long>(rows),
                      static_cast<long long>(group));
  }
  weights.rows = static_cast<size_t>(rows);
  weights.columns = static_cast<size_t>(columns);
  weights.group = static_cast<size_t>(group);
  Tensor codes, scales, zero_points, bias;
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kCodes, "codes", &codes));
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kScales, "scales", &scales));
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kZeroPoints, "zero_points", &zero_points));
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kBias, "bias", &bias));
  const auto tiles = static_cast<int64_t>(weights.tiles()), units = static_cast<int64_t>(weights.units());
  const auto groups = static_cast<int64_t>(weights.groups());
  const int64_t unit = codes.rank == 3 ? codes.shape[2] : 0;
  if (codes.rank != 3 || codes.shape[0] != tiles || codes.shape[1] != units || unit % 32 || unit < 32 || unit > 256) {
    return node.error("codes must have the shape [%lld, %lld, 32 * bits] for %lld rows and %lld columns",
                      static_cast<long long>(tiles), static_cast<long long>(units), static_cast<long long>(rows),
                      static_cast<long long>(columns));
  }
  weights.bits = static_cast<int>(unit / 32);
  weights.codes = static_cast<const uint8_t*>(codes.data);
  const auto one_for_each_group = [&](const Tensor& tensor) {
    return tensor.rank == 3 && tensor.shape[0] == tiles && tensor.shape[1] == groups && tensor.shape[2] == 16;
  };
  if (!one_for_each_group(scales)) {
    return node.error("scales must have the shape [%lld, %lld, 16]", static_cast<long long>(tiles),
                      static_cast<long long>(groups));
  }
  const bool half = scales.type == kFloat16;
  if (half) weights.half_scales = static_cast<const Half*>(scales.data);
  if (!half) weights.scales = static_cast<const float*>(scales.data);
  const int64_t* const shape = zero_points.shape.get();
  const bool one = zero_points.rank == 3 && shape[0] == 1 && shape[1] == 1 && shape[2] == 1;
  const bool neutral = one && (half ? !(static_cast<const Half*>(zero_points.data)->bits & 0x7fff)
                                    : *static_cast<const float*>(zero_points.data) == 0);
  if (!neutral) {
    if (!one_for_each_group(zero_points)) {
      return node.error("zero_points must be [[[0]]], or have the shape of scales, [%lld, %lld, 16]",
                        static_cast<long long>(tiles), static_cast<long long>(groups));
    }
    if (half) weights.half_zero_points = static_cast<const Half*>(zero_points.data);
    if (!half) weights.zero_points = static_cast<const float*>(zero_points.data);
  }
  const bool no_bias = bias.rank == 1 && bias.shape[0] == 1 && *static_cast<const float*>(bias.data) == 0;
  if (!no_bias && (bias.rank != 1 || bias.shape[0] != columns)) {
    return node.error("bias must be [0], or have %lld numbers, one for each column", static_cast<long long>(columns));
  }
  if (!no_bias) weights.bias = static_cast<const float*>(bias.data);
  return nullptr;
}

OrtStatus* Product::read_table(const OrtKernelInfo* info) {
  Tensor table;
  GRAPHOPT_RETURN_IF_ERROR(node.read_constant(info, kTable, "table", &table));
  const int64_t size = int64_t{1} << weights.bits, entries = table.rank == 1 ? table.shape[0] : 0;
  if (entries < 1 || entries > size) {
    return node.error("table must have from 1 to %lld numbers, for codes of %d bits", static_cast<long long>(size),
                      weights.bits);
  }
  const auto* const values = static_cast<const float*>(table.data);
  for (int64_t i = 0; i < entries; ++i) {
    if (!std::isfinite(values[i])) {
      return node.error("entry %lld of the table is no finite number", static_cast<long long>(i));
    }
  }
  if (entries < size) {
    const int largest = kernels->largest_code(weights, 0, weights.tiles());
    if (largest >= entries) {
      return node.error("a code is %d, in a table of %lld numbers", largest, static_cast<long long>(entries));
    }
  }
  weights.table.make(values, static_cast<size_t>(entries), weights.bits);
  return nullptr;
}

OrtStatus* Product::prepare(const OrtApi* api, const OrtKernelInfo* info) {
  GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
  if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
  kernels = &kMatMulScalar;
#if defined(__x86_64__)
  if (instructions == Instructions::kAvx2) kernels = &kMatMulAvx2;
  if (instructions == Instructions::kAvx512) kernels = &kMatMulAvx512;
#endif
  GRAPHOPT_RETURN_IF_ERROR(read_sizes(info));
  GRAPHOPT_RETURN_IF_ERROR(read_table(info));
  weights.codes = static_cast<const uint8_t*>(copy.of(weights.codes, weights.tiles() * weights.tile_bytes()));
  return nullptr;
}

namespace {

// One call, cut into tasks that share nothing they write but a flag; so their number changes no bit.
struct Call {
  const Product* product;
  const Before* before;
  const float* x;
  float *y, *changed;
  Rounded rounded;
  bool few;
  size_t panels_of_task, tiles_of_task;
  std::atomic<bool> no_memory{false};

  static void round(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Weights& weights = self.product->weights;
    const size_t first = index * self.panels_of_task, all = self.rounded.panels();
    const size_t end = first + self.panels_of_task < all ? first + self.panels_of_task : all;
    if (self.before) {
      const size_t of_panel = self.rounded.panel, most = self.rounded.rows_of_x;
      const size_t row = first * of_panel, last = end * of_panel < most ? end * of_panel : most;
      if (!self.before->run(self.x + row * weights.rows, last - row, self.changed + row * weights.rows)) {
        self.no_memory = true;
        return;
      }
    }
    const float* const x = self.before ? self.changed : self.x;
    for (size_t panel = first; panel < end; ++panel) self.product->kernels->round(weights, self.rounded, x, panel);
  }

  static void multiply(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Weights& weights = self.product->weights;
    const size_t first = index * self.tiles_of_task, all = weights.tiles();
    const size_t end = first + self.tiles_of_task < all ? first + self.tiles_of_task : all;
    const MatMulKernels& kernels = *self.product->kernels;
    (self.few ? kernels.multiply_few : kernels.multiply)(weights, self.rounded, self.y, first, end);
  }
};

OrtStatus* in_parallel(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t tasks,
                       Call* call) {
  if (tasks > 1) return KernelContextParallelFor::call(api, context, task, tasks, 0, call);
  task(call, 0);
  return nullptr;
}

}  // namespace

OrtStatus* Product::run(OrtKernelContext* context, Rounded how, const Before* before) const {
  const OrtApi* api = node.api;
  const OrtValue* value = nullptr;
  Tensor x;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, kX, &value));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "x", &x));
  if (x.rank < 1 || x.shape[x.rank - 1] != static_cast<int64_t>(weights.rows)) {
    return node.error("the last axis of x must have %zu numbers, as there are rows of weights", weights.rows);
  }
  size_t rows = 1;
  for (size_t axis = 0; axis + 1 < x.rank; ++axis) rows *= static_cast<size_t>(x.shape[axis]);
  x.shape[x.rank - 1] = static_cast<int64_t>(weights.columns);
  OrtValue* output = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
  if (!rows) return nullptr;
  void* y = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(api, output, &y));

  how.rows_of_x = rows;
  const bool integers = how.kind == Activations::kInt8 || how.kind == Activations::kInt16;
  const bool few = integers && how.rows() <= kernels->few;
  how.panel = few || how.rows() < kernels->panel ? width_for(how.rows()) : kernels->panel;
  how.padded = (how.panels() - 1) * how.panel + how.width(how.panels() - 1);
  const size_t words = round_up(how.padded * weights.units() * how.words_of_unit() * sizeof(uint32_t));
  const size_t of_rows = round_up(how.padded * weights.segments() * sizeof(float));
  Scratch::Piece* piece = scratch.take(words + 4 * of_rows + (before ? rows * weights.rows * sizeof(float) : 0));
  if (!piece) return node.error("no memory to round %zu rows of x", rows);
  char* const memory = Scratch::memory(piece);
  how.words = reinterpret_cast<uint32_t*>(memory);
  how.scales = reinterpret_cast<float*>(memory + words);
  how.sums = reinterpret_cast<float*>(memory + words + of_rows);
  how.starts[0] = reinterpret_cast<int32_t*>(memory + words + 2 * of_rows);
  how.starts[1] = reinterpret_cast<int32_t*>(memory + words + 3 * of_rows);

  Call call{this, before, static_cast<const float*>(x.data), static_cast<float*>(y),
            reinterpret_cast<float*>(memory + words + 4 * of_rows), how, few, 1, 1};
  const size_t numbers = how.panel * weights.rows;
  call.panels_of_task = (kTaskNumbers + numbers - 1) / numbers;
  // few rows wait for memory; many rows compute, and small tasks end together
  const size_t part = weights.tiles() * weights.tile_bytes() / kTasks;
  const size_t task_bytes = part < kLeastBytes ? kLeastBytes : part < kMostBytes ? part : kMostBytes;
  call.tiles_of_task = few ? 2 * ((task_bytes / weights.tile_bytes() + 2) / 2) : 2;
  const size_t panel_tasks = (how.panels() + call.panels_of_task - 1) / call.panels_of_task;
  const size_t tile_tasks = (weights.tiles() + call.tiles_of_task - 1) / call.tiles_of_task;
  OrtStatus* failure = in_parallel(api, context, Call::round, panel_tasks, &call);
  if (!failure && call.no_memory) failure = node.error("no memory to transform rows of x");
  if (!failure) failure = in_parallel(api, context, Call::multiply, tile_tasks, &call);
  scratch.give_back(piece);
  return failure;
}

}  // namespace graphopt
