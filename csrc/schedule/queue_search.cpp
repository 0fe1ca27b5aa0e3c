// SPDX-License-Identifier: Apache-2.0
#include "queue_search.hpp"

#include "local_search.hpp"

namespace adaptra {
namespace {

constexpr int kReach = 12;          // longest move, in places
constexpr int kMostImpossible = 1000;  // moves in a row

// Moves the action at `from` to `to`; those between shift by one.
void move(Order& order, int from, int to) {
    const auto begin = order.begin();
    if (from < to) {
        std::rotate(begin + from, begin + from + 1, begin + to + 1);
    } else {
        std::rotate(begin + to, begin + from, begin + from + 1);
    }
}

}  // namespace

void QueueSearch::run(std::int64_t replays, double target) {
    int impossible = 0;
    while (replays_ < replays && makespan_ > target && impossible < kMostImpossible) {
        ++impossible;
        const int stage = static_cast<int>(random(problem_.stages));
        Order& order = orders_[stage];
        const int length = static_cast<int>(order.size());
        const int from = static_cast<int>(random(length));
        const int reach = 1 + static_cast<int>(random(kReach));
        const int to = random(2) ? from + reach : from - reach;
        if (to < 0 || to >= length || !may_move(order, stage, from, to)) continue;
        move(order, from, to);
        if (peak_of(order, problem_.released[stage]) <= problem_.cap[stage] + kCapTolerance) {
            impossible = 0;
            ++replays_;
            const double makespan = launch_.run(orders_);
            if (makespan <= makespan_) {
                makespan_ = makespan;
                continue;
            }
        }
        move(order, to, from);
    }
}

bool QueueSearch::may_move(const Order& order, int stage, int from, int to) const {
    for (int position = from; position != to;) {
        position += from < to ? 1 : -1;
        const Code first = from < to ? order[from] : order[position], second = from < to ? order[position] : order[from];
        if (!may_swap(problem_, first, second, stage)) return false;
    }
    return true;
}

std::uint64_t QueueSearch::random(std::uint64_t below) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return (random_ >> 11) % below;
}

}  // namespace adaptra
