// The columns of a product with a stack of matrices (GGML_OP_MUL_MAT of tensors with more than two
// dimensions): each matrix multiplies the columns that lie beside it.
#pragma once

#include "ggml/ggml_internals.h"

// outputs[i3][i2][column] = weights[i3 / repeats3][i2 / repeats2] * inputs[i3][i2][column].
struct StackedColumns {
    explicit StackedColumns(const ggml_tensor *op)
        : weights(op->src[0]), inputs(op->src[1]), outputs(op),
          repeats2(inputs->ne[2] / weights->ne[2]), repeats3(inputs->ne[3] / weights->ne[3]),
          n_matrices(weights->ne[2] * weights->ne[3]), per_matrix(inputs->ne[1] * repeats2 * repeats3) {}

    static bool fit(const ggml_tensor *weights, const ggml_tensor *inputs) {
        return inputs->ne[2] % weights->ne[2] == 0 && inputs->ne[3] % weights->ne[3] == 0;
    }

    const char *matrix(int64_t m) const {
        return static_cast<const char *>(weights->data) + m % weights->ne[2] * weights->nb[2] +
               m / weights->ne[2] * weights->nb[3];
    }
    // Column c of those that matrix m multiplies.
    const char *input(int64_t m, int64_t c) const { return at(inputs, m, c); }
    float *output(int64_t m, int64_t c) const {
        return reinterpret_cast<float *>(const_cast<char *>(at(outputs, m, c)));
    }

    const ggml_tensor *weights, *inputs, *outputs;
    int64_t repeats2, repeats3, n_matrices, per_matrix;

  private:
    const char *at(const ggml_tensor *tensor, int64_t m, int64_t c) const {
        const int64_t i1 = c % inputs->ne[1], repeat = c / inputs->ne[1];
        const int64_t i2 = m % weights->ne[2] * repeats2 + repeat % repeats2;
        const int64_t i3 = m / weights->ne[2] * repeats3 + repeat / repeats2;
        return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
               i3 * tensor->nb[3];
    }
};
