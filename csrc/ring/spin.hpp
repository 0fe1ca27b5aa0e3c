// SPDX-License-Identifier: Apache-2.0
// Looking again and again for a short while before going to sleep: waking a sleeping thread takes longer than many a
// wait for a small message. Only while it pays, for the looking costs a core's time.
#pragma once

#include <sched.h>

#include <atomic>

#include "doorbell.hpp"

namespace adaptra {

class Spin {
public:
    // Return when `done()`, or soon. Any thread may call it.
    template <class Done>
    void until(Done done, double deadline_s) {
        if (done() || !worth_trying()) return;
        const double start_s = monotonic_s();
        const double end_s = std::fmin(start_s + kLongest_s, deadline_s);
        while (monotonic_s() < end_s) {
            for (int look = 0; look < kLooks; ++look) {
                if (done()) {
                    credit_.store(kCredit);
                    return;
                }
                relax();
            }
            sched_yield();  // another thread that can run on this core goes first: the awaited message may be its work
        }
        if (credit_.load() > 0) --credit_;
    }

private:
    // About twice what sleeping and being woken costs on a virtual machine.
    static constexpr double kLongest_s = 100e-6;
    static constexpr int kLooks = 16;
    // So many failures in a row end the spinning; then one wait in so many tries anew.
    static constexpr int kCredit = 4;
    static constexpr unsigned kTryEvery = 16;

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    bool worth_trying() { return several_cores_ && (credit_.load() > 0 || ++waits_ % kTryEvery == 0); }

    // With a single core, nothing can come while this thread spins.
    static bool has_several_cores() {
        cpu_set_t mine;
        return sched_getaffinity(0, sizeof mine, &mine) != 0 || CPU_COUNT(&mine) > 1;
    }

    const bool several_cores_ = has_several_cores();
    std::atomic<int> credit_{0};
    std::atomic<unsigned> waits_{0};
};

}  // namespace adaptra
