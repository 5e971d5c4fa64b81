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
constexpr const char* kNames[] = {GRAPHOPT_STORAGES(GRAPHOPT_NAME_OF) GRAPHOPT_CPU_STORAGES(GRAPHOPT_NAME_OF)};
constexpr const char* kAllNames = GRAPHOPT_STORAGES(GRAPHOPT_LISTED) GRAPHOPT_CPU_STORAGES(GRAPHOPT_LISTED);
constexpr int kTypes[] = {GRAPHOPT_STORAGES(GRAPHOPT_TYPE_OF) GRAPHOPT_CPU_STORAGES(GRAPHOPT_TYPE_OF)};

#define GRAPHOPT_LISTED_POLICY(id, name, States) ", " name
constexpr const char* kAllPolicies = GRAPHOPT_POLICIES(GRAPHOPT_LISTED_POLICY);

constexpr int kKnown = static_cast<int>(Storage::kCount);
// The storage of pages of that name; kKnown if there is none.
int storage_named(const char* name) {
  int which = 0;
  while (which < kKnown && std::strcmp(name, kNames[which])) ++which;
  return which;
}

// Checks the range of a count. What is beyond all positions counts as the last of them.
OrtStatus* check_count(const Node& node, const char* name, int64_t* count, int64_t least, int64_t most) {
  if (*count < least || *count > most) {
    return node.error("its attribute %s must be from %lld to %lld, it is %lld", name, print(least), print(most),
                      print(*count));
  }
  if (*count > kMostTokens) *count = kMostTokens;
  return nullptr;
}

// Reads the parameters of policies, as they ask for them.
struct ParameterReader {
  const Node& node;
  const OrtKernelInfo* info;

  OrtStatus* none() const { return nullptr; }
  OrtStatus* count(const char* name, int64_t* count) const {
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, name, count));
    return check_count(node, name, count, 0, INT64_MAX);
  }
  OrtStatus* optional_count(const char* name, int64_t* count) const {
    GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, name, count));
    return check_count(node, name, count, 0, INT64_MAX);
  }
  OrtStatus* flag(const char* name, bool* flag) const {
    int64_t number = 0;
    GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, name, &number));
    GRAPHOPT_RETURN_IF_ERROR(check_count(node, name, &number, 0, 1));
    *flag = number;
    return nullptr;
  }
  OrtStatus* share(const char* name, float* share) const {
    GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, name, share));
    if (*share >= 0 && *share <= 1) return nullptr;
    return node.error("its attribute %s must be a share from 0 to 1, it is %g", name, static_cast<double>(*share));
  }
  // `number` of two counts is a multiple of the other one, at most `most`, or 0.
  OrtStatus* multiple(const char* name, int64_t number, const char* of_name, int64_t of, int64_t most) const {
    if (!number || (of > 0 && number % of == 0 && number <= most)) return nullptr;
    return node.error("its attribute %s must be a multiple of %s up to %lld, or 0; they are %lld and %lld", name, of_name,
                      print(most), print(number), print(of));
  }
  // One of two words, of which the second sets the flag.
  OrtStatus* choice(const char* name, bool* is_second, const char* first, const char* second) const {
    char word[16] = {};
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, name, word, sizeof word));
    *is_second = !std::strcmp(word, second);
    if (*is_second || !std::strcmp(word, first)) return nullptr;
    return node.error("its attribute %s must be %s or %s, not '%s'", name, first, second, word);
  }
};

}  // namespace

OrtStatus* read_chunked(const Node& node, const OrtKernelInfo* info, Layout* layout) {
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "chunks", &layout->chunked));
  if (layout->chunked == 0 || (layout->chunked == 1 && layout->window > 0)) return nullptr;
  return node.error("its attribute chunks must be 0, or 1 with a window above 0; they are %lld and %lld",
                    print(layout->chunked), print(layout->window));
}

OrtStatus* Slopes::read(const Node& node, const OrtKernelInfo* info, const Layout& layout, bool chooses) {
  // called without a buffer, it returns the number of elements
  if (OrtStatus* failure = KernelInfoGetAttributeFloats::call(node.api, info, "slopes", nullptr, &count)) {
    if (!count) return node.present(failure, "slopes");
    ReleaseStatus::call(node.api, failure);
  }
  if (!count) return nullptr;
  numbers.reset(new (std::nothrow) float[count]);
  if (!numbers) return node.error("no memory for %zu slopes", count);
  OrtStatus* read = KernelInfoGetAttributeFloats::call(node.api, info, "slopes", numbers.get(), &count);
  GRAPHOPT_RETURN_IF_ERROR(node.missing(read, "slopes", "floats"));
  for (size_t head = 0; head < count; ++head) {
    if (!std::isfinite(numbers[head])) return node.error("its attribute slopes must be finite, that of head %zu is not", head);
  }
  if (layout.softcap == 0 && !chooses) return nullptr;
  return node.error("with slopes its attribute softcap must be 0, policies dense or streaming, and compensate 0");
}

OrtStatus* Slopes::give(const Node& node, Attention* call) const {
  if (count && count != call->layout.query_heads()) {
    return node.error("its attribute slopes must be a float for each of %zu query heads; there are %zu",
                      call->layout.query_heads(), count);
  }
  call->slopes = count ? numbers.get() : nullptr;
  return nullptr;
}

OrtStatus* KVAttributes::read(const Node& node, const OrtKernelInfo* info, int type) {
  int64_t heads = 0, page = 0;
  char storage[16] = {}, value_storage[16] = {};
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "kv_heads", &heads));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "page", &page));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "scale", &layout.scale));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "softcap", &layout.softcap));
  GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, "storage", storage, sizeof storage));
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "clip", &layout.clip));
  layout.value_clip = layout.clip;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "value_clip", &layout.value_clip));
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "token_factors", &layout.token_factors));
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "key_feedback", &layout.key_feedback));
  struct Count {
    const char* name;
    int64_t *value, least, most;
  };
  const Count counts[] = {{"window", &layout.window, 0, INT64_MAX},
                          {"sinks", &layout.sinks, 0, INT64_MAX},
                          {"recent", &layout.recent, 1, INT64_MAX},
                          {"sink_pages", &layout.sink_pages, 0, kMostPages},
                          {"recent_pages", &layout.recent_pages, 0, kMostPages}};
  for (const Count& count : counts) {
    GRAPHOPT_RETURN_IF_ERROR(node.read_attribute(info, count.name, count.value));
    GRAPHOPT_RETURN_IF_ERROR(check_count(node, count.name, count.value, count.least, count.most));
  }
  GRAPHOPT_RETURN_IF_ERROR(read_chunked(node, info, &layout));
  int64_t value_size = 0;
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "value_size", &value_size));
  if (value_size % 16 || value_size < 0 || value_size > kMostLatent) {
    return node.error("its attribute value_size must be a multiple of 16 up to %lld, it is %lld", print(kMostLatent),
                      print(value_size));
  }
  layout.value_size = static_cast<size_t>(value_size);
  const ParameterReader reader = {node, info};
  OrtStatus* status = nullptr;
  each_policy([&](Policy, auto states) {
    if (!status) status = decltype(states)::read(&layout, reader);
  });
  if (status) return status;
  if (layout.latent() && layout.compensate) {
    return node.error("with a value_size compensate must be 0");
  }
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
  const int which = storage_named(storage);
  if (which == kKnown) return node.error("its attribute storage must be one of %s, not '%s'", kAllNames + 2, storage);
  if (type != kTypes[which]) return node.error("keys and values have another type than %s is stored in", storage);
  layout.store_as(static_cast<Storage>(which));
  GRAPHOPT_RETURN_IF_ERROR(node.read_optional(info, "value_storage", value_storage, sizeof value_storage));
  if (value_storage[0]) {
    const int of_values = storage_named(value_storage);
    if (of_values != kKnown) layout.store_values_as(static_cast<Storage>(of_values));
    if (of_values != which && (of_values == kKnown || !layout.levels || !layout.value_levels || layout.latent())) {
      return node.error("its attributes storage and value_storage must name codes, of values that are no channels of "
                        "keys, where they differ; they are '%s' and '%s'",
                        storage, value_storage);
    }
  }
  struct Share {
    const char* name;
    float of_codes;
  };
  const Share shares[] = {{"clip", layout.clip}, {"value_clip", layout.value_clip}};
  for (const Share& share : shares) {
    if (!(share.of_codes > 0 && share.of_codes <= 1) || (share.of_codes < 1 && !layout.integers())) {
      return node.error("its attribute %s must be above 0 and at most 1, and 1 for floats; it is %g for %s", share.name,
                        static_cast<double>(share.of_codes), storage);
    }
  }
  if (layout.token_factors != 0 && !(layout.token_factors == 1 && layout.integers())) {
    return node.error("its attribute token_factors must be 0 or 1, and 0 for floats; it is %lld for %s",
                      print(layout.token_factors), storage);
  }
  if (layout.key_feedback != 0 && !(layout.key_feedback == 1 && layout.integers())) {
    return node.error("its attribute key_feedback must be 0 or 1, and 0 for floats; it is %lld for %s",
                      print(layout.key_feedback), storage);
  }
  layout.kv_heads = static_cast<size_t>(heads);
  layout.page = static_cast<size_t>(page);
  if (layout.page % layout.unit()) {
    return node.error("a page of %s must have a multiple of %lld tokens, it has %lld", storage,
                      print(static_cast<int64_t>(layout.unit())), print(page));
  }
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
    if (policy < 0 || policy >= kPolicies) {
      return node.error("the kernels know the policies 0 to %d (%s), not %lld", kPolicies - 1, kAllPolicies + 2,
                        print(policy));
    }
    policies[head] = static_cast<Policy>(policy);
    if (layout.latent() && (makes_lists(policies[head]) || chooses_in_blocks(policies[head]))) {
      return node.error("pages of latents are not chosen: with a value_size policies are dense or streaming");
    }
    wraps = wraps && may_drop(policies[head]);
  }
  bool chooses = layout.compensate;
  for (size_t head = 0; head < layout.kv_heads; ++head) {
    chooses = chooses || makes_lists(policies[head]) || chooses_in_blocks(policies[head]);
  }
  return slopes.read(node, info, layout, chooses);
}

}  // namespace graphopt
