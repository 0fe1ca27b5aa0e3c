// SPDX-License-Identifier: Apache-2.0
// A futex in shared memory that one process rings and another waits on: no spinning, always with a deadline.
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

enum class Outcome { kDone, kTimedOut, kClosed };

// Which of several waiting threads a ring wakes: patient ones only if nobody urgent is there.
enum class Wait : std::uint32_t { kPatient = 1, kUrgent = 2 };

class Doorbell {
public:
    // Call after having changed what a waiter's condition reads.
    void ring() {
        count_.fetch_add(1);
        // One process waits at each side of a ring, but several of its threads may (lanes, closing): wake them all.
        if (waiting_.load() == 0) return;
        wake(urgent_.load() != 0 ? static_cast<std::uint32_t>(Wait::kUrgent) : FUTEX_BITSET_MATCH_ANY);
    }

    // For what concerns every waiter, such as the end.
    void ring_all() {
        count_.fetch_add(1);
        if (waiting_.load() != 0) wake(FUTEX_BITSET_MATCH_ANY);
    }

    // Between the two, only urgent waiters are rung for. Who leaves sees to it that others hear of what is still undone.
    void begin_urgent() { urgent_.fetch_add(1); }
    void end_urgent() { urgent_.fetch_sub(1); }

    // Wait until `done()`, or `closed()`, or the time `deadline_s` of the monotonic clock. `done` goes first: what was
    // there before the closing is still delivered. A deadline of 0 does not wait at all.
    template <class Done, class Closed>
    Outcome wait(Done done, Closed closed, double deadline_s, Wait manner = Wait::kPatient) {
        const timespec deadline = to_timespec(deadline_s);
        while (true) {
            // The count is read before the condition: a ring in between makes the futex return at once.
            const std::uint32_t seen = count_.load();
            if (done()) return Outcome::kDone;
            if (closed()) return Outcome::kClosed;
            if (deadline_s <= 0.0) return Outcome::kTimedOut;
            waiting_.fetch_add(1);
            const bool late = !(done() || closed()) && wait_once(seen, deadline, manner) == ETIMEDOUT;
            waiting_.fetch_sub(1);
            if (late) return done() ? Outcome::kDone : Outcome::kTimedOut;
        }
    }

private:
    // FUTEX_WAIT_BITSET takes an absolute time; without FUTEX_PRIVATE_FLAG it works across processes.
    int wait_once(std::uint32_t seen, const timespec& deadline, Wait manner) {
        const long result = syscall(SYS_futex, &count_, FUTEX_WAIT_BITSET, seen, &deadline, nullptr,
                                    static_cast<std::uint32_t>(manner));
        return result == 0 ? 0 : errno;
    }

    void wake(std::uint32_t manners) {
        syscall(SYS_futex, &count_, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, manners);
    }

    std::atomic<std::uint32_t> count_{0};
    std::atomic<std::uint32_t> waiting_{0};
    std::atomic<std::uint32_t> urgent_{0};  // that wait, or are busy with what they have waited for
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "a lock would be private to a process");

}  // namespace adaptra
