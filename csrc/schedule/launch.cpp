// SPDX-License-Identifier: Apache-2.0
#include "launch.hpp"

#include <queue>

namespace adaptra {
namespace {

constexpr double kShortest = 1e-6;  // of the longest action
constexpr int kRounds = 3;

Problem lasting(Problem problem) {
    double longest = 0.0;
    const auto tables = {&problem.forward, &problem.backward, &problem.backward_input, &problem.backward_weight};
    for (const auto* table : tables) {
        for (double seconds : *table) longest = std::max(longest, seconds);
    }
    const double shortest = longest > 0.0 ? kShortest * longest : 1.0;
    for (auto* table : tables) {
        for (double& seconds : *table) seconds = std::max(seconds, shortest);
    }
    return problem;
}

}  // namespace

Launch::Launch(const Problem& problem)
    : problem_(problem), lasting_(lasting(problem)), expected_(lasting_), device_(problem), lasting_device_(lasting_) {}

double Launch::run(const Orders& orders) {
    double best = kNever;
    if (expected_.run(orders) == kNever) return kNever;
    const bool shared = problem_.shared_queue && problem_.has_rendezvous();
    for (int round = 0; round < (shared ? kRounds : 1); ++round) {
        const bool first = round == 0;
        const auto& start = first ? expected_.start() : lasting_device_.start();
        order(orders, start, made(orders, start, first ? expected_.end() : lasting_device_.end()), found_);
        const double makespan = shared ? lasting_device_.run(orders, found_) : 0.0;
        if (!first && makespan >= best) break;
        best = makespan;
        ranks_ = found_;
    }
    return device_.run(orders, ranks_);
}

// When the messages of each action leave: at its end, or before, if it is combined.
Replay::Times Launch::made(const Orders& orders, const Replay::Times& start, Replay::Times end) const {
    for (std::size_t stage = 0; stage < orders.size(); ++stage) {
        for (std::size_t place = 0; place < orders[stage].size(); ++place) {
            if (unit_size(orders[stage][place]) == 1) continue;
            const double first = start[stage][place];
            const double sent = first + problem_.combined_sends_at * (end[stage][place] - first);
            end[stage][place] = end[stage][place + 1] = sent;
        }
    }
    return end;
}

void Launch::order(const Orders& orders, const Replay::Times& start, const Replay::Times& end, Ranks& ranks) {
    using Entry = std::pair<double, int>;  // expected end of the next action of a stage
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> next;
    ranks.resize(orders.size());
    next_rank_ = 0;
    position_.assign(problem_.stages, 0);
    link_free_.assign(problem_.links.size(), 0.0);
    activation_made_.assign(problem_.slots(), 0);
    std::fill_n(activation_made_.begin(), problem_.micro_batches, 1);
    gradient_made_.assign(problem_.slots(), 0);
    const auto push = [&](int stage) {
        if (position_[stage] < static_cast<int>(orders[stage].size())) next.push({end[stage][position_[stage]], stage});
    };
    for (int stage = 0; stage < problem_.stages; ++stage) {
        ranks[stage].assign(orders[stage].size(), 0);
        push(stage);
    }
    while (!next.empty()) {
        const auto [moment, stage] = next.top();
        next.pop();
        if (position_[stage] == static_cast<int>(orders[stage].size()) || end[stage][position_[stage]] != moment) continue;
        const int other = held_up(orders, start, end, stage);
        if (other >= 0) {
            append_unit(orders, end, other, ranks);
            push(other);
            push(stage);
        } else {
            append_unit(orders, end, stage, ranks);
            push(stage);
        }
    }
}

// The stage whose next action is to come before that of `stage`, which makes a message for it; -1: none.
int Launch::held_up(const Orders& orders, const Replay::Times& start, const Replay::Times& end, int stage) const {
    const Code code = orders[stage][position_[stage]];
    const int virtual_stage = problem_.virtual_stage(stage, problem_.chunk_in(code));
    const int link = problem_.link_out(kind_of(code), virtual_stage);
    if (!problem_.shared_queue || link < 0 || !problem_.links[link].rendezvous) return -1;
    const int target = problem_.links[link].target;
    const int position = position_[target];
    if (position == static_cast<int>(orders[target].size())) return -1;
    const Code behind = orders[target][position];
    const int slot = problem_.virtual_stage(target, problem_.chunk_in(behind)) * problem_.micro_batches +
                     problem_.micro_batch_in(behind);
    const Kind kind = kind_of(behind);
    if (kind == kForward ? !activation_made_[slot] : sends_gradient(kind) && !gradient_made_[slot]) return -1;
    const double held_up = link_free_[link] - start[target][position];
    const double delayed = end[target][position] - std::max(end[stage][position_[stage]], link_free_[link]);
    return held_up > std::max(delayed, 0.0) ? target : -1;
}

// Halves of a combined action are launched together: nothing comes between them.
void Launch::append_unit(const Orders& orders, const Replay::Times& end, int stage, Ranks& ranks) {
    for (int left = unit_size(orders[stage][position_[stage]]); left > 0; --left) append(orders, end, stage, ranks);
}

void Launch::append(const Orders& orders, const Replay::Times& end, int stage, Ranks& ranks) {
    const int position = position_[stage]++;
    ranks[stage][position] = next_rank_++;
    const Code code = orders[stage][position];
    const Kind kind = kind_of(code);
    const int virtual_stage = problem_.virtual_stage(stage, problem_.chunk_in(code));
    const int slot = virtual_stage * problem_.micro_batches + problem_.micro_batch_in(code);
    if (kind == kForward) {
        if (virtual_stage + 1 < problem_.virtual_stages()) {
            activation_made_[slot + problem_.micro_batches] = 1;
        } else {
            gradient_made_[slot] = 1;
        }
    } else if (sends_gradient(kind) && virtual_stage > 0) {
        gradient_made_[slot - problem_.micro_batches] = 1;
    }
    const int link = problem_.link_out(kind, virtual_stage);
    if (link >= 0) link_free_[link] = std::max(link_free_[link], end[stage][position]) + problem_.links[link].occupancy;
}

}  // namespace adaptra
