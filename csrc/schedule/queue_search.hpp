// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "launch.hpp"

namespace adaptra {

// Descent over the orders of one schedule where stages share a hardware queue. What delays what there depends on the order
// of all actions, so no estimate tells the good moves: each is replayed. One that does not make the schedule longer is
// taken. Keeps each kind in ascending order per chunk, and the caps.
class QueueSearch {
public:
    QueueSearch(const Problem& problem, Launch& launch, const Orders& orders, double makespan)
        : problem_(problem), launch_(launch), orders_(orders), makespan_(makespan) {}

    // Tries moves until so many have been replayed or the makespan is at most `target`.
    void run(std::int64_t replays, double target);

    double makespan() const { return makespan_; }
    const Orders& orders() const { return orders_; }
    std::int64_t replays() const { return replays_; }

private:
    bool may_move(const Order& order, int stage, int from, int to) const;
    std::uint64_t random(std::uint64_t below);

    const Problem& problem_;
    Launch& launch_;
    Orders orders_;
    double makespan_;
    std::int64_t replays_ = 0;
    std::uint64_t random_ = 88172645463325252ULL;
};

}  // namespace adaptra
