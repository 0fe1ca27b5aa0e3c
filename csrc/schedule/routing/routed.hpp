// SPDX-License-Identifier: Apache-2.0
// What the routing of micro-batches between replicas shares: the costs of a job's cells, and which cell runs what.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../pipeline.hpp"

namespace adaptra {

// A micro-batch of the job: replica * micro_batches + its number within the replica.
using Job = int;
using Hosts = std::vector<int>;  // [stage * jobs + job]: replica whose cell runs it; an action's code is job << 2 | kind

inline Job job_in(Code code) { return code >> 2; }
inline Code code_of(Kind kind, Job job) { return (job << 2) | kind; }

struct RoutedLink {
    double latency = 0.0;
    double occupancy = 0.0;
    double transfer() const { return latency + occupancy; }
};

// Cells are numbered replica * stages + stage. A cell that takes no work is not `live`; its other entries do not count.
struct RoutedProblem {
    int replicas = 0, stages = 0, micro_batches = 0;
    std::vector<double> per_cell;         // [cell * 4 + kind]: seconds
    std::vector<double> factor;           // empty, or [(kind * stages + stage) * jobs + job]: what a micro-batch takes
    bool whole_given = false;             // whether B has seconds and factors of its own: else it takes what I and W do
    std::vector<char> live;               // [cell]
    std::vector<double> cap, released;    // [cell]
    std::vector<RoutedLink> own;          // [cell * 2 + (to the next stage: 0, to the previous one: 1)]
    std::unordered_map<std::int64_t, RoutedLink> given;  // by `pair`: links whose costs do not follow from `own`
    std::vector<double> sync;             // [stage]: seconds after its last action
    bool staggered = false;               // whether stages start their next iteration on their own
    std::vector<char> pinned;             // [stage]: whether its micro-batches stay at their own replicas

    int jobs() const { return replicas * micro_batches; }
    int cells() const { return replicas * stages; }
    int cell(int replica, int stage) const { return replica * stages + stage; }
    int stage_of(int cell) const { return cell % stages; }
    int replica_of(int cell) const { return cell / stages; }
    int owner(Job job) const { return job / micro_batches; }
    std::size_t slot(int stage, Job job) const { return static_cast<std::size_t>(stage) * jobs() + job; }
    std::size_t slots() const { return static_cast<std::size_t>(stages) * jobs(); }
    std::int64_t pair(int source, int target) const { return static_cast<std::int64_t>(source) * cells() + target; }

    double factor_of(Kind kind, int stage, Job job) const {
        return factor.empty() ? 1.0 : factor[(static_cast<std::size_t>(kind) * stages + stage) * jobs() + job];
    }
    double seconds(Kind kind, int cell, Job job) const {
        if (kind == kBackward && !whole_given) {
            return seconds(kBackwardInput, cell, job) + seconds(kBackwardWeight, cell, job);
        }
        const double usual = per_cell[cell * 4 + kind];
        return factor.empty() ? usual : usual * factor_of(kind, stage_of(cell), job);
    }
    // The link of a replica's own cells costs what is given; one between replicas, the worse of their two.
    RoutedLink link(int source, int target) const {
        if (!given.empty()) {
            const auto found = given.find(pair(source, target));
            if (found != given.end()) return found->second;
        }
        const int back = stage_of(target) < stage_of(source);
        const RoutedLink& here = own[source * 2 + back];
        if (replica_of(source) == replica_of(target)) return here;
        const RoutedLink& there = own[cell(replica_of(target), stage_of(source)) * 2 + back];
        return {std::max(here.latency, there.latency), std::max(here.occupancy, there.occupancy)};
    }
};

using Times = std::vector<std::vector<double>>;  // [cell][position]

// What an iteration takes: until the last stage has synchronised, or, where each stage starts its next iteration when it
// is ready itself, the longest time that one stage is at work.
inline double period_of(const RoutedProblem& problem, const Times& start, const Times& end) {
    std::vector<double> first(problem.stages, kNever), last(problem.stages, 0.0);
    for (int cell = 0; cell < problem.cells(); ++cell) {
        if (start[cell].empty()) continue;
        const int stage = problem.stage_of(cell);
        first[stage] = std::min(first[stage], start[cell].front());
        last[stage] = std::max(last[stage], end[cell].back());
    }
    double period = 0.0;
    for (int stage = 0; stage < problem.stages; ++stage) {
        period = std::max(period, last[stage] - (problem.staggered ? first[stage] : 0.0) + problem.sync[stage]);
    }
    return period;
}

// Carries messages in the order in which each link gets them.
class RoutedLinks {
public:
    explicit RoutedLinks(const RoutedProblem& problem) : problem_(problem) {}

    // Arrival of a message that is handed over at `end`.
    double send(int source, int target, double end) {
        const RoutedLink cost = problem_.link(source, target);
        if (cost.occupancy == 0.0) return end + cost.latency;
        double& free = free_[problem_.pair(source, target)];
        free = std::max(free, end) + cost.occupancy;
        return free + cost.latency;
    }
    // Read backwards in time: the least time from the start of a transfer to the end, `left` being that from its arrival.
    double before(int source, int target, double left) {
        const RoutedLink cost = problem_.link(source, target);
        if (cost.occupancy == 0.0) return left + cost.latency;
        double& sent = free_[problem_.pair(source, target)];
        sent = std::max(sent, left + cost.latency) + cost.occupancy;
        return sent;
    }

private:
    const RoutedProblem& problem_;
    std::unordered_map<std::int64_t, double> free_;
};

}  // namespace adaptra
