// SPDX-License-Identifier: Apache-2.0
#include "routed_replay.hpp"

namespace adaptra {
namespace {

// Cells that may be able to go on, each once.
class Pending {
public:
    explicit Pending(int cells) : is_pending_(cells, 1) {
        for (int cell = cells - 1; cell >= 0; --cell) cells_.push_back(cell);
    }
    bool empty() const { return cells_.empty(); }
    int take() {
        const int cell = cells_.back();
        cells_.pop_back();
        is_pending_[cell] = 0;
        return cell;
    }
    void add(int cell) {
        if (is_pending_[cell]) return;
        is_pending_[cell] = 1;
        cells_.push_back(cell);
    }

private:
    std::vector<int> cells_;
    std::vector<char> is_pending_;
};

}  // namespace

// As in Replay, no event queue is needed: one cell alone sends on a directed link, in the order of its actions.
double RoutedReplay::run(const Hosts& hosts, const Orders& orders) {
    const RoutedProblem& problem = problem_;
    std::vector<double> activation(problem.slots(), kNever), gradient(problem.slots(), kNever);
    std::vector<double> input_end(problem.slots(), kNever), free(problem.cells(), 0.0);
    std::fill_n(activation.begin(), problem.jobs(), 0.0);
    RoutedLinks links(problem);
    position_.assign(problem.cells(), 0);
    start_.assign(problem.cells(), {});
    end_.assign(problem.cells(), {});
    Pending pending(problem.cells());
    while (!pending.empty()) {
        const int cell = pending.take(), stage = problem.stage_of(cell);
        const Order& order = orders[cell];
        for (int& position = position_[cell]; position < static_cast<int>(order.size()); ++position) {
            const Kind kind = kind_of(order[position]);
            const Job job = job_in(order[position]);
            const std::size_t slot = problem.slot(stage, job);
            const double ready = kind == kForward ? activation[slot] : kind == kBackwardWeight ? input_end[slot] : gradient[slot];
            if (ready == kNever) break;
            start_[cell].push_back(std::max(free[cell], ready));
            free[cell] = start_[cell].back() + problem.seconds(kind, cell, job);
            end_[cell].push_back(free[cell]);
            if (kind == kBackwardInput) input_end[slot] = free[cell];
            if (kind == kForward && stage + 1 == problem.stages) gradient[slot] = free[cell];
            const int towards = kind == kForward ? stage + 1 : stage - 1;
            if (kind == kBackwardWeight || towards < 0 || towards == problem.stages) continue;
            const std::size_t there = problem.slot(towards, job);
            const int target = problem.cell(hosts[there], towards);
            (kind == kForward ? activation : gradient)[there] = links.send(cell, target, free[cell]);
            pending.add(target);
        }
    }
    double makespan = 0.0;
    for (int cell = 0; cell < problem.cells(); ++cell) {
        if (position_[cell] < static_cast<int>(orders[cell].size())) return kNever;
        makespan = std::max(makespan, free[cell]);
    }
    return makespan;
}

// The mirror image of run().
void RoutedReplay::remaining(const Hosts& hosts, const Orders& orders, Urgency& left) const {
    const RoutedProblem& problem = problem_;
    for (auto* table : {&left.forward, &left.backward, &left.weight}) table->assign(problem.slots(), -1.0);
    std::vector<double> free(problem.cells());
    std::vector<std::size_t> position(problem.cells());
    for (int cell = 0; cell < problem.cells(); ++cell) {
        free[cell] = problem.sync[problem.stage_of(cell)];
        position[cell] = orders[cell].size();
    }
    RoutedLinks links(problem);
    Pending pending(problem.cells());
    while (!pending.empty()) {
        const int cell = pending.take(), stage = problem.stage_of(cell);
        for (; position[cell] > 0; --position[cell]) {
            const Code code = orders[cell][position[cell] - 1];
            const Kind kind = kind_of(code);
            const Job job = job_in(code);
            const std::size_t slot = problem.slot(stage, job);
            const int towards = kind == kForward ? stage + 1 : stage - 1;
            double after = free[cell];
            if (kind == kBackwardInput) after = std::max(after, left.weight[slot]);
            if (kind == kForward && towards == problem.stages) {
                after = std::max(after, left.backward[slot]);
            } else if (kind != kBackwardWeight && towards >= 0) {
                const std::size_t there = problem.slot(towards, job);
                const double needed = (kind == kForward ? left.forward : left.backward)[there];
                if (needed < 0.0) break;
                after = std::max(after, links.before(cell, problem.cell(hosts[there], towards), needed));
            }
            free[cell] = after + problem.seconds(kind, cell, job);
            (kind == kForward ? left.forward : kind == kBackwardWeight ? left.weight : left.backward)[slot] = free[cell];
            const int before = kind == kForward ? stage - 1 : stage + 1;
            if (kind == kBackwardWeight || before < 0 || before == problem.stages) continue;
            pending.add(problem.cell(hosts[problem.slot(before, job)], before));
        }
    }
}

}  // namespace adaptra
