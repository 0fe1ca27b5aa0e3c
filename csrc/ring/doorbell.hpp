// SPDX-License-Identifier: Apache-2.0
// A futex in shared memory that one process rings and another waits on: no spinning, always with a deadline. Memory that
// others can write may be spoilt: a waiter looks every `kLook_s` whether it would still be woken.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdint>
#include <mutex>

namespace adaptra {

inline double monotonic_s() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline timespec to_timespec(double seconds) {
    seconds = std::fmin(std::fmax(seconds, 0.0), 1e15);
    const double whole = std::floor(seconds);
    return {static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
}

// A word to sleep on while it has the value that was seen.
struct FutexWord {
    std::atomic<std::uint32_t>* word = nullptr;
    std::uint32_t seen = 0;
};

inline void wake_word(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX); }

// FUTEX_WAIT_BITSET takes an absolute time; without FUTEX_PRIVATE_FLAG it works across processes.
inline int wait_word(FutexWord on, const timespec& deadline) {
    constexpr std::uint32_t kAny = FUTEX_BITSET_MATCH_ANY;
    return syscall(SYS_futex, on.word, FUTEX_WAIT_BITSET, on.seen, &deadline, nullptr, kAny) == 0 ? 0 : errno;
}

enum class Outcome { kDone, kTimedOut, kClosed };

// What a process has written into the words of a doorbell that it waits on, which are its alone to write.
struct Waiters {
    std::mutex mutex;
    std::uint32_t waiting = 0;
    std::uint32_t urgent = 0;
    std::uint32_t together = 0;
    bool spoilt = false;  // another had written there
};

class Doorbell {
public:
    // How long a waiter sleeps before it looks by itself.
    static constexpr double kLook_s = 0.5;

    // Call after having changed what a waiter's condition reads.
    void ring() {
        ring_waiting();
        if (urgent_.load() == 0) ring_together();
    }

    // For what concerns every waiter, such as the end.
    void ring_all() {
        ring_waiting();
        ring_together();
    }

    // For a thread that waits for several rings (RingWatch). Between the two it sleeps on a word of its own, so that an
    // urgent thread is woken without it.
    FutexWord begin_together(Waiters& own) {
        const FutexWord word{&together_count_, together_count_.load()};
        change(own, together_, own.together, +1);
        return word;
    }
    void end_together(Waiters& own) { change(own, together_, own.together, -1); }

    // Between the two, threads that wait for several rings are not rung for: waking one takes longer than what an urgent
    // thread does between two waits. The thread that leaves wakes them for what is left.
    void begin_urgent(Waiters& own) { change(own, urgent_, own.urgent, +1); }
    void end_urgent(Waiters& own) { change(own, urgent_, own.urgent, -1); }

    // Returns whether no other process has written into the words of the process that waits here.
    bool intact(Waiters& own) const {
        const std::lock_guard<std::mutex> lock(own.mutex);
        return !own.spoilt && waiting_.load() == own.waiting && urgent_.load() == own.urgent &&
               together_.load() == own.together;
    }

    // Wait until `done()`, or `closed()`, or the time `deadline_s` of the monotonic clock. `done` goes first: what was
    // there before the closing is still delivered. A deadline of 0 does not wait at all. `check()` throws for memory that
    // is spoilt; it is called before each sleep, and after one that timed out.
    template <class Done, class Closed, class Check>
    Outcome wait(Waiters& own, Done done, Closed closed, Check check, double deadline_s) {
        while (true) {
            // The count is read before the condition: a ring in between makes the futex return at once.
            const std::uint32_t seen = count_.load();
            if (done()) return Outcome::kDone;
            if (closed()) return Outcome::kClosed;
            if (deadline_s <= 0.0) return Outcome::kTimedOut;
            check();
            const double look_s = monotonic_s() + kLook_s;
            change(own, waiting_, own.waiting, +1);
            const bool late = !(done() || closed()) &&
                              wait_word({&count_, seen}, to_timespec(std::fmin(deadline_s, look_s))) == ETIMEDOUT;
            if (late) check();
            change(own, waiting_, own.waiting, -1);
            if (late && deadline_s <= look_s) return done() ? Outcome::kDone : Outcome::kTimedOut;
        }
    }

private:
    void ring_waiting() {
        count_.fetch_add(1);
        // One process waits at each side of a ring, but several of its threads may (lanes, closing): wake them all.
        if (waiting_.load() != 0) wake_word(count_);
    }

    void ring_together() {
        if (together_.load() == 0) return;
        together_count_.fetch_add(1);
        wake_word(together_count_);
    }

    static void change(Waiters& own, std::atomic<std::uint32_t>& shared, std::uint32_t& mine, int by) {
        const std::lock_guard<std::mutex> lock(own.mutex);
        own.spoilt |= shared.load() != mine;
        shared.store(mine += static_cast<std::uint32_t>(by));
    }

    std::atomic<std::uint32_t> count_{0};
    std::atomic<std::uint32_t> waiting_{0};
    std::atomic<std::uint32_t> urgent_{0};  // that wait, or are about to wait again
    std::atomic<std::uint32_t> together_count_{0};
    std::atomic<std::uint32_t> together_{0};
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a lock would be private to a process");

}  // namespace adaptra
