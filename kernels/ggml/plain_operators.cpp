// Operators on tensors that are not packed, which llama.cpp would round differently in a batch:
// products of activations with each other (attention without flash attention, slices of a model's
// hidden state), with weights that other operators read too (`token_embd` as the output), and with
// adapters; and the softmax of attention.
//
// llama.cpp computes a single column as dot products of rows, and two or more with tiles, which
// add up in another order. A model has few and small products of this kind, if any.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml/operator_kinds.h"
#include "ggml/packed_matrix.h"
#include "ggml/stacked_columns.h"

namespace {

// In op_params[1] of a product: llama.cpp transforms each row independently.
constexpr int hadamard_hint = 1;

// Whether the CPU can read a tensor as it is: llama.cpp has other layouts too.
bool is_plain(const ggml_tensor *tensor) {
    if (tensor->buffer == nullptr || tensor->extra != nullptr) return false;
    ggml_backend_buffer_type *type = tensor->buffer->buft;
    return type->iface.is_host != nullptr && type->iface.is_host(type);
}

bool is_float(NumberType type) {
    return type == NumberType::f32 || type == NumberType::f16 || type == NumberType::bf16;
}

// --- the share of a thread ---

// Some rows of one matrix of a stack.
struct Piece {
    int64_t matrix;
    int64_t first_row;
    int64_t n_rows;
};

// How many rows a piece has: few enough that each thread gets several pieces.
int64_t rows_of_piece(const StackedColumns &columns, int n_threads) {
    const int64_t fair = columns.weights->ne[1] * columns.n_matrices / (4 * n_threads);
    return std::clamp<int64_t>((fair + 15) / 16 * 16, 16, 256);
}

// Call `multiply` with each piece that is this thread's.
template <class Multiply>
void for_each_piece(const StackedColumns &columns, const ggml_compute_params *params,
                    Multiply multiply) {
    const int64_t n_rows = columns.weights->ne[1];
    const int64_t rows = rows_of_piece(columns, params->nth);
    const int64_t per_matrix = (n_rows + rows - 1) / rows;
    for (int64_t i = params->ith; i < columns.n_matrices * per_matrix; i += params->nth) {
        const int64_t first_row = i % per_matrix * rows;
        multiply(Piece{i / per_matrix, first_row, std::min(rows, n_rows - first_row)});
    }
}

// --- products of floats ---

struct FloatProductTraits : ggml::cpu::tensor_traits {
    // Whether the product sums over cells (see PlainProductJob).
    bool over_cells;

    explicit FloatProductTraits(bool over_cells) : over_cells(over_cells) {}

    bool work_size(int, const ggml_tensor *, size_t &size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackedColumns columns(op);
        for_each_piece(columns, params, [&](const Piece &piece) { multiply(columns, piece); });
        return true;
    }

    void multiply(const StackedColumns &columns, const Piece &piece) const {
        constexpr int64_t most = 32;  // columns that stay in the second-level cache
        const float *inputs[most];
        float *outputs[most];
        const ggml_tensor *weights = columns.weights;
        const char *rows = columns.matrix(piece.matrix) + piece.first_row * weights->nb[1];
        for (int64_t c = 0; c < columns.per_matrix; c += most) {
            const int64_t n = std::min(most, columns.per_matrix - c);
            for (int64_t i = 0; i < n; i++) {
                inputs[i] = columns.input(piece.matrix, c + i);
                outputs[i] = columns.output(piece.matrix, c + i) + piece.first_row;
            }
            kernels->multiply_plain({number_type(weights), rows, weights->nb[1], piece.n_rows,
                                     inputs, outputs, n, weights->ne[0], over_cells});
        }
    }
};

// --- products of quantised weights, with ggml's dot product of two rows ---

struct QuantizedProductTraits : ggml::cpu::tensor_traits {
    static const ggml_type_traits_cpu &cpu_type(const ggml_tensor *weights) {
        return *ggml_api.cpu_type(weights->type);
    }
    // Bytes of a column that is converted to the type that the dot product takes.
    static size_t column_bytes(const ggml_tensor *weights) {
        return ggml_api.row_size(cpu_type(weights).vec_dot_type, weights->ne[0]);
    }

    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = StackedColumns(op).n_columns() * column_bytes(op->src[0]);
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackedColumns columns(op);
        const ggml_tensor *weights = op->src[0];
        const ggml_type_traits_cpu &type = cpu_type(weights);
        const int n_inputs = static_cast<int>(weights->ne[0]);
        const size_t bytes = column_bytes(weights);
        char *converted = static_cast<char *>(params->wdata);

        const auto convert = ggml_api.cpu_type(type.vec_dot_type)->from_float;
        for (int64_t i = params->ith; i < columns.n_columns(); i += params->nth) {
            const float *column = columns.input(i / columns.per_matrix, i % columns.per_matrix);
            convert(column, converted + i * bytes, n_inputs);
        }
        ggml_api.barrier(params->threadpool);
        for_each_piece(columns, params, [&](const Piece &piece) {
            const char *inputs = converted + piece.matrix * columns.per_matrix * bytes;
            for (int64_t i = 0; i < piece.n_rows; i++) {
                const int64_t row = piece.first_row + i;
                const char *row_weights = columns.matrix(piece.matrix) + row * weights->nb[1];
                for (int64_t c = 0; c < columns.per_matrix; c++) {
                    float *output = columns.output(piece.matrix, c) + row;
                    type.vec_dot(n_inputs, output, 0, row_weights, 0, inputs + c * bytes, 0, 1);
                }
            }
        });
        return true;
    }
};

// --- the softmax over the cells that a row of attention sees ---

struct SoftmaxTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *scores = op->src[0];
        const ggml_tensor *mask = op->src[1];
        const ggml_tensor *sinks = op->src[2];
        float parameters[2];
        std::memcpy(parameters, op->op_params, sizeof parameters);
        const float scale = parameters[0];
        const float max_bias = parameters[1];
        const int64_t n_rows = scores->ne[1];
        const int64_t n_heads = scores->ne[2];
        const int64_t n_streams = scores->ne[3];
        for (int64_t i = params->ith; i < n_rows * n_heads * n_streams; i += params->nth) {
            const int64_t row = i % n_rows;
            const int64_t head = i / n_rows % n_heads;
            const int64_t stream = i / n_rows / n_heads;
            const auto row_of = [&](const ggml_tensor *tensor) {
                return static_cast<char *>(tensor->data) + row * tensor->nb[1] +
                       head % tensor->ne[2] * tensor->nb[2] +
                       stream % tensor->ne[3] * tensor->nb[3];
            };
            SoftmaxJob job = {};
            job.scores = reinterpret_cast<const float *>(row_of(scores));
            job.outputs = reinterpret_cast<float *>(row_of(op));
            job.n = scores->ne[0];
            job.mask = row_of(mask);
            job.mask_is_half = number_type(mask) == NumberType::f16;
            job.scale = scale;
            job.slope = alibi_slope(max_bias, n_heads, head);
            if (sinks != nullptr) job.sink = static_cast<const float *>(sinks->data) + head;
            kernels->softmax(job);
        }
        return true;
    }
};

bool is_softmax_of_cells(const ggml_tensor *op) {
    if (op->op != ggml_api.soft_max || op->src[1] == nullptr) return false;
    const NumberType mask = number_type(op->src[1]);
    return (mask == NumberType::f16 || mask == NumberType::f32) && has_float_rows(op->src[0]) &&
           has_float_rows(op) && is_plain(op->src[0]) && is_plain(op->src[1]) &&
           op->ne[0] <= most_cells;
}

}  // namespace

ggml::cpu::tensor_traits *plain_operator(const ggml_tensor *op) {
    static FloatProductTraits float_product(false);
    static FloatProductTraits float_product_over_cells(true);
    static QuantizedProductTraits quantized_product;
    static SoftmaxTraits softmax;
    if (op->op == ggml_api.soft_max) return is_softmax_of_cells(op) ? &softmax : nullptr;

    const ggml_tensor *weights = op->src[0];
    const ggml_tensor *inputs = op->src[1];
    if (op->op_params[1] == hadamard_hint || !has_float_rows(inputs) || !has_float_rows(op) ||
        !is_plain(weights) || !is_plain(inputs)) {
        return nullptr;
    }
    const NumberType type = number_type(weights);
    if (is_float(type)) {
        const size_t number_bytes = type == NumberType::f32 ? 4 : 2;
        if (weights->nb[0] != number_bytes) return nullptr;
        return is_softmax_of_cells(inputs) ? &float_product_over_cells : &float_product;
    }
    // Types without a packed form are left to llama.cpp, which is several times as fast with tiles.
    if (weight_type(weights) == WeightType::none) return nullptr;
    return &quantized_product;
}
