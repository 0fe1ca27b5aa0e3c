// SPDX-License-Identifier: Apache-2.0
// One thread that waits for several rings: for what comes out of some, and for room in others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "messages.hpp"

namespace adaptra {

// What a watched ring brought: an event, or the end of the ring, or neither (frames that came again were dropped).
struct Delivery {
    std::size_t index = 0;
    std::optional<Event> event;
    bool closed = false;
    std::exception_ptr error;
};

class RingWatch {
public:
    using Inboxes = std::vector<std::pair<Inbox*, std::shared_ptr<Ring>>>;
    using Rings = std::vector<std::shared_ptr<Ring>>;

    // `futex_waitv`: whether to use it if the kernel has it (5.16). Otherwise a thread for each ring sleeps on its futex.
    explicit RingWatch(bool futex_waitv = true);
    ~RingWatch();
    RingWatch(const RingWatch&) = delete;
    RingWatch& operator=(const RingWatch&) = delete;

    // Have the waiting thread return, now or at its next wait. For any thread.
    void wake();
    // Take frames from the rings, in turn, until one delivers something. No value after `wake` and at the deadline. An
    // inbox that a thread attends (Inbox::next) is left to that thread.
    std::optional<Delivery> next(const Inboxes& inboxes, double deadline_s);
    // Wait until a ring can be written into, or is closed or spoilt; returns its index. No value as above.
    std::optional<std::size_t> await_room(const Rings& rings, double deadline_s);

private:
    class Forwarder;

    bool woken();
    template <class Begin, class End, class Ready>
    std::optional<Delivery> sleep(const Rings& rings, Begin begin, End end, Ready ready, double deadline_s);
    void wait(const std::vector<FutexWord>& words, const Rings& rings, double deadline_s);

    bool futex_waitv_;
    std::atomic<bool> sleeping_{false};
    std::atomic<std::uint32_t> requests_{0};  // calls of `wake`
    std::uint32_t answered_ = 0;
    const std::shared_ptr<std::atomic<std::uint32_t>> wakes_;  // the same, and those of forwarders: the word to sleep on
    std::uint32_t seen_ = 0;
    std::size_t turn_ = 0;
    std::map<Ring*, std::shared_ptr<Forwarder>> forwarders_;
};

}  // namespace adaptra
