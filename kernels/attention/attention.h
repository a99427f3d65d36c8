// Attention of a few rows over a cache of keys and values, as needed for verifying drafts.
//
// A row's output has the same bits whatever is computed with it: other rows and streams, the
// number of threads, cells that it does not see, and the order of the cells that it sees. It
// depends on the row's query and on the set of (key, value) pairs that it sees. So a token that a
// draft tree predicted correctly gets, when it is verified in a batch, exactly the output that
// decoding it alone would give.
//
// There are three passes:
//     scores.h            scores = cap(queries * keys * scale) + slope * mask
//     softmax_weights.h   weights = exp(scores - the largest score), as integers
//     weighted_sums.h     outputs = the exact sum of weights * values / that of the weights
//
// For many rows on an AMD CPU, the first and the last take half of the multiplications
// (halved_products.h).
//
// The work is cut into tasks: up to 192 rows and heads that share a head of keys and values. Each
// thread takes whole tasks if there are enough of them; otherwise all threads share each task.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/integer_values.h"
#include "attention/scores.h"
#include "attention/softmax_weights.h"
#include "attention/task.h"
#include "attention/weighted_sums.h"

namespace {

// How threads wait for each other: `wait(argument)` returns once every thread has called it.
struct ThreadBarrier {
    void (*function)(void *);
    void *argument;

    void wait() const { function(argument); }
};

// How a job is cut into tasks, and where things are in the scratch memory:
//
//     the number of the next task | memory of each task | memory of each thread
template <class V, bool halved>
struct AttentionPlan {
    static constexpr int64_t alignment = 64;
    // Rows of a task: enough to hide the conversion of keys and values, few enough that the
    // scores of a long cache fit into the processor's cache. After 11 thousand cells, keys and
    // values do not fit either: then reading them once for 96 rows costs less than scores that
    // fit.
    static constexpr int64_t most_rows = 192;
    static constexpr int64_t least_rows = 96;
    static constexpr int64_t most_scores = 1 << 20;

    // --- tasks ---

    // Heads of queries for each head of keys and values.
    int64_t group;
    int64_t n_blocks;
    int64_t rows_per_task;
    int64_t tasks_per_head;
    int64_t n_tasks;
    // Whether all threads share each task.
    bool shared;

    // --- bytes of a task's memory: see TaskMemory ---

    int64_t scores;
    int64_t heavy_pairs;
    int64_t weight_products;
    int64_t scales;
    int64_t factors;
    int64_t largest;
    int64_t task_bytes;

    // --- bytes of a thread's memory: see ThreadMemory ---

    int64_t rows;
    int64_t queries;
    int64_t query_factors;
    int64_t query_products;
    int64_t keys;
    int64_t key_factors;
    int64_t key_starts;
    int64_t dots;
    int64_t values;
    int64_t value_starts;
    int64_t sums;
    int64_t blocks;
    int64_t thread_bytes;

    // Bytes of the scratch memory.
    int64_t bytes;

    AttentionPlan(const AttentionJob &job, int n_threads) {
        group = job.n_heads / job.n_kv_heads;
        n_blocks = (job.n_cells + cells_per_block - 1) / cells_per_block;
        const int64_t n_cells = n_blocks * cells_per_block;
        const int64_t fitting = n_cells ? most_scores / n_cells : most_rows;
        const int64_t most = larger(smaller(most_rows, larger(least_rows, fitting)) / group, 1);
        // Tasks of about the same size, so that no thread waits for the last one.
        tasks_per_head = larger((job.n_rows + most - 1) / most, 1);
        rows_per_task = (job.n_rows + tasks_per_head - 1) / tasks_per_head;
        n_tasks = tasks_per_head * job.n_kv_heads * job.n_streams;
        shared = n_tasks % n_threads != 0 && n_tasks < 4 * n_threads;

        const int64_t n_rows = rows_per_task * group;
        const int64_t n_parts = parts_of(job.key_size);
        const int64_t n_words = n_parts * part_words;
        scores = aligned(n_rows * row_distance(n_blocks) * sizeof(float));
        heavy_pairs = aligned(n_rows * n_blocks * sizeof(uint32_t));
        weight_products = aligned(n_rows * n_blocks * sizeof(int32_t));
        scales = aligned(n_rows * sizeof(double));
        factors = aligned(n_cells * sizeof(float));
        largest = aligned((shared ? n_threads : 1) * n_rows * largest_floats<V> * sizeof(float));
        task_bytes = scores + heavy_pairs + weight_products + scales + factors + largest;

        using Scores = AttentionScores<V, halved>;
        using Sums = WeightedSums<V, halved>;
        rows = aligned(n_rows * sizeof(TaskRow));
        queries = aligned(n_rows * n_words * sizeof(int32_t));
        query_factors = aligned(n_rows * n_parts * sizeof(float));
        query_products = aligned(n_rows * n_parts * sizeof(int32_t));
        keys = aligned(Scores::tile_cells * n_words * sizeof(int32_t));
        key_factors = aligned(Scores::tile_cells * n_parts * sizeof(float));
        key_starts = aligned(Scores::tile_cells * n_parts * sizeof(int32_t));
        dots = aligned(n_parts * Scores::most_rows * Scores::tile_cells * sizeof(int32_t));
        values = aligned(Sums::bytes_of_values(n_blocks));
        value_starts = aligned(Sums::bytes_of_starts(n_blocks));
        sums = aligned(Sums::bytes_of_sums(n_rows));
        blocks = aligned((shared ? n_tasks : 1) * (1 + n_blocks) * sizeof(uint32_t));
        thread_bytes = rows + queries + query_factors + query_products + keys + key_factors +
                       key_starts + dots + values + value_starts + sums + blocks;

        bytes = alignment + (shared ? n_tasks : n_threads) * task_bytes + n_threads * thread_bytes;
    }

    static int64_t aligned(int64_t bytes) { return rounded_up(bytes, alignment); }

    AttentionTask task(const AttentionJob &job, int64_t index) const {
        const int64_t head = index / tasks_per_head;
        const int64_t first = index % tasks_per_head * rows_per_task;
        return {head / job.n_kv_heads, head % job.n_kv_heads, first,
                smaller(rows_per_task, job.n_rows - first), group};
    }

    TaskMemory task_memory(void *scratch, int64_t index) const {
        char *at = static_cast<char *>(scratch) + alignment + index * task_bytes;
        TaskMemory memory;
        memory.scores = reinterpret_cast<float *>(at);
        memory.heavy_pairs = reinterpret_cast<uint32_t *>(at += scores);
        memory.own_products = reinterpret_cast<int32_t *>(at += heavy_pairs);
        memory.scales = reinterpret_cast<double *>(at += weight_products);
        memory.factors = reinterpret_cast<float *>(at += scales);
        memory.largest = reinterpret_cast<float *>(at += factors);
        return memory;
    }

    ThreadMemory thread_memory(void *scratch, int thread, int n_threads) const {
        char *at = static_cast<char *>(scratch) + alignment +
                   (shared ? n_tasks : n_threads) * task_bytes + thread * thread_bytes;
        ThreadMemory memory;
        memory.rows = reinterpret_cast<TaskRow *>(at);
        memory.queries = reinterpret_cast<int32_t *>(at += rows);
        memory.query_factors = reinterpret_cast<float *>(at += queries);
        memory.own_products = reinterpret_cast<int32_t *>(at += query_factors);
        memory.keys = reinterpret_cast<int32_t *>(at += query_products);
        memory.key_factors = reinterpret_cast<float *>(at += keys);
        memory.key_starts = reinterpret_cast<int32_t *>(at += key_factors);
        memory.dots = reinterpret_cast<int32_t *>(at += key_starts);
        memory.values = reinterpret_cast<int16_t *>(at += dots);
        memory.value_starts = reinterpret_cast<int32_t *>(at += values);
        memory.sums = at += value_starts;
        memory.blocks = reinterpret_cast<uint32_t *>(at += sums);
        return memory;
    }
};

// `halved`: see halved_products.h.
template <class V, bool halved>
struct AttentionPasses {
    using Plan = AttentionPlan<V, halved>;
    using Scores = AttentionScores<V, halved>;
    using Sums = WeightedSums<V, halved>;

    // Bytes of scratch memory for up to `n_threads` threads. ggml plans with that many, but OpenMP
    // may start fewer, which need more memory if they share all tasks.
    static size_t bytes(const AttentionJob &job, int n_threads) {
        int64_t most = 0;
        for (int n = n_threads; n > 0; n--) {
            const Plan plan(job, n);
            most = larger(most, plan.bytes);
            if (plan.shared) break;  // fewer threads need no more than these
        }
        return static_cast<size_t>(most);
    }

    // The part of one thread.
    static void run(const AttentionJob &job, int thread, int n_threads, void *scratch,
                    void (*barrier)(void *), void *barrier_argument) {
        const Plan plan(job, n_threads);
        const ThreadBarrier all_threads = {barrier, barrier_argument};
        if (plan.shared) {
            run_shared(job, plan, thread, n_threads, scratch, all_threads);
            return;
        }
        const ThreadMemory thread_memory = plan.thread_memory(scratch, thread, n_threads);
        const TaskMemory task_memory = plan.task_memory(scratch, thread);
        if (plan.n_tasks <= n_threads) {
            if (thread < plan.n_tasks) {
                run_alone(job, plan.task(job, thread), thread_memory, task_memory);
            }
            return;
        }
        // A thread that has finished a task takes the next one. The last rows of a prompt see the
        // most cells, so they come first.
        int64_t *next = static_cast<int64_t *>(scratch);
        if (thread == 0) __atomic_store_n(next, 0, __ATOMIC_RELAXED);
        all_threads.wait();
        for (;;) {
            const int64_t taken = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (taken >= plan.n_tasks) break;
            run_alone(job, plan.task(job, plan.n_tasks - 1 - taken), thread_memory, task_memory);
        }
    }

    // All passes of a task, in one thread.
    static void run_alone(const AttentionJob &job, const AttentionTask &task,
                          const ThreadMemory &thread_memory, const TaskMemory &task_memory) {
        const BlockList blocks = {thread_memory.blocks};
        const Share all = {0, 1};
        Scores::list_blocks(job, task, blocks);
        Scores::run(job, task, all, blocks, thread_memory, task_memory);
        SoftmaxWeights<V>::template run<halved>(job, task, all, blocks.n(), task_memory);
        Sums::run(job, task, all, blocks, thread_memory, task_memory);
    }

    // Each pass is run for all tasks before the next one begins. All threads share each task.
    static void run_shared(const AttentionJob &job, const Plan &plan, int thread, int n_threads,
                           void *scratch, const ThreadBarrier &all_threads) {
        const ThreadMemory thread_memory = plan.thread_memory(scratch, thread, n_threads);
        // Each task starts with another thread, because it may have few parts.
        const auto share = [&](int64_t i) {
            return Share{static_cast<int>((thread + i) % n_threads), n_threads};
        };
        const auto blocks = [&](int64_t i) {
            return BlockList{thread_memory.blocks + i * (1 + plan.n_blocks)};
        };
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            const AttentionTask task = plan.task(job, i);
            Scores::list_blocks(job, task, blocks(i));
            Scores::run(job, task, share(i), blocks(i), thread_memory,
                        plan.task_memory(scratch, i));
        }
        all_threads.wait();
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            SoftmaxWeights<V>::template run<halved>(job, plan.task(job, i), share(i),
                                                    blocks(i).n(), plan.task_memory(scratch, i));
        }
        all_threads.wait();
        const int64_t n_strips = Sums::shared_strips(job.value_size);
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            Sums::run(job, plan.task(job, i), share(i * n_strips), blocks(i), thread_memory,
                      plan.task_memory(scratch, i));
        }
    }
};

template <class V>
struct Attention {
    // Call `function` with the passes that suit a job.
    template <class Function>
    static auto with_passes(const AttentionJob &job, Function function) {
        if constexpr (V::least_halved_rows != 0) {
            // A task has all of these rows, or many of them.
            const int64_t n_rows = job.n_rows * (job.n_heads / job.n_kv_heads);
            if (n_rows >= V::least_halved_rows) return function(AttentionPasses<V, true>());
        }
        return function(AttentionPasses<V, false>());
    }

    // Bytes of scratch memory for up to `n_threads` threads.
    static size_t bytes(const AttentionJob &job, int n_threads) {
        return with_passes(job, [&](auto passes) { return passes.bytes(job, n_threads); });
    }

    // The part of one thread.
    static void run(const AttentionJob &job, int thread, int n_threads, void *scratch,
                    void (*barrier)(void *), void *barrier_argument) {
        with_passes(job, [&](auto passes) {
            passes.run(job, thread, n_threads, scratch, barrier, barrier_argument);
        });
    }
};

}  // namespace
