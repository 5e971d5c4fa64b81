#include "matmul_table/cpu/product.h"

#include <cstring>
#include <new>

#include "abi/convert.h"

namespace graphopt {
namespace {

constexpr size_t round_up(size_t bytes) {
  return (bytes + Pool::kAlignment - 1) / Pool::kAlignment * Pool::kAlignment;
}

// A task limited by memory: long stretches are read faster, but all threads should have a part of a small weight.
constexpr size_t kTasks = 8, kLeastBytes = size_t{64} << 10, kMostBytes = size_t{512} << 10;
// The least numbers of x that are worth a task of their own.
constexpr size_t kTaskNumbers = 16384;
// Bytes of codes that one task copies.
constexpr size_t kCopyBytes = size_t{1} << 20;

}  // namespace

OrtStatus* read_rounding(const Node& node, const OrtKernelInfo* info, Rounded* rounded) {
  GRAPHOPT_RETURN_IF_ERROR(read_activations(node, info, &rounded->kind));
  if (rounded->kind != Activations::kUint4) return nullptr;
  rounded->kind = Activations::kInt8;  // codes without their zero points are small integers
  rounded->levels = 15;
  rounded->of_range = true;
  return nullptr;
}

OrtStatus* Product::prepare(const OrtApi* api, const OrtKernelInfo* info, bool stacked) {
  GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
  if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
  kernels = &GRAPHOPT_OF(instructions, kMatMul);
#if defined(GRAPHOPT_AVXVNNI)
  if (instructions == Instructions::kAvxVnni) kernels = &kMatMulAvxVnni;
#endif
#if defined(GRAPHOPT_DOTPROD)
  if (instructions == Instructions::kDotprod) kernels = &kMatMulDotprod;
#endif
#if defined(GRAPHOPT_I8MM)
  if (instructions == Instructions::kI8mm) kernels = &kMatMulI8mm;
#endif
  GRAPHOPT_RETURN_IF_ERROR(read_weights(node, info, &weights, &computed, stacked));
  TableInput table = {};
  GRAPHOPT_RETURN_IF_ERROR(read_table(node, info, weights, &table));
  if (table.is_trellis) return make_trellis(node, table, weights.bits, &weights.table);
  for (size_t expert = 0; !weights.digits && table.entries < size_t{1} << weights.bits; ++expert) {
    const Weights matrix = stacked ? weights.of_expert(expert) : weights;
    GRAPHOPT_RETURN_IF_ERROR(check_codes(node, table, kernels->largest_code(matrix, 0, matrix.tiles())));
    if (expert + 1 >= weights.experts) break;
  }
  weights.table.make(table.values, table.entries, weights.bits);
  return nullptr;
}

namespace {

// One call, cut into tasks that share nothing they write but a flag; so their number changes no bit.
struct Call {
  const Product* product;
  const Weights& weights;
  const RowTransform* transform;
  const float* x;
  float* y;
  Rounded rounded;
  bool is_small_m;
  size_t panels_of_task, tiles_of_task;
  std::atomic<bool> no_memory{false};

  static void round(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Weights& weights = self.weights;
    const size_t first = index * self.panels_of_task, all = self.rounded.panels();
    const size_t end = first + self.panels_of_task < all ? first + self.panels_of_task : all;
    const MatMulKernels& kernels = *self.product->kernels;
    const size_t rows_of_panel = self.rounded.panel / self.rounded.rows_of_one();
    if (!self.transform) {
      for (size_t panel = first; panel < end; ++panel) {
        kernels.round(weights, self.rounded, self.x + panel * rows_of_panel * weights.rows, panel);
      }
      return;
    }
    const size_t bytes = round_up(rows_of_panel * weights.rows * sizeof(float));
    const Pool::Loan loan(self.product->tasks, bytes + self.transform->scratch());
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    // A panel is rounded while it is near, and the next one takes its place.
    auto* const float_rows = reinterpret_cast<float*>(loan.memory);
    for (size_t panel = first; panel < end; ++panel) {
      const size_t row = panel * rows_of_panel, left = self.rounded.rows_of_x - row;
      const size_t count = left < rows_of_panel ? left : rows_of_panel;
      self.transform->run(self.x + row * weights.rows, count, float_rows, loan.memory + bytes);
      kernels.round(weights, self.rounded, float_rows, panel);
    }
  }

  static void multiply(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Weights& weights = self.weights;
    const size_t first = index * self.tiles_of_task, all = weights.tiles();
    const size_t end = first + self.tiles_of_task < all ? first + self.tiles_of_task : all;
    const MatMulKernels& kernels = *self.product->kernels;
    (self.is_small_m ? kernels.small_m : kernels.gemm)(weights, self.rounded, self.y, first, end);
  }
};

}  // namespace

OrtStatus* in_parallel(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t tasks,
                       void* call) {
  if (tasks > 1) return KernelContextParallelFor::call(api, context, task, tasks, 0, call);
  task(call, 0);
  return nullptr;
}

Layout lay_out(const MatMulKernels& kernels, const Weights& weights, Rounded* to) {
  Rounded& rounded = *to;
  const bool is_small_m = rounded.rows() <= kernels.small_m_rows(weights, rounded.kind);
  rounded.form = kernels.form(weights, rounded.kind, is_small_m);
  rounded.widths = kernels.widths;
  rounded.panel = rounded.rows() < kernels.panel ? rounded.width_for(rounded.rows()) : kernels.panel;
  rounded.padded = (rounded.panels() - 1) * rounded.panel + rounded.width(rounded.panels() - 1);
  const size_t words = round_up(rounded.padded * weights.units() * rounded.words_of_unit() * sizeof(uint32_t));
  return {is_small_m, words, round_up(rounded.padded * weights.segments() * sizeof(float))};
}

void assign_memory(const Layout& layout, char* memory, Rounded* rounded) {
  char* const numbers = memory + layout.words;
  rounded->words = reinterpret_cast<uint32_t*>(memory);
  rounded->scales = reinterpret_cast<float*>(numbers);
  rounded->sums = reinterpret_cast<float*>(numbers + layout.numbers);
  rounded->starts[0] = reinterpret_cast<int32_t*>(numbers + 2 * layout.numbers);
  rounded->starts[1] = reinterpret_cast<int32_t*>(numbers + 3 * layout.numbers);
}

size_t panels_of_task(const Rounded& rounded, const Weights& weights) {
  const size_t numbers = rounded.panel * weights.rows;
  return (kTaskNumbers + numbers - 1) / numbers;
}

size_t tiles_of_task(const Weights& weights, bool is_small_m, size_t bytes) {
  // few rows wait for memory; many rows compute, and small tasks end together
  if (!is_small_m) return 2;
  const size_t part = bytes / kTasks;
  const size_t task_bytes = part < kLeastBytes ? kLeastBytes : part < kMostBytes ? part : kMostBytes;
  return 2 * ((task_bytes / weights.tile_bytes() + 2) / 2);
}

// A session opens without reading the codes. The first call, which needs all of them, copies them with all threads into
// large pages, where later calls find them faster than in a mapped file. Digits are taken apart on the way.
OrtStatus* Product::move_codes(OrtKernelContext* context) const {
  struct Copy {
    const uint8_t* from;
    uint8_t* to;
    size_t bytes;
    bool digits;

    static void part(void* copy, size_t index) {
      const Copy& self = *static_cast<Copy*>(copy);
      const size_t begin = index * kCopyBytes, left = self.bytes - begin;
      const size_t count = left < kCopyBytes ? left : kCopyBytes;
      if (!self.digits) {
        std::memcpy(self.to + begin, self.from + begin, count);
        return;
      }
      constexpr size_t kUnit = 64;  // bytes of a unit of 2 bits
      unpack_digits(self.from + begin / kUnit * Weights::kDigitBytes, count / kUnit, self.to + begin);
    }
  };
  if (moved.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard<std::mutex> lock(moving);
  if (moved.load(std::memory_order_relaxed)) return nullptr;
  const size_t matrices = weights.experts ? weights.experts : 1;
  const size_t units = matrices * weights.tiles() * weights.units(), bytes = 32 * static_cast<size_t>(weights.bits) * units;
  Copy task{weights.codes, static_cast<uint8_t*>(copy.reserve(bytes)), bytes, weights.digits};
  if (!task.to && weights.digits) {
    small_pages.reset(new (std::nothrow) uint8_t[bytes]);
    task.to = small_pages.get();
    if (!task.to) return node.error("no memory for %zu bytes of codes", bytes);
  }
  OrtStatus* failure = nullptr;
  if (task.to) {
    const size_t parts = (bytes + kCopyBytes - 1) / kCopyBytes;
    failure = in_parallel(node.api, context, Copy::part, parts, &task);
    if (failure) return failure;
    weights.codes = task.to;
    weights.digits = false;
  }
  moved.store(true, std::memory_order_release);
  return failure;
}

OrtStatus* Product::weights_of(OrtKernelContext* context, Weights* storage, const Weights** to) const {
  GRAPHOPT_RETURN_IF_ERROR(move_codes(context));
  *to = &weights;
  if (!computed) return nullptr;
  // Where x is float16 and its neighbours compute in float32, onnxruntime casts scales in the graph
  const OrtValue *scales = nullptr, *zero_points = nullptr;
  Tensor of_scales, of_zero_points;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kScales, &scales));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(scales, "scales", &of_scales));
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kZeroPoints, &zero_points));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(zero_points, "zero_points", &of_zero_points));
  *storage = weights;
  *to = storage;
  return set_scales(node, of_scales, of_zero_points, storage);
}

OrtStatus* Product::run(OrtKernelContext* context, Rounded rounded, const RowTransform* transform) const {
  Weights storage;
  const Weights* of_call = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(weights_of(context, &storage, &of_call));
  return run(context, *of_call, rounded, transform);
}

OrtStatus* Product::run(OrtKernelContext* context, const Weights& weights, Rounded rounded,
                        const RowTransform* transform) const {
  const OrtApi* api = node.api;
  const OrtValue* value = nullptr;
  Tensor x;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, kX, &value));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "x", &x));
  size_t rows = 0;
  GRAPHOPT_RETURN_IF_ERROR(count_rows(node, weights, x, &rows));
  x.shape[x.rank - 1] = static_cast<int64_t>(weights.columns);
  OrtValue* output = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
  if (!rows) return nullptr;
  void* y = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(api, output, &y));
  rounded.rows_of_x = rows;
  if (x.type == kFloat) {
    return multiply(context, weights, rounded, transform, static_cast<const float*>(x.data), static_cast<float*>(y));
  }
  const size_t x_numbers = rows * weights.rows, y_numbers = rows * weights.columns;
  const Pool::Loan loan(floats, (x_numbers + y_numbers) * sizeof(float));
  if (!loan.memory) return node.error("no memory for %zu rows of float16 as floats", rows);
  float* const wide = reinterpret_cast<float*>(loan.memory);
  widen(static_cast<const Half*>(x.data), x_numbers, wide);
  GRAPHOPT_RETURN_IF_ERROR(multiply(context, weights, rounded, transform, wide, wide + x_numbers));
  narrow(wide + x_numbers, y_numbers, static_cast<Half*>(y));
  return nullptr;
}

OrtStatus* Product::multiply(OrtKernelContext* context, const Weights& weights, Rounded rounded,
                             const RowTransform* transform, const float* x, float* y) const {
  const Layout layout = lay_out(*kernels, weights, &rounded);
  const Pool::Loan loan(calls, layout.bytes());
  if (!loan.memory) return node.error("no memory to round %zu rows of x", rounded.rows_of_x);
  assign_memory(layout, loan.memory, &rounded);

  Call call{this, weights, transform, x, y, rounded, layout.is_small_m, 1, 1};
  call.panels_of_task = panels_of_task(rounded, weights);
  call.tiles_of_task = tiles_of_task(weights, layout.is_small_m, weights.tiles() * weights.tile_bytes());
  const size_t panel_tasks = (rounded.panels() + call.panels_of_task - 1) / call.panels_of_task;
  const size_t tile_tasks = (weights.tiles() + call.tiles_of_task - 1) / call.tiles_of_task;
  OrtStatus* failure = in_parallel(node.api, context, Call::round, panel_tasks, &call);
  if (!failure && call.no_memory) failure = node.error("no memory to transform rows of x");
  if (!failure) failure = in_parallel(node.api, context, Call::multiply, tile_tasks, &call);
  return failure;
}

}  // namespace graphopt
