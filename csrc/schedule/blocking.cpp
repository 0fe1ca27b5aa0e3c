// SPDX-License-Identifier: Apache-2.0
#include "blocking.hpp"

namespace adaptra {

double BlockingReplay::run(const Orders& programs) {
    const int stages = problem_.stages;
    channels_.assign(2 * stages, Channel{});
    link_free_.assign(problem_.links.size(), 0.0);
    now_.assign(stages, 0.0);
    position_.assign(stages, 0);
    waiting_.assign(stages, {});
    start_.assign(stages, {});
    end_.assign(stages, {});
    std::vector<int> pending;
    std::vector<char> is_pending(stages, 1);
    for (int stage = stages - 1; stage >= 0; --stage) pending.push_back(stage);
    while (!pending.empty()) {
        const int stage = pending.back();
        pending.pop_back();
        is_pending[stage] = 0;
        if (!advance(programs[stage], stage)) continue;
        for (int neighbour : {(stage + stages - 1) % stages, (stage + 1) % stages}) {
            if (neighbour != stage && !is_pending[neighbour]) {
                is_pending[neighbour] = 1;
                pending.push_back(neighbour);
            }
        }
    }
    double makespan = 0.0;
    for (int stage = 0; stage < stages; ++stage) {
        if (position_[stage] < programs[stage].size() || !waiting_[stage].empty()) return kNever;
        if (!end_[stage].empty()) makespan = std::max(makespan, end_[stage].back());
    }
    return makespan;
}

// Runs `stage` until it must wait. Returns whether it did anything that its neighbours may wait for.
bool BlockingReplay::advance(const Order& program, int stage) {
    bool posted = false;
    while (true) {
        double now = now_[stage];
        for (const Waited& waited : waiting_[stage]) {
            now = std::max(now, channels_[waited.channel].transfers[waited.index].completed());
        }
        if (now == kNever) return posted;
        now_[stage] = now;
        waiting_[stage].clear();
        if (position_[stage] == program.size()) return posted;
        const Code step = program[position_[stage]++];
        if (step < 0) {
            post(stage, ~step);
            posted = true;
        } else {
            const int size = unit_size(step);
            now_[stage] += size == 2 ? problem_.combined_seconds(stage, step, program[position_[stage]++])
                                     : problem_.seconds(step, stage);
            start_[stage].insert(start_[stage].end(), size, now);
            end_[stage].insert(end_[stage].end(), size, now_[stage]);
        }
    }
}

void BlockingReplay::post(int stage, int call) {
    if (call & kSendPrevious) send(stage, false);
    if (call & kSendNext) send(stage, true);
    if (call & kReceivePrevious) receive(stage, false);
    if (call & kReceiveNext) receive(stage, true);
}

void BlockingReplay::send(int stage, bool next) {
    const int stages = problem_.stages;
    const int link = problem_.link_between(stage, next ? (stage + 1) % stages : (stage + stages - 1) % stages);
    double delivered = now_[stage];  // where no message of a schedule goes there is no link
    if (link >= 0) {
        link_free_[link] = std::max(delivered, link_free_[link]) + problem_.links[link].occupancy;
        delivered = link_free_[link] + problem_.links[link].latency;
    }
    Channel& channel = channels_[2 * stage + !next];
    at(channel, channel.sent).delivered = delivered;
    waiting_[stage].push_back({2 * stage + !next, channel.sent++});
}

void BlockingReplay::receive(int stage, bool from_next) {
    const int stages = problem_.stages;
    const int source = from_next ? (stage + 1) % stages : (stage + stages - 1) % stages;
    Channel& channel = channels_[2 * source + from_next];
    at(channel, channel.received).posted = now_[stage];
    waiting_[stage].push_back({2 * source + from_next, channel.received++});
}

BlockingReplay::Transfer& BlockingReplay::at(Channel& channel, std::size_t index) {
    if (index == channel.transfers.size()) channel.transfers.emplace_back();
    return channel.transfers[index];
}

}  // namespace adaptra
