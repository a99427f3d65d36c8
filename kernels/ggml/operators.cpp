#include "ggml/operators.h"

#include "ggml/operator_kinds.h"
#include "ggml/packed_matrix.h"
#include "ggml/stacked_columns.h"

std::atomic<uint64_t> n_products{0};
std::atomic<uint64_t> n_attentions{0};

namespace {

std::atomic<bool> products_enabled{true};
std::atomic<bool> attention_enabled{true};
std::atomic<uint64_t> n_other_attentions{0};

// Leaves attention to llama.cpp, and counts that.
struct CountingTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }
    bool compute_forward(ggml_compute_params *params, ggml_tensor *) override {
        if (params->ith == 0) n_other_attentions++;
        return false;
    }
};

// Whether a product can be computed with packed weights. llama.cpp asks this about each tensor of
// a file, with each operator that it may be used in. (Some of these have no second source: it
// asks about attention sinks as a GGML_OP_SCALE.)
bool can_multiply(const ggml_tensor *op) {
    if (op->op != ggml_api.mul_mat && op->op != ggml_api.mul_mat_id) return false;
    const ggml_tensor *weights = op->src[0];
    const ggml_tensor *inputs = op->src[1];
    // Weights without data are about to be loaded: the question is whether we want them.
    if (weights->data == nullptr && !products_enabled) return false;
    if (!is_packed(weights) || !can_pack(weights) || !has_float_rows(inputs)) return false;
    if (number_type(op) != NumberType::f32) return false;
    return op->op == ggml_api.mul_mat ? StackedColumns::fit(weights, inputs)
                                      : op->src[2] != nullptr;
}

// Whether the weights of a product are packed, so that it must be computed here. (For a worker's
// matrices llama.cpp did not ask whether it can be.)
bool has_packed_weights(const ggml_tensor *op) {
    const ggml_tensor *weights = op->src[0];
    if (is_packed(weights)) return true;
    return packed_for_worker(weights) != nullptr && has_float_rows(op->src[1]) &&
           number_type(op) == NumberType::f32 &&
           (op->op == ggml_api.mul_mat_id || weights->ne[2] == 1);
}

struct Operators : ggml::cpu::extra_buffer_type {
    CountingTraits counting;

    bool supports_op(ggml_backend_device *, const ggml_tensor *op) override {
        return can_multiply(op);
    }

    // What computes an operator; null: llama.cpp's own code.
    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        if (op->op == ggml_api.mul_mat && has_packed_weights(op)) {
            const ggml_tensor *weights = op->src[0];
            const bool is_one_matrix = weights->ne[2] * weights->ne[3] == 1;
            return is_one_matrix ? packed_product() : stack_product();
        }
        if (op->op == ggml_api.mul_mat_id && has_packed_weights(op)) return expert_product();
        check_readable(op);
        if (op->op == ggml_api.mul_mat || op->op == ggml_api.soft_max) {
            return attention_enabled ? plain_operator(op) : nullptr;
        }
        if (op->op != ggml_api.flash_attention) return nullptr;
        ggml::cpu::tensor_traits *ours = attention_enabled ? flash_attention(op) : nullptr;
        return ours != nullptr ? ours : &counting;
    }
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

OperatorCounts operator_counts() { return {n_products, n_attentions, n_other_attentions}; }
