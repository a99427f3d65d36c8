// What the threads of a test wait at, in place of ggml's own barrier.
#pragma once

#include <atomic>
#include <thread>

struct Barrier {
    int n_threads;
    std::atomic<int> waiting{0}, round{0};

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
