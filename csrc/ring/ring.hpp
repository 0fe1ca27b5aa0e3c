// SPDX-License-Identifier: Apache-2.0
// A ring of fixed-size slots in an anonymous memfd, from one producing process to one consuming process. The memory
// goes when the last of them does, however they end. Several threads of a process may produce or consume ("lanes"):
// slots are filled and emptied in any order, but published and released in the order in which they were claimed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "doorbell.hpp"
#include "frame.hpp"

namespace adaptra {

// The memory is not a ring of ours, or was tampered with.
struct RingError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Slot {
    std::uint64_t index = 0;
    FrameHeader* header = nullptr;
    std::byte* payload = nullptr;
};

class Ring {
public:
    // `slots` a power of two up to 4096, `slot_nbytes` a multiple of 4096 up to 64 MiB.
    static std::shared_ptr<Ring> create(std::uint32_t slots, std::uint64_t slot_nbytes);
    // Map the ring behind `fd` (which stays the caller's). Throws RingError unless it is one, sealed against resizing.
    static std::shared_ptr<Ring> attach(int fd);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    int fd() const { return fd_; }
    std::uint32_t slots() const { return slots_; }
    std::uint64_t slot_nbytes() const { return slot_nbytes_; }
    // All headers and payloads, without the page of counts before them: what an RNIC may be shown.
    std::byte* slots_memory() const;
    std::size_t slots_memory_nbytes() const;
    Slot slot(std::uint64_t index) const;

    // Producer: get a slot to fill, then publish it. Or several at once: `count` of them, at most and at first `most`,
    // whose payloads follow one another in memory.
    Outcome claim(Slot& first, double deadline_s, std::uint64_t most, std::uint64_t& count);
    Outcome claim(Slot& slot, double deadline_s);
    void commit(const Slot& first, std::uint64_t count = 1);
    // Consumer: get a published slot, then let the producer have it again.
    Outcome take(Slot& slot, double deadline_s);
    // The same, with the turn to take: other threads do not get a slot, or wait for one, until `turn` is given up.
    Outcome take(Slot& slot, double deadline_s, std::unique_lock<std::mutex>& turn);
    void release(const Slot& first, std::uint64_t count = 1);
    // Consumer: get the next slot if it is published and `wanted`, without waiting.
    template <class Wanted>
    bool take_if(Slot& slot, Wanted wanted) {
        const std::lock_guard<std::mutex> lock(taking_);
        if (!filled() || !wanted(this->slot(taken_.load()))) return false;
        slot = this->slot(taken_++);
        return true;
    }
    // Consumer: wait until there is a slot to take, or `poke` was called since `pokes` was `seen_pokes`.
    Outcome await_filled(std::uint64_t seen_pokes, double deadline_s);
    // Returns whether `await_filled` would return at once.
    bool changed(std::uint64_t seen_pokes) const;
    // Between the two, filled slots wake only threads that wait for this ring alone.
    void begin_urgent();
    void end_urgent();
    // For a thread that waits for several rings: see Doorbell. The `filled` pair is the consumer's, the other the
    // producer's. Beginning throws RingError if the memory is spoilt.
    FutexWord begin_filled_together();
    void end_filled_together() { bell_filled().end_together(for_filled_); }
    FutexWord begin_emptied_together();
    void end_emptied_together() { bell_emptied().end_together(for_emptied_); }
    // Consumer: whether there is a slot to take. Producer: whether there is one to fill.
    bool filled() const;
    bool has_room() const;
    // Wakes this process's threads in `await_filled`.
    void poke();
    std::uint64_t pokes() const { return pokes_.load(); }

    // Wake all threads at both ends. Published slots can still be taken; nothing can be claimed.
    void close();
    bool closed() const;
    // In a forked child: leave memory and descriptor to the parent. What stays is a closed, empty ring of its own.
    void disown();
    // Consumer: published slots that have not been taken yet.
    std::uint64_t backlog() const;
    // Consumer: throws RingError if others have changed what this side alone writes, so that what it has just read out of
    // slots may have been written over.
    void check_released() const;

private:
    struct Shared;

    // Slots are finished in any order; the count that the other process reads only covers an unbroken prefix.
    struct Finished {
        mutable std::mutex mutex;
        std::vector<bool> done;
        std::uint64_t prefix = 0;

        // Returns whether the prefix grew.
        bool add(std::uint64_t first, std::uint64_t count);
    };

    Ring(int fd, std::byte* memory, std::size_t mapped_nbytes, std::uint32_t slots, std::uint64_t slot_nbytes);
    Doorbell& bell_filled();
    Doorbell& bell_emptied();
    // Throw RingError if the first page is not as this process, on its side, left it. The first with `published_.mutex`.
    void check_published() const;
    void check_consumer();
    void check_producer();
    void check_first_page(const Doorbell& bell, Waiters& own) const;

    int fd_;
    std::byte* const memory_;
    const std::size_t mapped_nbytes_;
    Shared* const shared_;
    // Copies: what the other process could change is never used for addresses.
    const std::uint32_t slots_;
    const std::uint64_t slot_nbytes_;

    std::mutex claiming_;
    std::atomic<std::uint64_t> claimed_{0};
    Finished published_;
    std::mutex taking_;
    std::atomic<std::uint64_t> taken_{0};
    std::atomic<std::uint64_t> pokes_{0};
    Finished released_;
    bool released_spoilt_ = false;  // another had written where the count is; giving slots back must not throw
    Waiters for_emptied_;
    Waiters for_filled_;
};

}  // namespace adaptra
