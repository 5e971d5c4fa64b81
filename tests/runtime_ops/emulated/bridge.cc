// The side of onnxruntime: a library of operators whose kernels run in another process, on an emulated processor. The
// command in GRAPHOPT_EMULATOR starts it, see guest.cc. What a kernel asks there is asked of onnxruntime here, so tests
// of kernels are the same for both. It is linked so that it stays loaded: onnxruntime closes a library with the last session
// that uses it, and the next session would start another process.
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstring>
#include <mutex>

#include "abi/onnxruntime.h"
#include "rounding.h"
#include "wire.h"

extern char** environ;

namespace {

using emulated::Command;
using emulated::Question;
using emulated::Wire;
using graphopt::Function;
using GetErrorCode = Function<1, int, const OrtStatus*>;

pid_t process = 0;
std::mutex mutex;  // one command at a time

// A kernel that crashes takes this process with it, as it would without an emulator.
void crashed() {
  int status = 0;
  waitpid(process, &status, 0);
  std::fprintf(stderr, "emulated kernels ended by %s %d\n", WIFSIGNALED(status) ? "signal" : "exit status",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  std::abort();
}

Wire start() {
  int sockets[2];
  const char* const command = std::getenv("GRAPHOPT_EMULATOR");
  if (!command || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets)) {
    std::fprintf(stderr, "GRAPHOPT_EMULATOR must say how emulated kernels are started\n");
    std::abort();
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], 0);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], 1);
  const std::string script = std::string("exec ") + command;
  char* arguments[] = {const_cast<char*>("sh"), const_cast<char*>("-c"), const_cast<char*>(script.c_str()), nullptr};
  // what is loaded into this process, a sanitizer say, is not for the other one
  std::vector<char*> environment;
  for (char** each = environ; *each; ++each) {
    if (std::strncmp(*each, "LD_PRELOAD=", 11)) environment.push_back(*each);
  }
  environment.push_back(nullptr);
  if (posix_spawn(&process, "/bin/sh", &actions, nullptr, arguments, environment.data())) std::abort();
  posix_spawn_file_actions_destroy(&actions);
  close(sockets[1]);
  Wire wire(sockets[0], sockets[0]);
  wire.gone = crashed;
  return wire;
}

Wire& wire() {
  static Wire started = start();
  return started;
}

const OrtApi* api = nullptr;

// Sends an answer's first part; true where there is more of it.
bool answered(OrtStatus* failure) {
  wire().put(failure != nullptr);
  if (!failure) return true;
  wire().put(GetErrorCode::call(api, failure)).put(std::string(graphopt::GetErrorMessage::call(api, failure)));
  graphopt::ReleaseStatus::call(api, failure);
  return false;
}

// Which of these there is, a command's kernel may ask of.
struct Asked {
  const OrtKernelInfo* info = nullptr;
  OrtKernelContext* context = nullptr;
};

template <typename Get, typename T>
void attribute(const OrtKernelInfo* info) {
  T value{};
  const std::string name = wire().text();
  if (answered(Get::call(api, info, name.c_str(), &value))) wire().put(value);
}

template <typename T, typename Get>
void several(const Get& get) {
  const std::string name = wire().text();
  const bool wanted = wire().get<bool>();
  auto count = wire().get<size_t>();
  std::vector<T> values(wanted ? count : 0);
  const bool found = answered(get(name.c_str(), wanted ? values.data() : nullptr, &count));
  wire().put(count);
  if (found && wanted) wire().put(values.data(), count * sizeof(T));
}

size_t bytes_of(int type) {
  switch (type) {
    case 7: case 11: case 13: return 8;
    case 1: case 6: case 12: return 4;
    case 4: case 5: case 10: case 16: return 2;
    default: return 1;
  }
}

OrtStatus* read_shape(const OrtValue* value, int* type, std::vector<int64_t>* shape) {
  using namespace graphopt;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (OrtStatus* failure = GetTensorTypeAndShape::call(api, value, &info)) return failure;
  size_t rank = 0;
  OrtStatus* failure = GetTensorElementType::call(api, info, type);
  if (!failure) failure = GetDimensionsCount::call(api, info, &rank);
  shape->resize(rank);
  if (!failure) failure = GetDimensions::call(api, info, shape->data(), rank);
  ReleaseTensorTypeAndShapeInfo::call(api, info);
  return failure;
}

void send_shape() {
  int type = 0;
  std::vector<int64_t> shape;
  if (!answered(read_shape(wire().get<const OrtValue*>(), &type, &shape))) return;
  wire().put(type).put(shape.size()).put(shape.data(), shape.size() * sizeof(int64_t));
}

void send_data() {
  auto* const value = wire().get<OrtValue*>();
  int type = 0;
  std::vector<int64_t> shape;
  void* data = nullptr;
  OrtStatus* failure = read_shape(value, &type, &shape);
  if (!failure) failure = graphopt::GetTensorMutableData::call(api, value, &data);
  if (!answered(failure)) return;
  size_t bytes = bytes_of(type);
  for (const int64_t each : shape) bytes *= static_cast<size_t>(each);
  wire().put(reinterpret_cast<uint64_t>(data)).put(bytes).put(data, bytes);
}

// Answers questions until the command is done; returns its failure.
OrtStatus* serve(const Asked& asked) {
  using namespace graphopt;
  wire().send();
  for (;; wire().send()) {
    switch (wire().get<Question>()) {
      case Question::kDone: {
        if (!wire().get<bool>()) return nullptr;
        const int code = wire().get<int>();
        return CreateStatus::call(api, code, wire().text().c_str());
      }
      case Question::kAttributeInt: attribute<KernelInfoGetAttributeInt, int64_t>(asked.info); break;
      case Question::kAttributeFloat: attribute<KernelInfoGetAttributeFloat, float>(asked.info); break;
      case Question::kAttributeString:
        several<char>([&](const char* name, char* text, size_t* size) {
          return KernelInfoGetAttributeString::call(api, asked.info, name, text, size);
        });
        break;
      case Question::kAttributeInts:
        several<int64_t>([&](const char* name, int64_t* values, size_t* count) {
          return KernelInfoGetAttributeInts::call(api, asked.info, name, values, count);
        });
        break;
      case Question::kNodeName:
        several<char>([&](const char*, char* text, size_t* size) {
          return KernelInfoGetNodeName::call(api, asked.info, text, size);
        });
        break;
      case Question::kConstant: {
        int given = 0;
        const OrtValue* value = nullptr;
        const auto index = wire().get<size_t>();
        if (answered(KernelInfoGetConstantInput::call(api, asked.info, index, &given, &value))) {
          wire().put(given).put(value);
        }
        break;
      }
      case Question::kInput: {
        const OrtValue* value = nullptr;
        if (answered(KernelContextGetInput::call(api, asked.context, wire().get<size_t>(), &value))) wire().put(value);
        break;
      }
      case Question::kOutput: {
        const auto index = wire().get<size_t>();
        std::vector<int64_t> shape(wire().get<size_t>());
        wire().get(shape.data(), shape.size() * sizeof(int64_t));
        OrtValue* value = nullptr;
        if (answered(KernelContextGetOutput::call(api, asked.context, index, shape.data(), shape.size(), &value))) {
          wire().put(value);
        }
        break;
      }
      case Question::kShape: send_shape(); break;
      case Question::kData: send_data(); break;
    }
  }
}

Wire& command(Command which) { return wire().put(which); }
Wire& environment() {
  const char* const instructions = std::getenv("GRAPHOPT_OPS_ISA");
  return wire().put(std::string(instructions ? instructions : ""));
}

// An operator of the other process.
struct Operator : OrtCustomOp {
  size_t index;
  std::string name;
  int start, end;
  struct Port {
    int type, characteristic;
  };
  std::vector<Port> inputs, outputs;

  static const Operator& of(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

  explicit Operator(size_t position) : OrtCustomOp{}, index(position), name(wire().text()) {
    start = wire().get<int>(), end = wire().get<int>();
    inputs.resize(wire().get<size_t>()), outputs.resize(wire().get<size_t>());
    for (Port& each : inputs) each = wire().get<Port>();
    for (Port& each : outputs) each = wire().get<Port>();
    version = graphopt::kApiVersion;
    GetName = [](const OrtCustomOp* op) { return of(op).name.c_str(); };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputType = [](const OrtCustomOp* op, size_t i) { return of(op).inputs[i].type; };
    GetInputTypeCount = [](const OrtCustomOp* op) { return of(op).inputs.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t i) { return of(op).outputs[i].type; };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return of(op).outputs.size(); };
    GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) { return of(op).inputs[i].characteristic; };
    GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) { return of(op).outputs[i].characteristic; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return graphopt::kDefaultMemory; };
    GetStartVersion = [](const OrtCustomOp* op) { return of(op).start; };
    GetEndVersion = [](const OrtCustomOp* op) { return of(op).end; };
    CreateKernelV2 = create;
    KernelComputeV2 = compute;
    KernelDestroy = destroy;
  }

  static OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    const std::lock_guard<std::mutex> lock(mutex);
    command(Command::kCreate);
    environment().put(of(op).index);
    OrtStatus* const failure = serve({info, nullptr});
    *kernel = failure ? nullptr : wire().get<void*>();
    return failure;
  }

  static OrtStatus* compute(void* kernel, OrtKernelContext* context) {
    const std::lock_guard<std::mutex> lock(mutex);
    command(Command::kCompute).put(kernel);
    OrtStatus* const failure = serve({nullptr, context});
    for (;;) {
      void* const address = wire().get<void*>();
      const auto bytes = wire().get<size_t>();
      if (!address) return failure;
      wire().get(address, bytes);
    }
  }

  static void destroy(void* kernel) {
    const std::lock_guard<std::mutex> lock(mutex);
    command(Command::kDestroy).put(kernel);
    serve({});
  }
};

int round(graphopt::SearchWork search, bool searches) {
  const std::lock_guard<std::mutex> lock(mutex);
  command(Command::kRound);
  environment().put(searches).put(search);
  emulated::each_array(search, [](auto& array, size_t bytes, bool) { wire().put(array, array ? bytes : 0); });
  serve({});
  const int rounded = wire().get<int>();
  emulated::each_array(search, [](auto& array, size_t bytes, bool is_output) {
    if (is_output) wire().get(const_cast<void*>(static_cast<const void*>(array)), array ? bytes : 0);
  });
  return rounded;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                              const OrtApiBase* base) {
  using namespace graphopt;
  const std::lock_guard<std::mutex> lock(mutex);
  static OrtCustomOpDomain* domain = nullptr;
  api = base->GetApi(kApiVersion);
  if (!domain) {
    if (OrtStatus* failure = CreateCustomOpDomain::call(api, "ai.graphopt", &domain)) return failure;
    command(Command::kRegister);
    if (OrtStatus* failure = serve({})) return failure;
    const auto count = wire().get<size_t>();
    for (size_t i = 0; i < count; ++i) {
      if (OrtStatus* failure = CustomOpDomainAdd::call(api, domain, new Operator(i))) return failure;
    }
  }
  return AddCustomOpDomain::call(api, options, domain);
}

extern "C" __attribute__((visibility("default"))) const char* graphopt_instructions() {
  static std::string name;
  const std::lock_guard<std::mutex> lock(mutex);
  command(Command::kInstructions);
  environment();
  serve({});
  name = wire().text();
  return name.empty() ? nullptr : name.c_str();
}

extern "C" __attribute__((visibility("default"))) int graphopt_round_groups(const graphopt::RoundWork* work) {
  return round({*work, 1, nullptr}, false);
}

extern "C" __attribute__((visibility("default"))) int graphopt_search_groups(const graphopt::SearchWork* work) {
  return round(*work, true);
}
