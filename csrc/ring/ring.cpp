// SPDX-License-Identifier: Apache-2.0
#include "ring.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string>
#include <system_error>
#include <utility>

namespace adaptra {
namespace {

constexpr std::uint64_t kMagic = 0x474E495241445041;  // "APDARING"
constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kMaxSlots = 4096;
constexpr std::uint64_t kMaxSlotNbytes = std::uint64_t{64} << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

bool possible(std::uint32_t slots, std::uint64_t slot_nbytes) {
    return slots > 0 && slots <= kMaxSlots && (slots & (slots - 1)) == 0 && slot_nbytes > 0 &&
           slot_nbytes <= kMaxSlotNbytes && slot_nbytes % kPage == 0;
}

// Never to be executed, where the kernel has a word for it (from 6.3 on).
int new_memfd() {
    constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING, kNoExecSeal = 8;
    const int fd = memfd_create("adaptra-ring", kFlags | kNoExecSeal);
    return fd < 0 && errno == EINVAL ? memfd_create("adaptra-ring", kFlags) : fd;
}

// Headers lie together, so that payloads start at page boundaries.
std::size_t headers_nbytes(std::uint32_t slots) {
    return (slots * sizeof(FrameHeader) + kPage - 1) / kPage * kPage;
}

std::size_t memory_nbytes(std::uint32_t slots, std::uint64_t slot_nbytes) {
    return kPage + headers_nbytes(slots) + slots * slot_nbytes;
}

std::byte* map(int fd, std::size_t nbytes) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw_errno("mapping a ring");
    return static_cast<std::byte*>(memory);
}

class OwnedFd {
public:
    explicit OwnedFd(int fd) : fd_(fd) {}
    ~OwnedFd() {
        if (fd_ >= 0) ::close(fd_);
    }
    OwnedFd(const OwnedFd&) = delete;
    OwnedFd& operator=(const OwnedFd&) = delete;
    int get() const { return fd_; }
    int hand_over() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

}  // namespace

// The first page. Counts of the two sides lie in cache lines of their own.
struct Ring::Shared {
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t slots;
    std::uint64_t slot_nbytes;
    std::atomic<std::uint32_t> closed;
    alignas(64) std::atomic<std::uint64_t> published;
    Doorbell filled;
    alignas(64) std::atomic<std::uint64_t> released;
    Doorbell emptied;
};

bool Ring::Finished::add(std::uint64_t first, std::uint64_t count) {
    for (std::uint64_t index = first; index < first + count; ++index) done[index % done.size()] = true;
    const std::uint64_t before = prefix;
    while (done[prefix % done.size()]) done[prefix++ % done.size()] = false;
    return prefix != before;
}

Ring::Ring(int fd, std::byte* memory, std::size_t mapped_nbytes, std::uint32_t slots, std::uint64_t slot_nbytes)
    : fd_(fd),
      memory_(memory),
      mapped_nbytes_(mapped_nbytes),
      shared_(reinterpret_cast<Shared*>(memory)),
      slots_(slots),
      slot_nbytes_(slot_nbytes) {
    static_assert(sizeof(Shared) <= kPage && std::atomic<std::uint64_t>::is_always_lock_free);
    published_.done.resize(slots);
    released_.done.resize(slots);
}

Ring::~Ring() {
    munmap(memory_, mapped_nbytes_);
    if (fd_ >= 0) ::close(fd_);
}

std::shared_ptr<Ring> Ring::create(std::uint32_t slots, std::uint64_t slot_nbytes) {
    if (!possible(slots, slot_nbytes)) {
        throw std::invalid_argument("a ring of " + std::to_string(slots) + " slots of " +
                                    std::to_string(slot_nbytes) +
                                    " bytes cannot be: slots are a power of two up to 4096, their size a multiple of "
                                    "4096 up to 64 MiB");
    }
    OwnedFd fd(new_memfd());
    if (fd.get() < 0) throw_errno("creating a ring");
    const std::size_t nbytes = memory_nbytes(slots, slot_nbytes);
    if (ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) throw_errno("sizing a ring");
    if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_errno("sealing a ring");
    std::byte* memory = map(fd.get(), nbytes);
    Shared* shared = new (memory) Shared{};
    shared->magic = kMagic;
    shared->version = kRingVersion;
    shared->slots = slots;
    shared->slot_nbytes = slot_nbytes;
    return std::shared_ptr<Ring>(new Ring(fd.hand_over(), memory, nbytes, slots, slot_nbytes));
}

std::shared_ptr<Ring> Ring::attach(int fd) {
    OwnedFd own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (own.get() < 0) throw_errno("attaching a ring");
    struct stat status {};
    if (fstat(own.get(), &status) != 0) throw_errno("attaching a ring");
    // Unsealed memory could be cut under the mapping, and the next access would kill this process.
    const int seals = fcntl(own.get(), F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) throw RingError("the file is not a memfd sealed as a ring is");
    const auto nbytes = static_cast<std::size_t>(status.st_size);
    if (nbytes < kPage) throw RingError("the file is too small for a ring");
    std::byte* memory = map(own.get(), nbytes);
    const auto* shared = reinterpret_cast<const Shared*>(memory);
    const std::uint64_t magic = shared->magic;
    const std::uint32_t version = shared->version;
    const std::uint32_t slots = shared->slots;
    const std::uint64_t slot_nbytes = shared->slot_nbytes;
    if (magic != kMagic || version != kRingVersion || !possible(slots, slot_nbytes) ||
        memory_nbytes(slots, slot_nbytes) != nbytes) {
        munmap(memory, nbytes);
        throw RingError("the memory is no ring of version " + std::to_string(kRingVersion) + ": version " +
                        std::to_string(version) + ", " + std::to_string(slots) + " slots of " +
                        std::to_string(slot_nbytes) + " bytes in " + std::to_string(nbytes) +
                        " bytes; both ends must run the same version of this package");
    }
    return std::shared_ptr<Ring>(new Ring(own.hand_over(), memory, nbytes, slots, slot_nbytes));
}

std::byte* Ring::slots_memory() const { return memory_ + kPage; }

std::size_t Ring::slots_memory_nbytes() const { return mapped_nbytes_ - kPage; }

Slot Ring::slot(std::uint64_t index) const {
    const std::uint64_t position = index & (slots_ - 1);
    std::byte* headers = slots_memory();
    return {index, reinterpret_cast<FrameHeader*>(headers) + position,
            headers + headers_nbytes(slots_) + position * slot_nbytes_};
}

Outcome Ring::claim(Slot& first, double deadline_s, std::uint64_t most, std::uint64_t& count) {
    const std::lock_guard<std::mutex> lock(claiming_);
    if (closed()) return Outcome::kClosed;
    std::uint64_t unused = 0;
    const Outcome outcome = shared_->emptied.wait(
        for_emptied_,
        [&] {
            unused = slots_ - (claimed_ - shared_->released.load());
            if (unused > slots_) throw RingError("the consumer released more slots than were filled");
            return unused > 0;
        },
        [&] { return closed(); }, [&] { check_producer(); }, deadline_s);
    if (outcome != Outcome::kDone) return outcome;
    first = slot(claimed_);
    count = std::min<std::uint64_t>({most, unused, slots_ - (claimed_ & (slots_ - 1))});
    claimed_ += count;
    return outcome;
}

Outcome Ring::claim(Slot& slot, double deadline_s) {
    std::uint64_t one = 0;
    return claim(slot, deadline_s, 1, one);
}

void Ring::commit(const Slot& first, std::uint64_t count) {
    const std::lock_guard<std::mutex> lock(published_.mutex);
    check_published();
    check_first_page(shared_->emptied, for_emptied_);
    if (!published_.add(first.index, count)) return;
    shared_->published.store(published_.prefix);
    shared_->filled.ring();
}

bool Ring::filled() const {
    // In this order: slots taken meanwhile make the difference too large, never negative.
    const std::uint64_t taken = taken_.load();
    const std::uint64_t filled = shared_->published.load() - taken;
    if (filled > slots_ && taken_.load() == taken) throw RingError("the producer published more slots than there are");
    return filled > 0;
}

Outcome Ring::take(Slot& slot, double deadline_s) {
    std::unique_lock<std::mutex> turn;
    return take(slot, deadline_s, turn);
}

Outcome Ring::take(Slot& slot, double deadline_s, std::unique_lock<std::mutex>& turn) {
    if (!turn.owns_lock()) turn = std::unique_lock<std::mutex>(taking_);
    const Outcome outcome = shared_->filled.wait(
        for_filled_, [&] { return filled(); }, [&] { return closed(); }, [&] { check_consumer(); }, deadline_s);
    if (outcome == Outcome::kDone) slot = this->slot(taken_++);
    return outcome;
}

bool Ring::changed(std::uint64_t seen_pokes) const { return pokes_.load() != seen_pokes || filled() || closed(); }

Outcome Ring::await_filled(std::uint64_t seen_pokes, double deadline_s) {
    return shared_->filled.wait(
        for_filled_, [&] { return pokes_.load() != seen_pokes || filled(); }, [&] { return closed(); },
        [&] { check_consumer(); }, deadline_s);
}

void Ring::begin_urgent() { shared_->filled.begin_urgent(for_filled_); }

void Ring::end_urgent() {
    shared_->filled.end_urgent(for_filled_);
    // Others slept through this. No check of the counts: the thread that takes the next slot makes it.
    if (shared_->published.load() != taken_.load() || closed()) shared_->filled.ring_all();
}

Doorbell& Ring::bell_filled() { return shared_->filled; }

Doorbell& Ring::bell_emptied() { return shared_->emptied; }

FutexWord Ring::begin_filled_together() {
    check_consumer();
    return shared_->filled.begin_together(for_filled_);
}

FutexWord Ring::begin_emptied_together() {
    check_producer();
    return shared_->emptied.begin_together(for_emptied_);
}

bool Ring::has_room() const { return claimed_.load() - shared_->released.load() != slots_; }

void Ring::poke() {
    ++pokes_;
    shared_->filled.ring_all();
}

void Ring::release(const Slot& first, std::uint64_t count) {
    const std::lock_guard<std::mutex> lock(released_.mutex);
    released_spoilt_ |= shared_->released.load() != released_.prefix;
    if (!released_.add(first.index, count)) return;
    shared_->released.store(released_.prefix);
    shared_->emptied.ring();
}

void Ring::close() {
    shared_->closed.store(1);
    shared_->filled.ring_all();
    shared_->emptied.ring_all();
}

void Ring::disown() {
    // In place: code that still has this object in the child finds memory where it was.
    constexpr int kEmpty = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(memory_, mapped_nbytes_, PROT_READ | PROT_WRITE, kEmpty, -1, 0) == MAP_FAILED) {
        throw_errno("leaving a ring to the parent");
    }
    shared_->closed.store(1);
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool Ring::closed() const { return shared_->closed.load() != 0; }

void Ring::check_released() const {
    const std::lock_guard<std::mutex> lock(released_.mutex);
    if (released_spoilt_ || shared_->released.load() != released_.prefix) {
        throw RingError("another changed the count of slots released");
    }
}

void Ring::check_published() const {
    if (shared_->published.load() != published_.prefix) throw RingError("another changed the count of slots published");
}

void Ring::check_consumer() {
    check_released();
    check_first_page(shared_->filled, for_filled_);
}

void Ring::check_producer() {
    {
        const std::lock_guard<std::mutex> lock(published_.mutex);
        check_published();
    }
    check_first_page(shared_->emptied, for_emptied_);
}

void Ring::check_first_page(const Doorbell& bell, Waiters& own) const {
    if (!bell.intact(own)) throw RingError("another changed the count of who waits");
    if (shared_->magic != kMagic || shared_->version != kRingVersion || shared_->slots != slots_ ||
        shared_->slot_nbytes != slot_nbytes_) {
        throw RingError("another changed the description of its slots");
    }
}

std::uint64_t Ring::backlog() const { return shared_->published.load() - taken_.load(); }

}  // namespace adaptra
