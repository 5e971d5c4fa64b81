// KVAttention on a GPU without onnxruntime; see cuda/c_interface.h, and kv_attention/op.py for what the operator
// means.
//
// It works in place: the state is that before the call and becomes that after it. Rows are at the end of their
// columns, as the operator says. Lengths and policies are read from the host's memory before the call returns.
#pragma once

#include "cuda/c_interface.h"

#ifdef __cplusplus
extern "C" {
#endif

struct GraphoptKVAttention {
  int32_t type;     // of query, key, value, sink_query and y: a GraphoptType
  int32_t storage;  // its number in GRAPHOPT_STORAGES, see kv_attention/shared/storage.h
  // rows B, columns S, KV heads Hk (at most 256), query heads of each G, channels D (a multiple of 16 up to 256),
  // tokens of a page T (16, 32, 64 or 128), pages P
  int64_t rows, columns, kv_heads, group, size, page, pages;
  // attributes of the operator
  int64_t sink_pages, recent_pages, window, sinks, recent, budget, channels;
  float mass, scale, softcap, clip;  // clip above 0 and at most 1
  int32_t mean, compensate, chunked;
  const uint8_t* policies;                // host: [Hk], numbers in GRAPHOPT_POLICIES, see kv_attention/shared/policy.h
  const int64_t *past, *fresh;            // host: [B], tokens that a row has, and that it gets
  const void *query, *key, *value;        // [B, S, Hk G D], [B, S, Hk D] twice
  const float* sink_logits;               // [Hk G] or null
  const void* sink_query;                 // as query, or null
  void *keys, *values;                    // [B, Hk, P, bytes of a page]
  // [B, Hk, P, 2 D + 2 T], [B, Hk, R, 2 T D], [B, Hk, P, Z]; null where they are not used
  void* scales;  // float16
  float *slots, *summaries;
  void* y;                                // as query
  void* scratch;
  size_t list_bytes;  // that scores and lists of pages may take of scratch at a time, or those of one token; 0: 64 MiB
};

GRAPHOPT_PUBLIC size_t graphopt_cuda_kv_attention_scratch(const struct GraphoptKVAttention* call);
GRAPHOPT_PUBLIC const char* graphopt_cuda_kv_attention(const struct GraphoptKVAttention* call, void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
