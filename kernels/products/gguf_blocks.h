// How GGUF stores quantised weights: reading one block of a row into plain numbers.
//
// The layouts are those of ggml's types. A block holds 32 weights, or 256 of the "K" types, whose
// scales are themselves quantised. Codes (quantised weights) are kept four to a 32-bit word, in the
// order of the weights, as the products need them.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// The numbers of one block. With sub-blocks of `sub` weights, weight i is
//
//     scale * sub_scales[i / sub] * value(code i) - min * sub_mins[i / sub]
//
// A type without sub-blocks has 1 in place of sub-scales and sub-mins.
struct BlockNumbers {
    // Codes, four to a word.
    uint32_t words[64];
    // float16; or the exponent of MXFP4.
    uint16_t scale;
    // float16
    uint16_t min;
    // As they are stored in the packed form, signed or not. In Q2_K, the low 4 bits are the scale
    // and the high 4 bits the min.
    uint8_t sub_scales[16];
    uint8_t sub_mins[16];
};

inline uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}
inline uint16_t half_at(const uint8_t *p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}

// Masks for the four bytes of a word.
constexpr uint32_t low_nibbles = 0x0f0f0f0f;
constexpr uint32_t low_pairs_of_bits = 0x03030303;
constexpr uint32_t low_bits_of_bytes = 0x01010101;

// --- types with blocks of 32 ---

// Bits i, i + 1, i + 2 and i + 3 of a bit field, as bit `to` of the four bytes of a word.
inline uint32_t spread_bits(uint32_t field, int i, int to) {
    const uint32_t four = (field >> i) & 15;
    return ((four * 0x00204081U) & low_bits_of_bytes) << to;
}

// 16 bytes: their low nibbles are codes 0 to 15, their high nibbles codes 16 to 31.
inline void read_nibbles(const uint8_t *p, uint32_t *words) {
    for (int g = 0; g < 4; g++) {
        words[g] = word_at(p + 4 * g) & low_nibbles;
        words[g + 4] = (word_at(p + 4 * g) >> 4) & low_nibbles;
    }
}
// 4 bytes: bit i is the fifth bit of code i.
inline void read_fifth_bits(const uint8_t *p, uint32_t *words) {
    for (int g = 0; g < 8; g++) words[g] |= spread_bits(word_at(p), 4 * g, 4);
}

inline void read_q4_0(const uint8_t *p, BlockNumbers &block) {  // IQ4_NL too
    block.scale = half_at(p);
    read_nibbles(p + 2, block.words);
}
inline void read_q4_1(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    block.min = half_at(p + 2);
    read_nibbles(p + 4, block.words);
}
inline void read_q5_0(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    read_nibbles(p + 6, block.words);
    read_fifth_bits(p + 2, block.words);
}
inline void read_q5_1(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    block.min = half_at(p + 2);
    read_nibbles(p + 8, block.words);
    read_fifth_bits(p + 4, block.words);
}
inline void read_q8_0(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    std::memcpy(block.words, p + 2, 32);
}
inline void read_mxfp4(const uint8_t *p, BlockNumbers &block) {
    block.scale = p[0];
    read_nibbles(p + 1, block.words);
}

// --- K types: blocks of 256 ---

// 12 bytes: eight scales and eight mins of 6 bits each.
inline void read_six_bit_scales(const uint8_t *p, BlockNumbers &block) {
    for (int j = 0; j < 4; j++) {
        block.sub_scales[j] = p[j] & 63;
        block.sub_mins[j] = p[j + 4] & 63;
        block.sub_scales[j + 4] = static_cast<uint8_t>((p[j + 8] & 15) | (p[j] >> 6 << 4));
        block.sub_mins[j + 4] = static_cast<uint8_t>((p[j + 8] >> 4) | (p[j + 4] >> 6 << 4));
    }
}
// 128 bytes: in each 32 of them, the low nibbles are 32 codes and the high nibbles the next 32.
inline void read_long_nibbles(const uint8_t *p, uint32_t *words) {
    for (int j = 0; j < 4; j++) {
        for (int g = 0; g < 8; g++) {
            const uint32_t both = word_at(p + 32 * j + 4 * g);
            words[16 * j + g] = both & low_nibbles;
            words[16 * j + 8 + g] = (both >> 4) & low_nibbles;
        }
    }
}
// 32 bytes: bit j of byte i is bit `to` of code 32 j + i.
inline void read_high_bits(const uint8_t *p, int to, uint32_t *words) {
    for (int j = 0; j < 8; j++) {
        for (int g = 0; g < 8; g++) {
            words[8 * j + g] |= ((word_at(p + 4 * g) >> j) & low_bits_of_bytes) << to;
        }
    }
}
// 64 bytes: in each 32 of them, bits 2 s and 2 s + 1 are the codes 32 s to 32 s + 31 of 128.
inline void read_pairs_of_bits(const uint8_t *p, uint32_t *words) {
    for (int half = 0; half < 2; half++) {
        for (int s = 0; s < 4; s++) {
            for (int g = 0; g < 8; g++) {
                const uint32_t four = word_at(p + 32 * half + 4 * g);
                words[32 * half + 8 * s + g] = (four >> (2 * s)) & low_pairs_of_bits;
            }
        }
    }
}

inline void read_q2_k(const uint8_t *p, BlockNumbers &block) {
    std::memcpy(block.sub_scales, p, 16);
    read_pairs_of_bits(p + 16, block.words);
    block.scale = half_at(p + 80);
    block.min = half_at(p + 82);
}
inline void read_q3_k(const uint8_t *p, BlockNumbers &block) {
    read_pairs_of_bits(p + 32, block.words);
    read_high_bits(p, 2, block.words);
    // 12 bytes: the low 4 bits of 16 scales, then their high 2 bits.
    const uint8_t *scales = p + 96;
    for (int j = 0; j < 16; j++) {
        const int low = scales[j % 8] >> (j < 8 ? 0 : 4) & 15;
        const int high = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        block.sub_scales[j] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    block.scale = half_at(p + 108);
}
inline void read_q4_k(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    block.min = half_at(p + 2);
    read_six_bit_scales(p + 4, block);
    read_long_nibbles(p + 16, block.words);
}
inline void read_q5_k(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    block.min = half_at(p + 2);
    read_six_bit_scales(p + 4, block);
    read_long_nibbles(p + 48, block.words);
    read_high_bits(p + 16, 4, block.words);
}
inline void read_q6_k(const uint8_t *p, BlockNumbers &block) {
    const uint8_t *low = p;
    const uint8_t *high = p + 128;
    std::memcpy(block.sub_scales, p + 192, 16);
    block.scale = half_at(p + 208);
    for (int half = 0; half < 2; half++) {
        for (int quarter = 0; quarter < 4; quarter++) {
            for (int g = 0; g < 8; g++) {
                const uint32_t nibbles = word_at(low + 64 * half + 32 * (quarter & 1) + 4 * g);
                const uint32_t pairs = word_at(high + 32 * half + 4 * g);
                block.words[32 * half + 8 * quarter + g] =
                    ((nibbles >> (quarter & 2 ? 4 : 0)) & low_nibbles) |
                    (((pairs >> (2 * quarter)) & low_pairs_of_bits) << 4);
            }
        }
    }
}
inline void read_iq4_xs(const uint8_t *p, BlockNumbers &block) {
    block.scale = half_at(p);
    for (int j = 0; j < 8; j++) {
        const int low = p[4 + j / 2] >> (4 * (j % 2)) & 15;
        const int high = half_at(p + 2) >> (2 * j) & 3;
        block.sub_scales[j] = static_cast<uint8_t>((low | high << 4) - 32);
        read_nibbles(p + 8 + 16 * j, block.words + 8 * j);
    }
}

}  // namespace
