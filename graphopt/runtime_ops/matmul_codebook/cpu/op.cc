// ai.graphopt::MatMulCodebook as onnxruntime sees it: one operator per type of x and of scales.
#include <atomic>

#include "abi/convert.h"
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/pool.h"
#include "abi/register.h"
#include "matmul_codebook/cpu/kernels.h"

namespace graphopt {
namespace {

enum Input : size_t { kX, kCodes, kScales, kLevels, kLevelTable, kBooks, kShifts, kInputCount };
constexpr const char* kNames[] = {"x", "codes", "scales", "levels", "level_table", "books", "shifts"};
constexpr size_t kRanks[] = {0, 3, 3, 3, 2, 2, 1};  // x has any

// The tasks of a call share nothing but the flag.
struct Call {
  const CodebookProduct* product;
  const CodebookKernels* kernels;
  Pool* pool;
  std::atomic<bool> no_memory{false};

  static void task(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    const Pool::Loan loan(*self.pool, codebook_scratch(*self.product));
    if (!loan.memory) {
      self.no_memory = true;
      return;
    }
    self.kernels->run(*self.product, index, reinterpret_cast<float*>(loan.memory));
  }
};

struct Sizes {
  int64_t rows, columns, axis, index_bits, second_bits, sign_bits, level_bits, group, span;
};

struct Kernel {
  static constexpr const char* kName = "MatMulCodebook";
  static constexpr size_t kInputs = kInputCount, kOutputs = 1;
  // `type` is that of x, and 100 more than that where scales are float16
  static int input_type(size_t index, int type) {
    if (index == kX) return type % 100;
    if (index == kScales) return type < 100 ? static_cast<int>(kFloat) : static_cast<int>(kFloat16);
    return index == kCodes || index == kLevels ? static_cast<int>(kUint8) : static_cast<int>(kFloat);
  }
  static int output_type(size_t, int type) { return type % 100; }

  Node node;
  const CodebookKernels* kernels = nullptr;
  Sizes sizes;
  mutable Pool pool, floats;  // memory of tasks, and for float16 tensors as floats

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int);
  OrtStatus* compute(OrtKernelContext* context) const;
  OrtStatus* check(const Tensor* tensors, const size_t* counts, CodebookProduct* call) const;
  OrtStatus* run(OrtKernelContext* context, const CodebookProduct& call) const;
};

OrtStatus* Kernel::prepare(const OrtApi* api, const OrtKernelInfo* info, int) {
  GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
  Instructions instructions;
  if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
  kernels = &GRAPHOPT_OF(instructions, kCodebook);
  const struct {
    const char* name;
    int64_t* value;
    int64_t least, most;
  } attributes[] = {{"rows", &sizes.rows, 1, INT32_MAX},       {"columns", &sizes.columns, 1, INT32_MAX},
                    {"axis", &sizes.axis, 0, 1},               {"index_bits", &sizes.index_bits, 1, 16},
                    {"second_bits", &sizes.second_bits, 0, 16}, {"sign_bits", &sizes.sign_bits, 0, 16},
                    {"level_bits", &sizes.level_bits, 0, 8},   {"group", &sizes.group, 1, INT32_MAX},
                    {"span", &sizes.span, 1, INT32_MAX}};
  for (const auto& attribute : attributes) {
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, attribute.name, attribute.value));
    if (*attribute.value < attribute.least || *attribute.value > attribute.most) {
      return node.error("%s must be %lld to %lld, and is %lld", attribute.name, static_cast<long long>(attribute.least),
                        static_cast<long long>(attribute.most), static_cast<long long>(*attribute.value));
    }
  }
  return nullptr;
}

OrtStatus* Kernel::check(const Tensor* tensors, const size_t* counts, CodebookProduct* call) const {
  const auto dim = [&](Input input, size_t axis) { return static_cast<size_t>(tensors[input].shape[axis]); };
  const size_t size = dim(kBooks, 1), shifts = dim(kShifts, 0);
  if (size != 1 && size != 2 && size != 4 && size != 8 && size != 16) {
    return node.error("an entry of books must have 1, 2, 4, 8 or 16 numbers, and has %zu", size);
  }
  if (shifts != 1 && shifts != 2) return node.error("shifts must be [1] or [2], and has %zu numbers", shifts);
  const auto as_size = [](int64_t value) { return static_cast<size_t>(value); };
  const auto bits_of = [](int64_t value) { return static_cast<unsigned>(value); };
  call->rows = as_size(sizes.rows), call->columns = as_size(sizes.columns), call->size = size;
  call->group = as_size(sizes.group), call->span = as_size(sizes.span), call->of_rows = sizes.axis == 1;
  call->index_bits = bits_of(sizes.index_bits), call->second_bits = bits_of(sizes.second_bits);
  call->sign_bits = bits_of(sizes.sign_bits), call->level_bits = bits_of(sizes.level_bits);
  call->shift_bits = static_cast<unsigned>(shifts - 1);
  if (call->sign_bits && call->sign_bits != size && call->sign_bits + 1 != size) {
    return node.error("entries of %zu numbers have 0, %zu or %zu signs, not %u", size, size - 1, size, call->sign_bits);
  }
  if (call->bits() > 32) return node.error("a code must have 32 bits at most, and has %u", call->bits());
  if ((call->group % size && call->group < call->rows) || (call->span % size && call->span < call->rows)) {
    return node.error("group and span must be multiples of the %zu numbers of an entry", size);
  }
  const size_t tiles = (call->columns + kCodebookColumns - 1) / kCodebookColumns, levels = size_t{1} << call->level_bits;
  const size_t entries = (size_t{1} << call->index_bits) + (call->second_bits ? size_t{1} << call->second_bits : 0);
  const struct {
    Input input;
    size_t shape[3];
  } expected[] = {{kCodes, {tiles, call->blocks(), 2 * call->bits()}},
                  {kScales, {tiles, call->spans(), kCodebookColumns}},
                  {kLevels, {tiles, call->groups(), 2 * call->level_bits}},
                  {kLevelTable, {2, levels, 0}},
                  {kBooks, {entries, size, 0}}};
  for (const auto& tensor : expected) {
    if (tensor.input == kLevels && !call->level_bits) continue;
    for (size_t axis = 0; axis < kRanks[tensor.input]; ++axis) {
      if (dim(tensor.input, axis) == tensor.shape[axis]) continue;
      return node.error("axis %zu of %s must be %zu, and is %zu", axis, kNames[tensor.input], tensor.shape[axis],
                        dim(tensor.input, axis));
    }
  }
  const Tensor& x = tensors[kX];
  if (!x.rank || static_cast<size_t>(x.shape[x.rank - 1]) != call->rows) {
    return node.error("x must be [..., %zu]", call->rows);
  }
  call->batch = counts[kX] / call->rows;
  return nullptr;
}

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  Tensor tensors[kInputCount];
  size_t counts[kInputCount];
  for (size_t input = 0; input < kInputCount; ++input) {
    const OrtValue* value = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, input, &value));
    if (!value) return node.error("%s must not be left out", kNames[input]);
    size_t rank = kRanks[input];
    if (input == kX) {
      GRAPHOPT_RETURN_IF_ERROR(tensors[input].read(node.api, value));
      rank = tensors[input].rank;
    }
    GRAPHOPT_RETURN_IF_ERROR(node.read_dense(value, kNames[input], rank, &tensors[input], &counts[input]));
  }
  CodebookProduct call{};
  GRAPHOPT_RETURN_IF_ERROR(check(tensors, counts, &call));
  Tensor& x = tensors[kX];
  x.shape[x.rank - 1] = static_cast<int64_t>(call.columns);
  OrtValue* output = nullptr;
  void* y = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(node.api, context, 0, x.shape.get(), x.rank, &output));
  if (!output) return node.error("its output must have a name");
  GRAPHOPT_RETURN_IF_ERROR(GetTensorMutableData::call(node.api, output, &y));
  if (!call.batch) return nullptr;
  const bool is_half = x.type == kFloat16, has_half_scales = tensors[kScales].type == kFloat16;
  const size_t outputs = call.batch * call.columns;
  const size_t numbers = (is_half ? counts[kX] + outputs : 0) + (has_half_scales ? counts[kScales] : 0);
  const Pool::Loan loan(floats, numbers * sizeof(float) + 1);
  if (!loan.memory) return node.error("no memory for %zu numbers of float16 as floats", numbers);
  float* wide = reinterpret_cast<float*>(loan.memory);
  const auto floats_of = [&](Input input, bool half) {
    if (!half) return static_cast<const float*>(tensors[input].data);
    const float* const float_x = wide;
    widen(static_cast<const Half*>(tensors[input].data), counts[input], wide);
    wide += counts[input];
    return float_x;
  };
  call.x = floats_of(kX, is_half), call.scales = floats_of(kScales, has_half_scales);
  call.level_table = floats_of(kLevelTable, false), call.books = floats_of(kBooks, false);
  call.shifts = floats_of(kShifts, false);
  call.codes = static_cast<const uint8_t*>(tensors[kCodes].data);
  call.levels = static_cast<const uint8_t*>(tensors[kLevels].data);
  call.y = is_half ? wide : static_cast<float*>(y);
  GRAPHOPT_RETURN_IF_ERROR(run(context, call));
  if (is_half) narrow(call.y, outputs, static_cast<Half*>(y));
  return nullptr;
}

OrtStatus* Kernel::run(OrtKernelContext* context, const CodebookProduct& call) const {
  Call tasks{&call, kernels, &pool};
  const size_t count = (call.columns + kCodebookColumns - 1) / kCodebookColumns;
  if (count == 1) {
    Call::task(&tasks, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(node.api, context, Call::task, count, 0, &tasks));
  }
  return tasks.no_memory ? node.error("no memory for %zu sums of a tile", call.batch) : nullptr;
}

const OrtCustomOp kOps[4] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>(), custom_op<Kernel, 100 + kFloat>(),
                             custom_op<Kernel, 100 + kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
