// SPDX-License-Identifier: Apache-2.0
#include "timing.hpp"

namespace adaptra {
namespace {

constexpr int kSlots = 3;
constexpr double kUnknown = -1.0;   // of what remains
constexpr double kLookWeight = 0.5;  // what looking for a move among all actions takes, in simulations of each

int slot_of(const Problem& problem, Kind kind, int virtual_stage, int micro_batch) {
    const int place = kind == kForward ? 0 : kind == kBackwardWeight ? 2 : 1;
    return (virtual_stage * problem.micro_batches + micro_batch) * kSlots + place;
}

double taken_by(Kind kind, double released) {
    switch (kind) {
        case kForward: return 1.0;
        case kBackward: return -1.0;
        case kBackwardInput: return -released;
        default: return released - 1.0;
    }
}

Timing::Node node_of(const Problem& problem, Kind kind, int virtual_stage, int micro_batch) {
    Timing::Node node;
    const int stage = problem.stage_of(virtual_stage);
    node.seconds = problem.seconds(kind, problem.row(virtual_stage), micro_batch);
    node.taken = taken_by(kind, problem.released[stage]);
    node.slot = slot_of(problem, kind, virtual_stage, micro_batch);
    const bool forward = kind == kForward, turns = forward && virtual_stage + 1 == problem.virtual_stages();
    const int next = virtual_stage + (turns ? 0 : forward ? 1 : -1), before = virtual_stage + (forward ? -1 : 1);
    if (kind != kBackwardWeight && before >= 0 && before < problem.virtual_stages()) node.source = problem.stage_of(before);
    if (kind == kBackwardWeight || next < 0) return node;
    node.successor = slot_of(problem, forward && !turns ? kForward : kBackward, next, micro_batch);
    node.target = problem.stage_of(next);
    node.link = turns ? -1 : problem.link_out(kind, virtual_stage);
    if (node.link >= 0) node.occupancy = problem.links[node.link].occupancy;
    if (node.link >= 0) node.latency = problem.links[node.link].latency;
    return node;
}

}  // namespace

Timing::Timing(const Problem& problem)
    : problem_(&problem), codes_(static_cast<std::size_t>(problem.chunks) * problem.micro_batches * 4), start_(problem.stages),
      end_(problem.stages), left_(problem.stages), arrival_(problem.slots() * kSlots, 0.0),
      left_of_(problem.slots() * kSlots), link_free_(problem.links.size()), sent_(problem.slots() * kSlots),
      sent_left_(problem.slots() * kSlots), links_out_(problem.stages), is_pending_(problem.stages) {
    for (const Link& link : problem.links) ++links_out_[link.source];
    nodes_.resize(codes_ * problem.stages);
    for (int stage = 0; stage < problem.stages; ++stage) {
        for (std::size_t code = 0; code < codes_; ++code) {
            const Code action = static_cast<Code>((code / 4) << kCodeShift);
            const int virtual_stage = problem.virtual_stage(stage, problem.chunk_in(action));
            nodes_[stage * codes_ + code] =
                node_of(problem, static_cast<Kind>(code % 4), virtual_stage, problem.micro_batch_in(action));
        }
    }
}

double Timing::run(const Orders& orders) {
    const std::size_t stages = orders.size();
    first_.assign(stages, 0);
    last_.clear();
    looked_at_ = 0;
    for (std::size_t stage = 0; stage < stages; ++stage) {
        last_.push_back(static_cast<int>(orders[stage].size()));
        looked_at_ += last_.back();
        for (Times* times : {&start_, &end_, &left_}) (*times)[stage].assign(orders[stage].size(), 0.0);
    }
    looked_at_ = static_cast<std::int64_t>(kLookWeight * looked_at_);
    return run_from_here(orders);
}

double Timing::run_moved(const Orders& orders, int stage, int low, int high) {
    simulated_ += looked_at_;
    if (position_[stage] >= 0) {  // the last run was no deadlock
        const double since = low > 0 ? end_[stage][low - 1] : 0.0;
        const double until = high + 1 < static_cast<int>(orders[stage].size()) ? left_[stage][high + 1] : 0.0;
        const auto at_least = [](double value, double limit) { return value >= limit; };
        for (std::size_t other = 0; other < orders.size(); ++other) {
            first_[other] = std::lower_bound(start_[other].begin(), start_[other].end(), since) - start_[other].begin();
            last_[other] = std::lower_bound(left_[other].begin(), left_[other].end(), until, at_least) - left_[other].begin();
        }
        first_[stage] = std::min(first_[stage], low);
        last_[stage] = std::max(last_[stage], high + 1);
    }
    return run_from_here(orders);
}

// Whether the link that `sender` takes was not known: it is now, from what was found with this message.
bool Timing::recall(const Node& sender, const std::vector<double>& found) {
    if (sender.link < 0 || link_free_[sender.link] >= 0.0) return false;
    link_free_[sender.link] = found[sender.slot];
    return true;
}

void Timing::wake(int stage) {
    if (is_pending_[stage]) return;
    is_pending_[stage] = 1;
    pending_.push_back(stage);
}

double Timing::run_from_here(const Orders& orders) {
    const int stages = static_cast<int>(orders.size());
    link_free_.assign(link_free_.size(), kUnknown);
    position_ = first_;
    for (int stage = stages - 1; stage >= 0; --stage) {
        const Order& order = orders[stage];
        for (int position = first_[stage] - 1, found = 0; position >= 0 && found < links_out_[stage]; --position) {
            found += recall(node(order[position], stage), sent_);
        }
        for (std::size_t position = first_[stage]; position < order.size(); ++position) {
            const Node& sender = node(order[position], stage);
            if (sender.successor >= 0) arrival_[sender.successor] = kNever;
        }
        wake(stage);
    }
    while (!pending_.empty()) {
        const int stage = pending_.back();
        pending_.pop_back();
        is_pending_[stage] = 0;
        advance(orders[stage], stage);
    }
    double makespan = 0.0;
    for (int stage = 0; stage < stages; ++stage) {
        simulated_ += position_[stage] - first_[stage];
        if (position_[stage] < static_cast<int>(orders[stage].size())) makespan = kNever;
        else if (!end_[stage].empty()) makespan = std::max(makespan, end_[stage].back());
    }
    if (makespan == kNever) {
        position_.assign(stages, -1);
        return kNever;
    }
    link_free_.assign(link_free_.size(), kUnknown);
    position_ = last_;
    for (int stage = 0; stage < stages; ++stage) {
        const Order& order = orders[stage];
        const int length = static_cast<int>(order.size());
        for (int position = last_[stage], found = 0; position < length && found < links_out_[stage]; ++position) {
            found += recall(node(order[position], stage), sent_left_);
        }
        for (int position = 0; position < last_[stage]; ++position) left_of_[node(order[position], stage).slot] = kUnknown;
        simulated_ += last_[stage];
        wake(stage);
    }
    while (!pending_.empty()) {
        const int stage = pending_.back();
        pending_.pop_back();
        is_pending_[stage] = 0;
        advance_backwards(orders[stage], stage);
    }
    return makespan;
}

void Timing::advance(const Order& order, int stage) {
    const int length = static_cast<int>(order.size());
    int position = position_[stage];
    double now = position > 0 ? end_[stage][position - 1] : 0.0;
    for (; position < length; ++position) {
        const int size = unit_size(order[position]);
        double ready = now;
        for (int half = 0; half < size; ++half) ready = std::max(ready, arrival(node(order[position + half], stage)));
        if (ready == kNever) break;
        const double seconds = unit_seconds(stage, order[position], order[position + size - 1]);
        now = ready + seconds;
        const double made = size == 1 ? now : ready + problem_->combined_sends_at * seconds;
        for (int half = 0; half < size; ++half) {
            const Node& action = node(order[position + half], stage);
            start_[stage][position + half] = ready;
            end_[stage][position + half] = now;
            if (action.successor < 0) continue;
            double there = made;
            if (action.link >= 0) {
                double& free = link_free_[action.link];
                free = std::max(made, free) + action.occupancy;
                sent_[action.slot] = free;
                there = free + action.latency;
            }
            arrival_[action.successor] = there;
            if (action.target != stage) wake(action.target);
        }
        position += size - 1;
    }
    position_[stage] = position;
}

// The mirror image of advance(): what remains instead of what is over.
void Timing::advance_backwards(const Order& order, int stage) {
    int position = position_[stage];
    double after = position < static_cast<int>(order.size()) ? left_[stage][position] : 0.0;
    while (position > 0) {
        const int first = position - (position > 1 && unit_size(order[position - 2]) == 2 ? 2 : 1);
        const auto unknown = [&](Code code) {
            const Node& action = node(code, stage);
            return action.successor >= 0 && left_of_[action.successor] == kUnknown;
        };
        if (unknown(order[first]) || unknown(order[position - 1])) break;
        double message = 0.0;  // remaining when the messages leave
        for (int place = position - 1; place >= first; --place) {
            const Node& action = node(order[place], stage);
            if (action.successor < 0) continue;
            double needed = left_of_[action.successor];
            if (action.link >= 0) {
                double& free = link_free_[action.link];
                free = std::max(free, needed + action.latency) + action.occupancy;
                sent_left_[action.slot] = free;
                needed = free;
            }
            message = std::max(message, needed);
        }
        const double seconds = unit_seconds(stage, order[first], order[position - 1]);
        after = std::max(after + seconds, message + share_sent(order[first]) * seconds);
        for (int place = first; place < position; ++place) {
            const Node& action = node(order[place], stage);
            left_[stage][place] = after;
            left_of_[action.slot] = after;
            if (action.source >= 0 && action.source != stage) wake(action.source);
        }
        position = first;
    }
    position_[stage] = position;
}

}  // namespace adaptra
