// One step of a model that graphopt wrote, with graphopt's kernels: prints the token that comes next, most likely.
//
//   c++ -std=c++17 -I ../../graphopt/runtime_ops main.cc -ldl -o step
//   ./step .../onnxruntime/capi/libonnxruntime.so.1.31.1 .../graphopt/runtime_ops/libgraphopt_ops.so model.onnx 1 2 3
#include <dlfcn.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "ort.h"

int main(int count, char** arguments) {
  void* const onnxruntime = count > 4 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  void* const entry = onnxruntime ? dlsym(onnxruntime, "OrtGetApiBase") : nullptr;
  if (!entry) return std::fprintf(stderr, "usage: step ONNXRUNTIME OPERATORS MODEL TOKEN...\n"), 2;
  const ort::Caller call{reinterpret_cast<const OrtApiBase* (*)()>(entry)()->GetApi(graphopt::kApiVersion)};

  OrtEnv* const env = call.make<OrtEnv*, ort::CreateEnv>(ort::kWarnings, "step");
  OrtSessionOptions* const options = call.make<OrtSessionOptions*, ort::CreateSessionOptions>();
  call.make<void*, ort::RegisterCustomOpsLibrary>(options, arguments[2]);  // this is all that graphopt's models need
  OrtSession* const session = call.make<OrtSession*, ort::CreateSession>(env, arguments[3], options);
  OrtAllocator* const allocator = call.make<OrtAllocator*, ort::GetAllocatorWithDefaultOptions>();
  OrtMemoryInfo* const memory = call.make<OrtMemoryInfo*, ort::CreateCpuMemoryInfo>(ort::kArena, ort::kDefault);

  const size_t length = count - 4;
  std::vector<const char*> names;
  std::vector<OrtValue*> values;
  std::vector<std::vector<int64_t>> inputs;
  for (size_t i = 0; i < call.make<size_t, ort::SessionGetInputCount>(session); ++i) {
    names.push_back(call.make<char*, ort::SessionGetInputName>(session, i, allocator));
    OrtTypeInfo* const info = call.make<OrtTypeInfo*, ort::SessionGetInputTypeInfo>(session, i);
    const auto* const tensor = call.make<const OrtTensorTypeAndShapeInfo*, ort::CastTypeInfoToTensorInfo>(info);
    const int type = call.make<int, ort::GetTensorElementType>(tensor);
    std::vector<int64_t> shape(call.make<size_t, ort::GetDimensionsCount>(tensor));
    call.run<ort::GetDimensions>(tensor, shape.data(), shape.size());
    const std::string name = names.back();
    shape[0] = 1;
    if (shape.size() == 2) shape[1] = static_cast<int64_t>(length);
    // A cache: [batch, heads, past, width] without a past, or as many pages as there are tokens, which is enough.
    if (shape.size() == 4) shape[2] = name.back() == 's' ? static_cast<int64_t>(length) : 0;
    const size_t size = std::accumulate(shape.begin(), shape.end(), size_t{1}, [](auto a, auto b) { return a * b; });
    auto& numbers = inputs.emplace_back(size + 1);  // zeros, never none
    if (name == "input_ids") std::transform(arguments + 4, arguments + count, numbers.begin(), std::atoll);
    if (name == "attention_mask") std::fill(numbers.begin(), numbers.end(), 1);
    if (name == "position_ids") std::iota(numbers.begin(), numbers.end(), 0);
    if (name == "new_length") numbers[0] = static_cast<int64_t>(length);
    values.push_back(call.make<OrtValue*, ort::CreateTensorWithDataAsOrtValue>(
        memory, numbers.data(), size * sizeof(int64_t), shape.data(), shape.size(), type));
  }
  const char* const output = "logits";
  OrtValue* logits = nullptr;  // float [1, length, vocabulary]
  call.run<ort::Run>(session, nullptr, names.data(), values.data(), values.size(), &output, 1, &logits);
  int64_t shape[3];
  call.run<ort::GetDimensions>(call.make<OrtTensorTypeAndShapeInfo*, ort::GetTensorTypeAndShape>(logits), shape, 3);
  const auto* const rows = static_cast<float*>(call.make<void*, ort::GetTensorMutableData>(logits));
  const auto* const last = rows + (shape[1] - 1) * shape[2];
  std::printf("%td\n", std::max_element(last, last + shape[2]) - last);
}
