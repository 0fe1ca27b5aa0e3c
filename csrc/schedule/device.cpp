// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

namespace adaptra {

double DeviceReplay::run(const Orders& orders, const Ranks& ranks) {
    orders_ = &orders;
    ranks_ = &ranks;
    reset(orders);
    for (int stage = problem_.stages - 1; stage >= 0; --stage) wake(stage);
    while (!pending_.empty()) {
        const int stage = pending_.back();
        pending_.pop_back();
        is_pending_[stage] = 0;
        advance(stage);
    }
    double makespan = 0.0;
    for (int stage = 0; stage < problem_.stages; ++stage) {
        if (stages_[stage].position < static_cast<int>(orders[stage].size())) return kNever;
        makespan = std::max(makespan, stages_[stage].free);
    }
    return makespan;
}

void DeviceReplay::reset(const Orders& orders) {
    messages_.reset(problem_);
    stages_.assign(problem_.stages, Stage{});
    pending_.clear();
    is_pending_.assign(problem_.stages, 0);
    for (auto* times : {&start_, &end_}) times->assign(problem_.stages, {});
    channels_.resize(problem_.links.size());
    for (Channel& channel : channels_) {
        channel.source = channel.target = -1;
        channel.carried = 0;
        channel.free = 0.0;
        channel.made_at.clear();
        channel.sent.clear();
        channel.posted.clear();
        channel.arrived.clear();
    }
    for (int stage = 0; stage < problem_.stages; ++stage) {
        for (int position = 0; position < static_cast<int>(orders[stage].size()); ++position) {
            const Code code = orders[stage][position];
            const int link = problem_.link_out(kind_of(code), problem_.virtual_stage(stage, problem_.chunk_in(code)));
            if (link < 0 || !problem_.links[link].rendezvous) continue;
            channels_[link].source = stage;
            channels_[link].target = problem_.links[link].target;
            channels_[link].made_at.push_back(position);
        }
    }
}

// Issues what `stage` can, until it must wait for what another stage does.
void DeviceReplay::advance(int stage) {
    const Order& order = (*orders_)[stage];
    Stage& state = stages_[stage];
    while (true) {
        while (state.owed > 0) {
            if (!send(stage)) return;
        }
        if (state.position == static_cast<int>(order.size()) || !post_receives(stage)) return;
        const Code code = order[state.position];
        const int size = unit_size(code);
        double ready = arrival(code, stage);
        if (size == 2) ready = std::max(ready, arrival(order[state.position + 1], stage));
        if (ready == kNever || !clear(state)) return;
        double start = std::max(state.free, ready);
        if (problem_.shared_queue) start = state.queue = std::max(start, state.queue);
        const double seconds =
            size == 2 ? problem_.combined_seconds(stage, code, order[state.position + 1]) : problem_.seconds(code, stage);
        state.free = start + seconds;
        state.sent = size == 2 ? start + problem_.combined_sends_at * seconds : state.free;
        if (problem_.serial_queue) state.queue = state.free;
        start_[stage].insert(start_[stage].end(), size, start);
        end_[stage].insert(end_[stage].end(), size, state.free);
        state.position += size;
        state.owed = size;
    }
}

double DeviceReplay::arrival(Code code, int stage) const {
    const int virtual_stage = problem_.virtual_stage(stage, problem_.chunk_in(code));
    return messages_.ready(problem_, kind_of(code), virtual_stage, problem_.micro_batch_in(code));
}

// Before the action at hand: of other stages' messages, those made by what comes before it in the order of all actions.
bool DeviceReplay::post_receives(int stage) {
    Stage& state = stages_[stage];
    while (true) {
        Channel* first = nullptr;
        int lowest = (*ranks_)[stage][state.position];
        for (int link : problem_.incoming[stage]) {
            Channel& channel = channels_[link];
            if (channel.posted.size() == channel.made_at.size()) continue;
            const int rank = (*ranks_)[channel.source][channel.made_at[channel.posted.size()]];
            if (rank > lowest) continue;
            first = &channel;
            lowest = rank;
        }
        if (first == nullptr) return true;
        if (!begin(*first, first->posted, state.free, state)) return false;
        carry(*first);
    }
}

// Hands over what the first action makes that still owes it.
bool DeviceReplay::send(int stage) {
    Stage& state = stages_[stage];
    const Code code = (*orders_)[stage][state.position - state.owed];
    const Kind kind = kind_of(code);
    const int micro_batch = problem_.micro_batch_in(code);
    const int virtual_stage = problem_.virtual_stage(stage, problem_.chunk_in(code));
    const int link = problem_.link_out(kind, virtual_stage);
    if (link < 0 || !problem_.links[link].rendezvous) {
        --state.owed;
        const int target = messages_.deliver(problem_, kind, virtual_stage, micro_batch, state.sent);
        if (target >= 0 && target != stage) wake(target);
        return true;
    }
    if (kind == kBackwardInput) messages_.input_end[virtual_stage * problem_.micro_batches + micro_batch] = state.sent;
    Channel& channel = channels_[link];
    if (!begin(channel, channel.sent, state.sent, state)) return false;
    --state.owed;
    carry(channel);
    return true;
}

// Whether what a serial queue has in front has ended at a known time: a transfer ends when its other end has started.
bool DeviceReplay::clear(Stage& state) const {
    if (state.last == nullptr) return true;
    if (state.last_index >= state.last->carried) return false;
    state.queue = std::max(state.queue, state.last->arrived[state.last_index]);
    state.last = nullptr;
    return true;
}

// Issues one end of the next transfer. Whether its start is known: behind it in a shared queue nothing is, before.
bool DeviceReplay::begin(Channel& channel, std::vector<double>& starts, double ready, Stage& state) {
    if (problem_.shared_queue) {
        if (channel.carried < starts.size() || !clear(state)) return false;
        if (problem_.serial_queue) {
            state.last = &channel;
            state.last_index = starts.size();
        }
        ready = state.queue = std::max({ready, state.queue, channel.free});
    }
    starts.push_back(ready);
    return true;
}

void DeviceReplay::carry(Channel& channel) {
    const std::size_t before = channel.carried;
    while (channel.carried < std::min(channel.sent.size(), channel.posted.size())) {
        const std::size_t index = channel.carried++;
        const Code code = (*orders_)[channel.source][channel.made_at[index]];
        const Kind kind = kind_of(code);
        const int virtual_stage = problem_.virtual_stage(channel.source, problem_.chunk_in(code));
        const Link& link = problem_.links[problem_.link_out(kind, virtual_stage)];
        const double start = std::max({channel.sent[index], channel.posted[index], channel.free});
        channel.free = start + link.occupancy;
        channel.arrived.push_back(channel.free);
        const int slot = virtual_stage * problem_.micro_batches + problem_.micro_batch_in(code);
        if (kind == kForward) {
            messages_.activation[slot + problem_.micro_batches] = channel.free;
        } else {
            messages_.gradient[slot - problem_.micro_batches] = channel.free;
        }
    }
    if (channel.carried == before) return;
    wake(channel.source);
    wake(channel.target);
}

void DeviceReplay::wake(int stage) {
    if (is_pending_[stage]) return;
    is_pending_[stage] = 1;
    pending_.push_back(stage);
}

}  // namespace adaptra
