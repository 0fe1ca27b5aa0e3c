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
        const Kind kind = kind_of(code);
        const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(code));
        const int micro_batch = problem_->micro_batch_in(code);
        const double ready_at = messages_.ready(*problem_, kind, virtual_stage, micro_batch);
        if (ready_at == kNever) break;
        const double begin = std::max(now, ready_at);
        now = begin + problem_->seconds(kind, problem_->row(virtual_stage), micro_batch);
        start_[stage][position] = begin;
        end_[stage][position] = now;
        ++position;
        const int target = messages_.deliver(*problem_, kind, virtual_stage, micro_batch, now);
        if (target >= 0 && target != stage && !is_pending_[target]) {
            is_pending_[target] = 1;
            pending_.push_back(target);
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
    while (position_[stage] > 0) {
        const Code code = order[position_[stage] - 1];
        const Kind kind = kind_of(code);
        const int virtual_stage = problem_->virtual_stage(stage, problem_->chunk_in(code));
        const int slot = virtual_stage * problem_->micro_batches + problem_->micro_batch_in(code);
        const bool forward = kind == kForward;
        double after = free_[stage];
        if (kind == kBackwardInput) after = std::max(after, left.weight[slot]);
        if (forward && virtual_stage + 1 == problem_->virtual_stages()) {
            after = std::max(after, left.backward[slot]);
        } else if (kind != kBackwardWeight && (forward || virtual_stage > 0)) {
            const double needed = forward ? left.forward[slot + problem_->micro_batches]
                                          : left.backward[slot - problem_->micro_batches];
            if (needed < 0.0) return;
            const int link = problem_->link_out(kind, virtual_stage);
            if (link >= 0) {
                const Link& cost = problem_->links[link];
                double& sent = messages_.link_free[link];
                sent = std::max(sent, needed + cost.latency) + cost.occupancy;
                after = std::max(after, sent);
            } else {
                after = std::max(after, needed);
            }
        }
        auto& table = forward ? left.forward : kind == kBackwardWeight ? left.weight : left.backward;
        free_[stage] = after + problem_->seconds(kind, problem_->row(virtual_stage), problem_->micro_batch_in(code));
        table[slot] = free_[stage];
        --position_[stage];
        const int before = virtual_stage + (forward ? -1 : 1);
        if (kind == kBackwardWeight || before < 0 || before == problem_->virtual_stages()) continue;
        const int source = problem_->stage_of(before);
        if (source != stage && !is_pending_[source]) {
            is_pending_[source] = 1;
            pending_.push_back(source);
        }
    }
}

}  // namespace adaptra
