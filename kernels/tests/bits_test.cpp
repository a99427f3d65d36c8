// Prints a digest of the results of one instruction set for each weight type, and checks that the
// result of a row is bit-identical alone and in batches. Instruction sets whose results should be
// bit-identical print the same. scripts/arm_kernels.py builds this program with -DSET=avx2_set and
// instruction_sets/avx2.cpp, and with -DSET=neon_dotprod_set and instruction_sets/neon_dotprod.cpp.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "instruction_sets/instruction_set.h"
#include "tests/random_inputs.h"
#ifdef __aarch64__
#include "instruction_sets/arm_cpu.h"
#endif

namespace {

// --- results ---

struct Digest {
    uint64_t hash = 1469598103934665603U;

    void add(const std::vector<float> &values) {
        for (const float value : values) {
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            hash = (hash ^ bits) * 1099511628211U;
        }
    }
};

bool same(const float *a, const float *b, size_t n) { return std::memcmp(a, b, 4 * n) == 0; }

bool report(const char *name, const Digest &digest, bool equal) {
    std::printf("%s %016llx %s\n", name, static_cast<unsigned long long>(digest.hash),
                equal ? "same" : "DIFFERENT");
    return equal;
}

// --- products of packed weights ---

// The outputs of a product with the first n columns, as one tile.
std::vector<float> multiply(const InstructionSet &set, WeightType type, const Bytes &weights,
                            int n_rows, const std::vector<std::vector<float>> &columns, int n) {
    const int n_inputs = static_cast<int>(columns[0].size());
    const size_t row_bytes = weights.size() / n_rows;
    Bytes tile(set.column_bytes(type, n_inputs) * n);
    for (int c = 0; c < n; c++) {
        set.prepare(type, columns[c].data(), n_inputs, tile.data(), n, c);
    }
    std::vector<float> outputs(n * n_rows);
    for (int row = 0; row < n_rows; row += set.rows_per_group) {
        const int rows = std::min(set.rows_per_group, n_rows - row);
        Bytes group(set.group_bytes(type, n_inputs));
        set.pack(type, &weights[row * row_bytes], row_bytes, rows, n_inputs, group.data());
        set.multiply(type, group.data(), tile.data(), n_inputs, n, rows, &outputs[row], n_rows);
    }
    return outputs;
}

bool print_products(const InstructionSet &set, const Block &block) {
    constexpr int n_inputs = 1536;
    constexpr int n_rows = 37;
    constexpr int most_columns = 8;
    const Bytes weights = random_weights(block, n_rows, n_inputs);
    const auto columns = random_columns(most_columns, n_inputs);
    Digest digest;
    bool equal = true;
    std::vector<float> batch;
    for (int n = most_columns; n > 0; n--) {
        const std::vector<float> outputs = multiply(set, block.type, weights, n_rows, columns, n);
        if (n == most_columns) batch = outputs;
        equal = equal && same(outputs.data(), batch.data(), outputs.size());
        digest.add(outputs);
    }
    return report(block.name, digest, equal);
}

// --- products of tensors that are not packed ---

struct PlainInputs {
    static constexpr int n_inputs = 203;
    static constexpr int n_rows = 9;
    static constexpr int n_columns = 7;
    Bytes rows;
    std::vector<std::vector<float>> columns;

    explicit PlainInputs(const Block &block)
        : rows(random_weights(block, n_rows, n_inputs)),
          columns(n_columns, std::vector<float>(n_inputs)) {
        Random random(200);
        for (auto &column : columns) {
            for (float &x : column) x = std::fabs(number(random)) / 128;
        }
    }

    // Multiply the rows with `n` columns from column `first` on. `outputs` has n_rows for each.
    void multiply(const InstructionSet &set, NumberType type, bool over_cells, int first, int n,
                  float *outputs) const {
        const float *inputs[n_columns];
        float *to[n_columns];
        for (int c = 0; c < n; c++) {
            inputs[c] = columns[first + c].data();
            to[c] = outputs + c * n_rows;
        }
        set.multiply_plain({type, reinterpret_cast<const char *>(rows.data()),
                            rows.size() / n_rows, n_rows, inputs, to, n, n_inputs, over_cells});
    }

    // Whether the outputs are those of an exact product of float32 rows, within rounding errors.
    bool are_accurate(const std::vector<float> &outputs) const {
        bool good = true;
        for (int c = 0; c < n_columns; c++) {
            for (int r = 0; r < n_rows; r++) {
                double exact = 0;
                double size = 0;
                for (int i = 0; i < n_inputs; i++) {
                    float weight;
                    std::memcpy(&weight, &rows[4 * (r * n_inputs + i)], 4);
                    exact += double(weight) * columns[c][i];
                    size += std::fabs(double(weight) * columns[c][i]);
                }
                good = good && std::fabs(outputs[c * n_rows + r] - exact) <= 1e-6 * size;
            }
        }
        return good;
    }
};

// The order of a sum over inputs depends on the number of lanes, so results differ between
// instruction sets, and are compared with exact sums instead. A sum over cells does not depend on
// it.
bool print_plain(const InstructionSet &set, const Block &block, NumberType type, bool over_cells) {
    const PlainInputs inputs(block);
    std::vector<float> outputs(inputs.n_columns * inputs.n_rows);
    std::vector<float> alone(inputs.n_rows);
    inputs.multiply(set, type, over_cells, 0, inputs.n_columns, outputs.data());
    bool equal = true;
    for (int c = 0; c < inputs.n_columns; c++) {
        inputs.multiply(set, type, over_cells, c, 1, alone.data());
        equal = equal && same(alone.data(), &outputs[c * inputs.n_rows], inputs.n_rows);
    }
    if (over_cells) {
        Digest digest;
        digest.add(outputs);
        return report((std::string("cells-") + block.name).c_str(), digest, equal);
    }
    if (type == NumberType::f32) equal = equal && inputs.are_accurate(outputs);
    std::printf("plain-%s %s\n", block.name, equal ? "same" : "DIFFERENT");
    return equal;
}

// --- softmax ---

bool print_softmax(const InstructionSet &set) {
    Digest digest;
    for (const int n : {1, 7, 64, 333, 5000}) {
        std::vector<float> scores(n), mask(n), outputs(n);
        Random random(n);
        for (float &score : scores) score = number(random) * 8;
        for (float &hidden : mask) hidden = random() % 3 == 0 ? -INFINITY : 0;
        mask[0] = 0;
        const float sink = 0.5f;
        for (const float *sinks : {static_cast<const float *>(nullptr), &sink}) {
            set.softmax({scores.data(), outputs.data(), n,
                         reinterpret_cast<const char *>(mask.data()), false, 0.5f, 1.0f, sinks});
            digest.add(outputs);
        }
    }
    return report("softmax", digest, true);
}

}  // namespace

int main() {
#ifdef __aarch64__
    if (!arm_has_dot_products()) {
        std::printf("this CPU lacks dot products\n");
        return 2;
    }
#endif
    bool good = true;
    for (const Block &block : blocks) good = print_products(SET, block) && good;
    for (const bool over_cells : {false, true}) {
        good = print_plain(SET, f16_block, NumberType::f16, over_cells) && good;
        good = print_plain(SET, bf16_block, NumberType::bf16, over_cells) && good;
        good = print_plain(SET, f32_block, NumberType::f32, over_cells) && good;
    }
    return print_softmax(SET) && good ? 0 : 1;
}
