// Attention as one operator (GGML_OP_FLASH_ATTN_EXT).
#include <cstring>

#include "ggml/operator_kinds.h"
#include "ggml/packed_matrix.h"

namespace {

// The sources of the operator.
struct AttentionTensors {
    const ggml_tensor *queries;
    const ggml_tensor *keys;
    const ggml_tensor *values;
    const ggml_tensor *mask;   // may be null
    const ggml_tensor *sinks;  // may be null

    explicit AttentionTensors(const ggml_tensor *op)
        : queries(op->src[0]), keys(op->src[1]), values(op->src[2]), mask(op->src[3]),
          sinks(op->src[4]) {}
};

bool can_attend(const ggml_tensor *op) {
    const AttentionTensors from(op);
    const bool types_fit =
        has_float_rows(from.queries) && number_type(op) == NumberType::f32 &&
        number_type(from.keys) != NumberType::unsupported &&
        number_type(from.values) != NumberType::unsupported &&
        (from.mask == nullptr || number_type(from.mask) == NumberType::f16);
    const bool heads_fit = from.keys->ne[2] == from.values->ne[2] &&
                           from.queries->ne[2] % from.keys->ne[2] == 0;
    const bool streams_fit = from.keys->ne[3] == from.queries->ne[3] &&
                             from.values->ne[3] == from.queries->ne[3];
    const bool cells_fit = from.keys->ne[1] <= most_cells;
    return types_fit && heads_fit && streams_fit && cells_fit;
}

AttentionJob attention_job(const ggml_tensor *op) {
    const AttentionTensors from(op);
    AttentionJob job = {};
    job.queries = static_cast<const char *>(from.queries->data);
    job.query_row_stride = from.queries->nb[1];
    job.query_head_stride = from.queries->nb[2];
    job.query_stream_stride = from.queries->nb[3];
    job.keys = static_cast<const char *>(from.keys->data);
    job.key_cell_stride = from.keys->nb[1];
    job.key_head_stride = from.keys->nb[2];
    job.key_stream_stride = from.keys->nb[3];
    job.key_type = number_type(from.keys);
    job.values = static_cast<const char *>(from.values->data);
    job.value_cell_stride = from.values->nb[1];
    job.value_head_stride = from.values->nb[2];
    job.value_stream_stride = from.values->nb[3];
    job.value_type = number_type(from.values);
    if (from.mask != nullptr) {
        job.mask = static_cast<const char *>(from.mask->data);
        job.mask_row_stride = from.mask->nb[1];
        job.mask_head_stride = from.mask->nb[2];
        job.mask_stream_stride = from.mask->nb[3];
        job.n_mask_heads = from.mask->ne[2];
        job.n_mask_streams = from.mask->ne[3];
    }
    if (from.sinks != nullptr) job.sinks = static_cast<const float *>(from.sinks->data);
    job.outputs = static_cast<float *>(op->data);
    job.key_size = from.queries->ne[0];
    job.n_rows = from.queries->ne[1];
    job.n_heads = from.queries->ne[2];
    job.n_streams = from.queries->ne[3];
    job.value_size = from.values->ne[0];
    job.n_cells = from.keys->ne[1];
    job.n_kv_heads = from.keys->ne[2];
    float parameters[3];
    std::memcpy(parameters, op->op_params, sizeof parameters);
    job.scale = parameters[0];
    job.max_bias = parameters[1];
    job.softcap = parameters[2];
    return job;
}

struct AttentionTraits : ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        size = kernels->attention_bytes(attention_job(op), n_threads) + work_alignment;
        return true;
    }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        if (params->ith == 0) n_attentions++;
        kernels->attention(
            attention_job(op), params->ith, params->nth, aligned(params->wdata),
            [](void *pool) { ggml_api.barrier(static_cast<ggml_threadpool *>(pool)); },
            params->threadpool);
        return true;
    }
};

}  // namespace

ggml::cpu::tensor_traits *flash_attention(const ggml_tensor *op) {
    static AttentionTraits traits;
    return can_attend(op) ? &traits : nullptr;
}
