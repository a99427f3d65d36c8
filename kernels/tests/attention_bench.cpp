// Compares the speed of attention in two versions of the kernels, in interleaved runs in one
// process, and checks whether they compute the same bits. Not a test; build and run it by hand:
//
//     SOURCE=instruction_sets/avx512_vnni.cpp
//     g++ FLAGS -IOLD/kernels -Davx512_vnni_set=before -c OLD/kernels/$SOURCE -o before.o
//     g++ FLAGS -Ikernels -Davx512_vnni_set=after -c kernels/$SOURCE -o after.o
//     g++ -O3 -z muldefs -Ikernels kernels/tests/attention_bench.cpp *.o -o bench -pthread
//     ./bench 14105 f16 2          cells, type of the cache, threads
//     ./bench 16384 f16 2 512 2    the same, rows (512: those of a prompt), layers
//
// where FLAGS are those of scripts/build_kernels.py. (`-z muldefs`, because the file's second set,
// for AMD, is defined twice.)
//
// A job is a layer of Qwen2.5 1.5B for the last tokens of a text. The layers are computed in turn,
// so that their caches are read from memory. "read" is the time to read a cache without computing
// anything.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "instruction_sets/instruction_set.h"
#include "tests/barrier.h"

extern const InstructionSet before, after;

int n_layers = 28;
constexpr int n_heads = 12;
constexpr int n_kv_heads = 2;
constexpr int size = 128;

// Receives results that would otherwise be optimised away.
std::atomic<uint64_t> sink;

// The minimum time of a layer, in seconds.
template <class Work>
double least_seconds(int n_threads, Barrier &barrier, Work work) {
    double least = 1e9;
    const auto all_layers = [&](int thread) {
        for (int layer = 0; layer < n_layers; layer++) {
            Barrier::wait(&barrier);
            const auto start = std::chrono::steady_clock::now();
            work(layer, thread);
            Barrier::wait(&barrier);
            const auto spent = std::chrono::steady_clock::now() - start;
            if (thread == 0) least = std::min(least, std::chrono::duration<double>(spent).count());
        }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < n_threads; t++) others.emplace_back(all_layers, t);
    all_layers(0);
    for (auto &thread : others) thread.join();
    return least;
}

// The keys and values of all layers.
struct Caches {
    NumberType type;
    int64_t n_cells;
    int64_t head_bytes;
    int64_t cell_bytes;
    // [layer][keys or values]
    std::vector<std::vector<char>> memory;

    // Fills the caches with numbers of either sign and a magnitude of 1 to 2, or for q8_0 with
    // random bytes and a constant scale.
    Caches(NumberType type, int64_t n_cells, std::minstd_rand &random)
        : type(type), n_cells(n_cells), head_bytes(bytes_of_numbers(type, size)),
          cell_bytes(n_kv_heads * head_bytes),
          memory(2 * n_layers, std::vector<char>(n_cells * cell_bytes)) {
        for (auto &cache : memory) {
            for (size_t i = 0; i + 1 < cache.size(); i += 2) {
                const bool is_scale = i % 34 == 0;
                const uint16_t one = type == NumberType::bf16 ? 0x3f80 : 0x3c00;
                uint16_t half = one | (random() >> 8 & 0x807f);
                if (type == NumberType::q8_0) half = is_scale ? 0x2000 : random() >> 8;
                std::memcpy(&cache[i], &half, 2);
            }
        }
    }
    const char *keys(int layer) const { return memory[2 * layer].data(); }
    const char *values(int layer) const { return memory[2 * layer + 1].data(); }

    AttentionJob job(const std::vector<float> &queries, const std::vector<uint16_t> &mask,
                     int64_t n_rows) const {
        AttentionJob job = {};
        job.mask = reinterpret_cast<const char *>(mask.data());
        job.mask_row_stride = sizeof(uint16_t) * n_cells;
        job.n_mask_heads = 1;
        job.n_mask_streams = 1;
        job.queries = reinterpret_cast<const char *>(queries.data());
        job.query_head_stride = 4 * size;
        job.query_row_stride = 4 * size * n_heads;
        job.key_type = type;
        job.value_type = type;
        job.key_cell_stride = cell_bytes;
        job.value_cell_stride = cell_bytes;
        job.key_head_stride = head_bytes;
        job.value_head_stride = head_bytes;
        job.n_rows = n_rows;
        job.n_cells = n_cells;
        job.n_heads = n_heads;
        job.n_kv_heads = n_kv_heads;
        job.n_streams = 1;
        job.key_size = size;
        job.value_size = size;
        job.scale = 0.088f;
        return job;
    }
};

double time_attention(const InstructionSet &set, const Caches &caches, const AttentionJob &job,
                      int n_threads, std::vector<float> &outputs) {
    std::vector<char> scratch(set.attention_bytes(job, n_threads) + 64);
    char *const aligned = scratch.data() + 64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64;
    Barrier barrier{n_threads};
    return least_seconds(n_threads, barrier, [&](int layer, int thread) {
        AttentionJob own = job;
        own.outputs = outputs.data();
        own.keys = caches.keys(layer);
        own.values = caches.values(layer);
        set.attention(own, thread, n_threads, aligned, Barrier::wait, &barrier);
    });
}

double time_reading(const Caches &caches, int n_threads) {
    const int64_t n_words = caches.n_cells * caches.cell_bytes / 8;
    Barrier barrier{n_threads};
    return least_seconds(n_threads, barrier, [&](int layer, int thread) {
        uint64_t sum = 0;
        for (const char *cache : {caches.keys(layer), caches.values(layer)}) {
            const auto *words = reinterpret_cast<const uint64_t *>(cache);
            const int64_t end = n_words * (thread + 1) / n_threads;
            for (int64_t w = n_words * thread / n_threads; w < end; w++) sum += words[w];
        }
        sink += sum;
    });
}

// The mask of the last rows of a text: each attends to the cells up to its own.
std::vector<uint16_t> causal_mask(int64_t n_rows, int64_t n_cells) {
    constexpr uint16_t hidden = 0xfc00;
    std::vector<uint16_t> mask(n_rows * n_cells);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t own = n_cells - n_rows + row;
        std::fill(&mask[row * n_cells + own + 1], &mask[row * n_cells] + n_cells, hidden);
    }
    return mask;
}

void compare(const Caches &caches, int64_t n_rows, int n_threads, std::minstd_rand &random) {
    std::vector<float> queries(n_rows * n_heads * size);
    for (float &q : queries) q = (static_cast<int>(random() % 2001) - 1000) * 1e-3f;
    const std::vector<uint16_t> mask = causal_mask(n_rows, caches.n_cells);
    const AttentionJob job = caches.job(queries, mask, n_rows);
    std::vector<float> outputs_before(queries.size());
    std::vector<float> outputs_after(queries.size());
    double best_before = 1e9;
    double best_after = 1e9;
    double best_reading = 1e9;
    const int n_runs = n_rows < 64 ? 6 : 2;
    for (int run = 0; run < n_runs; run++) {
        best_before = std::min(
            best_before, time_attention(before, caches, job, n_threads, outputs_before));
        best_after =
            std::min(best_after, time_attention(after, caches, job, n_threads, outputs_after));
        best_reading = std::min(best_reading, time_reading(caches, n_threads));
    }
    std::printf("%3ld rows: before %6.0f, after %6.0f (%.2f); read %.0f; %s bits\n", long(n_rows),
                best_before * 1e6, best_after * 1e6, best_after / best_before,
                best_reading * 1e6, outputs_before == outputs_after ? "the same" : "different");
    std::fflush(stdout);
}

int main(int argc, char **argv) {
    const int64_t n_cells = argc > 1 ? atoi(argv[1]) : 14105;
    const std::string type_name = argc > 2 ? argv[2] : "f16";
    const int n_threads = argc > 3 ? atoi(argv[3]) : 2;
    NumberType type = NumberType::f16;
    if (type_name == "bf16") type = NumberType::bf16;
    if (type_name == "q8_0") type = NumberType::q8_0;
    if (argc > 5) n_layers = atoi(argv[5]);
    std::minstd_rand random(1);
    const Caches caches(type, n_cells, random);
    std::printf("%ld cells of %s, %d threads: microseconds per layer\n", long(n_cells),
                type_name.c_str(), n_threads);
    std::vector<int64_t> row_counts = {1, 2, 5, 8, 16};
    if (argc > 4) row_counts = {atoi(argv[4])};
    for (const int64_t n_rows : row_counts) compare(caches, n_rows, n_threads, random);
}
