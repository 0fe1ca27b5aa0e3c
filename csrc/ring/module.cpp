// SPDX-License-Identifier: Apache-2.0
// Python face of the ring. Every copy and every wait runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <sys/prctl.h>

#include "messages.hpp"
#include "ring.hpp"
#include "ring_watch.hpp"
#include "slot_access.hpp"
#include "tcp_pump.hpp"

namespace py = pybind11;

namespace adaptra {
namespace {

FrameHeader make_description(std::uint64_t sequence, std::int64_t iteration, std::uint8_t direction,
                             std::uint32_t chunk, std::uint32_t micro_batch, std::uint8_t dtype,
                             const std::vector<std::uint64_t>& shape) {
    if (shape.size() > kMaxDimensions) {
        throw FrameError("a message of " + std::to_string(shape.size()) + " dimensions has more than " +
                         std::to_string(kMaxDimensions));
    }
    FrameHeader header;
    header.kind = FrameKind::kData;
    header.sequence = sequence;
    header.iteration = iteration;
    header.direction = direction;
    header.chunk = chunk;
    header.micro_batch = micro_batch;
    header.dtype = dtype;
    header.dimensions = static_cast<std::uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), header.shape.begin());
    return header;
}

void raise_unless_done(Outcome outcome) {
    if (outcome == Outcome::kClosed) throw ClosedError("the ring is closed");
    if (outcome == Outcome::kTimedOut) {
        PyErr_SetString(PyExc_TimeoutError, "the ring stayed full until the deadline");
        throw py::error_already_set();
    }
}

void check_first_frame(const Ring& ring, FrameHeader first) {
    first.nbytes = std::min(first.total_nbytes, ring.slot_nbytes());
    check_frame(first, ring.slot_nbytes(), UINT64_MAX);
}

void write(Ring& ring, FrameHeader header, std::uintptr_t address, std::uint64_t nbytes, double deadline_s) {
    header.total_nbytes = nbytes;
    Outcome outcome;
    {
        py::gil_scoped_release release;
        check_first_frame(ring, header);
        outcome = write_message(ring, header, reinterpret_cast<const std::byte*>(address), deadline_s);
    }
    raise_unless_done(outcome);
}

// Returns where to go on: behind the end once all of it is in the ring, even if it is empty.
std::uint64_t write_some(Ring& ring, FrameHeader header, std::uintptr_t address, std::uint64_t nbytes,
                         std::uint64_t offset, std::uint64_t most, double patience_s) {
    header.total_nbytes = nbytes;
    Outcome outcome;
    {
        py::gil_scoped_release release;
        check_first_frame(ring, header);
        outcome = write_part(ring, header, reinterpret_cast<const std::byte*>(address), offset, most, patience_s);
    }
    if (outcome == Outcome::kClosed) raise_unless_done(outcome);
    return outcome == Outcome::kDone && offset == nbytes ? nbytes + 1 : offset;
}

void write_one(Ring& ring, FrameKind kind, std::uint64_t sequence, double deadline_s) {
    Outcome outcome;
    {
        py::gil_scoped_release release;
        outcome = write_control(ring, kind, sequence, deadline_s);
    }
    raise_unless_done(outcome);
}

std::optional<Event> next(Inbox& inbox, const std::shared_ptr<Ring>& ring, double deadline_s,
                          std::optional<std::uint64_t> seen_pokes, bool stays) {
    Outcome outcome = Outcome::kDone;
    std::optional<Event> event;
    {
        py::gil_scoped_release release;
        event = inbox.next(ring, seen_pokes.value_or(ring->pokes()), deadline_s, stays, outcome);
    }
    if (outcome == Outcome::kClosed) raise_unless_done(outcome);
    return event;
}

py::memoryview payload(const py::object& self) {
    const auto& event = self.cast<const Event&>();
    if (event.block == nullptr) throw FrameError("only messages have a payload");
    return py::memoryview(py::cast(event.block));
}

std::vector<std::uint64_t> shape(const Event& event) {
    return {event.header.shape.begin(), event.header.shape.begin() + event.header.dimensions};
}

void die_with_parent(int parent) {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) throw std::system_error(errno, std::generic_category(), "prctl");
    if (getppid() != parent) raise(SIGKILL);  // it was gone before
}

void define_errors(py::module_& module) {
    const py::object ring_error = py::register_exception<RingError>(module, "RingError", PyExc_RuntimeError);
    py::register_exception<ClosedError>(module, "RingClosedError", ring_error);
    py::register_exception<FrameError>(module, "FrameError", PyExc_ValueError);
}

void define_ring(py::module_& module) {
    py::class_<FrameHeader>(module, "Description")
        .def(py::init(&make_description), py::kw_only(), py::arg("sequence"), py::arg("iteration"),
             py::arg("direction"), py::arg("chunk"), py::arg("micro_batch"), py::arg("dtype"), py::arg("shape"));
    py::class_<Ring, std::shared_ptr<Ring>> ring(module, "Ring", py::buffer_protocol());
    define_slot_access(ring);
    ring.def_static("create", &Ring::create, py::arg("slots"), py::arg("slot_nbytes"))
        .def_static("attach", &Ring::attach, py::arg("fd"))
        .def_property_readonly("fd", &Ring::fd)
        .def_property_readonly("slots", &Ring::slots)
        .def_property_readonly("slot_nbytes", &Ring::slot_nbytes)
        .def_property_readonly("closed", &Ring::closed)
        .def_property_readonly("backlog", &Ring::backlog)
        .def_property_readonly("pokes", &Ring::pokes)
        .def("poke", &Ring::poke, py::call_guard<py::gil_scoped_release>())
        .def("close", &Ring::close)
        .def("disown", &Ring::disown)
        .def("write", &write, py::arg("description"), py::arg("address"), py::arg("nbytes"), py::arg("deadline_s"))
        .def("write_some", &write_some, py::arg("description"), py::arg("address"), py::arg("nbytes"),
             py::arg("offset"), py::arg("most_nbytes"), py::arg("patience_s"))
        .def(
            "write_ack",
            [](Ring& ring, std::uint64_t sequence, double deadline_s) {
                write_one(ring, FrameKind::kAck, sequence, deadline_s);
            },
            py::arg("sequence"), py::arg("deadline_s"))
        .def(
            "write_bye", [](Ring& ring, double deadline_s) { write_one(ring, FrameKind::kBye, 0, deadline_s); },
            py::arg("deadline_s"));
}

void define_inbox(py::module_& module) {
    py::class_<Block, std::shared_ptr<Block>>(module, "Block", py::buffer_protocol()).def_buffer([](Block& block) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(block.data()), static_cast<py::ssize_t>(block.nbytes()));
    });
    py::class_<Event> event(module, "Event");
    py::enum_<Event::Kind>(event, "Kind")
        .value("MESSAGE", Event::Kind::kMessage)
        .value("PART", Event::Kind::kPart)
        .value("REPEATED", Event::Kind::kRepeated)
        .value("ACK", Event::Kind::kAck)
        .value("BYE", Event::Kind::kBye);
    event.def_readonly("kind", &Event::kind)
        .def_readonly("arrived_s", &Event::arrived_s)
        .def_property_readonly("sequence", [](const Event& e) { return e.header.sequence; })
        .def_property_readonly("iteration", [](const Event& e) { return e.header.iteration; })
        .def_property_readonly("direction", [](const Event& e) { return e.header.direction; })
        .def_property_readonly("chunk", [](const Event& e) { return e.header.chunk; })
        .def_property_readonly("micro_batch", [](const Event& e) { return e.header.micro_batch; })
        .def_property_readonly("dtype", [](const Event& e) { return e.header.dtype; })
        .def_property_readonly("shape", &shape)
        .def_property_readonly("total_nbytes", [](const Event& e) { return e.header.total_nbytes; })
        .def_property_readonly("payload", &payload)
        .def_property_readonly("block_nbytes", [](const Event& e) { return e.block ? e.block->capacity() : 0; })
        .def_property_readonly("offset", [](const Event& e) { return e.header.offset; })
        .def_property_readonly("nbytes", [](const Event& e) { return e.header.nbytes; })
        .def_readonly("first_slot", &Event::first_slot)
        .def_readonly("slots", &Event::slots);
    py::class_<Inbox>(module, "Inbox")
        .def(py::init<std::uint64_t, std::uint64_t, std::uint64_t, bool>(), py::kw_only(),
             py::arg("max_message_nbytes"), py::arg("pooled_nbytes"),
             py::arg("window_nbytes") = std::uint64_t{256} << 20, py::arg("for_device") = false)
        .def("ask", &Inbox::ask, py::kw_only(), py::arg("iteration"), py::arg("direction"), py::arg("chunk"),
             py::arg("micro_batch"))
        .def("next", &next, py::arg("ring"), py::arg("deadline_s"), py::arg("seen_pokes") = py::none(),
             py::arg("stays") = false)
        .def("leave", &Inbox::leave, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("doubles", &Inbox::doubles);
}

// Raises what the reader of the ring is to meet: its end, or why it cannot be read.
std::optional<Event> delivered(Delivery& delivery) {
    if (delivery.error) std::rethrow_exception(delivery.error);
    if (delivery.closed) raise_unless_done(Outcome::kClosed);
    return std::move(delivery.event);
}

std::optional<Delivery> next_of(RingWatch& watch, const std::vector<std::pair<Inbox*, std::shared_ptr<Ring>>>& inboxes,
                                double deadline_s) {
    const py::gil_scoped_release release;
    return watch.next(inboxes, deadline_s);
}

void define_watch(py::module_& module) {
    py::class_<Delivery>(module, "Delivery")
        .def_readonly("index", &Delivery::index)
        .def("event", &delivered);
    py::class_<RingWatch>(module, "RingWatch")
        .def(py::init<bool>(), py::kw_only(), py::arg("futex_waitv") = true)
        .def("wake", &RingWatch::wake)
        .def("next", &next_of, py::arg("inboxes"), py::arg("deadline_s"))
        .def("await_room", &RingWatch::await_room, py::arg("rings"), py::arg("deadline_s"),
             py::call_guard<py::gil_scoped_release>());
}

void define_pumps(py::module_& module) {
    py::class_<PumpCounters>(module, "PumpCounters")
        .def(py::init<>())
        .def_property_readonly("frames", [](const PumpCounters& c) { return c.frames.load(); })
        .def_property_readonly("nbytes", [](const PumpCounters& c) { return c.nbytes.load(); });
    module.def("send_frames", &send_frames, py::arg("ring"), py::arg("socket"), py::arg("counters"),
               py::call_guard<py::gil_scoped_release>());
    module.def("receive_frames", &receive_frames, py::arg("ring"), py::arg("socket"), py::arg("max_message_nbytes"),
               py::arg("stall_s"), py::arg("counters"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace adaptra

PYBIND11_MODULE(_ring, module) {
    using namespace adaptra;
    module.doc() = "Native core of adaptra_megatron.transport: rings in shared memory, messages in them, TCP pumps.";
    define_errors(module);
    define_ring(module);
    define_inbox(module);
    define_watch(module);
    define_pumps(module);
    module.def("die_with_parent", &die_with_parent, py::arg("parent"));
    module.attr("PEER_ENDED") = kPeerEnded;
    module.attr("FRAME_HEADER_NBYTES") = sizeof(FrameHeader);
    py::dict types;
    for (std::size_t code = 0; code < kDataTypes.size(); ++code) types[kDataTypes[code].name] = code;
    module.attr("DATA_TYPES") = types;
}
