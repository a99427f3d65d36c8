// A barrier for the threads of a test, in place of ggml's.
#pragma once

#include <atomic>
#include <thread>

struct Barrier {
    int n_threads;
    // The number of threads that wait, and how often all of them have arrived.
    std::atomic<int> waiting{0};
    std::atomic<int> round{0};

    static void wait(void *argument) {
        Barrier &barrier = *static_cast<Barrier *>(argument);
        const int round = barrier.round;
        if (++barrier.waiting == barrier.n_threads) {
            barrier.waiting = 0;
            barrier.round++;
        } else {
            while (barrier.round == round) std::this_thread::yield();
        }
    }
};
