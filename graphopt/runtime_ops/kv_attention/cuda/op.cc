// ai.graphopt::KVAttention for onnxruntime's CUDA provider: one operator per type of activations, float and float16,
// and of keys and values.
#include "abi/register.h"
#include "cuda/kernel.h"
#include "kv_attention/cuda/interface.h"
#include "kv_attention/shared/inputs.h"

namespace graphopt {
namespace {

constexpr size_t kAlignment = 16;  // of a state: pages are read 16 bytes at a time

template <int Activations>
struct Kernel : KVTypes<Activations> {
  // how a call is cut depends on the lengths
  static bool host_input(size_t index) { return index == kPast || index == kNew; }

  Node node;
  KVAttributes attributes;

  OrtStatus* prepare(const OrtApi* api, const OrtKernelInfo* info, int type) {
    GRAPHOPT_RETURN_IF_ERROR(node.read(api, info));
    GRAPHOPT_RETURN_IF_ERROR(attributes.read(node, info, type));
    if (attributes.layout.token_factors) {
      return node.error("kernels on GPUs know no factors of tokens; store the cache without token_factors");
    }
    if (attributes.layout.key_feedback) {
      return node.error("kernels on GPUs round each channel of keys by itself; store the cache without key_feedback");
    }
    for (size_t head = 0; head < attributes.layout.kv_heads; ++head) {
      if (!chooses_in_blocks(attributes.policies[head])) continue;
      return node.error("GPUs have no kernels for blocks of queries that choose pages together: make the model for CPUs");
    }
    if (attributes.slopes.count) return node.error("GPUs have no kernels for biases by distance: leave slopes out");
    if (attributes.layout.latent()) return node.error("GPUs have no kernels for latents: value_size must be 0");
    const Layout& layout = attributes.layout;
    if (layout.value_storage != layout.storage || layout.value_clip != layout.clip) {
      return node.error(
          "kernels on GPUs store keys and values alike; store the cache without value_storage and value_clip");
    }
    if (known_to_gpus(attributes.layout.storage)) return nullptr;
    return node.error("kernels on GPUs know no codes of %lld bits; store the cache as int8 or int4",
                      static_cast<long long>(attributes.layout.bits));
  }

  OrtStatus* compute(OrtKernelContext* context) const {
    KVInputs inputs;
    Attention attention;
    GRAPHOPT_RETURN_IF_ERROR(inputs.read(node, attributes, context, &attention));
    void* written[1 + kStates] = {};
    GRAPHOPT_RETURN_IF_ERROR(inputs.make_outputs(node, context, kAlignment, written));
    const GraphoptKVAttention call = call_of(attention, written);
    DeviceCall device;
    const OrtValue* near = nullptr;
    GRAPHOPT_RETURN_IF_ERROR(KernelContextGetInput::call(node.api, context, kQuery, &near));
    GRAPHOPT_RETURN_IF_ERROR(device.begin(context, near, graphopt_cuda_kv_attention_scratch(&call)));
    for (size_t index = 1; index <= kStates; ++index) {
      const Given& from = inputs.of_output(index);
      if (from.empty() || from.data == written[index]) continue;
      GRAPHOPT_RETURN_IF_MESSAGE(node, copy_on_device(written[index], from.data, from.bytes(), device.stream()));
    }
    GraphoptKVAttention with_scratch = call;
    with_scratch.scratch = device.scratch();
    GRAPHOPT_RETURN_IF_MESSAGE(node, graphopt_cuda_kv_attention(&with_scratch, device.stream()));
    return nullptr;
  }

  GraphoptKVAttention call_of(const Attention& attention, void* const* written) const {
    const Layout& layout = attention.layout;
    GraphoptKVAttention call = {};
    const auto count = [](size_t number) { return static_cast<int64_t>(number); };
    call.type = Activations;
    call.storage = static_cast<int32_t>(layout.storage);
    call.rows = count(attention.rows), call.columns = count(attention.columns);
    call.kv_heads = count(layout.kv_heads), call.group = count(layout.group), call.size = count(layout.size);
    call.page = count(layout.page), call.pages = count(layout.pages);
    call.sink_pages = layout.sink_pages, call.recent_pages = layout.recent_pages, call.window = layout.window;
    call.sinks = layout.sinks, call.recent = layout.recent, call.budget = layout.budget;
    call.channels = layout.channels;
    call.mass = layout.mass, call.scale = layout.scale, call.softcap = layout.softcap, call.clip = layout.clip;
    call.mean = layout.mean, call.compensate = layout.compensate;
    call.chunked = static_cast<int32_t>(layout.chunked);
    call.policies = reinterpret_cast<const uint8_t*>(attributes.policies.get());
    call.past = attention.past, call.fresh = attention.fresh;
    call.query = attention.query, call.key = attention.key, call.value = attention.value;
    call.sink_logits = attention.sink_logits, call.sink_query = attention.sink_query;
    call.y = written[0], call.keys = written[1], call.values = written[2];
    call.scales = written[3], call.slots = static_cast<float*>(written[4]);
    call.summaries = static_cast<float*>(written[5]);
    return call;
  }
};

const OrtCustomOp kOps[10] = {
    cuda_op<Kernel<kFloat>, kFloat>(),      cuda_op<Kernel<kFloat>, kFloat16>(),   cuda_op<Kernel<kFloat>, kBFloat16>(),
    cuda_op<Kernel<kFloat>, kFloat8>(),     cuda_op<Kernel<kFloat>, kUint8>(),     cuda_op<Kernel<kFloat16>, kFloat>(),
    cuda_op<Kernel<kFloat16>, kFloat16>(),  cuda_op<Kernel<kFloat16>, kBFloat16>(),
    cuda_op<Kernel<kFloat16>, kFloat8>(),   cuda_op<Kernel<kFloat16>, kUint8>()};

const Operators kRegistered(kOps);

}  // namespace
}  // namespace graphopt
