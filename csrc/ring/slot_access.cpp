// SPDX-License-Identifier: Apache-2.0
#include "slot_access.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace py = pybind11;

namespace adaptra {
namespace {

// Index and payload size of the next frame to send. No value at the deadline or when the ring is closed and empty.
std::optional<std::pair<std::uint64_t, std::uint64_t>> take_frame(Ring& ring, double deadline_s) {
    const py::gil_scoped_release release;
    Slot slot;
    if (ring.take(slot, deadline_s) != Outcome::kDone) return std::nullopt;
    const FrameHeader header = *slot.header;
    check_frame(header, ring.slot_nbytes(), UINT64_MAX);
    return std::pair{slot.index, header.nbytes};
}

std::optional<std::uint64_t> claim_slot(Ring& ring, double deadline_s) {
    const py::gil_scoped_release release;
    Slot slot;
    if (ring.claim(slot, deadline_s) != Outcome::kDone) return std::nullopt;
    return slot.index;
}

// Returns the payload size that the header, which the peer wrote, claims; the reader of the ring checks it.
std::uint64_t commit_slot(Ring& ring, std::uint64_t index) {
    const Slot slot = ring.slot(index);
    const std::uint64_t nbytes = std::min(slot.header->nbytes, ring.slot_nbytes());
    ring.commit(slot);
    return nbytes;
}

// Index of the first and number of those claimed; none at the deadline. Their payloads follow one another in memory.
std::pair<std::uint64_t, std::uint64_t> claim_slots(Ring& ring, std::uint64_t most, double deadline_s) {
    const py::gil_scoped_release release;
    Slot first;
    std::uint64_t count = 0;
    if (ring.claim(first, deadline_s, most, count) == Outcome::kClosed) throw ClosedError("the ring is closed");
    return {first.index, count};
}

// The slots hold what is left of a message from `offset` on, as far as they reach.
void commit_frames(Ring& ring, std::uint64_t index, std::uint64_t count, FrameHeader header, std::uint64_t offset,
                   std::uint64_t total_nbytes) {
    header.total_nbytes = total_nbytes;
    header.offset = offset;
    for (std::uint64_t each = index; each < index + count; ++each) {
        header.nbytes = std::min(ring.slot_nbytes(), total_nbytes - header.offset);
        check_frame(header, ring.slot_nbytes(), UINT64_MAX);
        *ring.slot(each).header = header;
        header.offset += header.nbytes;
    }
    ring.commit(ring.slot(index), count);
}

// The slots hold nothing: a reader skips them.
void commit_void(Ring& ring, std::uint64_t index, std::uint64_t count) {
    for (std::uint64_t each = index; each < index + count; ++each) *ring.slot(each).header = FrameHeader{};
    ring.commit(ring.slot(index), count);
}

std::pair<std::uint64_t, std::uint64_t> offsets(const Ring& ring, std::uint64_t index) {
    const Slot slot = ring.slot(index);
    const std::byte* first = ring.slots_memory();
    return {reinterpret_cast<const std::byte*>(slot.header) - first, slot.payload - first};
}

}  // namespace

void define_slot_access(py::class_<Ring, std::shared_ptr<Ring>>& ring) {
    ring.def_buffer([](Ring& r) {
        const auto nbytes = static_cast<py::ssize_t>(r.slots_memory_nbytes());
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(r.slots_memory()), nbytes);
    });
    ring.def_property_readonly("slots_address",
                               [](const Ring& r) { return reinterpret_cast<std::uintptr_t>(r.slots_memory()); })
        .def_property_readonly("slots_nbytes", &Ring::slots_memory_nbytes)
        .def("slot_offsets", &offsets, py::arg("index"))
        .def("take_frame", &take_frame, py::arg("deadline_s"))
        .def("release_frame", [](Ring& r, std::uint64_t index) { r.release(r.slot(index)); }, py::arg("index"))
        .def(
            "release_frames",
            [](Ring& r, std::uint64_t index, std::uint64_t count) { r.release(r.slot(index), count); },
            py::arg("index"), py::arg("count"))
        .def("claim_slot", &claim_slot, py::arg("deadline_s"))
        .def("commit_slot", &commit_slot, py::arg("index"))
        .def("claim_slots", &claim_slots, py::arg("most"), py::arg("deadline_s"))
        .def("commit_frames", &commit_frames, py::arg("index"), py::arg("count"), py::arg("description"),
             py::arg("offset"), py::arg("total_nbytes"))
        .def("commit_void", &commit_void, py::arg("index"), py::arg("count"));
}

}  // namespace adaptra
