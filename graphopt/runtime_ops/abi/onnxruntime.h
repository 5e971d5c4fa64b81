// The part of onnxruntime's C ABI that our operators use, so that no header of onnxruntime is needed to build them.
//
// OrtApi is a table of function pointers. A function keeps its position for good once a version has shipped, so a view
// of the table with the few positions we call is all we need. We ask for version 17, which onnxruntime has had since
// 1.17: a library that requests a newer version than the runtime's does not load.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;  // null means success
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;
struct OrtMemoryInfo;
struct OrtAllocator;

struct OrtApi {
  void* functions[1];  // and more, as many as the requested version has
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// What an operator is, as onnxruntime reads it at version 17. The order and number of the fields are the ABI; later
// versions only add fields behind these, and `version` marks them as absent.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);  // null: the CPU's
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
};

}  // extern "C"

namespace graphopt {

constexpr uint32_t kApiVersion = 17;

// ONNX's element types, error codes and two characteristics, with the numbers that the ABI gives them.
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kDouble = 11,
                       kBFloat16 = 16, kFloat8 = 17 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
constexpr int kRequired = 0, kOptional = 1;
constexpr int kDefaultMemory = 0;
constexpr int kHostInput = -2;  // in memory of the host, whatever device the kernel runs on

// Position and type of each function of OrtApi that we call: call<CreateStatus>(api, code, message).
template <size_t Position, typename Result, typename... Arguments>
struct Function {
  static Result call(const OrtApi* api, Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(api->functions[Position])(arguments...);
  }
};

using CreateStatus = Function<0, OrtStatus*, int, const char*>;
using GetErrorMessage = Function<2, const char*, const OrtStatus*>;
using CreateCustomOpDomain = Function<26, OrtStatus*, const char*, OrtCustomOpDomain**>;
using CustomOpDomainAdd = Function<27, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*>;
using AddCustomOpDomain = Function<28, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*>;
using GetTensorMutableData = Function<51, OrtStatus*, OrtValue*, void**>;
using GetTensorElementType = Function<60, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int*>;
using GetDimensionsCount = Function<61, OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*>;
using GetDimensions = Function<62, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t>;
using GetTensorTypeAndShape = Function<65, OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**>;
using KernelInfoGetAttributeFloat = Function<85, OrtStatus*, const OrtKernelInfo*, const char*, float*>;
using KernelInfoGetAttributeInt = Function<86, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*>;
using KernelInfoGetAttributeString = Function<87, OrtStatus*, const OrtKernelInfo*, const char*, char*, size_t*>;
using AllocatorAlloc = Function<75, OrtStatus*, OrtAllocator*, size_t, void**>;
using AllocatorFree = Function<76, OrtStatus*, OrtAllocator*, void*>;
using KernelContextGetInput = Function<90, OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**>;
using KernelContextGetOutput =
    Function<91, OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>;
using ReleaseStatus = Function<93, void, OrtStatus*>;
using ReleaseTensorTypeAndShapeInfo = Function<99, void, OrtTensorTypeAndShapeInfo*>;
using ReleaseAllocator = Function<132, void, OrtAllocator*>;
using KernelInfoGetAttributeFloats = Function<162, OrtStatus*, const OrtKernelInfo*, const char*, float*, size_t*>;
using KernelInfoGetAttributeInts = Function<163, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*, size_t*>;
using KernelContextGetGPUComputeStream = Function<193, OrtStatus*, const OrtKernelContext*, void**>;
using GetTensorMemoryInfo = Function<194, OrtStatus*, const OrtValue*, const OrtMemoryInfo**>;
using KernelInfoGetNodeName = Function<244, OrtStatus*, const OrtKernelInfo*, char*, size_t*>;
using KernelInfoGetConstantInput = Function<249, OrtStatus*, const OrtKernelInfo*, size_t, int*, const OrtValue**>;
using KernelContextGetAllocator =
    Function<253, OrtStatus*, const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator**>;
using KernelContextParallelFor =
    Function<274, OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>;

// Since 1.18, where that version was requested.
constexpr uint32_t kScratchVersion = 18;
using KernelContextGetScratchBuffer =
    Function<277, OrtStatus*, const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**>;
using KernelInfoGetAllocator = Function<278, OrtStatus*, const OrtKernelInfo*, int, OrtAllocator**>;

}  // namespace graphopt
