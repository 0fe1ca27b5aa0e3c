// SPDX-License-Identifier: Apache-2.0
// Memory of received messages. What a dropped tensor leaves is used again: fresh pages cost as much as the copy into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace adaptra {

class MemoryPool;

// Memory of one message, aligned for any data type; goes back to its pool when the last owner lets go.
class Block {
public:
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::byte* data() const { return data_; }
    std::uint64_t nbytes() const { return nbytes_; }
    std::uint64_t capacity() const { return capacity_; }

private:
    friend class MemoryPool;
    Block(std::shared_ptr<MemoryPool> pool, std::byte* data, std::uint64_t nbytes, std::uint64_t capacity)
        : pool_(std::move(pool)), data_(data), nbytes_(nbytes), capacity_(capacity) {}

    const std::shared_ptr<MemoryPool> pool_;
    std::byte* const data_;
    const std::uint64_t nbytes_;
    const std::uint64_t capacity_;
};

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
public:
    // Keeps at most `limit_nbytes` of unused memory. `for_device`: a device reads it, so a forked child must not have it:
    // what either process wrote next would go to a copy of the page, and the device would go on reading the old one.
    explicit MemoryPool(std::uint64_t limit_nbytes, bool for_device = false)
        : limit_nbytes_(limit_nbytes), for_device_(for_device) {}
    ~MemoryPool();
    MemoryPool(const MemoryPool&) = delete;
    MemoryPool& operator=(const MemoryPool&) = delete;

    // Throws std::bad_alloc.
    std::shared_ptr<Block> get(std::uint64_t nbytes);

private:
    friend class Block;
    struct Unused {
        std::byte* data;
        std::uint64_t capacity;
    };
    void put_back(std::byte* data, std::uint64_t capacity);

    const std::uint64_t limit_nbytes_;
    const bool for_device_;
    std::mutex mutex_;
    std::uint64_t unused_nbytes_ = 0;
    std::vector<Unused> unused_;  // the one let go last is at the end: its pages are the warmest
};

}  // namespace adaptra
