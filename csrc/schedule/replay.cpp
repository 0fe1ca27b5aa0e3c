// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

namespace adaptra {

// No event queue is needed: the only shared resource is a directed link, one rank alone sends on it, in the order
// of its actions. So every time follows from the orders, whichever stage is advanced first.
double Replay::run(const Orders& orders) {
    const int stages = problem_->stages;
    messages_.reset(*problem_);
    position_.assign(stages, 0);
    free_.assign(stages, 0.0);
    start_.resize(stages);
    end_.resize(stages);
    pending_.clear();
    is_pending_.assign(stages, 1);
    for (int stage = stages - 1; stage >= 0; --stage) {
        start_[stage].assign(orders[stage].size(), kNever);
        end_[stage].assign(orders[stage].size(), kNever);
        pending_.push_back(stage);
    }
    while (!pending_.empty()) {
        const int stage = pending_.back();
        pending_.pop_back();
        is_pending_[stage] = 0;
        advance(orders[stage], stage);
    }
    double makespan = 0.0;
    for (int stage = 0; stage < stages; ++stage) {
        if (position_[stage] < static_cast<int>(orders[stage].size())) return kNever;
        makespan = std::max(makespan, free_[stage]);
    }
    return makespan;
}

void Replay::advance(const Order& order, int stage) {
    const int length = static_cast<int>(order.size());
    int position = position_[stage];
    double now = free_[stage];
    while (position < length) {
        const Code code = order[position];
        const bool combined = unit_size(code) == 2;
        const double ready_at = combined ? std::max(arrival(code, stage), arrival(order[position + 1], stage))
                                         : arrival(code, stage);
        if (ready_at == kNever) break;
        const double begin = std::max(now, ready_at);
        const double seconds =
            combined ? problem_->combined_seconds(stage, code, order[position + 1]) : problem_->seconds(code, stage);
        now = begin + seconds;
        const double sent = combined ? begin + problem_->combined_sends_at * seconds : now;
        for (const int last = position + unit_size(code); position < last; ++position) {
            start_[stage][position] = begin;
            end_[stage][position] = now;
            const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(order[position]));
            const int target = messages_.deliver(*problem_, kind_of(order[position]), virtual_stage,
                                                 problem_->micro_batch_in(order[position]), sent);
            if (target >= 0 && target != stage && !is_pending_[target]) {
                is_pending_[target] = 1;
                pending_.push_back(target);
            }
        }
    }
    position_[stage] = position;
    free_[stage] = now;
}

void Replay::remaining(const Orders& orders, Urgency& left) {
    const int stages = problem_->stages;
    for (auto* table : {&left.forward, &left.backward, &left.weight}) table->assign(problem_->slots(), -1.0);
    messages_.link_free.assign(problem_->links.size(), 0.0);
    free_.assign(stages, 0.0);
    is_pending_.assign(stages, 1);
    for (int stage = 0; stage < stages; ++stage) {
        position_[stage] = static_cast<int>(orders[stage].size());
        pending_.push_back(stage);
    }
    while (!pending_.empty()) {
        const int stage = pending_.back();
        pending_.pop_back();
        is_pending_[stage] = 0;
        advance_backwards(orders[stage], stage, left);
    }
}

// The mirror image of advance(): free_ and link_free hold remaining times instead of times.
void Replay::advance_backwards(const Order& order, int stage, Urgency& left) {
    const auto message_of = [&](Code code) {  // remaining when it leaves; below 0: not known yet
        const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(code));
        const int slot = virtual_stage * problem_->micro_batches + problem_->micro_batch_in(code);
        if (kind_of(code) == kForward) {
            return virtual_stage + 1 == problem_->virtual_stages() ? left.backward[slot]
                                                                    : left.forward[slot + problem_->micro_batches];
        }
        return sends_gradient(kind_of(code)) && virtual_stage > 0 ? left.backward[slot - problem_->micro_batches] : 0.0;
    };
    while (position_[stage] > 0) {
        const int end = position_[stage];
        const bool combined = end > 1 && unit_size(order[end - 2]) == 2;
        const int begin = end - (combined ? 2 : 1);
        double needed[2] = {0.0, 0.0};
        for (int place = begin; place < end; ++place) {
            needed[place - begin] = message_of(order[place]);
            if (needed[place - begin] < 0.0) return;
        }
        double after = free_[stage], sent = 0.0;
        for (int place = end - 1; place >= begin; --place) {
            const Code code = order[place];
            const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(code));
            const int slot = virtual_stage * problem_->micro_batches + problem_->micro_batch_in(code);
            if (kind_of(code) == kBackwardInput) after = std::max(after, left.weight[slot]);
            const int link = problem_->link_out(kind_of(code), virtual_stage);
            if (link >= 0) {
                const Link& cost = problem_->links[link];
                double& before = messages_.link_free[link];
                needed[place - begin] = before = std::max(before, needed[place - begin] + cost.latency) + cost.occupancy;
            }
            sent = std::max(sent, needed[place - begin]);
        }
        const double seconds = combined ? problem_->combined_seconds(stage, order[begin], order[begin + 1])
                                        : problem_->seconds(order[begin], stage);
        const double share = combined ? problem_->combined_sends_at : 1.0;
        free_[stage] = std::max(after + seconds, sent + share * seconds);
        position_[stage] = begin;
        for (int place = begin; place < end; ++place) {
            const Kind kind = kind_of(order[place]);
            const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(order[place]));
            const int slot = virtual_stage * problem_->micro_batches + problem_->micro_batch_in(order[place]);
            auto& table = kind == kForward ? left.forward : kind == kBackwardWeight ? left.weight : left.backward;
            table[slot] = free_[stage];
            const int before = virtual_stage + (kind == kForward ? -1 : 1);
            if (kind == kBackwardWeight || before < 0 || before == problem_->virtual_stages()) continue;
            const int source = problem_->stage_of(before);
            if (source != stage && !is_pending_[source]) {
                is_pending_[source] = 1;
                pending_.push_back(source);
            }
        }
    }
}

}  // namespace adaptra
