// Random weights and activations for tests: the same ones with every compiler and C library.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "products/weight_type.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937;

// The blocks of a weight type, as GGUF stores them.
struct Block {
    const char *name;
    WeightType type;
    int bytes;
    int weights;
    // The offsets of a float16 scale and a float16 minimum; -1 without one.
    int scale;
    int min;
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
constexpr const Block &f16_block = blocks[13];
constexpr const Block &bf16_block = blocks[14];
constexpr const Block &f32_block = blocks[15];

float number(Random &random) {
    return static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 8192.0f;
}
uint16_t random_half(Random &random) {  // a magnitude of 2^-8 to 2^-4, with either sign
    const unsigned exponent = 7 + random() % 4;
    return static_cast<uint16_t>((random() & 0x83ff) | exponent << 10);
}

Bytes random_weights(const Block &block, int n_rows, int n_inputs) {
    Random random(static_cast<unsigned>(block.type));
    Bytes weights(static_cast<size_t>(n_rows) * n_inputs / block.weights * block.bytes);
    for (uint8_t &byte : weights) byte = static_cast<uint8_t>(random());
    // Random bytes would be numbers of any magnitude, so the numbers of each block are set.
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

// Columns of activations, some of which are several times as large as the others.
std::vector<std::vector<float>> random_columns(int n_columns, int n_inputs) {
    std::vector<std::vector<float>> columns(n_columns, std::vector<float>(n_inputs));
    Random random(100);
    for (auto &column : columns) {
        for (float &x : column) {
            x = number(random);
            if (random() % 7 == 0) x *= 9;
        }
    }
    return columns;
}

}  // namespace
