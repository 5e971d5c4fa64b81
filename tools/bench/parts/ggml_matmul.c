// Products of llama.cpp's ggml through its public C API: one graph of `copies` products, each with an x of its own.
//
// The weights go where llama.cpp would put them: into the CPU's extra buffer types (weights rearranged for the
// processor's vectors) where one of those takes the product; otherwise, or with `plain`, into an ordinary buffer.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "ggml_common.h"

struct matmul {
    struct ggml_context *weights, *others;
    ggml_backend_t backend;
    ggml_backend_buffer_t weight_buffer, other_buffer;
    struct ggml_threadpool *pool;
    struct ggml_cgraph *graph;
    struct ggml_tensor **w, **x, **y;
    const char *where;
};

// Bytes of [n, k] weights, or 0 for an unknown type or a k that it cannot cut into blocks.
size_t matmul_bytes(const char *name, int64_t k, int64_t n) {
    enum ggml_type type = type_called(name);
    return type == GGML_TYPE_COUNT || k % ggml_blck_size(type) ? 0 : ggml_row_size(type, k) * n;
}

// Every input counts the same; types of two bits ask how much each does.
void matmul_quantize(const char *name, int64_t k, int64_t n, const float *from, void *to) {
    enum ggml_type type = type_called(name);
    float *importance = NULL;
    if (ggml_quantize_requires_imatrix(type)) {
        importance = malloc(k * sizeof(*importance));
        for (int64_t i = 0; i < k; ++i) {
            importance[i] = 1;
        }
    }
    ggml_quantize_init(type);
    ggml_quantize_chunk(type, from, to, 0, n, k, importance);
    free(importance);
}

void matmul_dequantize(const char *name, int64_t k, int64_t n, const void *from, float *to) {
    ggml_get_type_traits(type_called(name))->to_float(from, to, k * n);
}

static ggml_backend_buffer_type_t choose(struct matmul *m, int plain) {
    ggml_backend_dev_t device = ggml_backend_get_device(m->backend);
    ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t *types = extra != NULL && !plain ? extra(device) : NULL;
    for (; types != NULL && *types != NULL; ++types) {
        m->w[0]->buffer = ggml_backend_buft_alloc_buffer(*types, 0);
        int takes = ggml_backend_dev_supports_op(device, m->y[0]);
        ggml_backend_buffer_free(m->w[0]->buffer);
        m->w[0]->buffer = NULL;
        if (takes) {
            return *types;
        }
    }
    return ggml_backend_get_default_buffer_type(m->backend);
}

// A graph of x [rows, k] times weights [n, k]; NULL if memory is short.
struct matmul *matmul_new(const char *name, int64_t k, int64_t n, int64_t rows, int copies, int threads, int plain) {
    struct matmul *m = calloc(1, sizeof(*m));
    ggml_log_set(say_nothing, NULL);
    struct ggml_init_params room = {ggml_tensor_overhead() * copies, NULL, true};
    struct ggml_init_params more = {
        ggml_tensor_overhead() * 2 * copies + ggml_graph_overhead_custom(2 * copies, false), NULL, true};
    m->weights = ggml_init(room);
    m->others = ggml_init(more);
    m->w = calloc(3 * copies, sizeof(*m->w));
    m->x = m->w + copies;
    m->y = m->x + copies;
    m->backend = ggml_backend_cpu_init();
    m->graph = ggml_new_graph_custom(m->others, 2 * copies, false);
    for (int i = 0; i < copies; ++i) {
        m->w[i] = ggml_new_tensor_2d(m->weights, type_called(name), k, n);
        m->x[i] = ggml_new_tensor_2d(m->others, GGML_TYPE_F32, k, rows);
        m->y[i] = ggml_mul_mat(m->others, m->w[i], m->x[i]);
        ggml_build_forward_expand(m->graph, m->y[i]);
    }
    ggml_backend_buffer_type_t type = choose(m, plain);
    m->where = ggml_backend_buft_name(type);
    m->weight_buffer = ggml_backend_alloc_ctx_tensors_from_buft(m->weights, type);
    m->other_buffer = ggml_backend_alloc_ctx_tensors(m->others, m->backend);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    params.paused = true;
    m->pool = ggml_threadpool_new(&params);
    ggml_backend_cpu_set_n_threads(m->backend, threads);
    ggml_backend_cpu_set_threadpool(m->backend, m->pool);
    return m->weight_buffer == NULL || m->other_buffer == NULL || m->pool == NULL ? NULL : m;
}

const char *matmul_where(const struct matmul *m) { return m->where; }

void matmul_set(struct matmul *m, int copy, const void *weights, const float *x) {
    ggml_backend_tensor_set(m->w[copy], weights, 0, ggml_nbytes(m->w[copy]));
    ggml_backend_tensor_set(m->x[copy], x, 0, ggml_nbytes(m->x[copy]));
}

// The threads wait for work without sleeping while the graph runs, and are stopped behind it: nothing else is running
// then that they could disturb.
int matmul_run(struct matmul *m) {
    ggml_threadpool_resume(m->pool);
    enum ggml_status status = ggml_backend_graph_compute(m->backend, m->graph);
    ggml_threadpool_pause(m->pool);
    return status;
}

void matmul_get(const struct matmul *m, int copy, float *y) {
    ggml_backend_tensor_get(m->y[copy], y, 0, ggml_nbytes(m->y[copy]));
}

void matmul_free(struct matmul *m) {
    ggml_backend_free(m->backend);
    ggml_threadpool_free(m->pool);
    ggml_backend_buffer_free(m->weight_buffer);
    ggml_backend_buffer_free(m->other_buffer);
    ggml_free(m->weights);
    ggml_free(m->others);
    free(m->w);
    free(m);
}
