// The side of the emulated processor: a process that loads a library of operators and runs its kernels, as onnxruntime
// would. What a kernel asks of onnxruntime it asks of the process that runs it, through standard input and output; what
// onnxruntime's C interface is, abi/onnxruntime.h says.
//
// Tensors are copied: each lies at the end of pages of its own, at the same place within 64 bytes as the original, with a
// page behind it that nobody may touch.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "abi/onnxruntime.h"
#include "rounding.h"
#include "wire.h"

struct OrtStatus {
  int code;
  std::string message;
};

struct OrtTensorTypeAndShapeInfo {
  int type;
  std::vector<int64_t> shape;
};

namespace {

using emulated::Command;
using emulated::Question;
using emulated::Wire;

Wire wire(0, 1);
std::vector<const OrtCustomOp*> ops;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulated kernels: %s\n", what);
  std::abort();
}

class Copy {
 public:
  Copy(uint64_t address, size_t bytes) : bytes_(bytes) {
    constexpr size_t kPage = 4096;
    const size_t pages = (bytes + 64 + kPage - 1) / kPage * kPage;
    size_ = pages + kPage;
    void* const mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED || mprotect(static_cast<char*>(mapped) + pages, kPage, PROT_NONE)) fail("no memory");
    pages_ = static_cast<char*>(mapped);
    std::memset(pages_, kGuard, pages);
    data = pages_ + pages - bytes;
    while (reinterpret_cast<uintptr_t>(data) % 64 != address % 64) --data;
    gap_ = static_cast<size_t>(pages_ + pages - data) - bytes;
  }
  Copy(const Copy&) = delete;
  ~Copy() {
    for (size_t i = 0; i < gap_; ++i) {
      if (data[bytes_ + i] != kGuard) fail("a kernel wrote beyond the end of a tensor");
    }
    munmap(pages_, size_);
  }
  size_t bytes() const { return bytes_; }

  char* data;
  bool written = false;  // it is an output's

 private:
  static constexpr char kGuard = 0x5a;
  char* pages_;
  size_t bytes_, size_, gap_;
};

// Tensors by their addresses: two that are the same memory there are the same here.
using Memory = std::map<uint64_t, std::unique_ptr<Copy>>;

struct Kernel {
  const OrtCustomOp* op = nullptr;
  void* kernel = nullptr;
  Memory constants;
};

Memory* memory = nullptr;  // of this command
std::set<const OrtValue*> outputs;

// The answer's first part: whether onnxruntime failed, and why.
OrtStatus* answer() {
  if (!wire.get<bool>()) return nullptr;
  const int code = wire.get<int>();
  return new OrtStatus{code, wire.text()};
}

Wire& ask(Question question) { return wire.put(question); }

template <typename T>
OrtStatus* attribute(Question question, const char* name, T* value) {
  ask(question).put(std::string(name)).send();
  if (OrtStatus* const failure = answer()) return failure;
  *value = wire.get<T>();
  return nullptr;
}

// Several values of T, of a size that onnxruntime tells where there is no room for them.
template <typename T>
OrtStatus* several(Question question, const char* name, T* values, size_t* count) {
  ask(question).put(std::string(name)).put(values != nullptr).put(*count).send();
  OrtStatus* const failure = answer();
  *count = wire.get<size_t>();
  if (!failure && values) wire.get(values, *count * sizeof(T));
  return failure;
}

OrtStatus* create_status(int code, const char* message) { return new OrtStatus{code, message}; }
const char* message_of(const OrtStatus* status) { return status->message.c_str(); }
void release_status(OrtStatus* status) { delete status; }
OrtStatus* create_domain(const char*, OrtCustomOpDomain** domain) {
  *domain = reinterpret_cast<OrtCustomOpDomain*>(&ops);  // any that is not null
  return nullptr;
}
OrtStatus* add_op(OrtCustomOpDomain*, const OrtCustomOp* op) {
  ops.push_back(op);
  return nullptr;
}
OrtStatus* add_domain(OrtSessionOptions*, OrtCustomOpDomain*) { return nullptr; }

OrtStatus* float_attribute(const OrtKernelInfo*, const char* name, float* value) {
  return attribute(Question::kAttributeFloat, name, value);
}
OrtStatus* int_attribute(const OrtKernelInfo*, const char* name, int64_t* value) {
  return attribute(Question::kAttributeInt, name, value);
}
OrtStatus* string_attribute(const OrtKernelInfo*, const char* name, char* text, size_t* size) {
  return several(Question::kAttributeString, name, text, size);
}
OrtStatus* ints_attribute(const OrtKernelInfo*, const char* name, int64_t* values, size_t* count) {
  return several(Question::kAttributeInts, name, values, count);
}
OrtStatus* node_name(const OrtKernelInfo*, char* text, size_t* size) {
  return several(Question::kNodeName, "", text, size);
}

OrtStatus* constant_input(const OrtKernelInfo*, size_t index, int* given, const OrtValue** value) {
  ask(Question::kConstant).put(index).send();
  if (OrtStatus* const failure = answer()) return failure;
  *given = wire.get<int>();
  *value = wire.get<const OrtValue*>();
  return nullptr;
}
OrtStatus* input(const OrtKernelContext*, size_t index, const OrtValue** value) {
  ask(Question::kInput).put(index).send();
  if (OrtStatus* const failure = answer()) return failure;
  *value = wire.get<const OrtValue*>();
  return nullptr;
}
OrtStatus* output(OrtKernelContext*, size_t index, const int64_t* shape, size_t rank, OrtValue** value) {
  ask(Question::kOutput).put(index).put(rank).put(shape, rank * sizeof *shape).send();
  if (OrtStatus* const failure = answer()) return failure;
  *value = wire.get<OrtValue*>();
  outputs.insert(*value);
  return nullptr;
}

OrtStatus* type_and_shape(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) {
  ask(Question::kShape).put(value).send();
  if (OrtStatus* const failure = answer()) return failure;
  *info = new OrtTensorTypeAndShapeInfo{wire.get<int>(), std::vector<int64_t>(wire.get<size_t>())};
  wire.get((*info)->shape.data(), (*info)->shape.size() * sizeof(int64_t));
  return nullptr;
}
OrtStatus* type_of(const OrtTensorTypeAndShapeInfo* info, int* type) {
  *type = info->type;
  return nullptr;
}
OrtStatus* rank_of(const OrtTensorTypeAndShapeInfo* info, size_t* rank) {
  *rank = info->shape.size();
  return nullptr;
}
OrtStatus* shape_of(const OrtTensorTypeAndShapeInfo* info, int64_t* shape, size_t rank) {
  std::memcpy(shape, info->shape.data(), rank * sizeof *shape);
  return nullptr;
}
void release_info(OrtTensorTypeAndShapeInfo* info) { delete info; }

OrtStatus* data_of(OrtValue* value, void** data) {
  ask(Question::kData).put(value).send();
  if (OrtStatus* const failure = answer()) return failure;
  const auto address = wire.get<uint64_t>();
  const auto bytes = wire.get<size_t>();
  // what is empty may have the address of something else
  std::unique_ptr<Copy>& copy = (*memory)[bytes ? address : address % 64];
  const bool there = copy != nullptr;
  if (!there) copy = std::make_unique<Copy>(address, bytes);
  if (copy->bytes() != bytes) fail("two tensors of other sizes have one address");
  if (there) {
    std::vector<char> same(bytes);
    wire.get(same.data(), bytes);
  } else {
    wire.get(copy->data, bytes);
  }
  copy->written = copy->written || outputs.count(value);
  *data = copy->data;
  return nullptr;
}

OrtStatus* in_parallel(const OrtKernelContext*, void (*task)(void*, size_t), size_t tasks, size_t, void* call) {
  for (size_t i = 0; i < tasks; ++i) task(call, i);
  return nullptr;
}

constexpr size_t kFunctions = 300;
void* functions[kFunctions];

template <size_t Position, typename Result, typename... Arguments>
void set(graphopt::Function<Position, Result, Arguments...>, Result (*function)(Arguments...)) {
  functions[Position] = reinterpret_cast<void*>(function);
}

const OrtApi* make_api(uint32_t) {
  for (void*& each : functions) each = reinterpret_cast<void*>(+[] { fail("a kernel calls what guest.cc lacks"); });
  set(graphopt::CreateStatus(), create_status);
  set(graphopt::GetErrorMessage(), message_of);
  set(graphopt::ReleaseStatus(), release_status);
  set(graphopt::CreateCustomOpDomain(), create_domain);
  set(graphopt::CustomOpDomainAdd(), add_op);
  set(graphopt::AddCustomOpDomain(), add_domain);
  set(graphopt::KernelInfoGetAttributeFloat(), float_attribute);
  set(graphopt::KernelInfoGetAttributeInt(), int_attribute);
  set(graphopt::KernelInfoGetAttributeString(), string_attribute);
  set(graphopt::KernelInfoGetAttributeInts(), ints_attribute);
  set(graphopt::KernelInfoGetNodeName(), node_name);
  set(graphopt::KernelInfoGetConstantInput(), constant_input);
  set(graphopt::KernelContextGetInput(), input);
  set(graphopt::KernelContextGetOutput(), output);
  set(graphopt::GetTensorTypeAndShape(), type_and_shape);
  set(graphopt::GetTensorElementType(), type_of);
  set(graphopt::GetDimensionsCount(), rank_of);
  set(graphopt::GetDimensions(), shape_of);
  set(graphopt::ReleaseTensorTypeAndShapeInfo(), release_info);
  set(graphopt::GetTensorMutableData(), data_of);
  set(graphopt::KernelContextParallelFor(), in_parallel);
  return reinterpret_cast<const OrtApi*>(functions);
}

// The end of a command that may fail.
bool done(OrtStatus* failure) {
  ask(Question::kDone).put(failure != nullptr);
  if (!failure) return true;
  wire.put(failure->code).put(failure->message);
  delete failure;
  return false;
}

void describe(const OrtCustomOp& op) {
  wire.put(std::string(op.GetName(&op))).put(op.GetStartVersion(&op)).put(op.GetEndVersion(&op));
  wire.put(op.GetInputTypeCount(&op)).put(op.GetOutputTypeCount(&op));
  for (size_t i = 0; i < op.GetInputTypeCount(&op); ++i) {
    wire.put(op.GetInputType(&op, i)).put(op.GetInputCharacteristic(&op, i));
  }
  for (size_t i = 0; i < op.GetOutputTypeCount(&op); ++i) {
    wire.put(op.GetOutputType(&op, i)).put(op.GetOutputCharacteristic(&op, i));
  }
}

// The process of onnxruntime may change it at any time.
void take_environment() {
  const std::string instructions = wire.text();
  setenv("GRAPHOPT_OPS_ISA", instructions.c_str(), 1);
}

void compute(Kernel& kernel) {
  Memory copies;
  memory = &copies;
  outputs.clear();
  done(kernel.op->KernelComputeV2(kernel.kernel, nullptr));
  for (const auto& [address, copy] : copies) {
    if (copy->written && copy->bytes()) wire.put(address).put(copy->bytes()).put(copy->data, copy->bytes());
  }
  wire.put(uint64_t{0}).put(size_t{0});
}

// Rounds weights, where `searches` with the best of several scales.
void round(void* library) {
  take_environment();
  const bool searches = wire.get<bool>();
  auto search = wire.get<graphopt::SearchWork>();
  std::vector<std::vector<char>> arrays;
  emulated::each_array(search, [&](auto& array, size_t bytes, bool) {
    arrays.emplace_back(array ? bytes : 0);
    wire.get(arrays.back().data(), arrays.back().size());
    if (array) array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(arrays.back().data());
  });
  const auto of_round = reinterpret_cast<int (*)(const graphopt::RoundWork*)>(dlsym(library, "graphopt_round_groups"));
  const auto of_search = reinterpret_cast<int (*)(const graphopt::SearchWork*)>(dlsym(library, "graphopt_search_groups"));
  const int rounded = searches ? of_search(&search) : of_round(&search.round);
  done(nullptr);
  wire.put(rounded);
  size_t index = 0;
  emulated::each_array(search, [&](auto&, size_t, bool is_output) {
    const std::vector<char>& array = arrays[index++];
    if (is_output) wire.put(array.data(), array.size());
  });
}

}  // namespace

int main(int, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror());
  const auto add = reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>(dlsym(library, "RegisterCustomOps"));
  const auto instructions = reinterpret_cast<const char* (*)()>(dlsym(library, "graphopt_instructions"));
  const OrtApiBase base = {make_api, [] { return "emulated"; }};
  for (;; wire.send()) {
    switch (wire.get<Command>()) {
      case Command::kRegister:
        if (!done(add(nullptr, &base))) break;
        wire.put(ops.size());
        for (const OrtCustomOp* op : ops) describe(*op);
        break;
      case Command::kCreate: {
        take_environment();
        auto* const made = new Kernel;
        made->op = ops[wire.get<size_t>()];
        memory = &made->constants;
        if (done(made->op->CreateKernelV2(made->op, make_api(0), nullptr, &made->kernel))) {
          wire.put(made);
        } else {
          delete made;
        }
        break;
      }
      case Command::kCompute: compute(*wire.get<Kernel*>()); break;
      case Command::kDestroy: {
        const auto* const kernel = wire.get<Kernel*>();
        kernel->op->KernelDestroy(kernel->kernel);
        delete kernel;
        done(nullptr);
        break;
      }
      case Command::kInstructions: {
        take_environment();
        const char* const name = instructions();
        done(nullptr);
        wire.put(std::string(name ? name : ""));
        break;
      }
      case Command::kRound: round(library);
    }
  }
}
