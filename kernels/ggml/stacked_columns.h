// The columns of a product with a stack of matrices (GGML_OP_MUL_MAT of tensors with more than two
// dimensions): each matrix multiplies the columns of its own slice.
//
//     outputs[i3][i2][column] = weights[i3 / repeats3][i2 / repeats2] * inputs[i3][i2][column]
#pragma once

#include "ggml/ggml_internals.h"

struct StackedColumns {
    const ggml_tensor *weights;
    const ggml_tensor *inputs;
    const ggml_tensor *outputs;
    // How many slices of the inputs each matrix multiplies, in the third and fourth dimension.
    int64_t repeats2;
    int64_t repeats3;
    int64_t n_matrices;
    // Columns of each matrix.
    int64_t per_matrix;

    explicit StackedColumns(const ggml_tensor *op)
        : weights(op->src[0]), inputs(op->src[1]), outputs(op),
          repeats2(inputs->ne[2] / weights->ne[2]), repeats3(inputs->ne[3] / weights->ne[3]),
          n_matrices(weights->ne[2] * weights->ne[3]),
          per_matrix(inputs->ne[1] * repeats2 * repeats3) {}

    // Whether slices of inputs can be distributed evenly among the matrices.
    static bool fit(const ggml_tensor *weights, const ggml_tensor *inputs) {
        return inputs->ne[2] % weights->ne[2] == 0 && inputs->ne[3] % weights->ne[3] == 0;
    }

    int64_t n_columns() const { return n_matrices * per_matrix; }

    const char *matrix(int64_t m) const {
        return static_cast<const char *>(weights->data) + m % weights->ne[2] * weights->nb[2] +
               m / weights->ne[2] * weights->nb[3];
    }
    // Column c of those that matrix m multiplies.
    const float *input(int64_t m, int64_t c) const {
        return reinterpret_cast<const float *>(at(inputs, m, c));
    }
    float *output(int64_t m, int64_t c) const {
        return reinterpret_cast<float *>(const_cast<char *>(at(outputs, m, c)));
    }

  private:
    const char *at(const ggml_tensor *tensor, int64_t m, int64_t c) const {
        const int64_t i1 = c % inputs->ne[1];
        const int64_t repeat = c / inputs->ne[1];
        const int64_t i2 = m % weights->ne[2] * repeats2 + repeat % repeats2;
        const int64_t i3 = m / weights->ne[2] * repeats3 + repeat / repeats2;
        return static_cast<const char *>(tensor->data) + i1 * tensor->nb[1] +
               i2 * tensor->nb[2] + i3 * tensor->nb[3];
    }
};
