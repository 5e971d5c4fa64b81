// Attention of llama.cpp's ggml through its public C API: one graph of `copies` steps, each with a cache of its own.
//
// The cache has llama.cpp's layout: a row for each token, in it all KV heads. A step converts its new keys and values
// into their rows, then reads all rows under a mask.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "ggml_common.h"

struct attention {
    struct ggml_context *context;
    ggml_backend_t backend;
    ggml_backend_buffer_t buffer;
    struct ggml_threadpool *pool;
    struct ggml_cgraph *graph;
    struct ggml_tensor *query, *key, *value, *rows, *mask;
    struct ggml_tensor **k, **v, **y;
    int copies;
};

// Bytes of `n` numbers, or 0 for an unknown type or an n that it cannot cut into blocks.
size_t attention_bytes(const char *name, int64_t n) {
    enum ggml_type type = type_called(name);
    return type == GGML_TYPE_COUNT || n % ggml_blck_size(type) ? 0 : ggml_row_size(type, n);
}

void attention_quantize(const char *name, int64_t size, int64_t n, const float *from, void *to) {
    ggml_quantize_chunk(type_called(name), from, to, 0, n / size, size, NULL);
}

void attention_dequantize(const char *name, int64_t n, const void *from, float *to) {
    ggml_get_type_traits(type_called(name))->to_float(from, to, n);
}

void attention_free(struct attention *a) {
    if (a->backend != NULL) ggml_backend_free(a->backend);
    if (a->pool != NULL) ggml_threadpool_free(a->pool);
    if (a->buffer != NULL) ggml_backend_buffer_free(a->buffer);
    if (a->context != NULL) ggml_free(a->context);
    free(a->k);
    free(a);
}

// Steps of `tokens` new tokens, the last of `total`; NULL if memory is short.
struct attention *attention_new(const char *name, int64_t size, int64_t heads, int64_t kv_heads, int64_t total,
                                int64_t tokens, int copies, int threads) {
    struct attention *a = calloc(1, sizeof(*a));
    ggml_log_set(say_nothing, NULL);
    const int nodes = 16 * copies;
    struct ggml_init_params room = {
        ggml_tensor_overhead() * (nodes + 8) + ggml_graph_overhead_custom(nodes, false), NULL, true};
    struct ggml_context *c = a->context = ggml_init(room);
    enum ggml_type type = type_called(name);
    a->copies = copies;
    a->k = calloc(3 * copies, sizeof(*a->k));
    a->v = a->k + copies;
    a->y = a->v + copies;
    a->backend = ggml_backend_cpu_init();
    a->graph = ggml_new_graph_custom(c, nodes, false);
    a->query = ggml_new_tensor_3d(c, GGML_TYPE_F32, size, heads, tokens);
    a->key = ggml_new_tensor_2d(c, GGML_TYPE_F32, size * kv_heads, tokens);
    a->value = ggml_new_tensor_2d(c, GGML_TYPE_F32, size * kv_heads, tokens);
    a->rows = ggml_new_tensor_1d(c, GGML_TYPE_I64, tokens);
    a->mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, total, tokens);
    const size_t of_head = ggml_row_size(type, size), of_token = of_head * kv_heads;
    struct ggml_tensor *query = ggml_permute(c, a->query, 0, 2, 1, 3);
    for (int i = 0; i < copies; ++i) {
        a->k[i] = ggml_new_tensor_2d(c, type, size * kv_heads, total);
        a->v[i] = ggml_new_tensor_2d(c, type, size * kv_heads, total);
        ggml_build_forward_expand(a->graph, ggml_set_rows(c, a->k[i], a->key, a->rows));
        ggml_build_forward_expand(a->graph, ggml_set_rows(c, a->v[i], a->value, a->rows));
        struct ggml_tensor *k = ggml_view_3d(c, a->k[i], size, kv_heads, total, of_head, of_token, 0);
        struct ggml_tensor *v = ggml_view_3d(c, a->v[i], size, kv_heads, total, of_head, of_token, 0);
        a->y[i] = ggml_flash_attn_ext(c, query, ggml_permute(c, k, 0, 2, 1, 3), ggml_permute(c, v, 0, 2, 1, 3), a->mask,
                                      1.0f / sqrtf((float)size), 0, 0);
        ggml_build_forward_expand(a->graph, a->y[i]);
    }
    a->buffer = ggml_backend_alloc_ctx_tensors(c, a->backend);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.paused = true;
    a->pool = ggml_threadpool_new(&params);
    if (a->buffer == NULL || a->pool == NULL) {
        attention_free(a);
        return NULL;
    }
    ggml_backend_cpu_set_n_threads(a->backend, threads);
    ggml_backend_cpu_set_threadpool(a->backend, a->pool);
    int64_t *rows = a->rows->data;
    ggml_fp16_t *mask = a->mask->data;
    for (int64_t token = 0; token < tokens; ++token) {
        rows[token] = total - tokens + token;
        for (int64_t seen = 0; seen < total; ++seen) {
            mask[token * total + seen] = ggml_fp32_to_fp16(seen <= rows[token] ? 0 : -INFINITY);
        }
    }
    return a;
}

// Gives the query [tokens, heads, size] and the new keys and values [tokens, KV heads, size].
void attention_ask(struct attention *a, const float *query, const float *key, const float *value) {
    ggml_backend_tensor_set(a->query, query, 0, ggml_nbytes(a->query));
    ggml_backend_tensor_set(a->key, key, 0, ggml_nbytes(a->key));
    ggml_backend_tensor_set(a->value, value, 0, ggml_nbytes(a->value));
}

// Gives the cache of a copy, [total, KV heads] rows of packed numbers.
void attention_fill(struct attention *a, int copy, const void *keys, const void *values) {
    ggml_backend_tensor_set(a->k[copy], keys, 0, ggml_nbytes(a->k[copy]));
    ggml_backend_tensor_set(a->v[copy], values, 0, ggml_nbytes(a->v[copy]));
}

// The threads wait for work without sleeping while the graph runs, and are stopped behind it.
int attention_run(struct attention *a) {
    ggml_threadpool_resume(a->pool);
    enum ggml_status status = ggml_backend_graph_compute(a->backend, a->graph);
    ggml_threadpool_pause(a->pool);
    return status;
}

// y [tokens, heads, size] of a copy.
void attention_get(const struct attention *a, int copy, float *y) {
    ggml_backend_tensor_get(a->y[copy], y, 0, ggml_nbytes(a->y[copy]));
}
