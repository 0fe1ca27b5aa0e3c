// SPDX-License-Identifier: Apache-2.0
#include "memory_pool.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace adaptra {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

std::uint64_t rounded(std::uint64_t nbytes) {
    const std::uint64_t unit = nbytes >= kHugePage ? kHugePage : kPage;
    return std::max(unit, (nbytes + unit - 1) / unit * unit);
}

std::byte* map_memory(std::uint64_t nbytes, bool for_device) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    if (nbytes >= kHugePage) madvise(memory, nbytes, MADV_HUGEPAGE);  // a wish: without it, it is only slower
    if (for_device && madvise(memory, nbytes, MADV_DONTFORK) != 0) {
        munmap(memory, nbytes);
        throw std::bad_alloc();
    }
    return static_cast<std::byte*>(memory);
}

// AddressSanitizer, where it watches, takes all mapped memory for usable.
void allow_only(std::byte* memory, std::uint64_t nbytes, std::uint64_t capacity) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(memory, capacity);
    ASAN_UNPOISON_MEMORY_REGION(memory, nbytes);
#else
    static_cast<void>(memory), static_cast<void>(nbytes), static_cast<void>(capacity);
#endif
}

void unmap_memory(std::byte* memory, std::uint64_t nbytes) {
    allow_only(memory, nbytes, nbytes);
    munmap(memory, nbytes);
}

}  // namespace

Block::~Block() { pool_->put_back(data_, capacity_); }

MemoryPool::~MemoryPool() {
    for (const Unused& unused : unused_) unmap_memory(unused.data, unused.capacity);
}

std::shared_ptr<Block> MemoryPool::get(std::uint64_t nbytes) {
    const std::uint64_t capacity = rounded(nbytes);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        // Not more than twice what is needed, or small messages would sit in the memory of large ones.
        const auto fits = [&](const Unused& unused) {
            return unused.capacity >= capacity && unused.capacity / 2 <= capacity;
        };
        const auto found = std::find_if(unused_.rbegin(), unused_.rend(), fits);
        if (found != unused_.rend()) {
            const Unused unused = *found;
            unused_.erase(std::next(found).base());
            unused_nbytes_ -= unused.capacity;
            allow_only(unused.data, nbytes, unused.capacity);
            return std::shared_ptr<Block>(new Block(shared_from_this(), unused.data, nbytes, unused.capacity));
        }
    }
    std::byte* data = map_memory(capacity, for_device_);
    allow_only(data, nbytes, capacity);
    return std::shared_ptr<Block>(new Block(shared_from_this(), data, nbytes, capacity));
}

void MemoryPool::put_back(std::byte* data, std::uint64_t capacity) {
    allow_only(data, 0, capacity);
    std::vector<Unused> surplus;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        unused_.push_back({data, capacity});
        unused_nbytes_ += capacity;
        // Out goes what has been unused longest: sizes that are no longer asked for must not keep out those that are.
        auto kept = unused_.begin();
        for (; unused_nbytes_ > limit_nbytes_; ++kept) unused_nbytes_ -= kept->capacity;
        surplus.assign(unused_.begin(), kept);
        unused_.erase(unused_.begin(), kept);
    }
    for (const Unused& unused : surplus) unmap_memory(unused.data, unused.capacity);
}

}  // namespace adaptra
