// SPDX-License-Identifier: Apache-2.0
#include "routed_module.hpp"

#include <pybind11/stl.h>

#include <cmath>
#include <stdexcept>

#include "routed_bound.hpp"
#include "routed_replay.hpp"
#include "routed_search.hpp"

namespace py = pybind11;

namespace adaptra {
namespace {

using Table = std::vector<double>;
using GivenLinks = std::vector<std::tuple<int, int, double, double>>;

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void require_seconds(const Table& table, std::size_t size, const std::string& name) {
    require(table.size() == size, name + " has " + std::to_string(table.size()) + " entries, not " + std::to_string(size));
    for (const double each : table) require(std::isfinite(each) && each >= 0.0, name + " has an entry that is no finite number of 0 or more");
}

// Twice what all actions and messages take is finite: a lower bound adds what is before an action to what is after it.
void require_finite(const RoutedProblem& problem) {
    double total = 0.0, largest = 1.0;
    for (const double each : problem.per_cell) total += each;
    for (const double each : problem.factor) largest = std::max(largest, each);
    for (const RoutedLink& link : problem.own) total += link.transfer();
    for (const auto& entry : problem.given) total += entry.second.transfer();
    for (const double each : problem.sync) total += each;
    require(std::isfinite(4.0 * problem.jobs() * total * largest), "the seconds are no finite number");
}

RoutedProblem make_problem(int replicas, int stages, int micro_batches, Table per_cell, Table factor, bool whole_given,
                           const std::vector<bool>& live, Table cap, Table released, const Table& own_latency,
                           const Table& own_occupancy, const GivenLinks& given, Table sync, bool staggered,
                           const std::vector<bool>& pinned) {
    require(replicas > 0 && stages > 0 && micro_batches > 0, "replicas, stages and micro-batches must be 1 or more");
    require(static_cast<std::int64_t>(replicas) * micro_batches <= std::numeric_limits<Code>::max() / 4 / stages,
            "there are more actions than have a code");
    const std::size_t cells = static_cast<std::size_t>(replicas) * stages;
    require_seconds(per_cell, cells * 4, "per_cell");
    require_seconds(factor, factor.empty() ? 0 : 4 * cells * micro_batches, "factor");
    require(live.size() == cells && cap.size() == cells && released.size() == cells, "live, cap and released must have one entry per cell");
    require_seconds(own_latency, 2 * cells, "own_latency");
    require_seconds(own_occupancy, 2 * cells, "own_occupancy");
    require_seconds(sync, stages, "sync");
    require(static_cast<int>(pinned.size()) == stages, "pinned must have one entry per stage");
    for (const double each : cap) require(each >= 1.0, "cap has an entry that is not 1 or more");
    for (const double each : released) require(std::isfinite(each) && each <= 1.0, "released has an entry that is not finite and at most 1");
    RoutedProblem problem;
    problem.replicas = replicas;
    problem.stages = stages;
    problem.micro_batches = micro_batches;
    problem.per_cell = std::move(per_cell);
    problem.factor = std::move(factor);
    problem.whole_given = whole_given;
    problem.live.assign(live.begin(), live.end());
    problem.cap = std::move(cap);
    problem.released = std::move(released);
    for (std::size_t end = 0; end < own_latency.size(); ++end) problem.own.push_back({own_latency[end], own_occupancy[end]});
    for (const auto& [source, target, latency, occupancy] : given) {
        require(source >= 0 && target >= 0 && source < problem.cells() && target < problem.cells() &&
                    std::abs(problem.stage_of(source) - problem.stage_of(target)) == 1,
                "given has a link that does not join cells of neighbouring stages");
        require_seconds({latency, occupancy}, 2, "given");
        problem.given[problem.pair(source, target)] = {latency, occupancy};
    }
    problem.sync = std::move(sync);
    problem.staggered = staggered;
    problem.pinned.assign(pinned.begin(), pinned.end());
    require_finite(problem);
    for (int stage = 0; stage < stages; ++stage) {
        int alive = 0;
        for (int replica = 0; replica < replicas; ++replica) alive += problem.live[problem.cell(replica, stage)] != 0;
        require(alive > 0, "stage " + std::to_string(stage) + " has no live cell");
        require(alive == replicas || !pinned[stage], "stage " + std::to_string(stage) + " is pinned and has a dead cell");
    }
    return problem;
}

void check_hosts(const RoutedProblem& problem, const Hosts& hosts) {
    require(hosts.size() == problem.slots(), "hosts must have one entry per stage and micro-batch of the job");
    for (std::size_t slot = 0; slot < hosts.size(); ++slot) {
        const int stage = static_cast<int>(slot / problem.jobs());
        require(hosts[slot] >= 0 && hosts[slot] < problem.replicas && problem.live[problem.cell(hosts[slot], stage)],
                "hosts has a cell that takes no work");
    }
}

py::dict times_of(const RoutedProblem& problem, const Times& start, const Times& end) {
    py::dict result;
    double makespan = 0.0;
    for (int cell = 0; cell < problem.cells(); ++cell) {
        if (!end[cell].empty()) makespan = std::max(makespan, end[cell].back());
    }
    result["makespan_s"] = makespan;
    result["period_s"] = period_of(problem, start, end);
    result["start_s"] = start;
    result["end_s"] = end;
    return result;
}

py::dict replay(const RoutedProblem& problem, const Hosts& hosts, const Orders& orders) {
    check_hosts(problem, hosts);
    require(static_cast<int>(orders.size()) == problem.cells(), "there must be one order per cell");
    for (const Order& order : orders) {
        for (const Code code : order) require(code >= 0 && job_in(code) < problem.jobs(), "orders has a code of no action");
    }
    RoutedReplay run(problem);
    double makespan = 0.0;
    {
        py::gil_scoped_release release;
        makespan = run.run(hosts, orders);
    }
    py::dict result = times_of(problem, run.start(), run.end());
    if (makespan == kNever) result["makespan_s"] = kNever;
    std::vector<int> position;
    for (int cell = 0; cell < problem.cells(); ++cell) position.push_back(run.position(cell));
    result["position"] = position;
    return result;
}

py::dict plan(const RoutedProblem& problem, bool split, const Hosts& present, double least_gain, std::int64_t budget) {
    if (!present.empty()) check_hosts(problem, present);
    RoutedPlan found;
    RoutedBound bound;
    {
        py::gil_scoped_release release;
        bound = routed_bound(problem, split);
        found = plan_routed(problem, split, present, least_gain, bound.seconds, budget);
    }
    py::dict result = times_of(problem, found.best.start, found.best.end);
    result["hosts"] = found.best.hosts;
    result["orders"] = found.best.orders;
    result["present_s"] = found.present;
    result["kept"] = found.kept;
    result["simulated_actions"] = found.simulated_actions;
    result["bound_s"] = bound.seconds;
    result["bound_stage"] = bound.stage;
    return result;
}

py::tuple bound(const RoutedProblem& problem, bool split) {
    RoutedBound found;
    {
        py::gil_scoped_release release;
        found = routed_bound(problem, split);
    }
    return py::make_tuple(found.seconds, found.stage);
}

}  // namespace

void add_routing(py::module_& module) {
    py::class_<RoutedProblem>(module, "RoutedProblem")
        .def(py::init(&make_problem), py::kw_only(), py::arg("replicas"), py::arg("stages"), py::arg("micro_batches"),
             py::arg("per_cell"), py::arg("factor"), py::arg("whole_given"), py::arg("live"), py::arg("cap"),
             py::arg("released"), py::arg("own_latency"), py::arg("own_occupancy"), py::arg("given"), py::arg("sync"),
             py::arg("staggered"), py::arg("pinned"));
    module.def("replay_routed", &replay, py::arg("problem"), py::arg("hosts"), py::arg("orders"));
    module.def("plan_routed", &plan, py::arg("problem"), py::arg("split"), py::arg("present"), py::arg("least_gain"),
               py::arg("budget"));
    module.def("routed_bound", &bound, py::arg("problem"), py::arg("split"));
}

}  // namespace adaptra
