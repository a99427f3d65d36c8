// Attention of a few rows over a cache of keys and values, for verifying drafts.
//
// A row's output is the same bits whatever surrounds the row: other rows and streams, the number
// of threads, cells that it does not see, and the order of the cells that it sees. It depends on
// the row's query and on the set of the (key, value) pairs it sees. So a token that a draft's tree
// got right has, verified in a batch, the output that decoding it alone would have given it.
//
// Three passes:
//   attention_scores.h   scores = cap(queries * keys * scale) + slope * mask
//   attention_weights.h  weights = exp(scores - the largest score), as integers
//   attention_values.h   outputs = the exact sum of weights * values, divided by that of weights
//
// The work is cut into tasks: up to 96 rows and heads that share a head of keys and values. Each
// thread takes tasks of its own where there are enough; else all threads share each task.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/cells.h"
#include "attention/integer_values.h"
#include "attention/scores.h"
#include "attention/weighted_sums.h"
#include "attention/softmax_weights.h"

namespace {

template <class V>
struct Attention {
    static constexpr int64_t alignment = 64;
    // Rows of a task: enough to hide the conversion of keys and values, few enough that scores of a
    // long cache fit into the processor's cache. Behind 17 thousand cells keys and values do not: there
    // reading them once for 60 rows costs less than scores that fit (half the time at 64 thousand).
    static constexpr int64_t most_rows = 96, least_rows = 60;
    static constexpr int64_t most_scores = 1 << 20;

    // How a job is cut, and where things lie in the scratch memory.
    struct Plan {
        int64_t group, n_blocks, rows_per_task, tasks_per_head, n_tasks;
        bool shared;  // all threads share each task
        int64_t scores, heavy_pairs, scales, factors;  // bytes, of a task
        int64_t rows, keys, values, sums, blocks;      // bytes, of a thread
        int64_t task_bytes, thread_bytes, bytes;

        Plan(const AttentionJob &job, int n_threads) {
            group = job.n_heads / job.n_kv_heads;
            n_blocks = (job.n_cells + cells_per_block - 1) / cells_per_block;
            const int64_t n_cells = n_blocks * cells_per_block;
            const int64_t fitting = n_cells ? most_scores / n_cells : most_rows;
            const int64_t most = larger(smaller(most_rows, larger(least_rows, fitting)) / group, 1);
            // Tasks of about the same size, so that no thread waits for the last.
            tasks_per_head = larger((job.n_rows + most - 1) / most, 1);
            rows_per_task = (job.n_rows + tasks_per_head - 1) / tasks_per_head;
            n_tasks = tasks_per_head * job.n_kv_heads * job.n_streams;
            shared = n_tasks % n_threads != 0 && n_tasks < 4 * n_threads;

            const int64_t n_rows = rows_per_task * group;
            const int64_t key_size = rounded_up(job.key_size, V::lanes);
            scores = aligned(n_rows * n_cells * sizeof(float));
            heavy_pairs = aligned(n_rows * n_blocks * sizeof(uint32_t));
            scales = aligned(n_rows * sizeof(double));
            factors = aligned(n_cells * sizeof(float));
            rows = aligned(n_rows * sizeof(TaskRow));
            keys = aligned(AttentionScores<V>::tile_cells * key_size * sizeof(float));
            values = aligned(AttentionValues<V>::bytes_of_values(n_blocks));
            sums = aligned(AttentionValues<V>::bytes_of_sums(n_rows));
            blocks = aligned((shared ? n_tasks : 1) * (1 + n_blocks) * sizeof(uint32_t));
            task_bytes = scores + heavy_pairs + scales + factors;
            thread_bytes = rows + keys + values + sums + blocks;
            bytes = alignment + (shared ? n_tasks : n_threads) * task_bytes +
                    n_threads * thread_bytes;
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
            memory.scales = reinterpret_cast<double *>(at += heavy_pairs);
            memory.factors = reinterpret_cast<float *>(at += scales);
            return memory;
        }
        ThreadMemory thread_memory(void *scratch, int thread, int n_threads) const {
            char *at = static_cast<char *>(scratch) + alignment +
                       (shared ? n_tasks : n_threads) * task_bytes + thread * thread_bytes;
            ThreadMemory memory;
            memory.rows = reinterpret_cast<TaskRow *>(at);
            memory.keys = reinterpret_cast<float *>(at += rows);
            memory.values = reinterpret_cast<int16_t *>(at += keys);
            memory.sums = at += values;
            memory.blocks = reinterpret_cast<uint32_t *>(at += sums);
            return memory;
        }
    };

    static size_t bytes(const AttentionJob &job, int n_threads) {
        return static_cast<size_t>(Plan(job, n_threads).bytes);
    }

    static void run(const AttentionJob &job, int thread, int n_threads, void *scratch,
                    void (*barrier)(void *), void *barrier_argument) {
        const Plan plan(job, n_threads);
        if (plan.shared) {
            run_shared(job, plan, thread, n_threads, scratch, barrier, barrier_argument);
            return;
        }
        const ThreadMemory own = plan.thread_memory(scratch, thread, n_threads);
        const TaskMemory memory = plan.task_memory(scratch, thread);
        if (plan.n_tasks <= n_threads) {
            if (thread < plan.n_tasks) run_alone(job, plan.task(job, thread), own, memory);
            return;
        }
        // Threads take the next task when they are done with one. The last rows of a prompt see
        // the most cells: they come first.
        int64_t *next = static_cast<int64_t *>(scratch);
        if (thread == 0) __atomic_store_n(next, 0, __ATOMIC_RELAXED);
        barrier(barrier_argument);
        for (;;) {
            const int64_t taken = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
            if (taken >= plan.n_tasks) break;
            run_alone(job, plan.task(job, plan.n_tasks - 1 - taken), own, memory);
        }
    }

    static void run_alone(const AttentionJob &job, const AttentionTask &task,
                          const ThreadMemory &own, const TaskMemory &memory) {
        AttentionScores<V>::list_blocks(job, task, own.blocks);
        AttentionScores<V>::run(job, task, 0, 1, own.blocks, own, memory);
        AttentionWeights<V>::run(job, task, 0, 1, own.blocks[0], memory);
        AttentionValues<V>::run(job, task, 0, 1, own.blocks, own, memory);
    }

    static void run_shared(const AttentionJob &job, const Plan &plan, int thread, int n_threads,
                           void *scratch, void (*barrier)(void *), void *barrier_argument) {
        const ThreadMemory own = plan.thread_memory(scratch, thread, n_threads);
        // Tasks start with different threads, as a task may have few parts.
        const auto part = [&](int64_t i) { return static_cast<int>((thread + i) % n_threads); };
        const auto blocks = [&](int64_t i) { return own.blocks + i * (1 + plan.n_blocks); };
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            const AttentionTask task = plan.task(job, i);
            AttentionScores<V>::list_blocks(job, task, blocks(i));
            AttentionScores<V>::run(job, task, part(i), n_threads, blocks(i), own,
                                    plan.task_memory(scratch, i));
        }
        barrier(barrier_argument);
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            AttentionWeights<V>::run(job, plan.task(job, i), part(i), n_threads, blocks(i)[0],
                                     plan.task_memory(scratch, i));
        }
        barrier(barrier_argument);
        const int64_t n_strips = AttentionValues<V>::shared_strips(job.value_size);
        for (int64_t i = 0; i < plan.n_tasks; i++) {
            AttentionValues<V>::run(job, plan.task(job, i), part(i * n_strips), n_threads, blocks(i), own,
                                    plan.task_memory(scratch, i));
        }
    }
};

}  // namespace
