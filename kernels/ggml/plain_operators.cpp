// Products of activations with each other (attention without flash attention, slices of a model's
// hidden state), with weights that other operators read too (`token_embd` as the output), and with
// adapters; and the softmax of attention.
//
// llama.cpp computes a single column by a dot product of rows, and two and more by tiles that add up in
// another order. A model has few and small products of this kind, if any.
#include "ggml/plain_operators.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml/column_tiles.h"
#include "ggml/stacked_columns.h"

namespace {

constexpr int hadamard_hint = 1;  // in op_params[1]: llama.cpp transforms each row by itself

// Whether the CPU reads the tensor as it is: llama.cpp has layouts of its own too.
bool is_plain(const ggml_tensor *tensor) {
    if (tensor->buffer == nullptr || tensor->extra != nullptr) return false;
    ggml_backend_buffer_type *type = tensor->buffer->buft;
    return type->iface.is_host != nullptr && type->iface.is_host(type);
}

bool is_float(CacheType type) {
    return type == CacheType::f32 || type == CacheType::f16 || type == CacheType::bf16;
}

// Rows of a matrix that a thread multiplies at a time: so many that each thread gets several pieces.
int64_t rows_at_once(const StackedColumns &columns, int n_threads) {
    const int64_t fair = columns.weights->ne[1] * columns.n_matrices / (4 * n_threads);
    return std::clamp<int64_t>((fair + 15) / 16 * 16, 16, 256);
}

// Call `multiply` with each piece of each matrix that is this thread's: matrix, first row, rows.
template <class Multiply>
void for_each_piece(const StackedColumns &columns, const ggml_compute_params *params,
                    Multiply multiply) {
    const int64_t n_rows = columns.weights->ne[1], rows = rows_at_once(columns, params->nth);
    const int64_t n_pieces = (n_rows + rows - 1) / rows;
    for (int64_t i = params->ith; i < columns.n_matrices * n_pieces; i += params->nth) {
        const int64_t first = i % n_pieces * rows;
        multiply(i / n_pieces, first, std::min(rows, n_rows - first));
    }
}

// Products of floats.
struct FloatTraits : ggml::cpu::tensor_traits {
    explicit FloatTraits(bool over_cells) : over_cells(over_cells) {}

    bool work_size(int, const ggml_tensor *, size_t &size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackedColumns columns(op);
        for_each_piece(columns, params, [&](int64_t matrix, int64_t first, int64_t n_rows) {
            constexpr int64_t most = 32;  // columns that stay in the second-level cache
            const float *inputs[most];
            float *outputs[most];
            const ggml_tensor *weights = columns.weights;
            for (int64_t c = 0; c < columns.per_matrix; c += most) {
                const int64_t n = std::min(most, columns.per_matrix - c);
                for (int64_t i = 0; i < n; i++) {
                    inputs[i] = reinterpret_cast<const float *>(columns.input(matrix, c + i));
                    outputs[i] = columns.output(matrix, c + i) + first;
                }
                kernels->multiply_plain({cache_type(weights),
                                         columns.matrix(matrix) + first * weights->nb[1],
                                         weights->nb[1], n_rows, inputs, outputs, n, weights->ne[0],
                                         over_cells});
            }
        });
        return true;
    }

    bool over_cells;
};

// Products of quantised weights, by ggml's dot product of two rows.
struct QuantisedTraits : ggml::cpu::tensor_traits {
    static const ggml_type_traits_cpu &cpu_type(const ggml_tensor *weights) {
        return *ggml_api.cpu_type(weights->type);
    }
    static size_t column_bytes(const ggml_tensor *weights) {
        return ggml_api.row_size(cpu_type(weights).vec_dot_type, weights->ne[0]);
    }

    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        const StackedColumns columns(op);
        size = columns.n_matrices * columns.per_matrix * column_bytes(op->src[0]);
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackedColumns columns(op);
        const ggml_tensor *weights = op->src[0];
        const ggml_type_traits_cpu &type = cpu_type(weights);
        const auto convert = ggml_api.cpu_type(type.vec_dot_type)->from_float;
        const size_t bytes = column_bytes(weights);
        char *work = static_cast<char *>(params->wdata);
        const int n_inputs = static_cast<int>(weights->ne[0]);
        for (int64_t i = params->ith; i < columns.n_matrices * columns.per_matrix;
             i += params->nth) {
            const char *column = columns.input(i / columns.per_matrix, i % columns.per_matrix);
            convert(reinterpret_cast<const float *>(column), work + i * bytes, n_inputs);
        }
        ggml_api.barrier(params->threadpool);
        for_each_piece(columns, params, [&](int64_t matrix, int64_t first, int64_t n_rows) {
            const char *prepared = work + matrix * columns.per_matrix * bytes;
            for (int64_t row = first; row < first + n_rows; row++) {
                const char *at = columns.matrix(matrix) + row * weights->nb[1];
                for (int64_t c = 0; c < columns.per_matrix; c++) {
                    float *output = columns.output(matrix, c) + row;
                    type.vec_dot(n_inputs, output, 0, at, 0, prepared + c * bytes, 0, 1);
                }
            }
        });
        return true;
    }
};

// The softmax over the cells that a row of attention sees.
struct SoftmaxTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *scores = op->src[0], *mask = op->src[1], *sinks = op->src[2];
        float parameters[2];
        std::memcpy(parameters, op->op_params, sizeof parameters);
        const int64_t n_rows = scores->ne[1], n_heads = scores->ne[2];
        for (int64_t i = params->ith; i < n_rows * n_heads * scores->ne[3]; i += params->nth) {
            const int64_t row = i % n_rows, head = i / n_rows % n_heads, stream = i / n_rows / n_heads;
            const auto at = [&](const ggml_tensor *tensor) {
                return static_cast<char *>(tensor->data) + row * tensor->nb[1] +
                       head % tensor->ne[2] * tensor->nb[2] + stream % tensor->ne[3] * tensor->nb[3];
            };
            PlainSoftmax job = {};
            job.scores = reinterpret_cast<const float *>(at(scores));
            job.outputs = reinterpret_cast<float *>(at(op));
            job.n = scores->ne[0];
            job.mask = at(mask);
            job.mask_is_half = cache_type(mask) == CacheType::f16;
            job.scale = parameters[0];
            job.slope = alibi_slope(parameters[1], n_heads, head);
            if (sinks != nullptr) job.sink = static_cast<const float *>(sinks->data) + head;
            kernels->softmax(job);
        }
        return true;
    }
};

bool is_softmax_of_cells(const ggml_tensor *op) {
    if (op->op != ggml_api.soft_max || op->src[1] == nullptr) return false;
    const CacheType mask = cache_type(op->src[1]);
    return (mask == CacheType::f16 || mask == CacheType::f32) && has_float_rows(op->src[0]) &&
           has_float_rows(op) && is_plain(op->src[0]) && is_plain(op->src[1]);
}

}  // namespace

ggml::cpu::tensor_traits *plain_operator(const ggml_tensor *op) {
    static FloatTraits floats(false), over_cells(true);
    static QuantisedTraits quantised;
    static SoftmaxTraits softmax;
    if (op->op == ggml_api.soft_max) return is_softmax_of_cells(op) ? &softmax : nullptr;
    const ggml_tensor *weights = op->src[0], *inputs = op->src[1];
    if (op->op_params[1] == hadamard_hint || !has_float_rows(inputs) || !has_float_rows(op) ||
        !is_plain(weights) || !is_plain(inputs)) {
        return nullptr;
    }
    const CacheType type = cache_type(weights);
    if (is_float(type)) {
        if (weights->nb[0] != (type == CacheType::f32 ? 4 : 2)) return nullptr;
        return is_softmax_of_cells(inputs) ? &over_cells : &floats;
    }
    // Types without a packed form are left to llama.cpp, which is several times faster with tiles.
    if (weight_type(weights) == WeightType::none) return nullptr;
    return &quantised;
}
