// Checks the products in AMX's tile registers on any x86-64 CPU: the vector instructions and the
// registers are emulated (see emulated/). Each column of a batch has to get the same bits as alone,
// where the products for AVX-512 compute it.
//
//     g++ -std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -mavx2 -mfma -mf16c
//         -Ikernels/tests/emulated -Ikernels kernels/tests/amx_test.cpp -o amx_test
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "products/amx_product.h"
#include "tests/random_inputs.h"

namespace {

// The rows of two groups, the second of which is not full.
constexpr int n_rows = 19;
constexpr int lanes = Avx512Vnni::lanes;
using Columns = std::vector<std::vector<float>>;
// [column][row]
using Outputs = std::vector<float>;

// Calls `multiply` with each group of packed rows, its first row and the number of its rows.
template <class Weights, class Multiply>
void for_each_group(const Block &block, int n_inputs, Multiply multiply) {
    const Bytes weights = random_weights(block, n_rows, n_inputs);
    const size_t row_bytes = weights.size() / n_rows;
    for (int row = 0; row < n_rows; row += lanes) {
        const int n = std::min(lanes, n_rows - row);
        // Weights are prefetched beyond the end.
        Bytes group(Weights::group_bytes(n_inputs) + prefetch_bytes);
        Weights::pack(&weights[row * row_bytes], row_bytes, n, n_inputs, group.data());
        multiply(group.data(), row, n);
    }
}

// Each column alone, as the products for AVX-512 compute it.
template <class Weights>
Outputs multiply_alone(const Block &block, const Columns &columns) {
    const int n_inputs = static_cast<int>(columns[0].size());
    Outputs outputs(columns.size() * n_rows);
    for_each_group<Weights>(block, n_inputs, [&](const uint8_t *group, int row, int n) {
        for (size_t c = 0; c < columns.size(); c++) {
            std::vector<int32_t> tile(Weights::column_bytes(n_inputs) / 4);
            Weights::prepare(columns[c].data(), n_inputs, tile.data(), 1, 0);
            Avx512Vnni::Floats results[1];
            Weights::template multiply<1>(group, tile.data(), n_inputs, results);
            Avx512Vnni::store_first(&outputs[c * n_rows + row], results[0], n);
        }
    });
    return outputs;
}

// The first n columns together, in tiles.
template <class Weights>
Outputs multiply_tiles_of(const Block &block, const Columns &columns, int n_columns) {
    const int n_inputs = static_cast<int>(columns[0].size());
    // The last tile may read beyond the last column.
    std::vector<int32_t> tile(Weights::column_bytes(n_inputs) / 4 * n_columns + 16 * 64);
    for (int c = 0; c < n_columns; c++) {
        AmxProducts::prepare(block.type, columns[c].data(), n_inputs, tile.data(), n_columns, c);
    }
    Outputs outputs(n_columns * n_rows);
    TileState tile_state;
    for_each_group<Weights>(block, n_inputs, [&](const uint8_t *group, int row, int n) {
        AmxProducts::multiply(block.type, group, tile.data(), n_inputs, n_columns, n,
                              &outputs[row], n_rows, tile_state);
    });
    tile_state.release();
    return outputs;
}

template <class Weights>
bool check(const Block &block, int n_inputs) {
    const Columns columns = random_columns(most_columns, n_inputs);
    const Outputs alone = multiply_alone<Weights>(block, columns);
    bool good = true;
    for (const int n : {10, 13, 16, 17, 24, 32, 33, 47, 48, 49, 64, 80, 95, 96}) {
        if (!AmxProducts::takes(block.type, n)) continue;
        const Outputs together = multiply_tiles_of<Weights>(block, columns, n);
        if (std::memcmp(alone.data(), together.data(), together.size() * sizeof(float)) != 0) {
            std::printf("%s, %d inputs, %d columns: DIFFERENT\n", block.name, n_inputs, n);
            good = false;
        }
    }
    return good;
}

}  // namespace

int main() {
    bool good = true;
    for (const Block &block : blocks) {
        with_weights<Avx512Vnni>(block.type, [&](auto weights) {
            if constexpr (weights.is_quantized) {
                using Weights = decltype(weights);
                // Blocks of 32 are multiplied four at a time; here one or two are left over.
                for (const int n_inputs : {block.weights == 256 ? 768 : 160, 512}) {
                    good = check<Weights>(block, n_inputs) && good;
                }
                std::printf("%s checked\n", block.name);
            }
        });
    }
    return good ? 0 : 1;
}
