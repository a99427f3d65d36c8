#include "ggml/operators.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "ggml/column_tiles.h"
#include "ggml/plain_operators.h"
#include "ggml/stacked_columns.h"

// The groups of rows that products with a matrix of `n_rows` rows compute; their other outputs are
// -infinity. Of the thread that computes a graph; the other threads of its pool learn it from that one.
struct RowLimit {
    int64_t n_rows = 0;
    std::vector<int32_t> groups;
};

namespace {

thread_local RowLimit *row_limit = nullptr;

std::atomic<bool> products_enabled{true}, attention_enabled{true};
std::atomic<uint64_t> n_products{0}, n_attentions{0}, n_other_attentions{0};

// A panel of prepared columns that is used for one group of rows after the other stays in the
// second-level cache, and so does a chunk of groups.
constexpr size_t panel_bytes = 768 << 10, chunk_bytes = 256 << 10;

size_t rounded_up(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

// How many groups of rows a thread takes at once: a chunk that fits the cache, and small enough that
// the threads end together.
int64_t groups_of_chunk(int64_t n_groups, size_t group_bytes, int n_threads) {
    const int64_t fair = n_groups / (n_threads * 4) + 1;
    return std::min(fair, std::max<int64_t>(1, chunk_bytes / group_bytes));
}

// --- products ---

// outputs = weights * inputs, for the rows of one matrix and any number of columns.
struct Product {
    explicit Product(const ggml_tensor *op)
        : weights(op->src[0]), inputs(op->src[1]), outputs(op),
          type(weight_type(weights)), n_inputs(weights->ne[0]), n_rows(weights->ne[1]),
          n_columns(inputs->ne[1] * inputs->ne[2] * inputs->ne[3]), tiles(type, n_columns),
          column_bytes(kernels->column_bytes(type, n_inputs)),
          group_bytes(kernels->group_bytes(type, n_inputs)),
          n_groups((n_rows + kernels->rows_per_group - 1) / kernels->rows_per_group) {}

    // In front of the prepared columns is the address of the limit.
    size_t work_bytes() const { return column_bytes * n_columns + 2 * 64; }

    const float *column(int64_t c) const {
        const int64_t i1 = c % inputs->ne[1], rest = c / inputs->ne[1];
        return reinterpret_cast<const float *>(
            static_cast<const char *>(inputs->data) + i1 * inputs->nb[1] +
            rest % inputs->ne[2] * inputs->nb[2] + rest / inputs->ne[2] * inputs->nb[3]);
    }

    // Each thread prepares whole tiles, or of a few tiles a part of each: never single columns of a
    // tile, whose words stand between each other's, so that the threads would wait for cache lines.
    void prepare(char *prepared, int thread, int n_threads) const {
        const int64_t n_blocks = n_inputs / kernels->inputs_per_block(type);
        const bool whole = tiles.count >= 4 * n_threads;
        const int64_t first = whole ? 0 : n_blocks * thread / n_threads;
        const int64_t end = whole ? n_blocks : n_blocks * (thread + 1) / n_threads;
        if (first == end) return;
        for (int64_t t = whole ? thread : 0; t < tiles.count; t += whole ? n_threads : 1) {
            char *tile = prepared + tiles.first(t) * column_bytes;
            for (int i = 0; i < tiles.size(t); i++) {
                prepare_blocks(type, column(tiles.first(t) + i), first, end - first, tile,
                               tiles.size(t), i);
            }
        }
    }

    // A thread's share of the outputs that no group writes.
    void fill(int thread, int n_threads) const {
        auto *out = static_cast<float *>(outputs->data);
        const int64_t n = n_rows * n_columns;
        std::fill(out + n * thread / n_threads, out + n * (thread + 1) / n_threads,
                  -std::numeric_limits<float>::infinity());
    }

    void multiply(const char *prepared, const int32_t *groups, int64_t first_group,
                  int64_t end_group, int64_t first_tile, int64_t end_tile) const {
        const char *matrix = packed(weights);
        auto *out = static_cast<float *>(outputs->data);
        for (int64_t i = first_group; i < end_group; i++) {
            const int64_t g = groups == nullptr ? i : groups[i];
            const int64_t row = g * kernels->rows_per_group;
            const int rows = static_cast<int>(
                std::min<int64_t>(kernels->rows_per_group, n_rows - row));
            for (int64_t t = first_tile; t < end_tile; t++) {
                const int64_t c = tiles.first(t);
                kernels->multiply(type, matrix + g * group_bytes, prepared + c * column_bytes,
                                  n_inputs, tiles.size(t), rows, out + c * n_rows + row, n_rows);
            }
        }
    }

    const ggml_tensor *weights, *inputs, *outputs;
    WeightType type;
    int64_t n_inputs, n_rows, n_columns;
    Tiles tiles;
    size_t column_bytes, group_bytes;
    int64_t n_groups;
};

struct ProductTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = Product(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const Product product(op);
        char *work = aligned(params->wdata), *prepared = work + 64;
        auto &limit = *reinterpret_cast<const RowLimit **>(work);
        if (params->ith == 0) {
            n_products++;
            ggml_api.chunk_set(params->threadpool, params->nth);
            const bool is_limited = row_limit != nullptr && row_limit->n_rows == product.n_rows;
            limit = is_limited ? row_limit : nullptr;
        }
        product.prepare(prepared, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);
        const int32_t *listed = nullptr;
        int64_t n_groups = product.n_groups;
        if (limit != nullptr) {
            listed = limit->groups.data();
            n_groups = static_cast<int64_t>(limit->groups.size());
            product.fill(params->ith, params->nth);
            ggml_api.barrier(params->threadpool);
        }

        const int64_t panel_tiles = std::max<int64_t>(
            1, panel_bytes / (product.column_bytes * product.tiles.most + 1));
        const int64_t n_panels = (product.tiles.count + panel_tiles - 1) / panel_tiles;
        const int64_t groups = groups_of_chunk(n_groups, product.group_bytes, params->nth);
        const int64_t n_chunks = (n_groups + groups - 1) / groups;
        for (int64_t i = params->ith; i < n_chunks * n_panels;
             i = ggml_api.chunk_add(params->threadpool, 1)) {
            const int64_t group = i % n_chunks * groups, tile = i / n_chunks * panel_tiles;
            product.multiply(prepared, listed, group, std::min(n_groups, group + groups), tile,
                             std::min(product.tiles.count, tile + panel_tiles));
        }
        kernels->finish();
        return true;
    }
};

// --- products with a stack of matrices (each head or slice has its own) ---

struct StackProduct {
    explicit StackProduct(const ggml_tensor *op)
        : columns(op), type(weight_type(op->src[0])), n_inputs(op->src[0]->ne[0]),
          n_rows(op->src[0]->ne[1]), tiles(type, columns.per_matrix),
          column_bytes(kernels->column_bytes(type, n_inputs)),
          group_bytes(kernels->group_bytes(type, n_inputs)),
          n_groups((n_rows + kernels->rows_per_group - 1) / kernels->rows_per_group) {}

    int64_t n_columns() const { return columns.n_matrices * columns.per_matrix; }
    size_t work_bytes() const { return column_bytes * n_columns() + 64; }
    char *prepared(char *work, int64_t matrix, int64_t tile) const {
        return work + (matrix * columns.per_matrix + tiles.first(tile)) * column_bytes;
    }

    // Threads take whole tiles in turn, as Product does.
    void prepare(char *work, int thread, int n_threads) const {
        const int64_t n_blocks = n_inputs / kernels->inputs_per_block(type);
        for (int64_t i = thread; i < columns.n_matrices * tiles.count; i += n_threads) {
            const int64_t m = i / tiles.count, t = i % tiles.count;
            for (int c = 0; c < tiles.size(t); c++) {
                const char *column = columns.input(m, tiles.first(t) + c);
                prepare_blocks(type, reinterpret_cast<const float *>(column), 0, n_blocks,
                               prepared(work, m, t), tiles.size(t), c);
            }
        }
    }

    // One group of rows of one matrix, for all its columns.
    void multiply(char *work, int64_t m, int64_t g) const {
        float results[16 * 96];  // rows and columns of a tile of any instruction set
        const int lanes = kernels->rows_per_group;
        const int64_t row = g * lanes;
        const int rows = static_cast<int>(std::min<int64_t>(lanes, n_rows - row));
        const char *group = packed(columns.weights) + (m * n_groups + g) * group_bytes;
        for (int64_t t = 0; t < tiles.count; t++) {
            kernels->multiply(type, group, prepared(work, m, t), n_inputs, tiles.size(t), lanes,
                              results, lanes);
            for (int c = 0; c < tiles.size(t); c++) {
                std::memcpy(columns.output(m, tiles.first(t) + c) + row, results + c * lanes,
                            rows * sizeof(float));
            }
        }
    }

    StackedColumns columns;
    WeightType type;
    int64_t n_inputs, n_rows;
    Tiles tiles;
    size_t column_bytes, group_bytes;
    int64_t n_groups;
};

struct StackTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = StackProduct(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackProduct product(op);
        char *work = aligned(params->wdata);
        if (params->ith == 0) {
            n_products++;
            ggml_api.chunk_set(params->threadpool, params->nth);
        }
        product.prepare(work, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);

        const int64_t total = product.columns.n_matrices * product.n_groups;
        const int64_t groups = groups_of_chunk(total, product.group_bytes, params->nth);
        const int64_t n_chunks = (total + groups - 1) / groups;
        for (int64_t i = params->ith; i < n_chunks;
             i = ggml_api.chunk_add(params->threadpool, 1)) {
            for (int64_t g = i * groups; g < std::min(total, (i + 1) * groups); g++) {
                product.multiply(work, g / product.n_groups, g % product.n_groups);
            }
        }
        kernels->finish();
        return true;
    }
};

// --- products with a matrix for each expert (mixture of experts) ---

// outputs[token][slot] = weights[ids[token][slot]] * inputs[token][slot % slots of the inputs].
// The pairs of token and slot are sorted by expert; those of one expert are the columns of a
// product with its matrix.
struct ExpertProduct {
    explicit ExpertProduct(const ggml_tensor *op)
        : weights(op->src[0]), inputs(op->src[1]), ids(op->src[2]), outputs(op),
          type(weight_type(weights)), n_inputs(weights->ne[0]), n_rows(weights->ne[1]),
          n_experts(weights->ne[2]), n_slots(ids->ne[0]), n_pairs(ids->ne[0] * ids->ne[1]),
          column_bytes(kernels->column_bytes(type, n_inputs)),
          group_bytes(kernels->group_bytes(type, n_inputs)),
          n_groups((n_rows + kernels->rows_per_group - 1) / kernels->rows_per_group) {}

    // In the work memory: where each expert's pairs begin, the experts that have pairs, the pairs, the
    // prepared columns.
    size_t starts_bytes() const { return rounded_up((n_experts + 1) * sizeof(int64_t)); }
    size_t used_bytes() const { return rounded_up((n_experts + 1) * sizeof(int64_t)); }
    size_t pairs_bytes() const { return rounded_up(n_pairs * sizeof(int64_t)); }
    size_t work_bytes() const {
        return starts_bytes() + used_bytes() + pairs_bytes() + column_bytes * n_pairs + 64;
    }

    int32_t expert(int64_t pair) const {
        const char *at = static_cast<const char *>(ids->data) + pair % n_slots * ids->nb[0] +
                         pair / n_slots * ids->nb[1];
        int32_t id;
        std::memcpy(&id, at, sizeof id);
        return id;
    }
    // Also writes the number of experts that have pairs to used[0], and their numbers behind it.
    void sort(int64_t *starts, int64_t *used, int64_t *pairs) const {
        std::fill(starts, starts + n_experts + 1, 0);
        for (int64_t p = 0; p < n_pairs; p++) {
            if (expert(p) >= 0 && expert(p) < n_experts) starts[expert(p) + 1]++;
        }
        for (int64_t e = 0; e < n_experts; e++) starts[e + 1] += starts[e];
        const int64_t n_valid = starts[n_experts];
        for (int64_t p = n_pairs - 1; p >= 0; p--) {
            if (expert(p) >= 0 && expert(p) < n_experts) pairs[--starts[expert(p) + 1]] = p;
        }
        // Counting down has moved each end to its expert's beginning.
        for (int64_t e = 0; e < n_experts; e++) starts[e] = starts[e + 1];
        starts[n_experts] = n_valid;
        used[0] = 0;
        for (int64_t e = 0; e < n_experts; e++) {
            if (starts[e] < starts[e + 1]) used[++used[0]] = e;
        }
    }

    const float *column(int64_t pair) const {
        return reinterpret_cast<const float *>(
            static_cast<const char *>(inputs->data) +
            pair % n_slots % inputs->ne[1] * inputs->nb[1] + pair / n_slots * inputs->nb[2]);
    }
    float *output(int64_t pair) const {
        return reinterpret_cast<float *>(static_cast<char *>(outputs->data) +
                                         pair % n_slots * outputs->nb[1] +
                                         pair / n_slots * outputs->nb[2]);
    }

    void prepare(const int64_t *starts, const int64_t *pairs, char *prepared, int thread,
                 int n_threads) const {
        const int64_t n_blocks = n_inputs / kernels->inputs_per_block(type);
        int turn = 0;  // tiles in turn, as Product does
        for (int64_t e = 0; e < n_experts; e++) {
            const Tiles tiles(type, starts[e + 1] - starts[e]);
            for (int64_t t = 0; t < tiles.count; t++) {
                if (turn++ % n_threads != thread) continue;
                const int64_t first = starts[e] + tiles.first(t);
                for (int i = 0; i < tiles.size(t); i++) {
                    prepare_blocks(type, column(pairs[first + i]), 0, n_blocks,
                                   prepared + first * column_bytes, tiles.size(t), i);
                }
            }
        }
    }

    // One group of rows of one expert, for all its columns.
    void multiply(const int64_t *starts, const int64_t *pairs, const char *prepared, int64_t e,
                  int64_t g) const {
        float results[16 * 96];  // rows and columns of a tile of any instruction set
        const int lanes = kernels->rows_per_group;
        const int64_t row = g * lanes;
        const int rows = static_cast<int>(std::min<int64_t>(lanes, n_rows - row));
        const char *group = packed(weights) + (e * n_groups + g) * group_bytes;
        const Tiles tiles(type, starts[e + 1] - starts[e]);
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t c = starts[e] + tiles.first(t);
            kernels->multiply(type, group, prepared + c * column_bytes, n_inputs, tiles.size(t),
                              lanes, results, lanes);
            for (int i = 0; i < tiles.size(t); i++) {
                std::memcpy(output(pairs[c + i]) + row, results + i * lanes, rows * sizeof(float));
            }
        }
    }

    const ggml_tensor *weights, *inputs, *ids, *outputs;
    WeightType type;
    int64_t n_inputs, n_rows, n_experts, n_slots, n_pairs;
    size_t column_bytes, group_bytes;
    int64_t n_groups;
};

struct ExpertTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = ExpertProduct(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ExpertProduct product(op);
        char *work = aligned(params->wdata);
        auto *starts = reinterpret_cast<int64_t *>(work);
        auto *used = reinterpret_cast<int64_t *>(work += product.starts_bytes());
        auto *pairs = reinterpret_cast<int64_t *>(work += product.used_bytes());
        char *prepared = work + product.pairs_bytes();
        if (params->ith == 0) {
            n_products++;
            ggml_api.chunk_set(params->threadpool, params->nth);
            product.sort(starts, used, pairs);
        }
        ggml_api.barrier(params->threadpool);
        product.prepare(starts, pairs, prepared, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);

        // The matrices of the experts that have pairs, as if they were one. (A token uses a few of many:
        // turns for the others took a third of its time, 14.9 instead of 9.5 ms with 8 of 128 experts.)
        const int64_t n_groups = used[0] * product.n_groups;
        const int64_t groups = groups_of_chunk(n_groups, product.group_bytes, params->nth);
        for (int64_t i = params->ith; i * groups < n_groups;
             i = ggml_api.chunk_add(params->threadpool, 1)) {
            for (int64_t g = i * groups; g < std::min(n_groups, (i + 1) * groups); g++) {
                product.multiply(starts, pairs, prepared, used[1 + g / product.n_groups],
                                 g % product.n_groups);
            }
        }
        kernels->finish();
        return true;
    }
};

// --- attention ---

bool can_attend(const ggml_tensor *op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    return q->nb[0] == sizeof(float) &&
           cache_type(q) == CacheType::f32 && cache_type(op) == CacheType::f32 &&
           cache_type(k) != CacheType::unsupported && cache_type(v) != CacheType::unsupported &&
           k->ne[2] == v->ne[2] && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
           q->ne[2] % k->ne[2] == 0 && (mask == nullptr || cache_type(mask) == CacheType::f16);
}

AttentionJob attention_job(const ggml_tensor *op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    AttentionJob job = {};
    job.queries = static_cast<const char *>(q->data);
    job.query_row_stride = q->nb[1];
    job.query_head_stride = q->nb[2];
    job.query_stream_stride = q->nb[3];
    job.keys = static_cast<const char *>(k->data);
    job.key_cell_stride = k->nb[1];
    job.key_head_stride = k->nb[2];
    job.key_stream_stride = k->nb[3];
    job.key_type = cache_type(k);
    job.values = static_cast<const char *>(v->data);
    job.value_cell_stride = v->nb[1];
    job.value_head_stride = v->nb[2];
    job.value_stream_stride = v->nb[3];
    job.value_type = cache_type(v);
    if (mask != nullptr) {
        job.mask = static_cast<const char *>(mask->data);
        job.mask_row_stride = mask->nb[1];
        job.mask_head_stride = mask->nb[2];
        job.mask_stream_stride = mask->nb[3];
        job.n_mask_heads = mask->ne[2];
        job.n_mask_streams = mask->ne[3];
    }
    if (op->src[4] != nullptr) job.sinks = static_cast<const float *>(op->src[4]->data);
    job.outputs = static_cast<float *>(op->data);
    job.n_rows = q->ne[1];
    job.n_cells = k->ne[1];
    job.n_heads = q->ne[2];
    job.n_kv_heads = k->ne[2];
    job.n_streams = q->ne[3];
    job.key_size = q->ne[0];
    job.value_size = v->ne[0];
    float parameters[3];
    std::memcpy(parameters, op->op_params, sizeof parameters);
    job.scale = parameters[0];
    job.max_bias = parameters[1];
    job.softcap = parameters[2];
    return job;
}

struct AttentionTraits : ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor *op, size_t &size) override {
        size = kernels->attention_bytes(attention_job(op), n_threads) + 64;
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

// Stands in front of llama.cpp's own attention, to count what is left to it.
struct CountingTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *) override {
        if (params->ith == 0) n_other_attentions++;
        return false;
    }
};

// --- which operators are ours ---

// llama.cpp asks this of any operator that a tensor of the file may be used in: others have no second
// source (attention sinks are asked about as a GGML_OP_SCALE).
bool can_multiply(const ggml_tensor *op) {
    if (op->op != ggml_api.mul_mat && op->op != ggml_api.mul_mat_id) return false;
    const ggml_tensor *weights = op->src[0], *inputs = op->src[1];
    if (weights->data == nullptr && !products_enabled) return false;  // llama.cpp asks: load here?
    if (!is_packed(weights) || !can_pack(weights) || !has_float_rows(inputs)) return false;
    if (cache_type(op) != CacheType::f32) return false;
    return op->op == ggml_api.mul_mat ? StackedColumns::fit(weights, inputs)
                                      : op->src[2] != nullptr;
}

// Whether the weights of a product are packed, so that it has to be computed here: llama.cpp asked
// before whether it can be, of a worker's matrices nobody asked.
bool has_packed(const ggml_tensor *op) {
    const ggml_tensor *weights = op->src[0], *inputs = op->src[1];
    if (is_packed(weights)) return true;
    return packed_for_worker(weights) != nullptr && has_float_rows(inputs) &&
           cache_type(op) == CacheType::f32 &&
           (op->op == ggml_api.mul_mat_id || weights->ne[2] == 1);
}

struct Operators : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_device *, const ggml_tensor *op) override {
        return can_multiply(op);
    }

    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        if (op->op == ggml_api.mul_mat && has_packed(op)) {
            const ggml_tensor *weights = op->src[0];
            return weights->ne[2] * weights->ne[3] == 1
                       ? static_cast<ggml::cpu::tensor_traits *>(&product)
                       : &stack;
        }
        if (op->op == ggml_api.mul_mat_id && has_packed(op)) return &expert;
        check_readable(op);
        if (op->op == ggml_api.mul_mat || op->op == ggml_api.soft_max) {
            return attention_enabled ? plain_operator(op) : nullptr;
        }
        if (op->op != ggml_api.flash_attention) return nullptr;
        if (attention_enabled && can_attend(op)) return &attention;
        return &counting;
    }

    ProductTraits product;
    StackTraits stack;
    ExpertTraits expert;
    AttentionTraits attention;
    CountingTraits counting;
};

}  // namespace

ggml::cpu::extra_buffer_type *operators() {
    static Operators instance;
    return &instance;
}

void enable_operators(bool products, bool attention) {
    products_enabled = products;
    attention_enabled = attention;
}

RowLimit *new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n) {
    auto *limit = new RowLimit{n_rows, {}};
    for (int64_t i = 0; i < n; i++) {
        const int32_t group = rows[i] / kernels->rows_per_group;
        if (limit->groups.empty() || limit->groups.back() != group) limit->groups.push_back(group);
    }
    return limit;
}

void delete_row_limit(RowLimit *limit) { delete limit; }

void set_row_limit(RowLimit *limit) { row_limit = limit; }

OperatorCounts operator_counts() { return {n_products, n_attentions, n_other_attentions}; }
