// SPDX-License-Identifier: Apache-2.0
// What NCCL's kernel for sends and receives does (src/device/sendrecv.h, prims_simple.h, prims_ll.h), for one CPU thread
// that takes the sends and receives of all channels in turns. Compiled with NCCL's own headers: what its host code
// prepares is read as the kernel reads it. Over host memory and the network; neither peer access nor registered buffers.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "bitops.h"
#include "collectives.h"
#include "device.h"
#include "nccl_device.h"

namespace {

constexpr std::chrono::microseconds kPause{20};

template <typename T>
T read(const T* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename T>
void write(T* address, T value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

void must_be(bool true_, const char* what) {
    if (!true_) {
        std::fprintf(stderr, "send_receive_kernel: not modelled: %s\n", what);
        std::abort();
    }
}

// One direction of one work on one channel. Moves one chunk at a time through the connection's ring of NCCL_STEPS slots.
class Transfer {
public:
    Transfer(ncclKernelComm* comm, ncclConnInfo* connection, bool sends, bool ll, char* memory, size_t nbytes, int chunk)
        : comm_(comm), connection_(connection), sends_(sends), ll_(ll), memory_(memory), left_(nbytes), chunk_(chunk) {
        step_ = connection->step;
        if (!sends && !ll) write(connection->head, step_);
    }

    bool done() const { return begun_ && left_ == 0; }

    // Returns whether it moved on. The first chunk may be empty.
    bool go_on() {
        const size_t nbytes = std::min<size_t>(chunk_, left_);
        if (!(ll_ ? chunk_of_lines(nbytes) : chunk_of_bytes(nbytes))) return false;
        memory_ += nbytes;
        left_ -= nbytes;
        begun_ = true;
        connection_->step = ++step_;
        if (sends_ && !ll_) write(connection_->tail, step_);
        if (!sends_) write(connection_->head, step_);
        return true;
    }

private:
    bool chunk_of_bytes(size_t nbytes) {
        ncclConnInfo* const c = connection_;
        if (sends_ ? read(c->head) + NCCL_STEPS < step_ + 1 : read(c->tail) < step_ + 1) return false;
        ncclConnFifo* const slot = c->connFifo != nullptr ? &c->connFifo[step_ % NCCL_STEPS] : nullptr;
        if (sends_ && slot != nullptr) write(&slot->size, static_cast<ssize_t>(nbytes));
        char* there = c->buffs[NCCL_PROTO_SIMPLE];
        there += slot != nullptr && read(&slot->mode) == NCCL_MODE_OFFSET ? read(&slot->offset)
                                                                          : (step_ % NCCL_STEPS) * c->stepSize;
        std::memcpy(sends_ ? there : memory_, sends_ ? memory_ : there, nbytes);
        return true;
    }

    // Lines of eight bytes, with flags that say which step they are of.
    bool chunk_of_lines(size_t nbytes) {
        const size_t slot_lines = comm_->buffSizes[NCCL_PROTO_LL] / NCCL_STEPS / sizeof(ncclLLFifoLine);
        auto* const lines = reinterpret_cast<ncclLLFifoLine*>(connection_->buffs[NCCL_PROTO_LL]) + step_ % NCCL_STEPS * slot_lines;
        const uint32_t flag = NCCL_LL_FLAG(step_ + 1);
        const size_t count = divUp(nbytes, sizeof(uint64_t));
        if (sends_) {
            if (read(connection_->head) + NCCL_STEPS < step_ + 1) return false;
            if (connection_->connFifo != nullptr)
                write(&connection_->connFifo[step_ % NCCL_STEPS].size, static_cast<ssize_t>(count * sizeof(ncclLLFifoLine)));
        }
        for (; line_ < count; ++line_) {
            uint32_t words[2] = {0, 0};
            const size_t here = std::min(sizeof words, nbytes - line_ * sizeof words);
            if (sends_) {
                std::memcpy(words, memory_ + line_ * sizeof words, here);
                for (int half = 0; half < 2; ++half)
                    write(&lines[line_].v[half], words[half] | static_cast<uint64_t>(flag) << 32);
            } else {
                for (int half = 0; half < 2; ++half) {
                    const uint64_t found = read(&lines[line_].v[half]);
                    if (found >> 32 != flag) return false;
                    words[half] = static_cast<uint32_t>(found);
                }
                std::memcpy(memory_ + line_ * sizeof words, words, here);
            }
        }
        line_ = 0;
        return true;
    }

    ncclKernelComm* comm_;
    ncclConnInfo* connection_;
    bool sends_, ll_;
    char* memory_;
    size_t left_;
    size_t chunk_;
    uint64_t step_;
    size_t line_ = 0;
    bool begun_ = false;
};

// A thread block: the batches of one channel, one after the other.
class Block {
public:
    Block(const ncclDevKernelArgs* arguments, int channel, int batch)
        : arguments_(arguments), channel_(channel), batch_(batch) {
        load();
    }

    bool done() const { return transfers_.empty() && batch_ < 0; }

    bool go_on() {
        bool moved = false;
        for (size_t each = transfers_.size(); each-- > 0;) {
            moved |= transfers_[each].go_on();
            if (transfers_[each].done()) transfers_.erase(transfers_.begin() + each);
        }
        if (transfers_.empty() && batch_ >= 0) {
            load();
            return true;
        }
        return moved;
    }

private:
    void load() {
        const auto* const batches = reinterpret_cast<const ncclDevWorkBatch*>(arguments_ + 1);
        while (true) {
            const ncclDevWorkBatch& batch = batches[batch_];
            must_be(batch.workType == ncclDevWorkTypeP2p, "collectives");
            for (int bit = 0; bit < 64; ++bit)
                if (batch.offsetBitset >> bit & 1) add(work_at(batch.offsetBase + bit * sizeof(ncclDevWorkP2p)));
            const int next = batch.nextJump == 0 ? -1 : batch_ + static_cast<int>(batch.nextJump);
            const bool extends = batch.nextExtends;
            batch_ = next;
            if (!extends) return;
        }
    }

    const ncclDevWorkP2p* work_at(uint32_t offset) const {
        const char* const base = arguments_->workStorageType == ncclDevWorkStorageTypeArgs
                                     ? reinterpret_cast<const char*>(arguments_) + offset
                                     : static_cast<const char*>(arguments_->workBuf) + (offset & arguments_->workMask);
        return reinterpret_cast<const ncclDevWorkP2p*>(base);
    }

    void add(const ncclDevWorkP2p* work) {
        ncclKernelComm* const comm = arguments_->comm;
        must_be(!(work->sendIpcReg || work->recvIpcReg || work->sendNetReg || work->recvNetReg), "registered buffers");
        must_be(work->sendRank != comm->rank, "a send to itself");
        ncclDevChannelPeer** const peers = comm->channels[channel_].peers;
        const int part = (channel_ - work->channelBase) & (work->nP2pChannels - 1);
        size_t begin, end;
        if (part < work->nSendChannels) {
            ncclP2pPartBounds(work->nSendChannels, part, work->sendBytes, &begin, &end);
            transfers_.emplace_back(comm, &peers[work->sendRank]->send[1], true, work->sendProtoLL,
                                    static_cast<char*>(work->sendAddr) + begin, end - begin,
                                    u32fp8Decode(work->sendChunkSize_u32fp8));
        }
        if (part < work->nRecvChannels) {
            ncclP2pPartBounds(work->nRecvChannels, part, work->recvBytes, &begin, &end);
            transfers_.emplace_back(comm, &peers[work->recvRank]->recv[1], false, work->recvProtoLL,
                                    static_cast<char*>(work->recvAddr) + begin, end - begin,
                                    u32fp8Decode(work->recvChunkSize_u32fp8));
        }
    }

    const ncclDevKernelArgs* arguments_;
    int channel_;
    int batch_;
    std::vector<Transfer> transfers_;
};

}  // namespace

__global__ void ncclDevKernel_SendRecv(ncclDevKernelArgs4K const storage) {
    const ncclDevKernelArgs* const arguments = &storage.args;
    std::vector<Block> blocks;
    for (int channel = 0; channel < MAXCHANNELS; ++channel)
        if (arguments->channelMask >> channel & 1) blocks.emplace_back(arguments, channel, static_cast<int>(blocks.size()));
    while (!blocks.empty()) {
        bool moved = false;
        for (size_t each = blocks.size(); each-- > 0;) {
            moved |= blocks[each].go_on();
            if (blocks[each].done()) blocks.erase(blocks.begin() + each);
        }
        if (!moved) {
            if (read(const_cast<const uint32_t*>(arguments->comm->abortFlag)) != 0) return;
            std::this_thread::sleep_for(kPause);
        }
    }
}

// No kernel stands for anything else.
__global__ void ncclDevKernel_Generic(ncclDevKernelArgs4K const) { must_be(false, "collectives"); }

ncclResult_t ncclLaunchOneRank(void*, void const*, size_t, ncclDevRedOpFull, ncclDataType_t, cudaStream_t) {
    return ncclInternalError;
}

ncclResult_t ncclGinResetSignalsAndCounters(ncclComm*, ncclDevComm const*) { return ncclInternalError; }
