// Threads that go through a window together: who owns which rows and units, and where they meet.
#pragma once

#include <sched.h>

#include <atomic>

#include "vectors.h"

// Threads a pass may start: one in a forked child (a data loader's worker), else as many as wanted.
int usable_threads(int64_t wanted);

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A barrier that spins for about as long as a step's uneven ends, then lets others run: where there are more threads than
// cores, a thread that only spun would keep the one it waits for from running.
class Barrier {
  public:
    void set_size(int size) {
        size_ = size;
    }

    void meet() {
        if (size_ == 1) return;
        const int round = round_.load(std::memory_order_relaxed);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            waiting_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins < 20000)
                relax();
            else
                sched_yield();
        }
    }

  private:
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<int> round_{0};
    int size_ = 1;
};

struct Range {
    int first, last;
};

// The part-th of num_parts nearly equal pieces of `count` things.
INLINE Range share(int count, int part, int num_parts) {
    return {
        static_cast<int>(static_cast<int64_t>(count) * part / num_parts),
        static_cast<int>(static_cast<int64_t>(count) * (part + 1) / num_parts),
    };
}
