// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>

#include "transfers.hpp"

namespace py = pybind11;

namespace adaptra {
namespace {

using Addresses = std::map<std::string, std::uintptr_t>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

template <typename Function>
void set(Function& function, const Addresses& addresses, const char* name) {
    const auto found = addresses.find(name);
    if (found == addresses.end() || found->second == 0) throw py::value_error(std::string("no address of ") + name);
    function = reinterpret_cast<Function>(found->second);
}

Handle handle(std::uintptr_t number) { return reinterpret_cast<Handle>(number); }

Functions functions_at(const Addresses& addresses) {
    Functions found;
    set(found.get_device, addresses, "cudaGetDevice");
    set(found.set_device, addresses, "cudaSetDevice");
    set(found.event_create, addresses, "cudaEventCreateWithFlags");
    set(found.event_record, addresses, "cudaEventRecord");
    set(found.event_query, addresses, "cudaEventQuery");
    set(found.event_destroy, addresses, "cudaEventDestroy");
    set(found.stream_wait, addresses, "cudaStreamWaitEvent");
    set(found.cuda_error, addresses, "cudaGetErrorString");
    set(found.send, addresses, "ncclSend");
    set(found.receive, addresses, "ncclRecv");
    set(found.async_error, addresses, "ncclCommGetAsyncError");
    set(found.nccl_error, addresses, "ncclGetErrorString");
    set(found.nccl_last_error, addresses, "ncclGetLastError");
    return found;
}

}  // namespace
}  // namespace adaptra

PYBIND11_MODULE(_device, module) {
    using namespace adaptra;
    module.doc() = "What the device path asks of CUDA and NCCL for a message: one call each, without the GIL.";
    py::register_exception<DeviceCallError>(module, "DeviceCallError", PyExc_RuntimeError);
    py::class_<Work, WorkPointer>(module, "Work")
        .def_readonly("tensor", &Work::tensor)
        .def_property(
            "deadline_s", [](const Work& work) { return work.deadline.load(); },
            [](Work& work, double deadline) { work.deadline = deadline; })
        .def("query", [](const Work& work) { return work.ended.query(); }, ReleaseGil())
        .def("synchronize", [](const Work& work) { work.ended.synchronize(); }, ReleaseGil());
    py::class_<Transfers>(module, "Transfers")
        .def(py::init([](const Addresses& addresses, int device, std::uintptr_t communicator, std::uintptr_t stream,
                         int peer) {
                 return std::make_unique<Transfers>(functions_at(addresses), device, handle(communicator),
                                                    handle(stream), peer);
             }),
             py::arg("addresses"), py::arg("device"), py::arg("communicator"), py::arg("stream"), py::arg("peer"))
        .def(
            "begin",
            [](Transfers& transfers, bool sends, py::object tensor, std::uintptr_t address, std::size_t nbytes,
               std::optional<std::uintptr_t> after, double limit) {
                const Handle stream = handle(after.value_or(0));
                return transfers.begin(sends, std::move(tensor), address, nbytes, after.has_value(), stream, limit);
            },
            py::arg("sends"), py::arg("tensor"), py::arg("address"), py::arg("nbytes"), py::arg("after"),
            py::arg("limit_s"))
        .def(
            "follow",
            [](Transfers&, Work& work, std::uintptr_t stream, double deadline) {
                work.deadline = deadline;
                work.ended.make_wait(handle(stream));
            },
            py::arg("work"), py::arg("stream"), py::arg("deadline_s"), ReleaseGil())
        .def("free_done", &Transfers::free_done)
        .def("under_way", &Transfers::under_way)
        .def("end", &Transfers::end);
}
