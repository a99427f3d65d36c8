// Products of a packed matrix with any number of columns: outputs = weights * inputs.
#include <algorithm>
#include <limits>
#include <vector>

#include "ggml/operator_kinds.h"
#include "ggml/operators.h"
#include "ggml/packed_matrix.h"
#include "packed/weight_stream.h"

// See operators.h. The thread that computes a graph has a limit; the other threads of its pool
// learn it from that thread.
struct RowLimit {
    // The limit applies to matrices with this many rows.
    int64_t n_rows = 0;
    // The groups of rows to compute, in increasing order.
    std::vector<int32_t> groups;
};

namespace {

thread_local RowLimit *row_limit = nullptr;

// A panel of prepared columns stays in the second-level cache while the groups of rows are
// multiplied with it.
constexpr size_t panel_bytes = 768 << 10;

struct PackedProduct {
    const ggml_tensor *inputs;
    const ggml_tensor *outputs;
    PackedMatrix matrix;
    int64_t n_columns;
    ColumnTiles tiles;

    explicit PackedProduct(const ggml_tensor *op)
        : inputs(op->src[1]), outputs(op), matrix(op->src[0]),
          n_columns(inputs->ne[1] * inputs->ne[2] * inputs->ne[3]),
          tiles(matrix.type, n_columns) {}

    // The work memory holds the address of the limit, then the prepared columns.
    static constexpr size_t limit_bytes = work_alignment;
    size_t work_bytes() const {
        return matrix.column_bytes * n_columns + limit_bytes + work_alignment;
    }

    const float *column(int64_t c) const {
        const int64_t i1 = c % inputs->ne[1];
        const int64_t rest = c / inputs->ne[1];
        return reinterpret_cast<const float *>(
            static_cast<const char *>(inputs->data) + i1 * inputs->nb[1] +
            rest % inputs->ne[2] * inputs->nb[2] + rest / inputs->ne[2] * inputs->nb[3]);
    }

    // A thread prepares whole tiles, or a part of each tile if there are few: never single
    // columns of a tile, whose words are interleaved, so that threads would wait for each other's
    // cache lines.
    void prepare(char *prepared, int thread, int n_threads) const {
        const int64_t n_blocks = matrix.n_blocks();
        const bool whole = tiles.count >= 4 * n_threads;
        const int64_t first_block = whole ? 0 : n_blocks * thread / n_threads;
        const int64_t end_block = whole ? n_blocks : n_blocks * (thread + 1) / n_threads;
        if (first_block == end_block) return;
        for (int64_t t = whole ? thread : 0; t < tiles.count; t += whole ? n_threads : 1) {
            char *tile = prepared + tiles.first(t) * matrix.column_bytes;
            for (int i = 0; i < tiles.size(t); i++) {
                matrix.prepare(column(tiles.first(t) + i), first_block, end_block, tile,
                               tiles.size(t), i);
            }
        }
    }

    // Set a thread's share of the outputs to -infinity, for those that no group writes.
    void fill(int thread, int n_threads) const {
        auto *out = static_cast<float *>(outputs->data);
        const int64_t n = matrix.n_rows * n_columns;
        std::fill(out + n * thread / n_threads, out + n * (thread + 1) / n_threads,
                  -std::numeric_limits<float>::infinity());
    }

    // Multiply one group of rows with tiles first_tile to end_tile of the columns.
    void multiply(const char *prepared, int64_t group, int64_t first_tile,
                  int64_t end_tile) const {
        auto *out = static_cast<float *>(outputs->data) + matrix.first_row(group);
        for (int64_t t = first_tile; t < end_tile; t++) {
            const int64_t c = tiles.first(t);
            // The outputs of a tile are far apart. With 1,536 inputs, 512 columns take 0.98 of the
            // time if the cache fetches them while they are computed.
            for (int i = 0; i < tiles.size(t); i++) {
                __builtin_prefetch(out + (c + i) * matrix.n_rows, 1);
            }
            kernels->multiply(matrix.type, matrix.group(0, group),
                              prepared + c * matrix.column_bytes, matrix.n_inputs, tiles.size(t),
                              matrix.rows_of(group), out + c * matrix.n_rows, matrix.n_rows);
        }
    }
};

struct PackedProductTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        expect_weights(op->src[0]);
        size = PackedProduct(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const PackedProduct product(op);
        char *work = aligned(params->wdata);
        auto &limit = *reinterpret_cast<const RowLimit **>(work);
        char *prepared = work + PackedProduct::limit_bytes;

        // Prepare the columns, and tell all threads the limit.
        if (params->ith == 0) {
            n_products++;
            start_turns(params);
            begin_weights(op->src[0]);
            const bool is_limited =
                row_limit != nullptr && row_limit->n_rows == product.matrix.n_rows;
            limit = is_limited ? row_limit : nullptr;
        }
        product.prepare(prepared, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);

        // Multiply all groups of rows, or those of the limit.
        if (limit == nullptr) {
            multiply(product, params, prepared, nullptr, product.matrix.n_groups);
        } else {
            product.fill(params->ith, params->nth);
            ggml_api.barrier(params->threadpool);
            multiply(product, params, prepared, limit->groups.data(),
                     static_cast<int64_t>(limit->groups.size()));
        }
        kernels->finish();
        return true;
    }

    // A thread's part of the product: it takes turns, panel by panel of the columns, and within a
    // panel chunk by chunk of the groups of rows. `groups` lists these; null: 0 ... n_groups - 1.
    static void multiply(const PackedProduct &product, const ggml_compute_params *params,
                         const char *prepared, const int32_t *groups, int64_t n_groups) {
        const ColumnTiles &tiles = product.tiles;
        const int64_t panel_tiles = std::max<int64_t>(
            1, panel_bytes / (product.matrix.column_bytes * tiles.most + 1));
        const int64_t n_panels = (tiles.count + panel_tiles - 1) / panel_tiles;
        const int64_t chunk =
            groups_of_chunk(n_groups, product.matrix.group_bytes, params->nth);
        const int64_t n_chunks = (n_groups + chunk - 1) / chunk;
        take_turns(params, n_chunks * n_panels, [&](int64_t turn) {
            const int64_t first_group = turn % n_chunks * chunk;
            const int64_t end_group = std::min(n_groups, first_group + chunk);
            const int64_t first_tile = turn / n_chunks * panel_tiles;
            const int64_t end_tile = std::min(tiles.count, first_tile + panel_tiles);
            for (int64_t i = first_group; i < end_group; i++) {
                const int64_t group = groups == nullptr ? i : groups[i];
                product.multiply(prepared, group, first_tile, end_tile);
            }
        });
    }
};

}  // namespace

ggml::cpu::tensor_traits *packed_product() {
    static PackedProductTraits traits;
    return &traits;
}

RowLimit *new_row_limit(int64_t n_rows, const int32_t *rows, int64_t n) {
    auto *limit = new RowLimit{n_rows, {}};
    for (int64_t i = 0; i < n; i++) {
        const int32_t group = rows[i] / kernels->rows_per_group;
        if (limit->groups.empty() || limit->groups.back() != group) {
            limit->groups.push_back(group);
        }
    }
    return limit;
}

void delete_row_limit(RowLimit *limit) { delete limit; }

void set_row_limit(RowLimit *limit) { row_limit = limit; }
