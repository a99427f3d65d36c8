// Checks attention/attention.h without ggml, for each instruction set of this CPU: that it agrees
// with the formula in double precision, that the bits of a row depend only on the set of cells that
// it attends to, that infinities and NaN reach only the rows that attend to them, and that it
// writes only to its own memory.
//
//   cd kernels
//   flags="-O3 -std=c++17 -ffp-contract=off -fno-strict-aliasing -Wall -Wextra -pthread -I."
//   machine="-march=skylake-avx512 -mavx512vnni -mprefer-vector-width=512"
//   g++ $flags $machine tests/attention_test.cpp -o /tmp/attention_test && /tmp/attention_test
//
// With machine="-mavx2 -mfma -mf16c" it checks only AVX2; tests/llama/test_native_kernels.py does
// that. `--accuracy` prints errors, and `--bits` prints a digest of the inputs and outputs of each
// shape. scripts/arm_kernels.py checks NEON in an emulator. attention_bench.cpp compares the speed
// of two versions.
#ifdef __AVX512BW__
#include "vectors/avx512.h"
#endif
#ifdef __AVX512VNNI__
#include "vectors/avx512_amd.h"
#include "vectors/avx_vnni.h"
#endif
#ifdef __aarch64__
#include "vectors/neon.h"
#else
#include "vectors/avx2.h"
#endif

#include "attention/attention.h"
#include "tests/barrier.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

#ifdef __AVX512VNNI__
struct AlwaysHalved : Avx512Amd {
    static constexpr int least_halved_rows = 1;
};
#endif
#ifndef __aarch64__
// It is not faster, but checks halved products on any x86-64 CPU.
struct HalvedAvx2 : Avx2 {
    static constexpr int least_halved_rows = 1;
    static Ints add_shorts(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
    static Ints odd_lanes_moved_down(Ints a) { return _mm256_srli_epi64(a, 32); }
};
#endif

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937;

// --- problems ---

// Which cells rows attend to. (blind: some rows attend to none.)
enum class Mask { none, causal, random, blind };

struct Shape {
    int rows;
    int cells;
    int heads;
    int kv_heads;
    int key_size;
    int value_size;
    NumberType key_type = NumberType::f16;
    NumberType value_type = NumberType::f16;
    Mask mask = Mask::random;
    int streams = 1;
    int mask_heads = 1;
    float softcap = 0;
    float max_bias = 0;
    // The factor of queries: the larger it is, the more the scores differ.
    float sharpness = 1;
    bool sinks = false;
};

constexpr uint16_t hidden_half = 0xfc00;  // -inf as float16

size_t cell_bytes(NumberType type, int size) {
    return static_cast<size_t>(bytes_of_numbers(type, size));
}

#ifdef __aarch64__
uint16_t to_half(float value) {
    const __fp16 half = value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
float from_half(uint16_t half) { return Neon::load_half(&half); }
#else
uint16_t to_half(float value) { return _cvtss_sh(value, 0); }
float from_half(uint16_t half) { return _cvtsh_ss(half); }
#endif

void encode_q8_0(const float *values, int size, uint8_t *cell) {
    for (int i = 0; i < size; i += 32, cell += 34) {
        float largest = 0;
        for (int j = 0; j < 32; j++) largest = std::max(largest, std::fabs(values[i + j]));
        const uint16_t scale = to_half(largest / 127);
        std::memcpy(cell, &scale, 2);
        for (int j = 0; j < 32; j++) {
            cell[2 + j] = static_cast<uint8_t>(std::lrint(127 * values[i + j] / largest));
        }
    }
}

// Store the numbers of a key or value.
void encode(NumberType type, const float *values, int size, uint8_t *cell) {
    if (type == NumberType::q8_0) {
        encode_q8_0(values, size, cell);
        return;
    }
    for (int i = 0; i < size; i++) {
        const uint16_t half = to_half(values[i]);
        uint32_t bits;
        std::memcpy(&bits, values + i, 4);
        const uint16_t bfloat = (bits + 0x8000) >> 16;
        if (type == NumberType::f32) std::memcpy(cell + 4 * i, &bits, 4);
        if (type == NumberType::f16) std::memcpy(cell + 2 * i, &half, 2);
        if (type == NumberType::bf16) std::memcpy(cell + 2 * i, &bfloat, 2);
    }
}

// Number i of a key or value.
double decode(NumberType type, const uint8_t *cell, int i) {
    uint16_t half = 0;
    uint32_t bits = 0;
    if (type == NumberType::f32) {
        std::memcpy(&bits, cell + 4 * i, 4);
    } else if (type == NumberType::q8_0) {
        std::memcpy(&half, cell + i / 32 * 34, 2);
        return double(from_half(half)) * int8_t(cell[i / 32 * 34 + 2 + i % 32]);
    } else {
        std::memcpy(&half, cell + 2 * i, 2);
        if (type == NumberType::f16) return from_half(half);
        bits = uint32_t{half} << 16;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Problem {
    Shape shape;
    std::vector<float> queries;  // [stream][row][head][size], as llama.cpp has them
    std::vector<float> sinks;    // [head]
    Bytes keys;                  // [stream][cell][kv_head]
    Bytes values;                // [stream][cell][kv_head]
    std::vector<uint16_t> mask;  // [stream][head of the mask][row][cell]

    size_t mask_at(int stream, int head, int row, int cell) const {
        return ((size_t(stream) * shape.mask_heads + head % shape.mask_heads) * shape.rows + row) *
                   shape.cells + cell;
    }
    bool sees(int stream, int head, int row, int cell) const {
        return mask.empty() || mask[mask_at(stream, head, row, cell)] != hidden_half;
    }
    uint8_t *key(int stream, int cell, int head) {
        return keys.data() + ((size_t(stream) * shape.cells + cell) * shape.kv_heads + head) *
                                 cell_bytes(shape.key_type, shape.key_size);
    }
    uint8_t *value(int stream, int cell, int head) {
        return values.data() + ((size_t(stream) * shape.cells + cell) * shape.kv_heads + head) *
                                   cell_bytes(shape.value_type, shape.value_size);
    }
    float *query(int stream, int row, int head) {
        return queries.data() +
               ((size_t(stream) * shape.rows + row) * shape.heads + head) * shape.key_size;
    }

    AttentionJob job() const {
        const Shape &s = shape;
        AttentionJob job = {};
        job.queries = reinterpret_cast<const char *>(queries.data());
        job.query_head_stride = 4 * s.key_size;
        job.query_row_stride = job.query_head_stride * s.heads;
        job.query_stream_stride = job.query_row_stride * s.rows;
        job.keys = reinterpret_cast<const char *>(keys.data());
        job.key_type = s.key_type;
        job.key_head_stride = cell_bytes(s.key_type, s.key_size);
        job.key_cell_stride = job.key_head_stride * s.kv_heads;
        job.key_stream_stride = job.key_cell_stride * s.cells;
        job.values = reinterpret_cast<const char *>(values.data());
        job.value_type = s.value_type;
        job.value_head_stride = cell_bytes(s.value_type, s.value_size);
        job.value_cell_stride = job.value_head_stride * s.kv_heads;
        job.value_stream_stride = job.value_cell_stride * s.cells;
        job.mask = mask.empty() ? nullptr : reinterpret_cast<const char *>(mask.data());
        job.mask_row_stride = 2 * s.cells;
        job.mask_head_stride = job.mask_row_stride * s.rows;
        job.mask_stream_stride = job.mask_head_stride * s.mask_heads;
        job.n_mask_heads = s.mask_heads;
        job.n_mask_streams = s.streams;
        job.sinks = sinks.empty() ? nullptr : sinks.data();
        job.n_rows = s.rows;
        job.n_cells = s.cells;
        job.n_heads = s.heads;
        job.n_kv_heads = s.kv_heads;
        job.n_streams = s.streams;
        job.key_size = s.key_size;
        job.value_size = s.value_size;
        job.scale = 1 / std::sqrt(float(s.key_size));
        job.max_bias = s.max_bias;
        job.softcap = s.softcap;
        return job;
    }
    size_t n_outputs() const {
        return size_t(shape.streams) * shape.rows * shape.heads * shape.value_size;
    }
};

uint16_t random_mask(const Shape &shape, int row, int cell, Random &random) {
    const int first_own = shape.cells - shape.rows;
    if (shape.mask == Mask::causal) return cell <= first_own + row ? 0 : hidden_half;
    if (shape.mask == Mask::blind && row % 3 == 1) return hidden_half;
    // A common prefix with holes, and a tree whose nodes attend to some other nodes.
    const bool is_prefix = cell < first_own;
    const bool is_own = cell == first_own + row;
    const bool seen = is_own || random() % 100 < (is_prefix ? 95 : 40);
    if (!seen) return hidden_half;
    return shape.max_bias > 0 ? to_half(-float(std::abs(shape.cells - cell))) : 0;
}

void fill_cells(Problem &p, Random &random) {
    const Shape &shape = p.shape;
    std::normal_distribution<float> normal;
    const size_t n_cells = size_t(shape.streams) * shape.cells * shape.kv_heads;
    p.keys.resize(n_cells * cell_bytes(shape.key_type, shape.key_size));
    p.values.resize(n_cells * cell_bytes(shape.value_type, shape.value_size));
    std::vector<float> numbers(std::max(shape.key_size, shape.value_size));
    for (int stream = 0; stream < shape.streams; stream++) {
        for (int cell = 0; cell < shape.cells; cell++) {
            for (int head = 0; head < shape.kv_heads; head++) {
                for (float &x : numbers) x = normal(random);
                numbers[0] *= 5;  // real keys have a few large dimensions
                encode(shape.key_type, numbers.data(), shape.key_size, p.key(stream, cell, head));
                const float size = std::exp(0.5f * normal(random));
                for (float &x : numbers) x = normal(random) * size;
                encode(shape.value_type, numbers.data(), shape.value_size,
                       p.value(stream, cell, head));
            }
        }
    }
}

void fill_mask(Problem &p, Random &random) {
    const Shape &shape = p.shape;
    p.mask.resize(size_t(shape.streams) * shape.mask_heads * shape.rows * shape.cells);
    for (int stream = 0; stream < shape.streams; stream++) {
        for (int head = 0; head < shape.mask_heads; head++) {
            for (int row = 0; row < shape.rows; row++) {
                for (int cell = 0; cell < shape.cells; cell++) {
                    p.mask[p.mask_at(stream, head, row, cell)] =
                        random_mask(shape, row, cell, random);
                }
            }
        }
    }
}

Problem make(const Shape &shape, unsigned seed) {
    Random random(seed);
    std::normal_distribution<float> normal;
    Problem p;
    p.shape = shape;
    p.queries.resize(size_t(shape.streams) * shape.rows * shape.heads * shape.key_size);
    for (float &q : p.queries) q = normal(random) * shape.sharpness;
    fill_cells(p, random);
    if (shape.mask != Mask::none) fill_mask(p, random);
    for (int head = 0; shape.sinks && head < shape.heads; head++) {
        p.sinks.push_back(normal(random) * 2);
    }
    return p;
}

// --- the formula ---

double slope(const Shape &shape, int head) {
    if (shape.max_bias <= 0) return 1;
    const int n = 1 << int(std::floor(std::log2(shape.heads)));
    return head < n ? std::pow(2.0, -shape.max_bias / n * (head + 1))
                    : std::pow(2.0, -shape.max_bias / 2 / n * (2 * (head - n) + 1));
}

// The scores of one row of one head; -inf for hidden cells.
std::vector<double> exact_scores(Problem &p, int stream, int row, int head, bool halves) {
    const Shape &s = p.shape;
    const int kv_head = head / (s.heads / s.kv_heads);
    std::vector<double> scores(s.cells);
    const double scale = 1 / std::sqrt(float(s.key_size));
    const float *query = p.query(stream, row, head);
    for (int cell = 0; cell < s.cells; cell++) {
        scores[cell] = -INFINITY;
        if (!p.sees(stream, head, row, cell)) continue;
        double score = 0;
        for (int d = 0; d < s.key_size; d++) {
            const double q = halves ? from_half(to_half(query[d])) : query[d];
            score += q * decode(s.key_type, p.key(stream, cell, kv_head), d);
        }
        score *= scale;
        if (s.softcap > 0) score = s.softcap * std::tanh(score / s.softcap);
        if (!p.mask.empty()) {
            score += slope(s, head) * from_half(p.mask[p.mask_at(stream, head, row, cell)]);
        }
        scores[cell] = score;
    }
    return scores;
}

// The output of one row of one head. With `halves` it is computed as in llama.cpp: with the query
// in float16, and the sum over cells in float16.
std::vector<double> formula(Problem &p, int stream, int row, int head, bool halves) {
    const Shape &s = p.shape;
    const int kv_head = head / (s.heads / s.kv_heads);
    const std::vector<double> scores = exact_scores(p, stream, row, head, halves);
    std::vector<double> output(s.value_size);
    double largest = *std::max_element(scores.begin(), scores.end());
    if (largest == -INFINITY) return output;
    double sum = 0;
    if (s.sinks) largest = std::max(largest, double(p.sinks[head]));
    for (int cell = 0; cell < s.cells; cell++) {
        if (scores[cell] == -INFINITY) continue;
        const double weight = std::exp(scores[cell] - largest);
        sum += weight;
        for (int d = 0; d < s.value_size; d++) {
            output[d] += weight * decode(s.value_type, p.value(stream, cell, kv_head), d);
            if (halves) output[d] = from_half(to_half(float(output[d])));
        }
    }
    if (s.sinks) sum += std::exp(p.sinks[head] - largest);
    for (double &o : output) o /= sum;
    return output;
}

// --- runs ---

// Memory with guard bytes on both sides.
struct Scratch {
    static constexpr size_t guard = 4096;
    static constexpr uint8_t guard_byte = 0x5a;
    Bytes memory;
    size_t size;
    uint8_t *begin;

    Scratch(size_t size, uint8_t fill) : memory(size + 2 * guard + 64, fill), size(size) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(memory.data()) + guard;
        begin = memory.data() + guard + (64 - at % 64) % 64;
        std::memset(begin - guard, guard_byte, guard);
        std::memset(begin + size, guard_byte, guard);
    }
    bool guards_are_intact() const {
        const auto intact = [](uint8_t byte) { return byte == guard_byte; };
        return std::all_of(begin - guard, begin, intact) &&
               std::all_of(begin + size, begin + size + guard, intact);
    }
};

// False once a run has written beyond its memory.
bool all_guards_intact = true;

template <class V>
std::vector<float> run(const Problem &p, int n_threads = 1, uint8_t fill = 0xff,
                       int n_planned = 0) {
    AttentionJob job = p.job();
    Scratch scratch(Attention<V>::bytes(job, std::max(n_threads, n_planned)), fill);
    Scratch outputs(p.n_outputs() * sizeof(float), fill);
    job.outputs = reinterpret_cast<float *>(outputs.begin);
    Barrier barrier{n_threads};
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&, i] {
            Attention<V>::run(job, i, n_threads, scratch.begin, Barrier::wait, &barrier);
        });
    }
    for (auto &thread : threads) thread.join();
    all_guards_intact =
        all_guards_intact && scratch.guards_are_intact() && outputs.guards_are_intact();
    return std::vector<float>(job.outputs, job.outputs + p.n_outputs());
}

// Some rows of a problem by themselves.
Problem with_rows(Problem p, const std::vector<int> &rows) {
    Problem part = p;
    part.shape.rows = static_cast<int>(rows.size());
    part.queries.clear();
    part.mask.clear();
    const Shape &s = p.shape;
    for (int stream = 0; stream < s.streams; stream++) {
        for (const int row : rows) {
            const float *query = p.query(stream, row, 0);
            part.queries.insert(part.queries.end(), query, query + s.heads * s.key_size);
        }
        for (int head = 0; head < s.mask_heads; head++) {
            for (const int row : rows) {
                if (p.mask.empty()) continue;
                const uint16_t *mask = &p.mask[p.mask_at(stream, head, row, 0)];
                part.mask.insert(part.mask.end(), mask, mask + s.cells);
            }
        }
    }
    return part;
}

// A problem with its cells rearranged: cell i is the old cell from[i]; -1 is a hidden cell whose
// key and value are NaN.
Problem with_cells(Problem p, const std::vector<int> &from) {
    const Shape &s = p.shape;
    Problem moved = p;
    moved.shape.cells = static_cast<int>(from.size());
    const size_t n = size_t(s.streams) * from.size() * s.kv_heads;
    moved.keys.assign(n * cell_bytes(s.key_type, s.key_size), 0xff);
    moved.values.assign(n * cell_bytes(s.value_type, s.value_size), 0xff);
    moved.mask.assign(size_t(s.streams) * s.mask_heads * s.rows * from.size(), hidden_half);
    for (int stream = 0; stream < s.streams; stream++) {
        for (size_t i = 0; i < from.size(); i++) {
            if (from[i] < 0) continue;
            const int cell = static_cast<int>(i);
            std::memcpy(moved.key(stream, cell, 0), p.key(stream, from[i], 0),
                        s.kv_heads * cell_bytes(s.key_type, s.key_size));
            std::memcpy(moved.value(stream, cell, 0), p.value(stream, from[i], 0),
                        s.kv_heads * cell_bytes(s.value_type, s.value_size));
            for (int head = 0; head < s.mask_heads; head++) {
                for (int row = 0; row < s.rows; row++) {
                    moved.mask[moved.mask_at(stream, head, row, cell)] =
                        p.mask[p.mask_at(stream, head, row, from[i])];
                }
            }
        }
    }
    return moved;
}

bool same(const float *a, const float *b, size_t n) { return std::memcmp(a, b, n * 4) == 0; }
bool same(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() && same(a.data(), b.data(), a.size());
}

// --- checks ---

std::vector<Shape> shapes() {
    std::vector<Shape> all;
    const NumberType types[] = {NumberType::f32, NumberType::f16, NumberType::bf16,
                                NumberType::q8_0};
    for (const NumberType key : types) {
        for (const NumberType value : types) all.push_back({3, 150, 4, 2, 64, 96, key, value});
    }
    const int sizes[][2] = {{1, 1},     {8, 8},     {40, 40},   {64, 64},   {80, 80}, {96, 96},
                            {128, 128}, {192, 128}, {256, 256}, {576, 512}, {7, 33}};
    for (const auto &size : sizes) {
        all.push_back({5, 131, 6, 2, size[0], size[1]});
        all.push_back({2, 70, 3, 3, size[0], size[1], NumberType::f32, NumberType::bf16});
    }
    for (const int cells : {1, 2, 31, 63, 64, 65, 128, 200, 1300, 5000}) {
        for (const float sharpness : {0.0f, 1.0f, 4.0f}) {
            const int rows = cells < 7 ? 1 : 3;
            all.push_back({rows, cells, 6, 1, 128, 128, NumberType::f16, NumberType::f16,
                           cells < 7 ? Mask::none : Mask::random, 1, 1, 0, 0, sharpness});
        }
    }
    for (const int rows : {1, 2, 6, 7, 13, 32, 40}) {
        all.push_back({rows, 300, 8, 1, 64, 64});
        all.push_back({rows, 300, 5, 5, 64, 64, NumberType::f16, NumberType::f16, Mask::causal});
    }
    Shape s = {9, 333, 12, 2, 64, 64};
    for (const Mask mask : {Mask::none, Mask::causal, Mask::random, Mask::blind}) {
        for (const bool sinks : {false, true}) {
            for (const float softcap : {0.0f, 2.0f, 50.0f}) {
                for (const int streams : {1, 3}) {
                    s.mask = mask;
                    s.sinks = sinks;
                    s.softcap = softcap;
                    s.streams = streams;
                    s.mask_heads = 1;
                    all.push_back(s);
                }
            }
        }
    }
    s.max_bias = 8;
    s.mask = Mask::random;
    all.push_back(s);
    s.mask_heads = 12;
    all.push_back(s);
    s.max_bias = 0;
    s.mask_heads = 3;
    s.mask = Mask::blind;
    all.push_back(s);
    return all;
}

// The root mean square of an error, relative to that of the exact numbers.
double relative_error(const std::vector<double> &computed, const std::vector<double> &exact) {
    double error = 0;
    double size = 0;
    for (size_t d = 0; d < exact.size(); d++) {
        error += (computed[d] - exact[d]) * (computed[d] - exact[d]);
        size += exact[d] * exact[d];
    }
    if (error != error) return INFINITY;
    if (error == 0 && size == 0) return 0;
    return std::sqrt(error / size);
}

// The relative error of the worst row, of our outputs or of the formula in float16.
template <class V>
double worst_error(Problem &p, bool of_halves = false) {
    const Shape &s = p.shape;
    const std::vector<float> outputs = run<V>(p, 2);
    double worst = 0;
    for (int stream = 0; stream < s.streams; stream++) {
        for (int row = 0; row < s.rows; row++) {
            for (int head = 0; head < s.heads; head++) {
                const size_t at = ((size_t(stream) * s.rows + row) * s.heads + head) * s.value_size;
                std::vector<double> computed(&outputs[at], &outputs[at] + s.value_size);
                if (of_halves) computed = formula(p, stream, row, head, true);
                const std::vector<double> exact = formula(p, stream, row, head, false);
                worst = std::max(worst, relative_error(computed, exact));
            }
        }
    }
    return worst;
}

template <class V>
bool check_accuracy() {
    double worst = 0;
    bool good = true;
    for (const Shape &shape : shapes()) {
        Problem p = make(shape, 1);
        const double error = worst_error<V>(p);
        worst = std::max(worst, error);
        // With few dimensions, an output may be a small difference of large values. The scores of
        // sharp distributions are large, and so are their errors, in float16 too.
        const double limit = shape.value_size < 32 ? 2e-3 : 5e-4;
        if (error <= limit) continue;
        const double in_float16 = worst_error<V>(p, true);
        if (error > 2 * limit || error > 0.6 * in_float16) {
            std::printf("    %d rows, %d cells, %d heads on %d, %d/%d: error %.1e (%.1e)\n",
                        shape.rows, shape.cells, shape.heads, shape.kv_heads, shape.key_size,
                        shape.value_size, error, in_float16);
            good = false;
        }
    }
    std::printf("    worst relative error of a row %.1e\n", worst);
    return good;
}

template <class V>
bool check_threads() {
    bool good = true;
    for (const Shape &shape : shapes()) {
        const Problem p = make(shape, 2);
        const std::vector<float> one = run<V>(p, 1);
        for (int n_threads = 2; n_threads <= 4; n_threads++) {
            good = good && same(one, run<V>(p, n_threads, 0x77));
        }
    }
    return good;
}

// The memory for some threads is enough for fewer, too.
template <class V>
bool check_fewer_threads() {
    const Problem p = make({5, 300, 8, 8, 64, 64}, 15);
    const std::vector<float> one = run<V>(p, 1);
    bool good = true;
    for (const int n_planned : {2, 4, 8}) {
        for (int n_threads = 1; n_threads < n_planned; n_threads++) {
            good = good && same(one, run<V>(p, n_threads, 0x77, n_planned)) && all_guards_intact;
        }
    }
    return good;
}

template <class V>
bool check_batches() {
    bool good = true;
    for (const NumberType type : {NumberType::f16, NumberType::q8_0}) {
        for (const int kv_heads : {1, 2, 6}) {
            Shape shape = {40, 700, 6, kv_heads, 128, 128, type, type};
            const Problem p = make(shape, 3);
            const std::vector<float> all = run<V>(p, 2);
            const size_t row_size = 6 * 128;
            for (int n = 1; n < 40; n = n * 3 / 2 + 1) {
                std::vector<int> rows(n);
                for (int i = 0; i < n; i++) rows[i] = (i * 7 + n) % 40;
                const std::vector<float> some = run<V>(with_rows(p, rows), 1 + n % 3);
                for (int i = 0; i < n; i++) {
                    good = good && same(&some[i * row_size], &all[rows[i] * row_size], row_size);
                }
            }
        }
    }
    return good;
}

template <class V>
bool check_order() {
    bool good = true;
    Random random(5);
    for (const Shape &shape : shapes()) {
        if (shape.mask == Mask::none) continue;
        const Problem p = make(shape, 4);
        std::vector<int> from(shape.cells);
        for (int i = 0; i < shape.cells; i++) from[i] = i;
        const std::vector<float> outputs = run<V>(p);
        std::shuffle(from.begin(), from.end(), random);
        good = good && same(outputs, run<V>(with_cells(p, from), 2));
        // Hidden cells at the end, and in between.
        from.resize(shape.cells + 77, -1);
        good = good && same(outputs, run<V>(with_cells(p, from)));
        from.resize(shape.cells + 300, -1);
        std::shuffle(from.begin(), from.end(), random);
        good = good && same(outputs, run<V>(with_cells(p, from), 3));
    }
    return good;
}

// How the outputs of two runs differ, for each row and head.
struct Difference {
    std::vector<bool> differs;
    // Whether all outputs are NaN in the second run.
    std::vector<bool> is_nan;
};

Difference difference(const Problem &p, const std::vector<float> &a, const std::vector<float> &b) {
    Difference result;
    const int size = p.shape.value_size;
    for (size_t i = 0; i < a.size(); i += size) {
        result.differs.push_back(!same(&a[i], &b[i], size));
        result.is_nan.push_back(std::all_of(&b[i], &b[i] + size, [](float x) { return x != x; }));
    }
    return result;
}

template <class V>
bool check_other_rows() {
    Problem p = make({8, 400, 6, 2, 64, 64}, 6);
    const std::vector<float> before = run<V>(p);
    for (int i = 0; i < 6 * 64; i++) p.query(0, 3, 0)[i] *= -3;
    const Difference d = difference(p, before, run<V>(p));
    for (int row = 0; row < 8; row++) {
        for (int head = 0; head < 6; head++) {
            if (d.differs[row * 6 + head] != (row == 3)) return false;
        }
    }
    return true;
}

// Where an infinity or a NaN is put.
enum class Place { query, key, value };

// A problem with `number` in a query (row 3, head 4), or in a key or value (of one cell, for
// heads 3, 4 and 5).
constexpr int bad_cell = 397;
Problem with_bad_number(Problem p, Place place, float number) {
    const NumberType type = p.shape.key_type;
    float numbers[64];
    Random random(16);
    std::normal_distribution<float> normal;
    for (float &x : numbers) x = normal(random);
    numbers[13] = number;
    if (place == Place::query) p.query(0, 3, 4)[17] = number;
    if (place == Place::key) encode(type, numbers, 64, p.key(0, bad_cell, 1));
    if (place == Place::value) encode(type, numbers, 64, p.value(0, bad_cell, 1));
    return p;
}

// Whether the number made exactly the right outputs NaN.
bool reaches_the_right_rows(const Problem &p, const Difference &d, Place place, float number) {
    bool good = true;
    for (int row = 0; row < 8; row++) {
        for (int head = 0; head < 6; head++) {
            const bool sees = head >= 3 && p.sees(0, head, row, bad_cell);
            const bool reached = place == Place::query ? row == 3 && head == 4 : sees;
            // A score of -inf is a weight of 0, so only NaN always reaches the output.
            const bool must_be_nan = number != number || place == Place::value;
            if (!reached && d.differs[row * 6 + head]) good = false;
            if (reached && must_be_nan && !d.is_nan[row * 6 + head]) good = false;
        }
    }
    return good;
}

// An infinity or a NaN reaches only the rows and heads that attend to it. A NaN, or an infinity in
// a value, makes all of them NaN.
template <class V>
bool check_not_finite() {
    bool good = true;
    for (const NumberType type : {NumberType::f16, NumberType::f32, NumberType::bf16}) {
        const Problem p = make({8, 400, 6, 2, 64, 64, type, type}, 7);
        const std::vector<float> before = run<V>(p);
        for (const float number : {NAN, INFINITY, -INFINITY}) {
            for (const Place place : {Place::query, Place::key, Place::value}) {
                const Problem bad = with_bad_number(p, place, number);
                const Difference d = difference(p, before, run<V>(bad, 2));
                good = good && reaches_the_right_rows(p, d, place, number);
            }
        }
    }
    return good;
}

// Numbers near the ends of the range of float32, all-zero values, and equal large scores.
template <class V>
bool check_extremes() {
    bool good = true;
    for (const float size : {1e-38f, 1e-30f, 1e-8f, 1e8f, 1e30f, 1e36f}) {
        Problem p = make({3, 200, 2, 1, 64, 64, NumberType::f16, NumberType::f32}, 8);
        float *values = reinterpret_cast<float *>(p.values.data());
        for (int i = 0; i < 200 * 64; i++) values[i] *= size;
        // Below 2^-100 values lose digits, as they do in llama.cpp's sums.
        good = good && worst_error<V>(p) < (size < 1e-29f ? 1.01 : 5e-4);
    }
    Problem p = make({3, 200, 2, 1, 64, 64}, 9);
    p.values.assign(p.values.size(), 0);
    for (const float output : run<V>(p)) good = good && output == 0;
    // A value of 0, in a cell that has all but 1e-9 of the weight.
    p = make({2, 100, 1, 1, 64, 64, NumberType::f32, NumberType::f32, Mask::none}, 10);
    for (int i = 0; i < 64; i++) {
        reinterpret_cast<float *>(p.key(0, 50, 0))[i] = p.query(0, 0, 0)[i] * 3;
        reinterpret_cast<float *>(p.value(0, 50, 0))[i] = 0;
    }
    good = good && worst_error<V>(p) < 5e-4;
    // Queries and keys as large as integers can be, in dimensions that halved products add.
    p = make({2, 100, 1, 1, 32, 64, NumberType::f16, NumberType::f16, Mask::none}, 11);
    for (int row = 0; row < 2; row++) {
        for (int i = 0; i < 32; i++) p.query(0, row, 0)[i] = i == 0 || i == 2 ? 1 : 0;
    }
    for (int cell = 0; cell < 100; cell++) {
        float key[32] = {};
        key[0] = key[2] = cell % 3 ? 1.999f : -1.999f;
        encode(NumberType::f16, key, 32, p.key(0, cell, 0));
    }
    good = good && worst_error<V>(p) < 5e-4;
    return good;
}

// The largest possible sums: all values are the largest integer. Up to 2^20 cells have the same
// weight, or nearly all of the weight is in one cell, in 64 neighbouring cells, or in every 16th
// cell.
template <class V>
bool check_overflow() {
    bool good = true;
    for (const int cells : {64, 100, 200, 400, 500, 800, 1500, 3000, 50000, 1 << 20}) {
        for (int crowd = 0; crowd < 4; crowd++) {
            Problem p = make(
                {1, cells, 1, 1, 1, 8, NumberType::f32, NumberType::f16, Mask::none}, 13);
            p.query(0, 0, 0)[0] = 1;
            float values[8];
            for (int i = 0; i < 8; i++) values[i] = i % 2 ? 1.999f : -1.999f;
            for (int cell = 0; cell < cells; cell++) {
                const int block = cells / 128;
                const bool is_heavy[] = {true, cell == 0, cell / 64 == block, cell % 16 == 0};
                const float score = is_heavy[crowd] ? 25 : 0;
                encode(NumberType::f32, &score, 1, p.key(0, cell, 0));
                encode(NumberType::f16, values, 8, p.value(0, cell, 0));
            }
            const std::vector<float> outputs = run<V>(p);
            for (int i = 0; i < 8; i++) good = good && std::fabs(outputs[i] - values[i]) < 2e-3;
        }
    }
    return good;
}

template <class V>
bool check_exponential() {
    double worst = 0;
    for (double x = -86; x < 20; x += 0.00037) {
        const float argument = static_cast<float>(x);
        const double exact = std::exp(double(argument));
        const double got = V::first_lane(exponential<V>(V::all(argument), 0));
        const double unit = std::exp2(std::floor(std::log2(exact)) - 23);
        worst = std::max(worst, std::fabs(got - exact) / unit);
    }
    std::printf("    worst error %.2f units in the last place\n", worst);
    return worst < 1;
}

// --- figures ---

template <class V>
void print_accuracy(const char *name) {
    std::printf("%s: worst relative error of a row: ours, and in float16 as in llama.cpp\n", name);
    for (const int cells : {64, 300, 1300, 5000}) {
        for (const float sharpness : {0.0f, 1.0f, 3.0f}) {
            Problem p = make({4, cells, 6, 1, 128, 128, NumberType::f16, NumberType::f16,
                              Mask::causal, 1, 1, 0, 0, sharpness}, 12);
            std::printf("  %5d cells, scores of %g: %.1e  %.1e\n", cells, sharpness * 1.1,
                        worst_error<V>(p), worst_error<V>(p, true));
        }
    }
}

template <class T>
uint64_t digest(const std::vector<T> &values, uint64_t hash = 1469598103934665603U) {
    const char *bytes = reinterpret_cast<const char *>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); i++) {
        hash = (hash ^ static_cast<uint8_t>(bytes[i])) * 1099511628211U;
    }
    return hash;
}

template <class V>
void print_bits() {
    int number = 0;
    for (const Shape &shape : shapes()) {
        const Problem p = make(shape, 14);
        const uint64_t inputs =
            digest(p.mask, digest(p.values, digest(p.keys, digest(p.sinks, digest(p.queries)))));
        std::printf("attention-%d %016llx %016llx\n", number++,
                    static_cast<unsigned long long>(inputs),
                    static_cast<unsigned long long>(digest(run<V>(p))));
    }
}

template <class V>
bool check_all(const char *name) {
    struct {
        const char *what;
        bool (*check)();
    } const checks[] = {
        {"exp is accurate", check_exponential<V>},
        {"outputs are accurate, for all kinds of shapes and caches", check_accuracy<V>},
        {"any number of threads gives the same bits", check_threads<V>},
        {"fewer threads than planned need no more memory", check_fewer_threads<V>},
        {"a row has the same bits alone and in batches", check_batches<V>},
        {"the order of cells and hidden cells do not change the bits", check_order<V>},
        {"changing a row changes no other row", check_other_rows<V>},
        {"NaN and infinities reach only the rows that attend to them", check_not_finite<V>},
        {"very large, small and zero values", check_extremes<V>},
        {"the largest sums do not overflow", check_overflow<V>},
        {"nothing is written beyond scratch memory and outputs", [] { return all_guards_intact; }},
    };
    bool good = true;
    for (const auto &check : checks) {
        const bool passed = check.check();
        std::printf("%s %s: %s\n", passed ? "ok  " : "FAIL", name, check.what);
        std::fflush(stdout);
        good = good && passed;
    }
    return good;
}

template <class V>
bool act(const char *name, const std::string &option) {
    if (option == "--bits") {
        print_bits<V>();
        return true;
    }
    if (option == "--accuracy") {
        print_accuracy<V>(name);
        return true;
    }
    return check_all<V>(name);
}

}  // namespace

int main(int n_arguments, char **arguments) {
    const std::string option = n_arguments > 1 ? arguments[1] : "";
#ifdef __aarch64__
    bool good = act<Neon>("NEON", option);
#else
    bool good = act<Avx2>("AVX2", option);
    if (option.empty()) good = act<HalvedAvx2>("AVX2 with halved products", option) && good;
#endif
#ifdef __AVX512BW__
    good = act<Avx512>("AVX-512", option) && good;
#endif
#ifdef __AVX512VNNI__
    good = act<AvxVnni>("AVX-VNNI", option) && good;
    good = act<Avx512Vnni>("AVX-512 with VNNI", option) && good;
    // Here the same row has all of its products alone, and half of them in a batch.
    good = act<Avx512Amd>("AVX-512 on AMD", option) && good;
    good = act<AlwaysHalved>("AVX-512 with halved products", option) && good;
#endif
    return good ? 0 : 1;
}
