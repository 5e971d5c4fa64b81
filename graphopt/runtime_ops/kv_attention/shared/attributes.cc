// Reading and checking the attributes of a KVAttention node.
#include <cmath>
#include <cstring>

#include "kv_attention/shared/inputs.h"
#include "kv_attention/shared/text.h"

namespace graphopt {
namespace {

constexpr int64_t kMostPages = int64_t{1} << 31;

#define GRAPHOPT_NAME_OF(id, name, type, bits, levels, holds) name,
#define GRAPHOPT_LISTED(id, name, type, bits, levels, holds) ", " name
#define GRAPHOPT_TYPE_OF(id, name, type, bits, levels, holds) type,
constexpr const char* kNames[] = {GRAPHOPT_STORAGES(GRAPHOPT_NAME_OF)};
constexpr const char* kAllNames = GRAPHOPT_STORAGES(GRAPHOPT_LISTED);
constexpr int kTypes[] = {GRAPHOPT_STORAGES(GRAPHOPT_TYPE_OF)};

}  // namespace

OrtStatus* KVAttributes::read(const Node& node, const OrtKernelInfo* info, int type) {
  int64_t heads = 0, page = 0;
  int64_t compensates = 0;
  char storage[16] = {}, summary[16] = {};
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "kv_heads", &heads));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "page", &page));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "scale", &layout.scale));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "softcap", &layout.softcap));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "storage", storage, sizeof storage));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "summary", summary, sizeof summary));
  struct Count {
    const char* name;
    int64_t *value, least, most;
  };
  const Count counts[] = {{"window", &layout.window, 0, INT64_MAX},
                          {"sinks", &layout.sinks, 0, INT64_MAX},
                          {"recent", &layout.recent, 1, INT64_MAX},
                          {"budget", &layout.budget, 0, INT64_MAX},
                          {"channels", &layout.channels, 0, INT64_MAX},
                          {"compensate", &compensates, 0, 1},
                          {"sink_pages", &layout.sink_pages, 0, kMostPages},
                          {"recent_pages", &layout.recent_pages, 0, kMostPages}};
  for (const Count& count : counts) {
    const bool newer = count.value == &layout.channels || count.value == &compensates;
    GRAPHOPT_RETURN_IF_ERROR(newer ? node.read_optional(info, count.name, count.value)
                                   : node.read_attribute(info, count.name, count.value));
    if (*count.value < count.least || *count.value > count.most) {
      return node.error("its attribute %s must be from %lld to %lld, it is %lld", count.name, print(count.least),
                        print(count.most), print(*count.value));
    }
    if (*count.value > kMostTokens) *count.value = kMostTokens;
  }
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "mass", &layout.mass));
  if (!(layout.mass >= 0 && layout.mass <= 1)) {
    return node.error("its attribute mass must be a share from 0 to 1, it is %g", static_cast<double>(layout.mass));
  }
  if (layout.mass > 0 && !layout.budget) layout.budget = kMostTokens;  // no limit
  if (layout.mass == 1) layout.mass = 0;  // of all, their number alone counts
  layout.compensate = compensates;
  if (layout.compensate && layout.window) {
    return node.error("with a window of the model's own, %lld, no token that streaming drops is to be seen: compensate "
                      "must be 0",
                      print(layout.window));
  }
  if (heads < 1 || heads > kMostHeads) {
    return node.error("its attribute kv_heads must be from 1 to %lld, it is %lld", print(kMostHeads), print(heads));
  }
  if (page != 16 && page != 32 && page != 64 && page != 128) {
    return node.error("its attribute page must be 16, 32, 64 or 128, it is %lld", print(page));
  }
  if (!std::isfinite(layout.scale) || !std::isfinite(layout.softcap) || layout.softcap < 0) {
    return node.error("its attributes scale and softcap must be finite, and softcap not below 0");
  }
  constexpr int kKnown = static_cast<int>(Storage::kCount);
  int which = 0;
  while (which < kKnown && std::strcmp(storage, kNames[which])) ++which;
  if (which == kKnown) return node.error("its attribute storage must be one of %s, not '%s'", kAllNames + 2, storage);
  if (type != kTypes[which]) return node.error("keys and values have another type than %s is stored in", storage);
  layout.store_as(static_cast<Storage>(which));
  layout.mean = !std::strcmp(summary, "mean");
  if (!layout.mean && std::strcmp(summary, "bounds")) {
    return node.error("its attribute summary must be bounds or mean, not '%s'", summary);
  }
  layout.kv_heads = static_cast<size_t>(heads);
  layout.page = static_cast<size_t>(page);
  size_t given = 0;
  // called without a buffer, it returns the number of elements
  if (OrtStatus* failure = KernelInfoGetAttributeInts::call(node.api, info, "policies", nullptr, &given)) {
    ReleaseStatus::call(node.api, failure);
  }
  if (given != 1 && given != layout.kv_heads) {
    return node.error("its attribute policies must be 1 integer, or %lld, one for each KV head", print(heads));
  }
  std::unique_ptr<int64_t[]> numbers(new (std::nothrow) int64_t[given]);
  policies.reset(new (std::nothrow) Policy[layout.kv_heads]);
  if (!numbers || !policies) return node.error("no memory for %lld policies", print(heads));
  OrtStatus* read = KernelInfoGetAttributeInts::call(node.api, info, "policies", numbers.get(), &given);
  GRAPHOPT_RETURN_IF_ERROR(node.missing(read, "policies", "integers"));
  wraps = true;
  for (size_t head = 0; head < layout.kv_heads; ++head) {
    const int64_t policy = numbers[given == 1 ? 0 : head];
    if (policy < 0 || policy > 2) {
      return node.error("a policy must be 0 (dense), 1 (streaming) or 2 (retrieval), it is %lld", print(policy));
    }
    policies[head] = static_cast<Policy>(policy);
    wraps = wraps && policies[head] == Policy::kStreaming;
    retrieves = retrieves || policies[head] == Policy::kRetrieval;
  }
  return nullptr;
}

}  // namespace graphopt
