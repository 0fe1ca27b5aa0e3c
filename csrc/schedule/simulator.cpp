// SPDX-License-Identifier: Apache-2.0
// Python face of the native core. Costs and orders come in as plain lists of numbers and go out as such; every
// computation runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "blocking.hpp"
#include "bounds.hpp"
#include "dispatch.hpp"
#include "input_checks.hpp"
#include "launch.hpp"
#include "replay.hpp"
#include "routing/routed_module.hpp"
#include "split_choice.hpp"

namespace py = pybind11;

namespace adaptra {
namespace {

using Table = std::vector<double>;
using LinkTable = std::vector<std::tuple<int, int, double, double, bool>>;

std::vector<Link> links_from(const LinkTable& table) {
    std::vector<Link> links;
    for (const auto& [source, target, latency, occupancy, rendezvous] : table) {
        const double alone = rendezvous ? 0.0 : latency;
        links.push_back({alone, rendezvous ? occupancy + latency : occupancy, rendezvous, source, target});
    }
    return links;
}

Problem make_problem(int stages, int chunks, int micro_batches, Table forward, Table backward_input,
                     Table backward_weight, Table backward, std::vector<int> stage_of, const LinkTable& links,
                     Table cap, Table released, bool shared_queue, bool serial_queue, Table combined_saving,
                     double combined_sends_at) {
    Problem problem;
    problem.stages = stages;
    problem.chunks = chunks;
    problem.micro_batches = micro_batches;
    problem.forward = std::move(forward);
    problem.backward_input = std::move(backward_input);
    problem.backward_weight = std::move(backward_weight);
    problem.backward = std::move(backward);
    problem.stage_at = std::move(stage_of);
    problem.links = links_from(links);
    problem.cap = std::move(cap);
    problem.released = std::move(released);
    problem.shared_queue = shared_queue;
    problem.serial_queue = shared_queue && serial_queue;
    problem.combined_saving = std::move(combined_saving);
    problem.combined_sends_at = combined_sends_at;
    if (problem.forward.size() != static_cast<std::size_t>(stages) * chunks) {
        problem.width = micro_batches;
        problem.step = 1;
    }
    check_problem(problem);
    problem.route();
    for (std::size_t row = 0; row < problem.forward.size(); ++row) {
        problem.backward_differs |= problem.backward[row] != problem.backward_input[row] + problem.backward_weight[row];
    }
    return problem;
}

// Orders, or programs with the calls of stages that block, kept on this side: for many replays of the same ones.
struct EncodedOrders {
    Orders orders;
    CodeRange range = range_of(orders);
};

// Below 0, a program has calls.
constexpr Code kLeastCall = ~(kSendNext | kSendPrevious | kReceiveNext | kReceivePrevious);

// Times of one iteration. Python makes lists of those that it asks for: of most replicas of a job, `finish_of`.
struct Run {
    double makespan = kNever;
    Replay::Times start, end;
    std::vector<double> peaks;
    Orders orders;              // of online dispatch
    std::vector<int> position;  // of orders that deadlock: the action of each stage that waits
};

// Last end of each stage's actions.
std::vector<double> finish_of(const Run& run) {
    std::vector<double> finish;
    for (const auto& ends : run.end) finish.push_back(ends.empty() ? 0.0 : ends.back());
    return finish;
}

Run replay(const Problem& problem, const EncodedOrders& encoded) {
    check_orders(problem, encoded.orders, encoded.range, kLeastCall);
    py::gil_scoped_release release;
    const auto run = [&](auto simulator) {
        Run found;
        found.makespan = simulator.run(encoded.orders);
        found.start = std::move(simulator.start());
        found.end = std::move(simulator.end());
        found.peaks = peaks_of(encoded.orders, problem.released);
        for (int stage = 0; stage < problem.stages; ++stage) found.position.push_back(simulator.position(stage));
        return found;
    };
    if (encoded.range.least < 0) return run(BlockingReplay(problem));
    return problem.launch_matters() ? run(Launch(problem)) : run(Replay(problem));
}

Ranks launch_ranks(const Problem& problem, const Orders& orders) {
    check_orders(problem, orders, range_of(orders));
    py::gil_scoped_release release;
    Launch launch(problem);
    if (launch.run(orders) == kNever) throw std::invalid_argument("the orders wait on each other for ever");
    return launch.ranks();
}

Run dispatch(const Problem& problem) {
    py::gil_scoped_release release;
    Policy policy;
    policy.split = most_split(problem);
    policy.cap = problem.cap;
    policy.released = problem.released;
    policy.group = largest_group(problem, policy.split);
    policy.pairing = problem.combined_saving.empty() ? Pairing::kNever : Pairing::kAtOnce;
    Dispatcher dispatcher(problem);
    Run found;
    if (policy.group > 0) found.makespan = dispatcher.run(policy);
    found.orders = dispatcher.orders();
    found.start = std::move(dispatcher.start());
    found.end = std::move(dispatcher.end());
    found.peaks = peaks_of(found.orders, problem.released);
    return found;
}

py::dict plan(const Problem& problem, bool split, std::int64_t budget, const std::vector<Orders>& known, double gap) {
    if (budget < 0) throw std::invalid_argument("budget must be 0 or more actions");
    for (const Orders& orders : known) {
        check_orders(problem, orders, range_of(orders));
        if (Replay(problem).run(orders) == kNever) throw std::invalid_argument("known orders wait for each other");
    }
    SearchResult found;
    Bound bound;
    {
        py::gil_scoped_release release;
        bound = lower_bound(problem);
        found = search_any_split(problem, split, known, {bound.seconds, gap, budget});
    }
    py::dict result;
    result["makespan_s"] = found.makespan;
    result["orders"] = found.orders;
    result["simulated_actions"] = found.simulated_actions;
    result["bound_s"] = bound.seconds;
    result["bound_kind"] = bound.kind;
    result["bound_place"] = bound.place;
    return result;
}

py::tuple bound(const Problem& problem) {
    Bound found;
    {
        py::gil_scoped_release release;
        found = lower_bound(problem);
    }
    return py::make_tuple(found.seconds, found.kind, found.place);
}

std::vector<double> peak_in_flight(const Orders& orders, const Table& released) {
    if (orders.size() != released.size()) throw std::invalid_argument("released must have one entry per order");
    return peaks_of(orders, released);
}

// The order of one stage as a tuple of Actions. Made here because a large plan has hundreds of thousands of them:
// an Action is a tuple by another name, and all of one micro-batch share its number.
py::tuple actions(const Problem& problem, int stage, const Order& codes, const py::type& action, const py::tuple& kinds) {
    PyTypeObject* type = reinterpret_cast<PyTypeObject*>(action.ptr());
    if (!PyType_IsSubtype(type, &PyTuple_Type)) throw py::type_error("an action must be a kind of tuple");
    const py::int_ owner(stage);
    std::vector<py::int_> numbers;
    for (int number = 0; number < std::max(problem.micro_batches, problem.chunks); ++number) numbers.emplace_back(number);
    py::tuple order(codes.size());
    for (std::size_t position = 0; position < codes.size(); ++position) {
        const Code code = codes[position];
        const py::object fields[] = {owner, kinds[kind_of(code)], numbers.at(problem.chunk_in(code)),
                                     numbers.at(problem.micro_batch_in(code)), py::bool_((code & kCombined) != 0)};
        PyObject* made = type->tp_alloc(type, std::size(fields));
        if (made == nullptr) throw py::error_already_set();
        for (std::size_t field = 0; field < std::size(fields); ++field) {
            PyTuple_SET_ITEM(made, field, fields[field].inc_ref().ptr());
        }
        PyTuple_SET_ITEM(order.ptr(), position, made);
    }
    return order;
}

}  // namespace
}  // namespace adaptra

PYBIND11_MODULE(_native, module) {
    using namespace adaptra;
    module.doc() = "Native core of adaptra_megatron.schedule: simulator, lower bounds and planner.";
    py::class_<Problem>(module, "Problem")
        .def(py::init(&make_problem), py::kw_only(), py::arg("stages"), py::arg("chunks"), py::arg("micro_batches"),
             py::arg("forward_s"), py::arg("backward_input_s"), py::arg("backward_weight_s"), py::arg("backward_s"),
             py::arg("stage_of"), py::arg("links"), py::arg("cap"), py::arg("released"), py::arg("shared_queue"),
             py::arg("serial_queue") = false, py::arg("combined_saving") = Table(), py::arg("combined_sends_at") = 1.0);
    py::class_<EncodedOrders>(module, "EncodedOrders")
        .def(py::init([](Orders orders) { return EncodedOrders{std::move(orders)}; }), py::arg("orders"));
    py::class_<Run>(module, "Run")
        .def_readonly("makespan_s", &Run::makespan)
        .def_readonly("start_s", &Run::start)
        .def_readonly("end_s", &Run::end)
        .def_property_readonly("finish_s", &finish_of)
        .def_readonly("peaks", &Run::peaks)
        .def_readonly("orders", &Run::orders)
        .def_readonly("position", &Run::position);
    module.def("peak_in_flight", &peak_in_flight, py::arg("orders"), py::arg("released"));
    module.def("actions", &actions, py::arg("problem"), py::arg("stage"), py::arg("codes"), py::arg("action"),
               py::arg("kinds"));
    module.def("replay", &replay, py::arg("problem"), py::arg("orders"));
    module.def("launch_ranks", &launch_ranks, py::arg("problem"), py::arg("orders"));
    module.def("dispatch", &dispatch, py::arg("problem"));
    module.def("plan", &plan, py::arg("problem"), py::arg("split"), py::arg("budget"),
               py::arg("known") = std::vector<Orders>(), py::arg("gap") = 0.0);
    module.def("lower_bound", &bound, py::arg("problem"));
    add_routing(module);
}
