// The packed form of each weight type.
//
// One group holds as many rows as a vector has 32-bit lanes, side by side: lane r of every vector
// belongs to row r. A row's codes come four to a lane. Codes of fewer than 8 bits are packed in
// planes: a plane of b bits holds 8 / b consecutive words of codes in one vector, the first one in
// its lowest bits, so that a shift and a mask bring a word out:
//
//     lane r of a vector of the 4-bit plane:   | code 7 | code 3 | code 6 | code 2 | ...
//                                                byte 3            byte 2
//
// A code of 5 or 6 bits has its low 4 bits in one plane and the rest in another one.
#pragma once

#include "products/gguf_blocks.h"

namespace {

// Values of the 4-bit codes of IQ4_NL and IQ4_XS, and twice those of MXFP4.
constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
constexpr int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

enum class Offset { none, eight, sixteen, signed_byte };  // what a code has too much
enum class Scale { half, exponent };                      // what the scale of a block is
enum class SubScales { none, with_mins, with_nibble_mins, signed_with_offset };
enum class Values { codes, iq4, mxfp4 };

// A format as the products see it; the comments give the formula of a weight.
template <int weights_, int sub_, int low_, int high_, SubScales sub_scales_>
struct Format {
    static constexpr int weights = weights_;  // of a block
    static constexpr int sub = sub_;          // weights of a sub-block, which has a scale
    static constexpr int low_bits = low_, high_bits = high_;
    static constexpr SubScales sub_scales = sub_scales_;
    static constexpr Values values = Values::codes;
    static constexpr Scale scale = Scale::half;
    static constexpr Offset offset = Offset::none;
    static constexpr bool has_min = false;
    static constexpr int largest_code = (1 << (low_ + high_)) - 1;
    static constexpr int largest_sub_scale = 0;  // its largest absolute value
    static constexpr int offset_of_scales = 0;   // what a code with a sub-scale has too much
};

// scale * (code - 8)
struct Q4_0 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::eight;
    static constexpr int gguf_bytes = 18;
    static void read(const uint8_t *p, PlainBlock &b) { read_q4_0(p, b); }
};
// scale * code + min
struct Q4_1 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr bool has_min = true;
    static constexpr int gguf_bytes = 20;
    static void read(const uint8_t *p, PlainBlock &b) { read_q4_1(p, b); }
};
// scale * (code - 16)
struct Q5_0 : Format<32, 32, 4, 1, SubScales::none> {
    static constexpr Offset offset = Offset::sixteen;
    static constexpr int gguf_bytes = 22;
    static void read(const uint8_t *p, PlainBlock &b) { read_q5_0(p, b); }
};
// scale * code + min
struct Q5_1 : Format<32, 32, 4, 1, SubScales::none> {
    static constexpr bool has_min = true;
    static constexpr int gguf_bytes = 24;
    static void read(const uint8_t *p, PlainBlock &b) { read_q5_1(p, b); }
};
// scale * code, signed
struct Q8_0 : Format<32, 32, 8, 0, SubScales::none> {
    static constexpr Offset offset = Offset::signed_byte;
    static constexpr int gguf_bytes = 34;
    static void read(const uint8_t *p, PlainBlock &b) { read_q8_0(p, b); }
};
// scale * iq4_values[code]
struct IQ4_NL : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::signed_byte;
    static constexpr Values values = Values::iq4;
    static constexpr int largest_code = 255;
    static constexpr int gguf_bytes = 18;
    static void read(const uint8_t *p, PlainBlock &b) { read_q4_0(p, b); }
};
// 2^(exponent - 127) / 2 * mxfp4_values[code]
struct MXFP4 : Format<32, 32, 4, 0, SubScales::none> {
    static constexpr Offset offset = Offset::sixteen;
    static constexpr Values values = Values::mxfp4;
    static constexpr Scale scale = Scale::exponent;
    static constexpr int largest_code = 28;
    static constexpr int gguf_bytes = 17;
    static void read(const uint8_t *p, PlainBlock &b) { read_mxfp4(p, b); }
};
// scale * sub_scale * code - min * sub_min
struct Q4_K : Format<256, 32, 4, 0, SubScales::with_mins> {
    static constexpr int largest_sub_scale = 63;
    static constexpr int gguf_bytes = 144;
    static void read(const uint8_t *p, PlainBlock &b) { read_q4_k(p, b); }
};
struct Q5_K : Format<256, 32, 4, 1, SubScales::with_mins> {
    static constexpr int largest_sub_scale = 63;
    static constexpr int gguf_bytes = 176;
    static void read(const uint8_t *p, PlainBlock &b) { read_q5_k(p, b); }
};
struct Q2_K : Format<256, 16, 2, 0, SubScales::with_nibble_mins> {
    static constexpr int largest_sub_scale = 15;
    static constexpr int gguf_bytes = 84;
    static void read(const uint8_t *p, PlainBlock &b) { read_q2_k(p, b); }
};
// scale * sub_scale * (code - 32)
struct Q6_K : Format<256, 16, 4, 2, SubScales::signed_with_offset> {
    static constexpr int offset_of_scales = 32;
    static constexpr int largest_sub_scale = 128;
    static constexpr int gguf_bytes = 210;
    static void read(const uint8_t *p, PlainBlock &b) { read_q6_k(p, b); }
};
// scale * sub_scale * (code - 4)
struct Q3_K : Format<256, 16, 2, 1, SubScales::signed_with_offset> {
    static constexpr int offset_of_scales = 4;
    static constexpr int largest_sub_scale = 32;
    static constexpr int gguf_bytes = 110;
    static void read(const uint8_t *p, PlainBlock &b) { read_q3_k(p, b); }
};
// scale * sub_scale * iq4_values[code]
struct IQ4_XS : Format<256, 32, 4, 0, SubScales::signed_with_offset> {
    static constexpr Values values = Values::iq4;
    static constexpr int largest_code = 255;
    static constexpr int offset_of_scales = 128;
    static constexpr int largest_sub_scale = 32;
    static constexpr int gguf_bytes = 136;
    static void read(const uint8_t *p, PlainBlock &b) { read_iq4_xs(p, b); }
};

// Where things lie within one packed block of `rows` rows.
template <class F, int rows>
struct Layout {
    static constexpr int n_subs = F::weights / F::sub;
    static constexpr int vector_bytes = 4 * rows;
    // Words of codes of a step: two sub-blocks, whose scales are a pair, or the whole block.
    static constexpr int words = (n_subs > 1 ? 2 * F::sub : F::weights) / 4;
    static constexpr int low_vectors = words * F::low_bits / 8;
    static constexpr int high_vectors = words * F::high_bits / 8;
    static constexpr int step_bytes = (low_vectors + high_vectors) * vector_bytes;
    static constexpr int n_steps = F::weights / 4 / words;

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

// Write row `row` of one packed block. `signed_offset` is added to signed bytes: 128 where the
// instruction set multiplies unsigned codes, 0 where it can multiply signed ones.
template <class F, int rows>
void pack_block(const PlainBlock &plain, int row, uint8_t *block, int signed_offset) {
    using L = Layout<F, rows>;
    if (F::scale == Scale::half) {
        std::memcpy(block + 2 * row, &plain.scale, 2);
    } else {
        block[row] = static_cast<uint8_t>(plain.scale);
    }
    if (L::own_min) std::memcpy(block + L::min_at + 2 * row, &plain.min, 2);
    if (F::sub_scales != SubScales::none) {
        for (int j = 0; j < L::n_subs; j++) {  // in pairs
            const int at = j / 2 * 2 * rows + 2 * row + j % 2;
            block[L::sub_scales_at + at] = plain.sub_scales[j];
            if (F::sub_scales == SubScales::with_mins) {
                block[L::sub_mins_at + at] = plain.sub_mins[j];
            }
        }
    }
    const uint32_t flip = F::low_bits == 8 && signed_offset ? 0x80808080U : 0;
    constexpr int per_low = 8 / F::low_bits;
    constexpr int per_high = F::high_bits ? 8 / F::high_bits : 1;
    constexpr uint32_t low_mask = 0x01010101U * ((1 << F::low_bits) - 1);
    for (int step = 0; step < L::n_steps; step++) {
        const uint32_t *words = plain.words + step * L::words;
        uint8_t *codes = block + L::codes_at + step * L::step_bytes + 4 * row;
        for (int v = 0; v < L::low_vectors; v++, codes += L::vector_bytes) {
            uint32_t packed = 0;
            for (int i = 0; i < per_low; i++) {
                packed |= (words[per_low * v + i] & low_mask) << (F::low_bits * i);
            }
            packed ^= flip;
            std::memcpy(codes, &packed, 4);
        }
        for (int v = 0; v < L::high_vectors; v++, codes += L::vector_bytes) {
            uint32_t packed = 0;
            for (int i = 0; i < per_high; i++) {
                const uint32_t high = (words[per_high * v + i] & ~low_mask) >> F::low_bits;
                packed |= high << (F::high_bits * i);
            }
            std::memcpy(codes, &packed, 4);
        }
    }
}

}  // namespace
