// SPDX-License-Identifier: Apache-2.0
#include "tcp_pump.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace adaptra {
namespace {

// How often a pump that waits looks whether its ring has been closed.
constexpr double kLook_s = 5.0;

constexpr std::uint64_t kSmallNbytes = 64 << 10;

struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] void broken(const char* doing) {
    throw Broken(std::string(doing) + ": " + std::generic_category().message(errno));
}

// Returns whether `socket` is ready for `events` by `deadline_s`.
bool await(int socket, short events, double deadline_s) {
    pollfd waiting{socket, events, 0};
    const double left_s = std::max(0.0, std::min(kLook_s, deadline_s - monotonic_s()));
    const int count = poll(&waiting, 1, static_cast<int>(left_s * 1e3) + 1);
    if (count < 0 && errno != EINTR) broken("waiting for the connection");
    return count > 0;
}

// Gives up `turn` before it waits.
void send_frame(const Ring& ring, int socket, const Slot& slot, const FrameHeader& header,
                std::unique_lock<std::mutex>& turn) {
    iovec parts[2] = {{slot.header, sizeof(FrameHeader)}, {slot.payload, header.nbytes}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = header.nbytes != 0 ? 2 : 1;
    while (message.msg_iovlen != 0) {
        const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) broken("sending");
            if (turn.owns_lock()) turn.unlock();
            // A receiver that does not read holds us up for as long as it likes; closing the ring ends it.
            if (!await(socket, POLLOUT, monotonic_s() + kLook_s) && ring.closed()) throw Broken("closed while sending");
            continue;
        }
        auto left = static_cast<std::size_t>(sent);
        while (message.msg_iovlen != 0 && left >= message.msg_iov->iov_len) {
            left -= message.msg_iov->iov_len;
            ++message.msg_iov;
            --message.msg_iovlen;
        }
        if (message.msg_iovlen != 0) {
            message.msg_iov->iov_base = static_cast<std::byte*>(message.msg_iov->iov_base) + left;
            message.msg_iov->iov_len -= left;
        }
    }
}

// Reads frames off a connection. What follows a payload is read along with it: the next header then costs nothing.
class FrameReader {
public:
    FrameReader(const Ring& ring, int socket, double stall_s) : ring_(ring), socket_(socket), stall_s_(stall_s) {}

    // False if the peer ended the connection between two frames.
    bool read_header(FrameHeader& header) {
        while (ahead_ < sizeof next_) {
            iovec rest{reinterpret_cast<std::byte*>(&next_) + ahead_, sizeof next_ - ahead_};
            const std::size_t count = read_some(&rest, 1, ahead_ == 0);
            if (count == 0 && ahead_ == 0) return false;
            if (count == 0) throw Broken(kCutOff);
            ahead_ += count;
        }
        header = next_;
        ahead_ = 0;
        return true;
    }

    void read_payload(std::byte* target, std::size_t nbytes) {
        std::size_t received = 0;
        while (received < nbytes) {
            iovec parts[2] = {{target + received, nbytes - received}, {&next_, sizeof next_}};
            const std::size_t count = read_some(parts, 2, false);
            if (count == 0) throw Broken(kCutOff);
            received += count;
        }
        ahead_ = received - nbytes;
    }

private:
    static constexpr const char* kCutOff = "the peer ended the connection in the middle of a frame";

    // At least one byte, or 0 at the end of the connection. `idle`: between frames a peer may be silent for ever.
    std::size_t read_some(iovec* parts, std::size_t count, bool idle) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const double deadline_s = monotonic_s() + stall_s_;
        while (true) {
            const ssize_t received = recvmsg(socket_, &message, MSG_DONTWAIT);
            if (received >= 0) return static_cast<std::size_t>(received);
            if (errno == EINTR) continue;
            if (errno != EAGAIN) broken("receiving");
            const bool ready = await(socket_, POLLIN, idle ? monotonic_s() + kLook_s : deadline_s);
            if (!ready && ring_.closed()) throw Broken("closed while receiving");
            if (!ready && !idle && monotonic_s() >= deadline_s) throw Broken("the rest of a frame did not come");
        }
    }

    const Ring& ring_;
    const int socket_;
    const double stall_s_;
    FrameHeader next_;
    std::size_t ahead_ = 0;  // bytes of `next_` that are here
};

void receive_payload(Ring& ring, FrameReader& reader, const FrameHeader& header, const Slot& slot) {
    try {
        reader.read_payload(slot.payload, header.nbytes);
        *slot.header = header;
    } catch (const Broken&) {
        *slot.header = FrameHeader{};
        ring.commit(slot);
        throw;
    }
    ring.commit(slot);
}

// False when the ring is closed.
bool claim_slot(Ring& ring, Slot& slot) {
    while (true) {
        const Outcome outcome = ring.claim(slot, monotonic_s() + kLook_s);
        if (outcome != Outcome::kTimedOut) return outcome == Outcome::kDone;
    }
}

}  // namespace

std::string send_frames(Ring& ring, int socket, PumpCounters& counters) try {
    std::unique_lock<std::mutex> turn;
    while (true) {
        Slot slot;
        const Outcome outcome = ring.take(slot, monotonic_s() + kLook_s, turn);
        if (outcome == Outcome::kClosed) return "";
        if (outcome == Outcome::kTimedOut) continue;
        const FrameHeader header = *slot.header;
        check_frame(header, ring.slot_nbytes(), UINT64_MAX);
        // A small frame is sent in less time than it takes to wake the pump of another lane, which would find nothing.
        if (header.nbytes > kSmallNbytes || ring.filled()) turn.unlock();
        send_frame(ring, socket, slot, header, turn);
        ring.release(slot);
        ++counters.frames;
        counters.nbytes += header.nbytes;
    }
} catch (const std::runtime_error& cause) {
    return cause.what();
}

std::string receive_frames(Ring& ring, int socket, std::uint64_t max_message_nbytes, double stall_s,
                           PumpCounters& counters) try {
    FrameReader reader(ring, socket, stall_s);
    FrameHeader header;
    while (reader.read_header(header)) {
        check_frame(header, ring.slot_nbytes(), max_message_nbytes);
        Slot slot;
        if (!claim_slot(ring, slot)) return "";
        receive_payload(ring, reader, header, slot);
        ++counters.frames;
        counters.nbytes += header.nbytes;
    }
    return kPeerEnded;
} catch (const std::runtime_error& cause) {
    return cause.what();
}

}  // namespace adaptra
