// Products with a stack of packed matrices: each head or slice has its own matrix.
#include <algorithm>
#include <cstring>

#include "ggml/operator_kinds.h"
#include "ggml/packed_matrix.h"
#include "ggml/stacked_columns.h"
#include "packed/weight_stream.h"

namespace {

struct StackProduct {
    StackedColumns columns;
    PackedMatrix matrix;
    // The tiles of each matrix's columns.
    ColumnTiles tiles;

    explicit StackProduct(const ggml_tensor *op)
        : columns(op), matrix(op->src[0]), tiles(matrix.type, columns.per_matrix) {}

    // The work memory holds the prepared columns.
    size_t work_bytes() const {
        return matrix.column_bytes * columns.n_columns() + work_alignment;
    }
    char *prepared(char *work, int64_t m, int64_t tile) const {
        return work + (m * columns.per_matrix + tiles.first(tile)) * matrix.column_bytes;
    }

    // A thread prepares whole tiles (see PackedProduct).
    void prepare(char *work, int thread, int n_threads) const {
        for (int64_t i = thread; i < columns.n_matrices * tiles.count; i += n_threads) {
            const int64_t m = i / tiles.count;
            const int64_t t = i % tiles.count;
            for (int c = 0; c < tiles.size(t); c++) {
                matrix.prepare(columns.input(m, tiles.first(t) + c), 0, matrix.n_blocks(),
                               prepared(work, m, t), tiles.size(t), c);
            }
        }
    }

    // Multiply one group of rows of matrix m with all its columns.
    void multiply(char *work, int64_t m, int64_t group) const {
        float results[16 * 96];  // rows and columns of a tile of any instruction set
        const int lanes = kernels->rows_per_group;
        const int64_t row = matrix.first_row(group);
        for (int64_t t = 0; t < tiles.count; t++) {
            kernels->multiply(matrix.type, matrix.group(m, group), prepared(work, m, t),
                              matrix.n_inputs, tiles.size(t), lanes, results, lanes);
            for (int c = 0; c < tiles.size(t); c++) {
                std::memcpy(columns.output(m, tiles.first(t) + c) + row, results + c * lanes,
                            matrix.rows_of(group) * sizeof(float));
            }
        }
    }
};

struct StackProductTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        expect_weights(op->src[0]);
        size = StackProduct(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const StackProduct product(op);
        char *work = aligned(params->wdata);
        if (params->ith == 0) {
            n_products++;
            start_turns(params);
            begin_weights(op->src[0]);
        }
        product.prepare(work, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);

        // The groups of rows of all matrices, as if they were one.
        const int64_t per_matrix = product.matrix.n_groups;
        const int64_t n_groups = product.columns.n_matrices * per_matrix;
        const int64_t chunk =
            groups_of_chunk(n_groups, product.matrix.group_bytes, params->nth);
        const int64_t n_chunks = (n_groups + chunk - 1) / chunk;
        take_turns(params, n_chunks, [&](int64_t turn) {
            const int64_t end = std::min(n_groups, (turn + 1) * chunk);
            for (int64_t group = turn * chunk; group < end; group++) {
                product.multiply(work, group / per_matrix, group % per_matrix);
            }
        });
        kernels->finish();
        return true;
    }
};

}  // namespace

ggml::cpu::tensor_traits *stack_product() {
    static StackProductTraits traits;
    return &traits;
}
