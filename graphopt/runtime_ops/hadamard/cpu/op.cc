// ai.graphopt::Hadamard as onnxruntime sees it: one operator per type of x.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/register.h"
#include "abi/tensor.h"
#include "hadamard/cpu/kernels.h"
#include "hadamard/shared/matrix.h"

namespace graphopt {
namespace {

enum Input : size_t { kX, kLeft, kRight };
constexpr const char* kNames[] = {"x", "left", "right"};

// The smallest task worth running separately, in numbers, and the smallest output that bypasses the caches, in bytes.
constexpr size_t kTask = 16384;
constexpr size_t kStreaming = size_t{8} << 20;

struct Kernel {
  static constexpr const char* kName = "Hadamard";
  static constexpr size_t kInputs = 3, kOutputs = 1;
  static int input_type(size_t index, int type) { return index == kX ? type : kInt8; }
  static int output_type(size_t, int type) { return type; }

  Node node;
  HadamardKernel run = nullptr;
  OwnedFactor constant[3];  // at kLeft and kRight, where the graph holds the matrix; its order is 1 where not
  bool is_constant[3] = {};

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) {
      return node.error("%s", kWrongInstructions);
    }
    const HadamardKernels* const kernels = &GRAPHOPT_OF(instructions, kHadamard);
    run = type == kFloat ? kernels->float32 : type == kDouble ? kernels->float64 : kernels->float16;
    for (Input factor : {kLeft, kRight}) {
      int is_given = 0;
      const OrtValue* value = nullptr;
      GRAPHOPT_RETURN_IF_ERROR(KernelInfoGetConstantInput::call(api, info, factor, &is_given, &value));
      if (is_given) GRAPHOPT_RETURN_IF_ERROR(read_matrix(node, value, kNames[factor], &constant[factor]));
      is_constant[factor] = is_given;
    }
    return nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const;
};

// One call, cut into tasks of `runs_of_task` runs; tasks share nothing but the flag, so their number changes no bit.
struct Call {
  const Kernel* kernel;
  HadamardWork all;
  size_t runs_of_task, bytes_of_run, bytes_of_scratch;
  std::atomic<bool> no_memory{false};

  static void task(void* call, size_t index) {
    Call& self = *static_cast<Call*>(call);
    HadamardWork work = self.all;
    const size_t first = index * self.runs_of_task;
    work.x = static_cast<const char*>(work.x) + first * self.bytes_of_run;
    work.y = static_cast<char*>(work.y) + first * self.bytes_of_run;
    work.runs = work.runs - first < self.runs_of_task ? work.runs - first : self.runs_of_task;
    if (posix_memalign(&work.scratch, 64, self.bytes_of_scratch)) {
      self.no_memory = true;
      return;
    }
    self.kernel->run(work);
    std::free(work.scratch);
  }
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  const OrtApi* api = node.api;
  const OrtValue* values[3];
  for (Input input : {kX, kLeft, kRight}) {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, input, &values[input]));
  }
  Tensor x, y;
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(values[kX], "x", &x));
  OwnedFactor call_factors[3];
  const Factor* factors[3];
  for (Input factor : {kLeft, kRight}) {
    factors[factor] = is_constant[factor] ? &constant[factor] : &call_factors[factor];
    if (is_constant[factor]) continue;
    GRAPHOPT_RETURN_IF_ERROR(read_matrix(node, values[factor], kNames[factor], &call_factors[factor]));
  }
  const Factor &left = *factors[kLeft], &right = *factors[kRight];
  size_t runs = 0;
  GRAPHOPT_RETURN_IF_ERROR(count_runs(node, x, left.order(), right.order(), &runs));
  const size_t order = left.order() * right.order(), numbers = runs * order;
  OrtValue* output = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
  if (!numbers) return nullptr;
  GRAPHOPT_RETURN_IF_ERROR(y.read(api, output));
  const size_t bytes = x.type == kFloat ? 4 : x.type == kDouble ? 8 : 2;
  const double scale = 1 / std::sqrt(static_cast<double>(order));
  const bool streaming = numbers * bytes >= kStreaming;
  Call call{this, {x.data, y.data, runs, left, right, scale, nullptr, streaming}, (kTask + order - 1) / order,
            order * bytes, hadamard_scratch(left, right, bytes < 4 ? 4 : bytes)};
  const size_t tasks = (runs + call.runs_of_task - 1) / call.runs_of_task;
  if (tasks == 1) {
    Call::task(&call, 0);
  } else {
    GRAPHOPT_RETURN_IF_ERROR(KernelContextParallelFor::call(api, context, Call::task, tasks, 0, &call));
  }
  return call.no_memory ? node.error("no memory to transform runs of %zu numbers", order) : nullptr;
}

const OrtCustomOp kOps[3] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kDouble>(), custom_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
