// SPDX-License-Identifier: Apache-2.0
#include "memory_pool.hpp"

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

}  // namespace

Block::~Block() { pool_->put_back(data_, capacity_); }

MemoryPool::~MemoryPool() {
    for (const Unused& unused : unused_) munmap(unused.data, unused.capacity);
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
            return std::shared_ptr<Block>(new Block(shared_from_this(), unused.data, nbytes, unused.capacity));
        }
    }
    std::byte* data = map_memory(capacity, for_device_);
    return std::shared_ptr<Block>(new Block(shared_from_this(), data, nbytes, capacity));
}

void MemoryPool::put_back(std::byte* data, std::uint64_t capacity) {
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
    for (const Unused& unused : surplus) munmap(unused.data, unused.capacity);
}

}  // namespace adaptra
