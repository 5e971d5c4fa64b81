#include "matmul_table/cpu/product.h"

#include <cstring>

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

OrtStatus* Product::prepare(const OrtApi* api, const OrtKernelInfo* info) {
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
  GRAPHOPT_RETURN_IF_ERROR(read_weights(node, info, &weights, &computed));
  TableInput table = {};
  GRAPHOPT_RETURN_IF_ERROR(read_table(node, info, weights, &table));
  if (table.entries < size_t{1} << weights.bits) {
    GRAPHOPT_RETURN_IF_ERROR(check_codes(node, table, kernels->largest_code(weights, 0, weights.tiles())));
  }
  weights.table.make(table.values, table.entries, weights.bits);
  return nullptr;
}

namespace {

// One call, cut into tasks that share nothing they write but a flag; so their number changes no bit.
struct Call {
  const Product* product;
  const Weights& weights;
  const Before* before;
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
    const size_t of_panel = self.rounded.panel / self.rounded.rows_of_one();
    if (!self.before) {
      for (size_t panel = first; panel < end; ++panel) {
        kernels.round(weights, self.rounded, self.x + panel * of_panel * weights.rows, panel);
      }
      return;
    }
    const size_t bytes = round_up(of_panel * weights.rows * sizeof(float));
    const Pool::Loan loan(self.product->tasks, bytes + self.before->scratch());
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    // A panel is rounded while it is near, and the next one takes its place.
    auto* const changed = reinterpret_cast<float*>(loan.memory);
    for (size_t panel = first; panel < end; ++panel) {
      const size_t row = panel * of_panel, left = self.rounded.rows_of_x - row;
      const size_t count = left < of_panel ? left : of_panel;
      self.before->run(self.x + row * weights.rows, count, changed, loan.memory + bytes);
      kernels.round(weights, self.rounded, changed, panel);
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

OrtStatus* in_parallel(const OrtApi* api, OrtKernelContext* context, void (*task)(void*, size_t), size_t tasks,
                       void* call) {
  if (tasks > 1) return KernelContextParallelFor::call(api, context, task, tasks, 0, call);
  task(call, 0);
  return nullptr;
}

}  // namespace

// A session opens without reading the codes. The first call, which needs all of them, copies them with all threads into
// large pages, where later calls find them faster than in a mapped file.
OrtStatus* Product::move_codes(OrtKernelContext* context) const {
  struct Copy {
    const uint8_t* from;
    uint8_t* to;
    size_t bytes;

    static void part(void* copy, size_t index) {
      const Copy& self = *static_cast<Copy*>(copy);
      const size_t begin = index * kCopyBytes, left = self.bytes - begin;
      std::memcpy(self.to + begin, self.from + begin, left < kCopyBytes ? left : kCopyBytes);
    }
  };
  if (moved.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard<std::mutex> lock(moving);
  if (moved.load(std::memory_order_relaxed)) return nullptr;
  const size_t bytes = weights.tiles() * weights.tile_bytes();
  Copy copied{weights.codes, static_cast<uint8_t*>(copy.room(bytes)), bytes};
  OrtStatus* failure = nullptr;
  if (copied.to) {
    const size_t parts = (bytes + kCopyBytes - 1) / kCopyBytes;
    failure = in_parallel(node.api, context, Copy::part, parts, &copied);
    if (!failure) weights.codes = copied.to;
  }
  moved.store(true, std::memory_order_release);
  return failure;
}

OrtStatus* Product::run(OrtKernelContext* context, Rounded how, const Before* before) const {
  GRAPHOPT_RETURN_IF_ERROR(move_codes(context));
  if (!computed) return run(context, weights, how, before);
  // where x is float16 and its neighbours compute in float32, onnxruntime casts scales in the graph
  const OrtValue *scales = nullptr, *zero_points = nullptr;
  Tensor of_scales, of_zero_points;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kScales, &scales));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(scales, "scales", &of_scales));
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kZeroPoints, &zero_points));
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(zero_points, "zero_points", &of_zero_points));
  Weights of_call = weights;
  GRAPHOPT_RETURN_IF_ERROR(set_scales(node, of_scales, of_zero_points, &of_call));
  return run(context, of_call, how, before);
}

OrtStatus* Product::run(OrtKernelContext* context, const Weights& weights, Rounded how, const Before* before) const {
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
  how.rows_of_x = rows;
  if (x.type == kFloat) {
    return multiply(context, weights, how, before, static_cast<const float*>(x.data), static_cast<float*>(y));
  }
  const size_t of_x = rows * weights.rows, of_y = rows * weights.columns;
  const Pool::Loan loan(floats, (of_x + of_y) * sizeof(float));
  if (!loan.memory) return node.error("no memory for %zu rows of float16 as floats", rows);
  float* const wide = reinterpret_cast<float*>(loan.memory);
  widen(static_cast<const Half*>(x.data), of_x, wide);
  GRAPHOPT_RETURN_IF_ERROR(multiply(context, weights, how, before, wide, wide + of_x));
  narrow(wide + of_x, of_y, static_cast<Half*>(y));
  return nullptr;
}

OrtStatus* Product::multiply(OrtKernelContext* context, const Weights& weights, Rounded how, const Before* before,
                             const float* x, float* y) const {
  const bool is_small_m = how.rows() <= kernels->small_m_rows(weights, how.kind);
  how.form = kernels->form(weights, how.kind, is_small_m);
  how.widths = kernels->widths;
  how.panel = how.rows() < kernels->panel ? how.width_for(how.rows()) : kernels->panel;
  how.padded = (how.panels() - 1) * how.panel + how.width(how.panels() - 1);
  const size_t words = round_up(how.padded * weights.units() * how.words_of_unit() * sizeof(uint32_t));
  const size_t of_rows = round_up(how.padded * weights.segments() * sizeof(float));
  const Pool::Loan loan(calls, words + 4 * of_rows);
  char* const memory = loan.memory;
  if (!memory) return node.error("no memory to round %zu rows of x", how.rows_of_x);
  how.words = reinterpret_cast<uint32_t*>(memory);
  how.scales = reinterpret_cast<float*>(memory + words);
  how.sums = reinterpret_cast<float*>(memory + words + of_rows);
  how.starts[0] = reinterpret_cast<int32_t*>(memory + words + 2 * of_rows);
  how.starts[1] = reinterpret_cast<int32_t*>(memory + words + 3 * of_rows);

  Call call{this, weights, before, x, y, how, is_small_m, 1, 1};
  const size_t numbers = how.panel * weights.rows;
  call.panels_of_task = (kTaskNumbers + numbers - 1) / numbers;
  // few rows wait for memory; many rows compute, and small tasks end together
  const size_t part = weights.tiles() * weights.tile_bytes() / kTasks;
  const size_t task_bytes = part < kLeastBytes ? kLeastBytes : part < kMostBytes ? part : kMostBytes;
  call.tiles_of_task = is_small_m ? 2 * ((task_bytes / weights.tile_bytes() + 2) / 2) : 2;
  const size_t panel_tasks = (how.panels() + call.panels_of_task - 1) / call.panels_of_task;
  const size_t tile_tasks = (weights.tiles() + call.tiles_of_task - 1) / call.tiles_of_task;
  OrtStatus* failure = in_parallel(node.api, context, Call::round, panel_tasks, &call);
  if (!failure && call.no_memory) failure = node.error("no memory to transform rows of x");
  if (!failure) failure = in_parallel(node.api, context, Call::multiply, tile_tasks, &call);
  return failure;
}

}  // namespace graphopt
