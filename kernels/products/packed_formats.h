// The packed form of each type of quantised weights.
//
// A group holds as many rows as a vector has 32-bit lanes, side by side: lane r of every vector
// belongs to row r. Each lane has four codes of its row. Codes of fewer than 8 bits are packed in
// planes: a plane of b bits holds 8 / b consecutive words of codes in one vector, the first word in
// its lowest bits, so that a shift and a mask extract a word:
//
//     lane r of a vector of a 4-bit plane:     | code 7 | code 3 | code 6 | code 2 | ...
//                                                byte 3            byte 2
//
// A code of 5 or 6 bits has its low 4 bits in one plane and the others in a second one.
#pragma once

#include "products/gguf_blocks.h"

namespace {

// The values of the 4-bit codes of IQ4_NL and IQ4_XS, and twice the values of those of MXFP4.
constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What is subtracted from a code. (signed_byte: 128 if the instruction set multiplies unsigned
// codes, because it was added when the weight was packed; otherwise nothing.)
enum class Offset { none, eight, sixteen, signed_byte };
// What the scale of a block is: a float16, or the exponent of a power of two.
enum class Scale { half, exponent };
// What a sub-block has: a scale and a min in bytes of their own; both in one byte; or a signed
// scale, where codes have an offset.
enum class SubScales { none, with_mins, with_nibble_mins, signed_with_offset };
// What a code stands for: itself, or an entry of a table.
enum class Values { codes, iq4, mxfp4 };

// A format as the products see it. Each format below states the formula of its weights.
template <int weights_, int sub_, int low_bits_, int high_bits_, SubScales sub_scales_>
struct Format {
    // Weights of a block, and of a sub-block, which has its own scale.
    static constexpr int weights = weights_;
    static constexpr int sub = sub_;
    // Bits of a code in the first plane and in the second one.
    static constexpr int low_bits = low_bits_;
    static constexpr int high_bits = high_bits_;
    static constexpr SubScales sub_scales = sub_scales_;
    static constexpr Values values = Values::codes;
    static constexpr Scale scale = Scale::half;
    static constexpr Offset offset = Offset::none;
    // Whether a block (without sub-blocks) has a min, which is added.
    static constexpr bool has_min = false;
    static constexpr int largest_code = (1 << (low_bits_ + high_bits_)) - 1;
    // The largest magnitude of a sub-scale.
    static constexpr int largest_sub_scale = 0;
    // What is subtracted from a code whose sub-block has a scale but no min.
    static constexpr int offset_of_scales = 0;
};

// --- blocks of 32 ---

// scale * (code - 8)
struct Q4_0 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::eight;
    static constexpr int gguf_bytes = 18;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q4_0(p, block); }
};
// scale * code + min
struct Q4_1 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr bool has_min = true;
    static constexpr int gguf_bytes = 20;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q4_1(p, block); }
};
// scale * (code - 16)
struct Q5_0 : Format<32, 32, 4, 1, SubScales::none> {
    static constexpr Offset offset = Offset::sixteen;
    static constexpr int gguf_bytes = 22;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q5_0(p, block); }
};
// scale * code + min
struct Q5_1 : Format<32, 32, 4, 1, SubScales::none> {
    static constexpr bool has_min = true;
    static constexpr int gguf_bytes = 24;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q5_1(p, block); }
};
// scale * code, which is signed
struct Q8_0 : Format<32, 32, 8, 0, SubScales::none> {
    static constexpr Offset offset = Offset::signed_byte;
    static constexpr int gguf_bytes = 34;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q8_0(p, block); }
};
// scale * iq4_values[code]
struct IQ4_NL : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::signed_byte;
    static constexpr Values values = Values::iq4;
    static constexpr int largest_code = 255;
    static constexpr int gguf_bytes = 18;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q4_0(p, block); }
};
// 2^(exponent - 127) / 2 * mxfp4_values[code]
struct MXFP4 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::sixteen;
    static constexpr Values values = Values::mxfp4;
    static constexpr Scale scale = Scale::exponent;
    static constexpr int largest_code = 28;
    static constexpr int gguf_bytes = 17;
    static void read(const uint8_t *p, BlockNumbers &block) { read_mxfp4(p, block); }
};

// --- blocks of 256 ---

// scale * sub_scale * code - min * sub_min
struct Q2_K : Format<256, 16, 2, 0, SubScales::with_nibble_mins> {
    static constexpr int largest_sub_scale = 15;
    static constexpr int gguf_bytes = 84;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q2_k(p, block); }
};
// scale * sub_scale * (code - 4)
struct Q3_K : Format<256, 16, 2, 1, SubScales::signed_with_offset> {
    static constexpr int offset_of_scales = 4;
    static constexpr int largest_sub_scale = 32;
    static constexpr int gguf_bytes = 110;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q3_k(p, block); }
};
// scale * sub_scale * code - min * sub_min
struct Q4_K : Format<256, 32, 4, 0, SubScales::with_mins> {
    static constexpr int largest_sub_scale = 63;
    static constexpr int gguf_bytes = 144;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q4_k(p, block); }
};
// scale * sub_scale * code - min * sub_min
struct Q5_K : Format<256, 32, 4, 1, SubScales::with_mins> {
    static constexpr int largest_sub_scale = 63;
    static constexpr int gguf_bytes = 176;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q5_k(p, block); }
};
// scale * sub_scale * (code - 32)
struct Q6_K : Format<256, 16, 4, 2, SubScales::signed_with_offset> {
    static constexpr int offset_of_scales = 32;
    static constexpr int largest_sub_scale = 128;
    static constexpr int gguf_bytes = 210;
    static void read(const uint8_t *p, BlockNumbers &block) { read_q6_k(p, block); }
};
// scale * sub_scale * iq4_values[code]
struct IQ4_XS : Format<256, 32, 4, 0, SubScales::signed_with_offset> {
    static constexpr Values values = Values::iq4;
    static constexpr int largest_code = 255;
    static constexpr int offset_of_scales = 128;
    static constexpr int largest_sub_scale = 32;
    static constexpr int gguf_bytes = 136;
    static void read(const uint8_t *p, BlockNumbers &block) { read_iq4_xs(p, block); }
};

// Where things are in one packed block of `rows` rows:
//
//     scales | mins | sub-scales | sub-mins | step 0: low plane, high plane | step 1 | ...
//
// Each part has the numbers of all rows. Sub-scales and sub-mins are in pairs, those of two
// neighbouring sub-blocks of a row side by side.
template <class F, int rows>
struct PackedLayout {
    static constexpr int n_subs = F::weights / F::sub;
    static constexpr int vector_bytes = 4 * rows;
    // Words of codes of a step, which is two sub-blocks (whose scales are a pair) or a whole block.
    static constexpr int words = (n_subs > 1 ? 2 * F::sub : F::weights) / 4;
    // Vectors of its first plane and of its second one.
    static constexpr int low_vectors = words * F::low_bits / 8;
    static constexpr int high_vectors = words * F::high_bits / 8;
    static constexpr int step_bytes = (low_vectors + high_vectors) * vector_bytes;
    static constexpr int n_steps = F::weights / 4 / words;

    // Whether the block has mins as float16.
    static constexpr bool own_min =
        F::has_min || F::sub_scales == SubScales::with_mins ||
        F::sub_scales == SubScales::with_nibble_mins;
    static constexpr int scale_bytes = F::scale == Scale::half ? 2 * rows : rows;
    static constexpr int min_at = scale_bytes;
    static constexpr int sub_scales_at = min_at + (own_min ? 2 * rows : 0);
    static constexpr int sub_mins_at =
        sub_scales_at + (F::sub_scales == SubScales::none ? 0 : n_subs * rows);
    static constexpr int codes_at =
        sub_mins_at + (F::sub_scales == SubScales::with_mins ? n_subs * rows : 0);
    static constexpr int bytes = codes_at + n_steps * step_bytes;
};

// Write the scales and mins of row `row` of a packed block.
template <class F, int rows>
void pack_scales(const BlockNumbers &numbers, int row, uint8_t *block) {
    using Layout = PackedLayout<F, rows>;
    if (F::scale == Scale::half) {
        std::memcpy(block + 2 * row, &numbers.scale, 2);
    } else {
        block[row] = static_cast<uint8_t>(numbers.scale);
    }
    if (Layout::own_min) std::memcpy(block + Layout::min_at + 2 * row, &numbers.min, 2);
    if (F::sub_scales == SubScales::none) return;
    for (int j = 0; j < Layout::n_subs; j++) {  // in pairs
        const int at = j / 2 * 2 * rows + 2 * row + j % 2;
        block[Layout::sub_scales_at + at] = numbers.sub_scales[j];
        if (F::sub_scales == SubScales::with_mins) {
            block[Layout::sub_mins_at + at] = numbers.sub_mins[j];
        }
    }
}

// Write the codes of row `row` of a packed block. `signed_offset` is added to signed bytes: 128
// if the instruction set multiplies unsigned codes, 0 if it can multiply signed ones.
template <class F, int rows>
void pack_codes(const BlockNumbers &numbers, int row, uint8_t *block, int signed_offset) {
    using Layout = PackedLayout<F, rows>;
    const uint32_t flip = F::low_bits == 8 && signed_offset ? 0x80808080U : 0;
    constexpr int words_per_low = 8 / F::low_bits;
    constexpr int words_per_high = F::high_bits ? 8 / F::high_bits : 1;
    constexpr uint32_t low_mask = low_bits_of_bytes * ((1 << F::low_bits) - 1);
    for (int step = 0; step < Layout::n_steps; step++) {
        const uint32_t *words = numbers.words + step * Layout::words;
        uint8_t *codes = block + Layout::codes_at + step * Layout::step_bytes + 4 * row;
        for (int v = 0; v < Layout::low_vectors; v++, codes += Layout::vector_bytes) {
            uint32_t packed = 0;
            for (int i = 0; i < words_per_low; i++) {
                packed |= (words[words_per_low * v + i] & low_mask) << (F::low_bits * i);
            }
            packed ^= flip;
            std::memcpy(codes, &packed, 4);
        }
        for (int v = 0; v < Layout::high_vectors; v++, codes += Layout::vector_bytes) {
            uint32_t packed = 0;
            for (int i = 0; i < words_per_high; i++) {
                const uint32_t high = (words[words_per_high * v + i] & ~low_mask) >> F::low_bits;
                packed |= high << (F::high_bits * i);
            }
            std::memcpy(codes, &packed, 4);
        }
    }
}

}  // namespace
