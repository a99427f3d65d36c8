// The operations of Avx512Vnni that products of packed weights need, in plain C++: one lane after
// the other. With this folder before kernels/ among the folders of headers, products for AVX-512
// and AMX run on every x86-64 CPU, slowly. kernels/vectors/avx512_vnni.h is the original, and
// explains the names.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

struct Avx512Vnni {
    static constexpr int lanes = 16;
    static constexpr int accumulators = 24;
    static constexpr bool has_dot_product = true;
    static constexpr bool needs_unsigned_codes = true;
    static constexpr bool adds_pairs = true;

    struct Floats {
        float lane[16];
    };
    union Ints {
        int32_t ints[16];
        uint32_t unsigned_ints[16];
        int16_t shorts[32];
        uint16_t unsigned_shorts[32];
        int8_t bytes[64];
        uint8_t unsigned_bytes[64];
    };
    using Sums = Ints;

    // --- one function for each kind of lane ---

    template <class Function> static Floats floats_of(Function value) {
        Floats v;
        for (int i = 0; i < 16; i++) v.lane[i] = value(i);
        return v;
    }
    // Sums wrap around, as those of the CPU do.
    template <class Function> static Ints ints_of(Function value) {
        Ints v;
        for (int i = 0; i < 16; i++) v.unsigned_ints[i] = static_cast<uint32_t>(value(i));
        return v;
    }
    template <class Function> static Ints shorts_of(Function value) {
        Ints v;
        for (int i = 0; i < 32; i++) v.unsigned_shorts[i] = static_cast<uint16_t>(value(i));
        return v;
    }
    template <class Function> static Ints bytes_of(Function value) {
        Ints v;
        for (int i = 0; i < 64; i++) v.unsigned_bytes[i] = static_cast<uint8_t>(value(i));
        return v;
    }

    // --- constants ---

    static Floats zero() { return all(0); }
    static Floats opaque_zero() { return zero(); }
    static Ints zero_ints() { return all_ints(0); }
    static Floats all(float value) {
        return floats_of([=](int) { return value; });
    }
    static Ints all_ints(int value) {
        return ints_of([=](int) { return value; });
    }
    static Ints all_shorts(int value) {
        return shorts_of([=](int) { return value; });
    }
    static Ints all_bytes(int value) {
        return bytes_of([=](int) { return value; });
    }
    static Ints broadcast_word(const int32_t *word) { return all_ints(*word); }

    // --- loads and stores ---

    static Ints load(const void *p) {
        Ints v;
        std::memcpy(&v, p, 64);
        return v;
    }
    static Floats load_floats(const float *p) {
        Floats v;
        std::memcpy(&v, p, 64);
        return v;
    }
    static Floats load_halves(const void *p) {
        return floats_of([=](int i) { return load_half(static_cast<const uint16_t *>(p) + i); });
    }
    static Floats load_signed_bytes(const void *p) {
        return floats_of([=](int i) { return static_cast<const int8_t *>(p)[i]; });
    }
    static Floats load_powers_of_two(const void *p) {
        return floats_of([=](int i) {
            const uint32_t bits = static_cast<uint32_t>(static_cast<const uint8_t *>(p)[i]) << 23;
            float value;
            std::memcpy(&value, &bits, 4);
            return value;
        });
    }
    static Ints load_byte_pairs(const void *p) {
        return shorts_of([=](int i) { return static_cast<const uint8_t *>(p)[i]; });
    }
    static Ints load_signed_pairs(const void *p) {
        return shorts_of([=](int i) { return static_cast<const int8_t *>(p)[i]; });
    }
    static float load_half(const void *p) {
        uint16_t bits;
        std::memcpy(&bits, p, 2);
        return _cvtsh_ss(bits);
    }
    static void store(float *p, Floats v) { std::memcpy(p, &v, 64); }
    static void store(void *p, Ints a) { std::memcpy(p, &a, 64); }
    static void store_first(float *p, Floats v, int n) { std::memcpy(p, &v, 4 * n); }

    // --- arithmetic ---

    static Floats multiply(Floats a, Floats b) {
        return floats_of([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Floats multiply_add(Floats a, Floats b, Floats c) {
        return floats_of([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
    }
    static Floats subtract_product(Floats a, Floats b, Floats c) {
        return floats_of([&](int i) { return std::fma(-a.lane[i], b.lane[i], c.lane[i]); });
    }
    static Floats to_floats(Ints a) {
        return floats_of([&](int i) { return static_cast<float>(a.ints[i]); });
    }
    static Ints add(Ints a, Ints b) {
        return ints_of([&](int i) { return a.unsigned_ints[i] + b.unsigned_ints[i]; });
    }
    static Ints multiply(Ints a, Ints b) {
        return ints_of([&](int i) { return a.unsigned_ints[i] * b.unsigned_ints[i]; });
    }
    static Ints multiply_shorts(Ints a, Ints b) {
        return shorts_of([&](int i) { return a.shorts[i] * b.shorts[i]; });
    }
    static Ints subtract_bytes(Ints a, Ints b) {
        return bytes_of([&](int i) { return a.bytes[i] - b.bytes[i]; });
    }

    // --- bits ---

    static Ints bit_and(Ints a, Ints mask) {
        return ints_of([&](int i) { return a.ints[i] & mask.ints[i]; });
    }
    static Ints bit_or(Ints a, Ints b) {
        return ints_of([&](int i) { return a.ints[i] | b.ints[i]; });
    }
    static Ints bit_xor(Ints a, Ints b) {
        return ints_of([&](int i) { return a.ints[i] ^ b.ints[i]; });
    }
    template <int n> static Ints shift_ints_left(Ints a) {
        return ints_of([&](int i) { return a.unsigned_ints[i] << n; });
    }
    template <int n> static Ints shift_ints_right(Ints a) {
        return ints_of([&](int i) { return a.ints[i] >> n; });
    }
    template <int n> static Ints shift_ints_right_unsigned(Ints a) {
        return ints_of([&](int i) { return a.unsigned_ints[i] >> n; });
    }
    template <int n> static Ints shift_shorts_left(Ints a) {
        return shorts_of([&](int i) { return a.unsigned_shorts[i] << n; });
    }
    template <int n> static Ints shift_shorts_right(Ints a) {
        return shorts_of([&](int i) { return a.unsigned_shorts[i] >> n; });
    }

    // --- bytes ---

    static Ints look_up(const int8_t *table, Ints indices) {
        return bytes_of([&](int i) { return table[indices.unsigned_bytes[i]]; });
    }
    static Ints alternate_bytes(Ints even, Ints odd) {
        return bytes_of([&](int i) { return i % 2 ? odd.bytes[i] : even.bytes[i]; });
    }
    static Sums start_sums(Ints total) { return total; }
    static Sums add_products(Sums sums, Ints codes, const int32_t *words, int i) {
        int8_t column[4];
        std::memcpy(column, &words[i], 4);
        return ints_of([&](int lane) {
            int sum = sums.ints[lane];
            for (int b = 0; b < 4; b++) sum += codes.unsigned_bytes[4 * lane + b] * column[b];
            return sum;
        });
    }
    static Sums add_signed_products(Sums sums, Ints codes, const int32_t *words, int i) {
        return add_products(sums, codes, words, i);
    }
    static Ints new_total(Sums sums, Ints) { return sums; }
    static Ints add_scaled(Sums sums, Ints scale, Ints total) {
        return add(total, multiply(sums, scale));
    }
    static Ints in_order(Ints sums) { return sums; }

    // --- shorts ---

    static Ints pair_shorts(Ints first, Ints second) {
        return shorts_of([&](int i) { return i % 2 ? second.shorts[i - 1] : first.shorts[i]; });
    }
    static Ints first_of_pairs(Ints a) {
        return ints_of([&](int i) { return a.shorts[2 * i]; });
    }
    static Ints second_of_pairs(Ints a) {
        return ints_of([&](int i) { return a.shorts[2 * i + 1]; });
    }
    static Ints dot_shorts(Ints sums, Ints a, Ints b) {
        return ints_of([&](int i) {
            const int first = a.shorts[2 * i] * b.shorts[2 * i];
            const int second = a.shorts[2 * i + 1] * b.shorts[2 * i + 1];
            return sums.unsigned_ints[i] + static_cast<uint32_t>(first) +
                   static_cast<uint32_t>(second);
        });
    }
    static Ints add_pair_products(Ints sums, Ints pairs, const int32_t *word) {
        return dot_shorts(sums, pairs, broadcast_word(word));
    }
};
