// The few functions of onnxruntime that the example calls, on top of graphopt's own header of the ABI. A program that
// has onnxruntime_c_api.h includes that instead: wheels come without it.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "abi/onnxruntime.h"

struct OrtEnv;
struct OrtSession;
struct OrtRunOptions;
struct OrtTypeInfo;
struct OrtMemoryInfo;
struct OrtAllocator;

namespace ort {

// Positions are those of OrtApi, and never change.
using graphopt::Function;
using GetErrorMessage = Function<2, const char*, const OrtStatus*>;
using CreateEnv = Function<3, OrtStatus*, int, const char*, OrtEnv**>;
using CreateSession = Function<7, OrtStatus*, const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**>;
using Run = Function<9, OrtStatus*, OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*,
                     size_t, const char* const*, size_t, OrtValue**>;
using CreateSessionOptions = Function<10, OrtStatus*, OrtSessionOptions**>;
using RegisterCustomOpsLibrary = Function<29, OrtStatus*, OrtSessionOptions*, const char*, void**>;
using SessionGetInputCount = Function<30, OrtStatus*, const OrtSession*, size_t*>;
using SessionGetInputTypeInfo = Function<33, OrtStatus*, const OrtSession*, size_t, OrtTypeInfo**>;
using SessionGetInputName = Function<36, OrtStatus*, const OrtSession*, size_t, OrtAllocator*, char**>;
using CreateTensorWithDataAsOrtValue =
    Function<49, OrtStatus*, const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t, int, OrtValue**>;
using CastTypeInfoToTensorInfo = Function<55, OrtStatus*, const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**>;
using CreateCpuMemoryInfo = Function<69, OrtStatus*, int, int, OrtMemoryInfo**>;
using GetAllocatorWithDefaultOptions = Function<78, OrtStatus*, OrtAllocator**>;
using graphopt::GetDimensions;
using graphopt::GetDimensionsCount;
using graphopt::GetTensorElementType;
using graphopt::GetTensorMutableData;
using graphopt::GetTensorTypeAndShape;

constexpr int kWarnings = 2, kArena = 1, kDefault = 0;

// Calls functions of OrtApi, and ends the program with onnxruntime's message where one fails.
struct Caller {
  const OrtApi* api;

  template <typename Called, typename... Arguments>
  void run(Arguments... arguments) const {
    OrtStatus* const failure = Called::call(api, arguments...);
    if (!failure) return;
    std::fprintf(stderr, "%s\n", GetErrorMessage::call(api, failure));
    std::exit(1);
  }

  // Returns what the function writes to its last argument.
  template <typename Result, typename Called, typename... Arguments>
  Result make(Arguments... arguments) const {
    Result result{};
    run<Called>(arguments..., &result);
    return result;
  }
};

}  // namespace ort
