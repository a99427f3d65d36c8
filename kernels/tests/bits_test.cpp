// Prints the bits of all products of one instruction set, as a digest for each weight type, and
// checks that a row has the same bits alone and in batches. Programs for different instruction sets
// whose bits should be equal print the same. scripts/arm_kernels.py builds one with
//
//     -DSET=avx2_set, linked with avx2.o, and one with -DSET=neon_dotprod_set, linked with neon_dotprod.o
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "instruction_sets/instruction_set.h"
#ifdef __aarch64__
#include "instruction_sets/arm_cpu.h"
#endif

namespace {

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937;

// A type's blocks, as GGUF has them: bytes, weights, and where float16 scales are (-1: none).
struct Block {
    const char *name;
    WeightType type;
    int bytes, weights, scale, min;
};
constexpr Block blocks[] = {
    {"q4_0", WeightType::q4_0, 18, 32, 0, -1},     {"q4_1", WeightType::q4_1, 20, 32, 0, 2},
    {"q5_0", WeightType::q5_0, 22, 32, 0, -1},     {"q5_1", WeightType::q5_1, 24, 32, 0, 2},
    {"q8_0", WeightType::q8_0, 34, 32, 0, -1},     {"q2_k", WeightType::q2_k, 84, 256, 80, 82},
    {"q3_k", WeightType::q3_k, 110, 256, 108, -1}, {"q4_k", WeightType::q4_k, 144, 256, 0, 2},
    {"q5_k", WeightType::q5_k, 176, 256, 0, 2},    {"q6_k", WeightType::q6_k, 210, 256, 208, -1},
    {"iq4_nl", WeightType::iq4_nl, 18, 32, 0, -1}, {"iq4_xs", WeightType::iq4_xs, 136, 256, 0, -1},
    {"mxfp4", WeightType::mxfp4, 17, 32, -1, -1},  {"f16", WeightType::f16, 2, 1, 0, -1},
    {"bf16", WeightType::bf16, 2, 1, -1, -1},      {"f32", WeightType::f32, 4, 1, -1, -1},
};

// Numbers that are the same with every compiler and C library.
float number(Random &random) {
    return static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 8192.0f;
}
uint16_t random_half(Random &random) {  // of 2^-8 to 2^-4, of either sign
    const unsigned exponent = 7 + random() % 4;
    return static_cast<uint16_t>((random() & 0x83ff) | exponent << 10);
}

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

Bytes random_weights(const Block &block, int n_rows, int n_inputs) {
    Random random(static_cast<unsigned>(block.type));
    Bytes weights(static_cast<size_t>(n_rows) * n_inputs / block.weights * block.bytes);
    for (uint8_t &byte : weights) byte = static_cast<uint8_t>(random());
    for (size_t at = 0; at < weights.size(); at += block.bytes) {
        for (const int where : {block.scale, block.min}) {
            const uint16_t half = random_half(random);
            if (where >= 0) std::memcpy(&weights[at + where], &half, 2);
        }
        if (block.type == WeightType::mxfp4) weights[at] = 110 + random() % 20;
        const float value = number(random);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (block.type == WeightType::f32) std::memcpy(&weights[at], &bits, 4);
        bits >>= 16;
        if (block.type == WeightType::bf16) std::memcpy(&weights[at], &bits, 2);
    }
    return weights;
}

bool print_products(const InstructionSet &set, const Block &block) {
    constexpr int n_inputs = 1536, n_rows = 37, most = 8;
    const Bytes weights = random_weights(block, n_rows, n_inputs);
    const size_t row_bytes = weights.size() / n_rows;
    std::vector<std::vector<float>> columns(most, std::vector<float>(n_inputs));
    Random random(100);
    for (auto &column : columns) {
        for (float &x : column) {
            x = number(random);
            if (random() % 7 == 0) x *= 9;
        }
    }
    Digest digest;
    bool equal = true;
    std::vector<float> batch(most * n_rows);
    for (int n = most; n > 0; n--) {
        Bytes tile(set.column_bytes(block.type, n_inputs) * n);
        for (int c = 0; c < n; c++) {
            set.prepare(block.type, columns[c].data(), n_inputs, tile.data(), n, c);
        }
        std::vector<float> outputs(n * n_rows);
        for (int row = 0; row < n_rows; row += set.rows_per_group) {
            const int rows = std::min(set.rows_per_group, n_rows - row);
            Bytes group(set.group_bytes(block.type, n_inputs));
            set.pack(block.type, &weights[row * row_bytes], row_bytes, rows, n_inputs, group.data());
            set.multiply(block.type, group.data(), tile.data(), n_inputs, n, rows, &outputs[row],
                         n_rows);
        }
        if (n == most) batch = outputs;
        equal = equal && same(outputs.data(), batch.data(), outputs.size());
        digest.add(outputs);
    }
    return report(block.name, digest, equal);
}

// Tensors that are not packed. Sums over inputs have an order that depends on the lanes, so these bits
// differ from one instruction set to another: they are compared with exact sums. Sums over cells do not.
bool print_plain(const InstructionSet &set, const Block &block, NumberType type, bool over_cells) {
    constexpr int n_inputs = 203, n_rows = 9, n_columns = 7;
    const Bytes rows = random_weights(block, n_rows, n_inputs);
    std::vector<std::vector<float>> columns(n_columns, std::vector<float>(n_inputs));
    Random random(200);
    for (auto &column : columns) {
        for (float &x : column) x = std::fabs(number(random)) / 128;
    }
    std::vector<float> outputs(n_columns * n_rows), alone(n_rows);
    bool equal = true;
    for (int first = -1; first < n_columns; first++) {  // all columns, and each by itself
        const float *inputs[n_columns];
        float *to[n_columns];
        for (int c = 0; c < n_columns; c++) {
            inputs[c] = columns[first < 0 ? c : first].data();
            to[c] = first < 0 ? &outputs[c * n_rows] : alone.data();
        }
        set.multiply_plain({type, reinterpret_cast<const char *>(rows.data()), rows.size() / n_rows,
                            n_rows, inputs, to, first < 0 ? n_columns : 1, n_inputs, over_cells});
        if (first >= 0) equal = equal && same(alone.data(), &outputs[first * n_rows], n_rows);
    }
    if (over_cells) {
        Digest digest;
        digest.add(outputs);
        return report((std::string("cells-") + block.name).c_str(), digest, equal);
    }
    for (int c = 0; type == NumberType::f32 && c < n_columns; c++) {
        for (int r = 0; r < n_rows; r++) {
            double exact = 0, size = 0;
            for (int i = 0; i < n_inputs; i++) {
                float weight;
                std::memcpy(&weight, &rows[4 * (r * n_inputs + i)], 4);
                exact += double(weight) * columns[c][i];
                size += std::fabs(double(weight) * columns[c][i]);
            }
            equal = equal && std::fabs(outputs[c * n_rows + r] - exact) <= 1e-6 * size;
        }
    }
    std::printf("plain-%s %s\n", block.name, equal ? "same" : "DIFFERENT");
    return equal;
}

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
            set.softmax({scores.data(), outputs.data(), n, reinterpret_cast<const char *>(mask.data()),
                         false, 0.5f, 1.0f, sinks});
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
        good = print_plain(SET, blocks[13], NumberType::f16, over_cells) && good;
        good = print_plain(SET, blocks[14], NumberType::bf16, over_cells) && good;
        good = print_plain(SET, blocks[15], NumberType::f32, over_cells) && good;
    }
    return print_softmax(SET) && good ? 0 : 1;
}
