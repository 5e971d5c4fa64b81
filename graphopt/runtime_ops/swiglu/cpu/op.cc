// ai.graphopt::SwiGLU as onnxruntime sees it: one operator per type of x.
#include "abi/custom_op.h"
#include "abi/instructions.h"
#include "abi/register.h"
#include "swiglu/cpu/kernels.h"
#include "swiglu/shared/shape.h"

namespace graphopt {
namespace {

// The smallest task worth running separately, in numbers of y.
constexpr size_t kTask = 16384;

struct Kernel {
  static constexpr const char* kName = "SwiGLU";
  static constexpr size_t kInputs = 1, kOutputs = 1;
  static int input_type(size_t, int type) { return type; }
  static int output_type(size_t, int type) { return type; }

  Node node;
  SwiGLUKernel run = nullptr;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    Instructions instructions;
    if (!choose_instructions(&instructions)) return node.error("%s", kWrongInstructions);
    const SwiGLUKernels& kernels = GRAPHOPT_OF(instructions, kSwiGLU);
    run = type == kFloat ? kernels.float32 : kernels.float16;
    return nullptr;
  }

  OrtStatus* compute(OrtKernelContext* context) const;
};

// A call, cut into tasks of some rows each; tasks share nothing.
struct Call {
  SwiGLUKernel run;
  const char* x;
  char* y;
  size_t rows, columns, bytes_of_number, rows_of_task;

  static void task(void* call, size_t index) {
    const Call& self = *static_cast<const Call*>(call);
    const size_t bytes = self.columns * self.bytes_of_number, first = index * self.rows_of_task;
    const size_t remaining_rows = self.rows - first;
    const size_t end = first + (remaining_rows < self.rows_of_task ? remaining_rows : self.rows_of_task);
    for (size_t row = first; row < end; ++row) {
      const char* const gate = self.x + 2 * row * bytes;
      self.run(gate, gate + bytes, self.y + row * bytes, self.columns);
    }
  }
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
  const OrtApi* api = node.api;
  const OrtValue* value = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(api, context, 0, &value));
  Tensor x, y;
  GRAPHOPT_RETURN_IF_ERROR(node.read_numbers(value, "x", &x));
  Call call{run, static_cast<const char*>(x.data), nullptr, 0, 0, x.type == kFloat ? size_t{4} : size_t{2}, 0};
  GRAPHOPT_RETURN_IF_ERROR(halve_last_axis(node, &x, &call.rows, &call.columns));
  OrtValue* output = nullptr;
  GRAPHOPT_RETURN_IF_ERROR(KernelContextGetOutput::call(api, context, 0, x.shape.get(), x.rank, &output));
  if (!call.rows || !call.columns) return nullptr;
  GRAPHOPT_RETURN_IF_ERROR(y.read(api, output));
  call.y = static_cast<char*>(y.data);
  call.rows_of_task = (kTask + call.columns - 1) / call.columns;
  const size_t tasks = (call.rows + call.rows_of_task - 1) / call.rows_of_task;
  if (tasks == 1) {
    Call::task(&call, 0);
    return nullptr;
  }
  return KernelContextParallelFor::call(api, context, Call::task, tasks, 0, &call);
}

const OrtCustomOp kOps[2] = {custom_op<Kernel, kFloat>(), custom_op<Kernel, kFloat16>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
