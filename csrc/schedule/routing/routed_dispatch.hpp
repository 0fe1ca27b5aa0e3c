// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../replay.hpp"
#include "routed.hpp"

namespace adaptra {

// How a routed dispatcher decides: among the actions that are ready and fit, a cell runs the one of highest priority.
struct RoutedPolicy {
    const Hosts* hosts = nullptr;
    const Urgency* priority = nullptr;  // by slot
    std::vector<char> split;            // [cell]: whether backwards are split there
    std::vector<double> cap;            // [cell], never above the problem's
};

// Runs a job in order of time: a cell that is free never idles by choice.
//
// Why caps of at least 1 (where an input gradient adds activations: 1 and what it adds, or whole backwards) cannot
// deadlock it. A cell of the last stage needs no message for a backward: what it holds it can end, so every forward that
// reaches it gets its turn. A cell of the stage before then gets the gradients of all that it holds, and needs no room
// for their backwards; and so on up to the first stage. Which replica a cell belongs to does not matter. A forward leaves
// room for what the next input gradient adds once all weight gradients are over (as in Dispatcher).
class RoutedDispatcher {
public:
    explicit RoutedDispatcher(const RoutedProblem& problem) : problem_(problem) {}

    // Returns the period.
    double run(const RoutedPolicy& policy);

    const Orders& orders() const { return orders_; }
    const Times& start() const { return start_; }
    const Times& end() const { return end_; }

private:
    struct Ready {
        double priority;
        Job job;
        bool operator<(const Ready& other) const {
            return priority < other.priority || (priority == other.priority && job > other.job);
        }
    };
    struct Cell {
        std::vector<Ready> ready[3];  // heaps: forwards, backwards, weight gradients
        double free = 0.0;
        int forwards = 0, inputs = 0, weights = 0;
    };
    // An arrival of what an action needs, or, with a code below 0, a cell that has become free.
    struct Event {
        double time;
        int cell;
        Code code;
        bool operator<(const Event& other) const { return time > other.time; }
    };

    void arrive(int cell, Kind kind, Job job);
    bool fits(int cell, Kind kind) const;
    void decide(int cell, double now);
    void start(int cell, Kind kind, Job job, double now);
    void push(const Event& event);

    const RoutedProblem& problem_;
    const RoutedPolicy* policy_ = nullptr;
    RoutedLinks* links_ = nullptr;
    std::vector<Cell> cells_;
    std::vector<Event> events_;
    Orders orders_;
    Times start_, end_;
};

}  // namespace adaptra
