// Compares the speed of attention in two versions of the kernels, by turns in one process, and tells
// whether they compute the same bits. Not a test; build and run by hand:
//
//     g++ FLAGS -Davx512_vnni_set=before -c OLD/kernels/avx512_vnni.cpp -o before.o
//     g++ FLAGS -Davx512_vnni_set=after -c kernels/avx512_vnni.cpp -o after.o
//     g++ -O3 -std=c++17 -Ikernels kernels/tests/attention_bench.cpp before.o after.o -o bench -pthread
//     ./bench 14105 f16 2      cells, type of the cache, threads (and rows)
//
// where FLAGS are those of scripts/build_kernels.py. A job is a layer of Qwen2.5 1.5B; the caches of
// 28 layers are read in turn, so that they come from memory. "read" is that without arithmetic.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/barrier.h"
#include "instruction_sets/instruction_set.h"

extern const InstructionSet before, after;

constexpr int n_layers = 28, n_heads = 12, n_kv_heads = 2, size = 128;

// The least seconds that a layer took.
std::atomic<uint64_t> sink;

template <class Work> double least_seconds(int n_threads, Barrier &barrier, Work work) {
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

int main(int argc, char **argv) {
    const int64_t n_cells = argc > 1 ? atoi(argv[1]) : 14105;
    const char *const type = argc > 2 ? argv[2] : "f16";
    const int n_threads = argc > 3 ? atoi(argv[3]) : 2;
    const bool bytes = std::strcmp(type, "q8_0") == 0, bfloats = std::strcmp(type, "bf16") == 0;
    const int64_t head_bytes = bytes ? size / 32 * 34 : 2 * size, cell_bytes = n_kv_heads * head_bytes;
    // Halves of 1 to 2 or so, of either sign; random bytes with scales of that size.
    std::minstd_rand random(1);
    std::vector<std::vector<char>> caches(2 * n_layers, std::vector<char>(n_cells * cell_bytes));
    for (auto &cache : caches) {
        for (size_t i = 0; i + 1 < cache.size(); i += 2) {
            const bool is_scale = bytes && i % 34 == 0;
            uint16_t half = (bfloats ? 0x3f80 : 0x3c00) | (random() >> 8 & 0x807f);
            if (bytes) half = is_scale ? 0x2000 : random() >> 8;
            std::memcpy(&cache[i], &half, 2);
        }
    }
    std::printf("%ld cells of %s, %d threads: microseconds for a layer\n", long(n_cells), type, n_threads);
    for (const int64_t n_rows : {1, 2, 5, 8, 16}) {
        if (argc > 4 && n_rows != atoi(argv[4])) continue;
        std::vector<float> queries(n_rows * n_heads * size), outputs[2];
        for (float &q : queries) q = (static_cast<int>(random() % 2001) - 1000) * 1e-3f;
        AttentionJob job = {};
        job.queries = reinterpret_cast<const char *>(queries.data());
        job.query_head_stride = 4 * size, job.query_row_stride = 4 * size * n_heads;
        job.key_type = job.value_type =
            bytes ? NumberType::q8_0 : bfloats ? NumberType::bf16 : NumberType::f16;
        job.key_cell_stride = job.value_cell_stride = cell_bytes;
        job.key_head_stride = job.value_head_stride = head_bytes;
        job.n_rows = n_rows, job.n_cells = n_cells, job.n_heads = n_heads, job.n_kv_heads = n_kv_heads;
        job.n_streams = 1, job.key_size = job.value_size = size;
        job.scale = 0.088f;
        double best[3] = {1e9, 1e9, 1e9};
        for (int turn = 0; turn < 6; turn++) {
            for (int i = 0; i < 2; i++) {
                const InstructionSet &set = i == 0 ? before : after;
                std::vector<char> scratch(set.attention_bytes(job, n_threads) + 64);
                char *const at = scratch.data() + 64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64;
                outputs[i].resize(queries.size());
                Barrier barrier{n_threads};
                best[i] = std::min(best[i], least_seconds(n_threads, barrier, [&](int layer, int thread) {
                    AttentionJob own = job;
                    own.outputs = outputs[i].data();
                    own.keys = caches[2 * layer].data();
                    own.values = caches[2 * layer + 1].data();
                    set.attention(own, thread, n_threads, at, Barrier::wait, &barrier);
                }));
            }
            Barrier barrier{n_threads};
            best[2] = std::min(best[2], least_seconds(n_threads, barrier, [&](int layer, int thread) {
                uint64_t sum = 0;
                for (int i = 0; i < 2; i++) {
                    const auto *words = reinterpret_cast<const uint64_t *>(caches[2 * layer + i].data());
                    const int64_t n = n_cells * cell_bytes / 8;
                    for (int64_t w = n * thread / n_threads; w < n * (thread + 1) / n_threads; w++) sum += words[w];
                }
                sink += sum;
            }));
        }
        std::printf("%3ld rows: before %6.0f, after %6.0f (%.2f); read %.0f; %s bits\n", long(n_rows),
                    best[0] * 1e6, best[1] * 1e6, best[1] / best[0], best[2] * 1e6,
                    outputs[0] == outputs[1] ? "the same" : "other");
        std::fflush(stdout);
    }
}
