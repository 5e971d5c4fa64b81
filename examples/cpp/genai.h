// The few functions of onnxruntime-genai's C API that the example calls. A program that has ort_genai_c.h includes that
// instead: wheels come without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

struct OgaResult;
struct OgaModel;
struct OgaEngine;
struct OgaRequestOptions;
struct OgaRequest;
struct OgaTurnOptions;
struct OgaEngineEventBuffer;
struct OgaEngineEvent;

extern "C" {
const char* OgaResultGetError(const OgaResult*);
OgaResult* OgaCreateModel(const char* folder, OgaModel**);
OgaResult* OgaCreateEngine(OgaModel*, OgaEngine**);
OgaResult* OgaEngineCreateRequest(OgaEngine*, const OgaRequestOptions*, OgaRequest**);
OgaResult* OgaRequestCreateTurnOptions(OgaRequest*, OgaTurnOptions**);
OgaResult* OgaTurnOptionsSetMaxGeneratedTokens(OgaTurnOptions*, uint64_t);
OgaResult* OgaRequestBeginTurn(OgaRequest*, const OgaTurnOptions*, const int32_t*, uint64_t, uint64_t* turn);
OgaResult* OgaCreateEngineEventBuffer(OgaEngine*, size_t, OgaEngineEventBuffer**);
OgaResult* OgaEngineHasPendingRequests(OgaEngine*, bool*);
OgaResult* OgaEngineRun(OgaEngine*, OgaEngineEventBuffer*);
size_t OgaEngineEventBufferGetCount(const OgaEngineEventBuffer*);
const OgaEngineEvent* OgaEngineEventBufferGet(const OgaEngineEventBuffer*, size_t);
OgaResult* OgaEngineEventGetFlags(const OgaEngineEvent*, uint32_t*);
OgaResult* OgaEngineEventGetRequest(const OgaEngineEvent*, const OgaRequest**);
OgaResult* OgaEngineEventGetToken(const OgaEngineEvent*, int32_t*);
void OgaDestroyTurnOptions(OgaTurnOptions*);
void OgaDestroyRequest(OgaRequest*);
void OgaDestroyEngineEventBuffer(OgaEngineEventBuffer*);
void OgaDestroyEngine(OgaEngine*);
void OgaDestroyModel(OgaModel*);
}

namespace genai {

// What an event may hold.
constexpr uint32_t kToken = 1, kFailed = 8;

// Ends the program with onnxruntime-genai's message where a function failed.
inline void check(const OgaResult* failure) {
  if (!failure) return;
  std::fprintf(stderr, "%s\n", OgaResultGetError(failure));
  std::exit(1);
}

// Returns what the function writes to its last argument.
template <typename Result, typename... Parameters, typename... Arguments>
Result make(OgaResult* (*function)(Parameters...), Arguments... arguments) {
  Result result{};
  check(function(arguments..., &result));
  return result;
}

}  // namespace genai
