// SPDX-License-Identifier: Apache-2.0
// Python face of the native core. Costs and orders come in as plain lists of numbers and go out as such; every
// computation runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bounds.hpp"
#include "dispatch.hpp"
#include "replay.hpp"
#include "search.hpp"

namespace py = pybind11;

namespace adaptra {
namespace {

using Table = std::vector<double>;
using LinkTable = std::vector<std::pair<double, double>>;

std::vector<Link> links_from(const LinkTable& table) {
    std::vector<Link> links;
    for (const auto& [latency, occupancy] : table) links.push_back({latency, occupancy});
    return links;
}

Problem make_problem(int stages, int chunks, int micro_batches, Table forward, Table backward_input,
                     Table backward_weight, const LinkTable& to_next, const LinkTable& to_previous, Table cap,
                     double released) {
    Problem problem;
    problem.stages = stages;
    problem.chunks = chunks;
    problem.micro_batches = micro_batches;
    problem.forward = std::move(forward);
    problem.backward_input = std::move(backward_input);
    problem.backward_weight = std::move(backward_weight);
    for (std::size_t row = 0; row < problem.forward.size(); ++row) {
        problem.backward.push_back(problem.backward_input[row] + problem.backward_weight[row]);
    }
    problem.to_next = links_from(to_next);
    problem.to_previous = links_from(to_previous);
    problem.cap = std::move(cap);
    problem.released = released;
    return problem;
}

py::dict replay(const Problem& problem, const Orders& orders) {
    Replay run(problem);
    double makespan = 0.0;
    {
        py::gil_scoped_release release;
        makespan = run.run(orders);
    }
    std::vector<int> position;
    for (int stage = 0; stage < problem.stages; ++stage) position.push_back(run.position(stage));
    py::dict result;
    result["makespan_s"] = makespan;
    result["start_s"] = run.start();
    result["end_s"] = run.end();
    result["position"] = position;
    return result;
}

py::dict dispatch(const Problem& problem) {
    Dispatcher dispatcher(problem);
    double makespan = kNever;
    {
        py::gil_scoped_release release;
        Policy policy;
        policy.cap = problem.cap;
        policy.released = problem.released;
        policy.group = largest_group(problem);
        if (policy.group > 0) makespan = dispatcher.run(policy);
    }
    py::dict result;
    result["makespan_s"] = makespan;
    result["start_s"] = dispatcher.start();
    result["end_s"] = dispatcher.end();
    result["orders"] = dispatcher.orders();
    return result;
}

py::dict plan(const Problem& problem, bool split, std::int64_t budget) {
    SearchResult found;
    Bound bound;
    {
        py::gil_scoped_release release;
        bound = lower_bound(problem);
        found = search(problem, split, bound.seconds, budget);
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

}  // namespace
}  // namespace adaptra

PYBIND11_MODULE(_native, module) {
    using namespace adaptra;
    module.doc() = "Native core of adaptra_megatron.schedule: simulator, lower bounds and planner.";
    py::class_<Problem>(module, "Problem")
        .def(py::init(&make_problem), py::kw_only(), py::arg("stages"), py::arg("chunks"), py::arg("micro_batches"),
             py::arg("forward_s"), py::arg("backward_input_s"), py::arg("backward_weight_s"), py::arg("to_next"),
             py::arg("to_previous"), py::arg("cap"), py::arg("released"));
    module.def("replay", &replay, py::arg("problem"), py::arg("orders"));
    module.def("dispatch", &dispatch, py::arg("problem"));
    module.def("plan", &plan, py::arg("problem"), py::arg("split"), py::arg("budget"));
    module.def("lower_bound", &bound, py::arg("problem"));
    module.def("least_cap", &least_cap, py::arg("problem"), py::arg("group"));
}
