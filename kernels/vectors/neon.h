// The vector operations that the kernels are written in, for AArch64 with dot products of bytes
// (ARMv8.2). The kernels compute the same bits with them as with AVX2.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

struct Neon {
    static constexpr int lanes = 4;
    using Ints = int32x4_t;
    using Floats = float32x4_t;

    static Ints load(const void *p) {
        return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t *>(p)));
    }
    static Ints zero_ints() { return vdupq_n_s32(0); }
    static Floats zero() { return vdupq_n_f32(0); }
    static Floats load_floats(const float *p) { return vld1q_f32(p); }
    static void store(float *p, Floats v) { vst1q_f32(p, v); }
    static Floats all(float value) { return vdupq_n_f32(value); }
    // a * b + c and c - a * b, rounded once.
    static Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats subtract_product(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Ints multiply(Ints a, Ints b) { return vmulq_s32(a, b); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
    // One float16 for each lane.
    static Floats load_halves(const void *p) {
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t *>(p))));
    }

    // --- for products ---

    // Sums of products of bytes: 4 signed ones of `codes` times 4 of words[i] in each lane. They are
    // exact, and never overflow 32 bits. One load brings four words, of which the instruction takes
    // one: to load each word into all lanes would take as many instructions as the products. (The
    // words of a step are a multiple of four. Once loops are unrolled, `i` is a constant.)
    using Sums = Ints;
    static constexpr bool has_dot_product = true;  // sdot
    static constexpr bool needs_unsigned_codes = false;
    static Sums no_sums() { return zero_ints(); }
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        const int8x16_t bytes = vreinterpretq_s8_s32(codes);
        const int8x16_t four = vreinterpretq_s8_s32(load(words + i / 4 * 4));
        switch (i % 4) {
            case 0: return vdotq_laneq_s32(sums, bytes, four, 0);
            case 1: return vdotq_laneq_s32(sums, bytes, four, 1);
            case 2: return vdotq_laneq_s32(sums, bytes, four, 2);
            default: return vdotq_laneq_s32(sums, bytes, four, 3);
        }
    }
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    static Ints widen(Sums sums, Ints total) { return vaddq_s32(total, sums); }

    // 2 signed 16-bit numbers of `pairs` times 2 of the word, added in each lane.
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return dot_shorts(sums, pairs, all_words(word));
    }
    static Ints all_words(const int32_t *word) { return vld1q_dup_s32(word); }
    static Ints all_bytes(int value) {
        return vreinterpretq_s32_s8(vdupq_n_s8(static_cast<int8_t>(value)));
    }
    static Ints bits(Ints a, Ints mask) { return vandq_s32(a, mask); }
    static Ints either(Ints a, Ints b) { return vorrq_s32(a, b); }
    template <int n> static Ints shift_right(Ints a) {
        return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), n));
    }
    template <int n> static Ints shift_left(Ints a) {
        return vreinterpretq_s32_u16(vshlq_n_u16(vreinterpretq_u16_s32(a), n));
    }
    // Look up each byte (0 to 15) in a table of 16.
    static Ints look_up(const int8_t *table, Ints indices) {
        return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(indices)));
    }
    // Two bytes for each lane, as 16-bit numbers; and the first and second of each lane.
    static Ints load_byte_pairs(const void *p) {
        return vreinterpretq_s32_u16(vmovl_u8(vld1_u8(static_cast<const uint8_t *>(p))));
    }
    static Ints load_signed_pairs(const void *p) {
        return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(static_cast<const int8_t *>(p))));
    }
    static Ints first_of_pairs(Ints a) { return vshrq_n_s32(vshlq_n_s32(a, 16), 16); }
    static Ints second_of_pairs(Ints a) { return vshrq_n_s32(a, 16); }
    // One number for each lane.
    static Floats load_bfloats(const void *p) {
        const uint16x4_t halves = vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t *>(p)));
        return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
    }
    // Powers of two from their biased exponents, one byte for each lane.
    static Floats load_exponents(const void *p) {
        const uint16x4_t wide = vget_low_u16(vmovl_u8(load_4_bytes(p)));
        return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(wide), 23));
    }
    static uint8x8_t load_4_bytes(const void *p) {
        uint32_t four;
        std::memcpy(&four, p, 4);
        return vreinterpret_u8_u32(vdup_n_u32(four));
    }
    static void store_first(float *p, Floats v, int n) {
        float lane[lanes];
        vst1q_f32(lane, v);
        std::memcpy(p, lane, sizeof(float) * n);
    }

    // --- for attention ---

    using Mask = Ints;
    // Sums that a tile keeps in registers; the others are for operands.
    static constexpr int accumulators = 24;
    static Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
    static Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
    static Floats round(Floats a) { return vrndnq_f32(a); }
    // The larger one; `b` where either is NaN. (vmaxq_f32 gives NaN there.)
    static Floats larger(Floats a, Floats b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    // a * 2^n for whole n between -126 and 127.
    static Floats times_power(Floats a, Floats n) {
        const Ints biased = vaddq_s32(to_ints(n), all_ints(127));
        return multiply(a, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
    }
    // Lanes that are not equal (a NaN equals nothing); how many; `a` in these and 0 elsewhere.
    static Mask differ(Floats a, Floats b) {
        return vreinterpretq_s32_u32(vmvnq_u32(vceqq_f32(a, b)));
    }
    static int count(Mask lanes_of) { return -vaddvq_s32(lanes_of); }
    static Floats only(Mask lanes_of, Floats a) {
        return vreinterpretq_f32_s32(vandq_s32(lanes_of, vreinterpretq_s32_f32(a)));
    }
    static Ints only(Mask lanes_of, Ints a) { return vandq_s32(lanes_of, a); }
    // The largest and the sum of the lanes.
    static float largest_lane(Floats a) { return vmaxvq_f32(a); }
    static int largest_lane(Ints a) { return vmaxvq_s32(a); }
    static int sum_of_lanes(Ints a) { return vaddvq_s32(a); }
    static float first_lane(Floats a) { return vgetq_lane_f32(a, 0); }

    // 2 signed 16-bit numbers of each lane of `a` times those of `b`, added to the sums.
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
        const Ints low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
        return vaddq_s32(sums, vpaddq_s32(low, high));
    }
    static Ints all_ints(int value) { return vdupq_n_s32(value); }
    static Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
    static Ints subtract(Ints a, Ints b) { return vsubq_s32(a, b); }
    static Ints larger(Ints a, Ints b) { return vmaxq_s32(a, b); }
    static Ints absolute(Ints a) { return vabsq_s32(a); }
    static Mask reach(Ints a, Ints b) { return vreinterpretq_s32_u32(vcgeq_s32(a, b)); }
    template <int n> static Ints shift_lanes_left(Ints a) { return vshlq_n_s32(a, n); }
    template <int n> static Ints shift_lanes_right(Ints a) { return vshrq_n_s32(a, n); }
    template <int n> static Ints unsigned_lanes_right(Ints a) {
        return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), n));
    }
    // The nearest integer, and the bits of a float as an integer.
    static Ints to_ints(Floats a) { return vcvtnq_s32_f32(a); }
    static Ints bits_of(Floats a) { return vreinterpretq_s32_f32(a); }
    static void store(void *p, Ints a) {
        vst1q_u8(static_cast<uint8_t *>(p), vreinterpretq_u8_s32(a));
    }
    // The low 16 bits of each lane, side by side.
    static void store_shorts(int16_t *p, Ints a) { vst1_s16(p, vmovn_s32(a)); }
    // The low 16 bits of `first` below those of `second` in each lane.
    static Ints pair(Ints first, Ints second) { return vsliq_n_s32(first, second, 16); }
    // A bit for each lane that is not 0.
    static unsigned nonzero_lanes(Ints a) {
        constexpr uint32_t lane_bits[lanes] = {1, 2, 4, 8};
        return vaddvq_u32(vandq_u32(vtstq_s32(a, a), vld1q_u32(lane_bits)));
    }
    // Whether two 16-bit numbers for each lane all equal `value`.
    static bool shorts_equal(const void *p, int16_t value) {
        return vminvq_u16(vceqq_s16(vreinterpretq_s16_s32(load(p)), vdupq_n_s16(value))) != 0;
    }
    // The largest of |float16| among two for each lane, as bits of float16 (NaN is the largest).
    static Ints larger_halves(Ints halves, Ints largest) {
        const uint16x8_t size = vandq_u16(vreinterpretq_u16_s32(halves), vdupq_n_u16(0x7fff));
        return vreinterpretq_s32_u16(vmaxq_u16(size, vreinterpretq_u16_s32(largest)));
    }
    static int largest_short(Ints a) { return vmaxvq_u16(vreinterpretq_u16_s32(a)); }
    static float half(const void *p) {
        __fp16 half;
        std::memcpy(&half, p, 2);
        return half;
    }
    // The lanes in double precision, in two halves.
    struct Doubles {
        float64x2_t low, high;
    };
    static Doubles to_doubles(Floats a) {
        return {vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a)};
    }
    static Doubles all_doubles(double value) { return {vdupq_n_f64(value), vdupq_n_f64(value)}; }
    // a * b + c, rounded once, downwards while a RoundingDown is alive.
    class RoundingDown {
        uint64_t before;
        static void set(uint64_t control) { asm volatile("msr fpcr, %0" ::"r"(control) : "memory"); }

    public:
        RoundingDown() {
            asm volatile("mrs %0, fpcr" : "=r"(before));
            constexpr uint64_t modes = uint64_t{3} << 22, down = uint64_t{2} << 22;
            set((before & ~modes) | down);
        }
        ~RoundingDown() { set(before); }
    };
    static Doubles multiply_add_down(Doubles a, Doubles b, Doubles c) {
        return {vfmaq_f64(c.low, a.low, b.low), vfmaq_f64(c.high, a.high, b.high)};
    }
    static Doubles subtract(Doubles a, Doubles b) {
        return {vsubq_f64(a.low, b.low), vsubq_f64(a.high, b.high)};
    }
    static double sum(Doubles sums) { return vaddvq_f64(vaddq_f64(sums.low, sums.high)); }

    // A signed byte for each lane.
    static Floats load_signed_bytes(const void *p) {
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p)));
        return to_floats(vmovl_s16(vget_low_s16(wide)));
    }
    // Transpose a square of 4 vectors.
    static void transpose(Floats (&v)[lanes]) {
        const float32x4x2_t a = vtrnq_f32(v[0], v[1]), b = vtrnq_f32(v[2], v[3]);
        v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
        v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
        v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
        v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
    }
    // (high * 2^16 + low + heavy * 2^12) * scale in double precision, where the sum is exact.
    static Floats join(Ints high, Ints low, Ints heavy, double scale) {
        return vcombine_f32(
            join_half(vget_low_s32(high), vget_low_s32(low), vget_low_s32(heavy), scale),
            join_half(vget_high_s32(high), vget_high_s32(low), vget_high_s32(heavy), scale));
    }
    static float32x2_t join_half(int32x2_t high, int32x2_t low, int32x2_t heavy, double scale) {
        const auto wide = [](int32x2_t a) { return vcvtq_f64_s64(vmovl_s32(a)); };
        const float64x2_t sum = vfmaq_f64(wide(low), wide(high), vdupq_n_f64(65536));
        const float64x2_t all = vfmaq_f64(sum, wide(heavy), vdupq_n_f64(4096));
        return vcvt_f32_f64(vmulq_f64(all, vdupq_n_f64(scale)));
    }
};
