// The kernels for CPUs with AMX and its extension for bytes. Products with many columns use its
// tile registers (products/amx_product.h); everything else is done by the kernels for AVX-512
// with VNNI.
#include "instruction_sets/instruction_set.h"
#include "products/amx_product.h"

namespace {

const InstructionSet &vnni = avx512_vnni_set;
thread_local TileState tile_state;

int max_columns(WeightType type, int64_t n_columns) {
    return AmxProducts::takes(type, n_columns) ? most_columns : vnni.max_columns(type, n_columns);
}

void prepare(WeightType type, const float *values, int64_t n_inputs, void *tile, int n_columns,
             int column) {
    if (AmxProducts::takes(type, n_columns)) {
        AmxProducts::prepare(type, values, n_inputs, tile, n_columns, column);
    } else {
        vnni.prepare(type, values, n_inputs, tile, n_columns, column);
    }
}

void multiply(WeightType type, const void *group, const void *tile, int64_t n_inputs, int n_columns,
              int n_rows, float *outputs, size_t output_stride) {
    if (AmxProducts::takes(type, n_columns)) {
        AmxProducts::multiply(type, group, tile, n_inputs, n_columns, n_rows, outputs,
                              output_stride, tile_state);
    } else {
        vnni.multiply(type, group, tile, n_inputs, n_columns, n_rows, outputs, output_stride);
    }
}

}  // namespace

// The lambdas read VNNI's table when they are called: in this file its entries are not constants.
const InstructionSet amx_int8_set = {
    "amx-int8",
    Avx512Vnni::lanes,
    max_columns,
    [](WeightType type, int64_t n_inputs) { return vnni.group_bytes(type, n_inputs); },
    [](WeightType type, const void *rows, size_t row_bytes, int n_rows, int64_t n_inputs,
       void *group) { vnni.pack(type, rows, row_bytes, n_rows, n_inputs, group); },
    [](WeightType type, int64_t n_inputs) { return vnni.column_bytes(type, n_inputs); },
    [](WeightType type) { return vnni.inputs_per_block(type); },
    prepare,
    multiply,
    [] { tile_state.release(); },
    [](const AttentionJob &job, int n_threads) { return vnni.attention_bytes(job, n_threads); },
    [](const AttentionJob &job, int thread, int n_threads, void *scratch, void (*barrier)(void *),
       void *argument) { vnni.attention(job, thread, n_threads, scratch, barrier, argument); },
    [](const PlainProductJob &job) { vnni.multiply_plain(job); },
    [](const SoftmaxJob &job) { vnni.softmax(job); },
    [](float *row, int64_t n, int n_best, int32_t *tokens, float *scores) {
        return vnni.likeliest_tokens(row, n, n_best, tokens, scores);
    },
};
