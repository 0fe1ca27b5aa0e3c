// SPDX-License-Identifier: Apache-2.0
#include "ring_watch.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace adaptra {
namespace {

// As in the kernel's headers from 5.16 on; wheels are built with older ones.
struct Waitv {
    std::uint64_t value;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};
constexpr long kFutexWaitv = 449;
constexpr std::uint32_t kSize32 = 2;
constexpr std::size_t kMostWords = 128;

}  // namespace

// A thread that sleeps on a ring's word in place of the watch, where the kernel cannot wait for several. It ends within
// Doorbell::kLook_s of its release, and keeps what it uses until then.
class RingWatch::Forwarder : public std::enable_shared_from_this<RingWatch::Forwarder> {
public:
    Forwarder(std::shared_ptr<Ring> ring, std::shared_ptr<std::atomic<std::uint32_t>> wakes)
        : ring_(std::move(ring)), wakes_(std::move(wakes)) {}

    static std::shared_ptr<Forwarder> start(std::shared_ptr<Ring> ring,
                                            std::shared_ptr<std::atomic<std::uint32_t>> wakes) {
        auto made = std::make_shared<Forwarder>(std::move(ring), std::move(wakes));
        std::thread([made] { made->run(); }).detach();
        return made;
    }

    void sleep_on(FutexWord word) {
        const std::lock_guard<std::mutex> lock(mutex_);
        word_ = word;
        changed_.notify_one();
    }

    void release() {
        const std::lock_guard<std::mutex> lock(mutex_);
        released_ = true;
        changed_.notify_one();
    }

private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return released_ || word_.word != nullptr; });
            if (released_) return;
            const FutexWord word = word_;
            lock.unlock();
            const int result =
                wait_word(word, to_timespec(monotonic_s() + Doorbell::kLook_s));
            lock.lock();
            if (result == ETIMEDOUT || result == EINTR) continue;
            // Of a later sleep, perhaps: then this thread goes on to that.
            if (word_.seen == word.seen) word_.word = nullptr;
            wakes_->fetch_add(1);
            wake_word(*wakes_);
        }
    }

    const std::shared_ptr<Ring> ring_;
    const std::shared_ptr<std::atomic<std::uint32_t>> wakes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    FutexWord word_;
    bool released_ = false;
};

RingWatch::RingWatch(bool futex_waitv)
    : futex_waitv_(futex_waitv), wakes_(std::make_shared<std::atomic<std::uint32_t>>(0)) {}

RingWatch::~RingWatch() {
    for (const auto& [ring, forwarder] : forwarders_) forwarder->release();
}

void RingWatch::wake() {
    requests_.fetch_add(1);
    wakes_->fetch_add(1);
    if (sleeping_.load()) wake_word(*wakes_);
}

bool RingWatch::woken() {
    seen_ = wakes_->load();  // before the rings are looked at: what comes later ends the sleep
    return std::exchange(answered_, requests_.load()) != answered_;
}

std::optional<Delivery> RingWatch::next(const Inboxes& inboxes, double deadline_s) {
    while (true) {
        if (woken()) return std::nullopt;
        for (std::size_t count = 0; count < inboxes.size(); ++count) {
            const std::size_t index = (turn_ + count) % inboxes.size();
            auto& [inbox, ring] = inboxes[index];
            Delivery delivery;
            delivery.index = index;
            try {
                if (!inbox->deliver(*ring, delivery.event, delivery.closed)) continue;
            } catch (...) {
                delivery.error = std::current_exception();
            }
            turn_ = index + 1;
            return delivery;
        }
        if (monotonic_s() >= deadline_s) return std::nullopt;
        Rings rings;
        for (const auto& each : inboxes) rings.push_back(each.second);
        const auto failed = sleep(
            rings, [](Ring& ring) { return ring.begin_filled_together(); },
            [](Ring& ring) { ring.end_filled_together(); },
            [&](std::size_t index) { return inboxes[index].first->would_deliver(*rings[index]); }, deadline_s);
        if (failed) return failed;
    }
}

std::optional<std::size_t> RingWatch::await_room(const Rings& rings, double deadline_s) {
    const auto ready = [&](std::size_t index) { return rings[index]->closed() || rings[index]->has_room(); };
    while (true) {
        if (woken()) return std::nullopt;
        for (std::size_t index = 0; index < rings.size(); ++index) {
            if (ready(index)) return index;
        }
        if (monotonic_s() >= deadline_s) return std::nullopt;
        const auto failed = sleep(
            rings, [](Ring& ring) { return ring.begin_emptied_together(); },
            [](Ring& ring) { ring.end_emptied_together(); }, ready, deadline_s);
        if (failed) return failed->index;  // the next write there meets the error
    }
}

// Sleep until the watch is woken, a ring's word changes, or it is time to look at the memory of all. Returns the ring
// whose memory is spoilt, if one is.
template <class Begin, class End, class Ready>
std::optional<Delivery> RingWatch::sleep(const Rings& rings, Begin begin, End end, Ready ready, double deadline_s) {
    std::vector<FutexWord> words{{wakes_.get(), seen_}};
    std::optional<Delivery> failed;
    bool changed = false;
    sleeping_.store(true);
    std::size_t begun = 0, at = 0;
    try {
        for (; at < rings.size(); begun = ++at) words.push_back(begin(*rings[at]));
        // Who publishes after this wakes; who published before is seen here.
        for (at = 0; at < rings.size() && !changed; ++at) changed = ready(at);
    } catch (...) {
        failed.emplace();
        failed->index = at;
        failed->error = std::current_exception();
    }
    if (!failed && !changed) wait(words, rings, std::fmin(deadline_s, monotonic_s() + Doorbell::kLook_s));
    for (std::size_t index = 0; index < begun; ++index) end(*rings[index]);
    sleeping_.store(false);
    return failed;
}

void RingWatch::wait(const std::vector<FutexWord>& words, const Rings& rings, double deadline_s) {
    const timespec deadline = to_timespec(deadline_s);
    if (futex_waitv_ && words.size() <= kMostWords) {
        std::vector<Waitv> waits;
        for (const FutexWord& each : words) {
            waits.push_back({each.seen, reinterpret_cast<std::uintptr_t>(each.word), kSize32, 0});
        }
        if (syscall(kFutexWaitv, waits.data(), waits.size(), 0, &deadline, CLOCK_MONOTONIC) >= 0) return;
        if (errno != ENOSYS && errno != EPERM) return;  // it timed out, was interrupted, or a word has changed
        futex_waitv_ = false;                            // an old kernel, or a sandbox
    }
    std::map<Ring*, std::shared_ptr<Forwarder>> left = std::exchange(forwarders_, {});
    for (std::size_t index = 0; index < rings.size(); ++index) {
        auto found = left.extract(rings[index].get());
        auto& forwarder = forwarders_[rings[index].get()];
        forwarder = found ? found.mapped() : Forwarder::start(rings[index], wakes_);
        forwarder->sleep_on(words[index + 1]);
    }
    for (const auto& [ring, forwarder] : left) forwarder->release();
    wait_word(words.front(), deadline);
}

}  // namespace adaptra
