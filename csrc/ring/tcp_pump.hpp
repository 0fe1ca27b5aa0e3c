// SPDX-License-Identifier: Apache-2.0
// Moves frames between a ring and one connected TCP socket, without a copy in user space. Several pumps may share a
// ring, each on a connection of its own: the frames of a message then travel side by side.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "ring.hpp"

namespace adaptra {

constexpr const char* kPeerEnded = "the peer ended the connection";

// What one pump has moved, readable while it runs.
struct PumpCounters {
    std::atomic<std::uint64_t> frames{0};
    std::atomic<std::uint64_t> nbytes{0};
};

// Both return when the ring is closed (the outbound one drained), or the connection or what came over it is broken:
// the text says why, and is empty for an orderly end. The socket stays open. A broken connection in the middle of a
// frame leaves a slot marked void. `stall_s`: how long the rest of a frame may keep the other side waiting.
std::string send_frames(Ring& ring, int socket, PumpCounters& counters);
std::string receive_frames(Ring& ring, int socket, std::uint64_t max_message_nbytes, double stall_s,
                           PumpCounters& counters);

}  // namespace adaptra
