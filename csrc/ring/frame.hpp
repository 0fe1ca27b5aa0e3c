// SPDX-License-Identifier: Apache-2.0
// What a slot of the ring and a TCP connection carry: a fixed header and up to one slot of payload. Both ends run on
// little-endian machines (the magic number says so), and nothing of a frame is used before `check_frame` has seen it.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace adaptra {

constexpr std::uint32_t kFrameMagic = 0x46504441;  // "ADPF"
constexpr std::size_t kMaxDimensions = 8;
constexpr std::uint8_t kLastDirection = 2;  // activation, gradient, note

enum class FrameKind : std::uint8_t {
    kData = 1,  // a part of a message
    kAck = 2,   // the message of this sequence number has been received and was asked for
    kBye = 3,   // the sender closes on purpose: nothing follows
    kVoid = 4,  // a connection broke while it filled this slot: skip it
};

// Python's `Description`. A change of its fields:
// - check_frame and same_message (frame.cpp); make_description and Event's properties (module.cpp, _ring.pyi); describe,
//   describe_note and describe_probe (adaptra_megatron/transport/host_link/frames.py), and others that make a Description;
// - kRingVersion below and VERSION of common/handshake.py are raised (by hand where only meanings change): rings and
//   connections of other versions are refused;
// - the tests' copies: tests/support/raw_frames.py, tests/fuzz/reference_inbox.py, FIELDS of tests/fuzz/mutations.py, SPOILT
//   and the test of versions in tests/transport/test_ring.py.
struct FrameHeader {
    std::uint32_t magic = kFrameMagic;
    FrameKind kind = FrameKind::kVoid;
    std::uint8_t direction = 0;
    std::uint8_t dtype = 0;
    std::uint8_t dimensions = 0;
    std::uint64_t sequence = 0;  // numbers the messages of one sender to one receiver
    std::int64_t iteration = 0;
    std::uint32_t chunk = 0;
    std::uint32_t micro_batch = 0;
    std::uint64_t total_nbytes = 0;
    std::uint64_t offset = 0;  // where in the message this payload belongs
    std::uint64_t nbytes = 0;  // of this payload
    std::array<std::uint64_t, kMaxDimensions> shape{};
    std::uint64_t reserved = 0;  // 0, or the frame is refused
};
static_assert(sizeof(FrameHeader) == 128, "the header's layout is part of the protocol");

constexpr std::uint32_t kRingVersion = 3;  // of a ring's memory, frames included

struct DataType {
    const char* name;
    std::uint64_t item_nbytes;
};

// The code of a data type is its position. Names are torch's.
constexpr std::array<DataType, 16> kDataTypes{{
    {"uint8", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"bool", 1},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"complex64", 8},
    {"complex128", 16},
    {"uint16", 2},
    {"uint32", 4},
}};

// A frame that no sender of ours writes.
struct FrameError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws FrameError unless every field is possible, the payload is one of the slots of `slot_nbytes` that its message is
// cut into, and the message is what its shape and data type say and no larger than `max_message_nbytes`.
void check_frame(const FrameHeader& header, std::uint64_t slot_nbytes, std::uint64_t max_message_nbytes);

// Returns whether two frames belong to the same message as far as everything but their position in it goes.
bool same_message(const FrameHeader& a, const FrameHeader& b);

}  // namespace adaptra
