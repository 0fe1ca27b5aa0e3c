// SPDX-License-Identifier: Apache-2.0
#include "frame.hpp"

#include <algorithm>

namespace adaptra {
namespace {

[[noreturn]] void refuse(const FrameHeader& header, const std::string& why) {
    throw FrameError("frame of message " + std::to_string(header.sequence) + " (micro-batch " +
                     std::to_string(header.micro_batch) + ", chunk " + std::to_string(header.chunk) +
                     ", iteration " + std::to_string(header.iteration) + "): " + why);
}

// Bytes of a tensor of this shape; refuses products beyond 64 bits.
std::uint64_t described_nbytes(const FrameHeader& header) {
    std::uint64_t nbytes = kDataTypes[header.dtype].item_nbytes;
    for (std::size_t dimension = 0; dimension < header.dimensions; ++dimension) {
        if (__builtin_mul_overflow(nbytes, header.shape[dimension], &nbytes)) refuse(header, "its shape is too large");
    }
    return nbytes;
}

void check_data(const FrameHeader& header, std::uint64_t slot_nbytes, std::uint64_t max_message_nbytes) {
    if (header.direction > kLastDirection) refuse(header, "direction " + std::to_string(header.direction) + " does not exist");
    if (header.iteration < 0) refuse(header, "its iteration is negative");
    if (header.dtype >= kDataTypes.size()) refuse(header, "data type " + std::to_string(header.dtype) + " is unknown");
    if (header.dimensions > kMaxDimensions) {
        refuse(header, std::to_string(header.dimensions) + " dimensions are more than " +
                           std::to_string(kMaxDimensions));
    }
    if (header.total_nbytes > max_message_nbytes) {
        refuse(header, std::to_string(header.total_nbytes) + " bytes exceed the limit of " +
                           std::to_string(max_message_nbytes));
    }
    if (described_nbytes(header) != header.total_nbytes) {
        refuse(header, "shape and data type do not make " + std::to_string(header.total_nbytes) + " bytes");
    }
    if (header.offset > header.total_nbytes || header.nbytes > header.total_nbytes - header.offset) {
        refuse(header, "its payload lies outside of the message");
    }
    if (header.nbytes == 0 && header.total_nbytes != 0) refuse(header, "it carries nothing of a message");
    // So the frames of a message neither overlap nor leave a gap, in whichever order they come.
    if (header.offset % slot_nbytes != 0 || header.nbytes != std::min(slot_nbytes, header.total_nbytes - header.offset)) {
        refuse(header, std::to_string(header.nbytes) + " bytes at " + std::to_string(header.offset) + " of " +
                           std::to_string(header.total_nbytes) + " are no slot of " + std::to_string(slot_nbytes) +
                           " bytes, nor the message's last");
    }
}

}  // namespace

void check_frame(const FrameHeader& header, std::uint64_t slot_nbytes, std::uint64_t max_message_nbytes) {
    if (header.magic != kFrameMagic) refuse(header, "it does not start as a frame does");
    if (header.reserved != 0) refuse(header, "its reserved field is not 0");
    if (header.nbytes > slot_nbytes) {
        refuse(header, std::to_string(header.nbytes) + " bytes of payload exceed a slot of " +
                           std::to_string(slot_nbytes));
    }
    switch (header.kind) {
        case FrameKind::kData:
            return check_data(header, slot_nbytes, max_message_nbytes);
        case FrameKind::kAck:
        case FrameKind::kBye:
        case FrameKind::kVoid:
            if (header.nbytes != 0) refuse(header, "a control frame carries no payload");
            return;
    }
    refuse(header, "kind " + std::to_string(static_cast<int>(header.kind)) + " does not exist");
}

bool same_message(const FrameHeader& a, const FrameHeader& b) {
    return a.sequence == b.sequence && a.iteration == b.iteration && a.direction == b.direction &&
           a.chunk == b.chunk && a.micro_batch == b.micro_batch && a.dtype == b.dtype &&
           a.dimensions == b.dimensions && a.total_nbytes == b.total_nbytes && a.shape == b.shape;
}

}  // namespace adaptra
