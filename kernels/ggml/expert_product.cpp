// Products with a packed matrix for each expert of a mixture of experts:
//
//     outputs[token][slot] = weights[ids[token][slot]] * inputs[token][slot % slots of the inputs]
//
// The pairs of a token and a slot are sorted by expert. Those of one expert are the columns of a
// product with its matrix.
#include <algorithm>
#include <cstring>

#include "ggml/operator_kinds.h"
#include "ggml/packed_matrix.h"
#include "packed/weight_stream.h"

namespace {

// The pairs by expert, in the work memory.
struct PairsByExpert {
    // [n_experts + 1]: the pairs of expert e are pairs[starts[e]] to pairs[starts[e + 1]].
    int64_t *starts;
    // How many experts have pairs, then these experts.
    int64_t *used;
    int64_t *pairs;

    int64_t first(int64_t expert) const { return starts[expert]; }
    int64_t n(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
    int64_t n_used() const { return used[0]; }
    int64_t used_expert(int64_t i) const { return used[1 + i]; }
};

struct ExpertProduct {
    const ggml_tensor *inputs;
    const ggml_tensor *ids;
    const ggml_tensor *outputs;
    PackedMatrix matrix;
    int64_t n_experts;
    // Experts of each token.
    int64_t n_slots;
    int64_t n_pairs;

    explicit ExpertProduct(const ggml_tensor *op)
        : inputs(op->src[1]), ids(op->src[2]), outputs(op), matrix(op->src[0]),
          n_experts(op->src[0]->ne[2]), n_slots(ids->ne[0]), n_pairs(ids->ne[0] * ids->ne[1]) {}

    // --- work memory: the pairs by expert, then the prepared columns ---

    size_t expert_list_bytes() const { return aligned_bytes((n_experts + 1) * sizeof(int64_t)); }
    size_t pairs_bytes() const { return aligned_bytes(n_pairs * sizeof(int64_t)); }
    size_t prepared_at() const { return 2 * expert_list_bytes() + pairs_bytes(); }
    size_t work_bytes() const {
        return prepared_at() + matrix.column_bytes * n_pairs + work_alignment;
    }
    PairsByExpert pairs_in(char *work) const {
        return {reinterpret_cast<int64_t *>(work),
                reinterpret_cast<int64_t *>(work + expert_list_bytes()),
                reinterpret_cast<int64_t *>(work + 2 * expert_list_bytes())};
    }

    // --- the tensors, by pair ---

    int32_t expert(int64_t pair) const {
        const char *at = static_cast<const char *>(ids->data) + pair % n_slots * ids->nb[0] +
                         pair / n_slots * ids->nb[1];
        int32_t id;
        std::memcpy(&id, at, sizeof id);
        return id;
    }
    bool has_expert(int64_t pair) const { return expert(pair) >= 0 && expert(pair) < n_experts; }
    const float *column(int64_t pair) const {
        const int64_t slot = pair % n_slots % inputs->ne[1];
        return reinterpret_cast<const float *>(static_cast<const char *>(inputs->data) +
                                               slot * inputs->nb[1] +
                                               pair / n_slots * inputs->nb[2]);
    }
    float *output(int64_t pair) const {
        return reinterpret_cast<float *>(static_cast<char *>(outputs->data) +
                                         pair % n_slots * outputs->nb[1] +
                                         pair / n_slots * outputs->nb[2]);
    }

    // --- the work ---

    // Sort the pairs by expert, with a counting sort.
    void sort(const PairsByExpert &by_expert) const {
        int64_t *starts = by_expert.starts;
        // Count each expert's pairs, one place further on; then sum up, to get where each one ends.
        std::fill(starts, starts + n_experts + 1, 0);
        for (int64_t p = 0; p < n_pairs; p++) {
            if (has_expert(p)) starts[expert(p) + 1]++;
        }
        for (int64_t e = 0; e < n_experts; e++) starts[e + 1] += starts[e];
        const int64_t n_valid = starts[n_experts];
        // Place the pairs from the last one on: this moves each end to the expert's first pair.
        for (int64_t p = n_pairs - 1; p >= 0; p--) {
            if (has_expert(p)) by_expert.pairs[--starts[expert(p) + 1]] = p;
        }
        for (int64_t e = 0; e < n_experts; e++) starts[e] = starts[e + 1];
        starts[n_experts] = n_valid;
        // List the experts that have pairs.
        int64_t *used = by_expert.used;
        used[0] = 0;
        for (int64_t e = 0; e < n_experts; e++) {
            if (by_expert.n(e) > 0) used[++used[0]] = e;
        }
    }

    // A thread prepares whole tiles (see PackedProduct).
    void prepare(const PairsByExpert &by_expert, char *prepared, int thread,
                 int n_threads) const {
        int turn = 0;
        for (int64_t e = 0; e < n_experts; e++) {
            const ColumnTiles tiles(matrix.type, by_expert.n(e));
            for (int64_t t = 0; t < tiles.count; t++) {
                if (turn++ % n_threads != thread) continue;
                const int64_t first = by_expert.first(e) + tiles.first(t);
                for (int i = 0; i < tiles.size(t); i++) {
                    matrix.prepare(column(by_expert.pairs[first + i]), 0, matrix.n_blocks(),
                                   prepared + first * matrix.column_bytes, tiles.size(t), i);
                }
            }
        }
    }

    // Multiply one group of rows of an expert with all its columns.
    void multiply(const PairsByExpert &by_expert, const char *prepared, int64_t expert,
                  int64_t group) const {
        float results[16 * 96];  // rows and columns of a tile of any instruction set
        const int lanes = kernels->rows_per_group;
        const int64_t row = matrix.first_row(group);
        const ColumnTiles tiles(matrix.type, by_expert.n(expert));
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = by_expert.first(expert) + tiles.first(t);
            kernels->multiply(matrix.type, matrix.group(expert, group),
                              prepared + first * matrix.column_bytes, matrix.n_inputs,
                              tiles.size(t), lanes, results, lanes);
            for (int i = 0; i < tiles.size(t); i++) {
                std::memcpy(output(by_expert.pairs[first + i]) + row, results + i * lanes,
                            matrix.rows_of(group) * sizeof(float));
            }
        }
    }
};

struct ExpertProductTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        expect_weights(op->src[0]);
        size = ExpertProduct(op).work_bytes();
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ExpertProduct product(op);
        char *work = aligned(params->wdata);
        const PairsByExpert by_expert = product.pairs_in(work);
        char *prepared = work + product.prepared_at();
        if (params->ith == 0) {
            n_products++;
            start_turns(params);
            begin_weights(op->src[0]);
            product.sort(by_expert);
        }
        ggml_api.barrier(params->threadpool);
        product.prepare(by_expert, prepared, params->ith, params->nth);
        ggml_api.barrier(params->threadpool);

        // The groups of rows of the experts that have pairs, as if they were one matrix. (A token
        // uses few experts of many: turns for the others took a third of its time, 14.9 instead
        // of 9.5 ms with 8 of 128 experts.)
        const int64_t per_expert = product.matrix.n_groups;
        const int64_t n_groups = by_expert.n_used() * per_expert;
        const int64_t chunk =
            groups_of_chunk(n_groups, product.matrix.group_bytes, params->nth);
        const int64_t n_chunks = (n_groups + chunk - 1) / chunk;
        take_turns(params, n_chunks, [&](int64_t turn) {
            const int64_t end = std::min(n_groups, (turn + 1) * chunk);
            for (int64_t group = turn * chunk; group < end; group++) {
                product.multiply(by_expert, prepared, by_expert.used_expert(group / per_expert),
                                 group % per_expert);
            }
        });
        kernels->finish();
        return true;
    }
};

}  // namespace

ggml::cpu::tensor_traits *expert_product() {
    static ExpertProductTraits traits;
    return &traits;
}
