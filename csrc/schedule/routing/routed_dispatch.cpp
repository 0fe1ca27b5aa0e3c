// SPDX-License-Identifier: Apache-2.0
#include "routed_dispatch.hpp"

namespace adaptra {
namespace {

constexpr Code kFree = -1;
constexpr int kForwards = 0, kBackwards = 1, kWeights = 2;

}  // namespace

double RoutedDispatcher::run(const RoutedPolicy& policy) {
    policy_ = &policy;
    RoutedLinks links(problem_);
    links_ = &links;
    cells_.assign(problem_.cells(), {});
    events_.clear();
    orders_.assign(problem_.cells(), {});
    start_.assign(problem_.cells(), {});
    end_.assign(problem_.cells(), {});
    std::vector<int> touched;
    std::vector<char> is_touched(problem_.cells(), 0);
    const auto touch = [&](int cell) {
        if (!is_touched[cell]) touched.push_back(cell);
        is_touched[cell] = 1;
    };
    for (Job job = 0; job < problem_.jobs(); ++job) {
        const int cell = problem_.cell((*policy.hosts)[job], 0);
        arrive(cell, kForward, job);
        touch(cell);
    }
    for (double now = 0.0;;) {
        // Cells that decide at the same instant do so in ascending order, on all that has arrived by then.
        std::sort(touched.begin(), touched.end());
        for (const int cell : touched) {
            decide(cell, now);
            is_touched[cell] = 0;
        }
        touched.clear();
        if (events_.empty()) break;
        now = events_.front().time;
        while (!events_.empty() && events_.front().time == now) {
            const Event event = events_.front();
            std::pop_heap(events_.begin(), events_.end());
            events_.pop_back();
            if (event.code != kFree) arrive(event.cell, kind_of(event.code), job_in(event.code));
            touch(event.cell);
        }
    }
    return period_of(problem_, start_, end_);
}

void RoutedDispatcher::push(const Event& event) {
    events_.push_back(event);
    std::push_heap(events_.begin(), events_.end());
}

void RoutedDispatcher::arrive(int cell, Kind kind, Job job) {
    const std::size_t slot = problem_.slot(problem_.stage_of(cell), job);
    const Urgency& priority = *policy_->priority;
    const int which = kind == kForward ? kForwards : kind == kBackwardWeight ? kWeights : kBackwards;
    const double of_action = (kind == kForward ? priority.forward : kind == kBackwardWeight ? priority.weight : priority.backward)[slot];
    auto& heap = cells_[cell].ready[which];
    heap.push_back({of_action, job});
    std::push_heap(heap.begin(), heap.end());
}

bool RoutedDispatcher::fits(int cell, Kind kind) const {
    const Cell& state = cells_[cell];
    const double cap = policy_->cap[cell] + kCapTolerance, released = problem_.released[cell];
    const double added = policy_->split[cell] ? added_by_input(released) : 0.0;
    if (kind == kForward) {
        return held(state.forwards + 1, state.inputs, state.weights, released) <= cap &&
               state.forwards + 1 - state.inputs + added <= cap;
    }
    return added == 0.0 || held(state.forwards, state.inputs + 1, state.weights, released) <= cap;
}

void RoutedDispatcher::decide(int cell, double now) {
    Cell& state = cells_[cell];
    if (state.free > now) return;
    int chosen = -1;
    for (const int which : {kBackwards, kForwards, kWeights}) {
        const auto& heap = state.ready[which];
        if (heap.empty() || (chosen >= 0 && heap.front().priority <= state.ready[chosen].front().priority)) continue;
        if (which == kForwards && !fits(cell, kForward)) continue;
        if (which == kBackwards && !fits(cell, kBackwardInput)) continue;
        chosen = which;
    }
    if (chosen < 0) return;
    auto& heap = state.ready[chosen];
    const Job job = heap.front().job;
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    const Kind backward = policy_->split[cell] ? kBackwardInput : kBackward;
    start(cell, chosen == kForwards ? kForward : chosen == kBackwards ? backward : kBackwardWeight, job, now);
}

void RoutedDispatcher::start(int cell, Kind kind, Job job, double now) {
    Cell& state = cells_[cell];
    const int stage = problem_.stage_of(cell);
    state.free = now + problem_.seconds(kind, cell, job);
    orders_[cell].push_back(code_of(kind, job));
    start_[cell].push_back(now);
    end_[cell].push_back(state.free);
    state.forwards += kind == kForward;
    state.inputs += sends_gradient(kind);
    state.weights += kind == kBackward || kind == kBackwardWeight;
    push({state.free, cell, kFree});
    // What stays here is ready for the next decision, which is not before this action has ended.
    if (kind == kBackwardInput) arrive(cell, kBackwardWeight, job);
    if (kind == kForward && stage + 1 == problem_.stages) arrive(cell, kBackward, job);
    const int towards = kind == kForward ? stage + 1 : stage - 1;
    if (kind == kBackwardWeight || towards < 0 || towards == problem_.stages) return;
    const int target = problem_.cell((*policy_->hosts)[problem_.slot(towards, job)], towards);
    push({links_->send(cell, target, state.free), target, code_of(kind == kForward ? kForward : kBackward, job)});
}

}  // namespace adaptra
