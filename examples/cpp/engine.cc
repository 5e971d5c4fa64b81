// Replies to several prompts at once, by onnxruntime-genai's Engine on a folder that the step `serve` made: the second
// prompt comes when the first has its first token. Prints each token as it comes, with the number of its prompt.
//
//   c++ -std=c++17 engine.cc $GENAI/libonnxruntime-genai.so -Wl,-rpath,$GENAI -o engine
//   ORT_LIB_PATH=.../onnxruntime/capi/libonnxruntime.so.1.31.1 ./engine served 20 1,2,3 4,5,6,7
//
// where $GENAI is the folder of the package onnxruntime_genai. Kernels lie in the folder `served` itself.
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "genai.h"

using genai::check;
using genai::make;

namespace {

std::vector<int32_t> tokens_of(const std::string& prompt) {
  std::vector<int32_t> tokens;
  std::istringstream stream(prompt);
  for (std::string token; std::getline(stream, token, ',');) tokens.push_back(std::atoi(token.c_str()));
  return tokens;
}

OgaRequest* ask(OgaEngine* engine, const std::vector<int32_t>& prompt, uint64_t length) {
  auto* const request = make<OgaRequest*>(OgaEngineCreateRequest, engine, nullptr);
  auto* const options = make<OgaTurnOptions*>(OgaRequestCreateTurnOptions, request);
  check(OgaTurnOptionsSetMaxGeneratedTokens(options, length));
  make<uint64_t>(OgaRequestBeginTurn, request, options, prompt.data(), prompt.size());
  OgaDestroyTurnOptions(options);
  return request;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return std::fprintf(stderr, "usage: engine FOLDER LENGTH PROMPT...\n"), 2;
  auto* const model = make<OgaModel*>(OgaCreateModel, arguments[1]);
  auto* const engine = make<OgaEngine*>(OgaCreateEngine, model);
  auto* const events = make<OgaEngineEventBuffer*>(OgaCreateEngineEventBuffer, engine, 64);
  std::map<const OgaRequest*, int> requests;
  int asked = 3;
  const auto next = [&] {
    requests[ask(engine, tokens_of(arguments[asked]), std::atoi(arguments[2]))] = asked - 3;
    ++asked;
  };
  next();
  while (make<bool>(OgaEngineHasPendingRequests, engine)) {
    check(OgaEngineRun(engine, events));
    for (size_t i = 0; i < OgaEngineEventBufferGetCount(events); ++i) {
      const OgaEngineEvent* const event = OgaEngineEventBufferGet(events, i);
      const auto flags = make<uint32_t>(OgaEngineEventGetFlags, event);
      if (flags & genai::kFailed) return std::fprintf(stderr, "the engine cannot go on\n"), 1;
      if (!(flags & genai::kToken)) continue;
      const auto* const request = make<const OgaRequest*>(OgaEngineEventGetRequest, event);
      std::printf("%d %d\n", requests.at(request), make<int32_t>(OgaEngineEventGetToken, event));
      if (asked < count) next();
    }
  }
  for (const auto& [request, number] : requests) OgaDestroyRequest(const_cast<OgaRequest*>(request));
  OgaDestroyEngineEventBuffer(events);
  OgaDestroyEngine(engine);
  OgaDestroyModel(model);
}
