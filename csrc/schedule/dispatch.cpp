// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

namespace adaptra {

int reference_index(const Problem& problem, int group, int chunk, int micro_batch) {
    const int first = micro_batch / group * group;
    const int size = std::min(group, problem.micro_batches - first);
    return first * problem.chunks + chunk * size + (micro_batch - first);
}

int least_cap(const Problem& problem, int group) {
    // Backwards run in the same groups with the chunks reversed; the first of a group waits for the most forwards.
    int needed = 1;
    for (int first = 0; first < problem.micro_batches; first += group) {
        const int forward = reference_index(problem, group, problem.chunks - 1, first);
        needed = std::max(needed, forward + 1 - first * problem.chunks);
    }
    return needed;
}

int largest_group(const Problem& problem) {
    const double cap = *std::min_element(problem.cap.begin(), problem.cap.end());
    for (int group = std::min(problem.stages, problem.micro_batches); group > 0; --group) {
        if (least_cap(problem, group) <= cap + kCapTolerance) return group;
    }
    return 0;
}

double Dispatcher::run(const Policy& policy) {
    policy_ = policy;
    const int needed = least_cap(problem_, policy.group);
    for (double cap : policy.cap) {
        if (cap + kCapTolerance < needed) return kNever;
    }
    reset();
    const std::size_t actions = problem_.slots() * (policy.split ? 3 : 2);
    double makespan = 0.0;
    for (std::size_t done = 0; done < actions; ++done) {
        const int stage = winner_[1];
        if (choice_[stage].time == kNever) return kNever;
        start_action(stage, choice_[stage]);
        makespan = std::max(makespan, state_[stage].free);
    }
    return makespan;
}

void Dispatcher::reset() {
    const int stages = problem_.stages;
    messages_.reset(problem_);
    state_.assign(stages, Stage{});
    next_forward_.assign(problem_.virtual_stages(), 0);
    next_backward_.assign(problem_.virtual_stages(), 0);
    choice_.assign(stages, Choice{});
    orders_.resize(stages);
    start_.resize(stages);
    end_.resize(stages);
    weight_queue_.resize(stages);
    for (int stage = 0; stage < stages; ++stage) {
        orders_[stage].clear();
        start_[stage].clear();
        end_[stage].clear();
        weight_queue_[stage].clear();
    }
    leaves_ = 1;
    while (leaves_ < stages) leaves_ *= 2;
    // Leaves beyond the last stage stand for it: every node that joins them with real leaves has it below too.
    winner_.assign(2 * leaves_, stages - 1);
    for (int stage = 0; stage < stages; ++stage) winner_[leaves_ + stage] = stage;
    for (int stage = stages - 1; stage >= 0; --stage) update(stage);
}

bool Dispatcher::within_cap(const Stage& state, int stage, int index) const {
    const int charged = std::max(index, state.highest) + 1;
    return held(charged, state.inputs, state.weights, problem_.released) <= policy_.cap[stage] + kCapTolerance;
}

Dispatcher::Choice Dispatcher::choose(int stage) const {
    const Stage& state = state_[stage];
    const int count = problem_.micro_batches;
    Choice backward, forward;
    int backward_index = 0, forward_index = 0;
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int virtual_stage = chunk * problem_.stages + stage;
        const int next_backward = next_backward_[virtual_stage];
        if (next_backward < count) {
            const double time = std::max(state.free, messages_.gradient[virtual_stage * count + next_backward]);
            const int index =
                reference_index(problem_, policy_.group, problem_.chunks - 1 - chunk, next_backward);
            if (time < backward.time || (time == backward.time && time < kNever && index < backward_index)) {
                backward = {time, problem_.code(policy_.split ? kBackwardInput : kBackward, chunk, next_backward)};
                backward_index = index;
            }
        }
        const int next_forward = next_forward_[virtual_stage];
        if (next_forward < count) {
            const double time = std::max(state.free, messages_.activation[virtual_stage * count + next_forward]);
            const int index = reference_index(problem_, policy_.group, chunk, next_forward);
            const bool sooner = time < forward.time || (time == forward.time && index < forward_index);
            if (time < kNever && sooner && within_cap(state, stage, index)) {
                forward = {time, problem_.code(kForward, chunk, next_forward)};
                forward_index = index;
            }
        }
    }
    const int row = stage * problem_.chunks;
    const bool has_weight = state.weights < static_cast<int>(weight_queue_[stage].size());
    if (has_weight) {
        const Code weight = weight_queue_[stage][state.weights];
        const double seconds = problem_.backward_weight[row + problem_.chunk_in(weight)];
        const double soonest = std::min(backward.time, forward.time);
        const bool idle = soonest > state.free && soonest >= state.free + policy_.weight_patience * seconds;
        if (idle) return {state.free, weight};
    }
    if (forward.time < backward.time) {
        const double seconds = problem_.forward[row + problem_.chunk_in(forward.code)];
        if (backward.time >= forward.time + policy_.forward_patience * seconds) return forward;
    }
    return backward;
}

void Dispatcher::start_action(int stage, const Choice& choice) {
    Stage& state = state_[stage];
    const Kind kind = kind_of(choice.code);
    const int chunk = problem_.chunk_in(choice.code);
    const int micro_batch = problem_.micro_batch_in(choice.code);
    const int virtual_stage = chunk * problem_.stages + stage;
    orders_[stage].push_back(choice.code);
    start_[stage].push_back(choice.time);
    state.free = choice.time + problem_.seconds(kind, stage * problem_.chunks + chunk);
    end_[stage].push_back(state.free);
    if (kind == kForward) {
        ++state.forwards;
        ++next_forward_[virtual_stage];
        state.highest = std::max(state.highest, reference_index(problem_, policy_.group, chunk, micro_batch));
    } else if (kind == kBackwardWeight) {
        ++state.weights;
    } else {
        ++state.inputs;
        ++next_backward_[virtual_stage];
        if (kind == kBackward) {
            ++state.weights;
        } else {
            weight_queue_[stage].push_back(problem_.code(kBackwardWeight, chunk, micro_batch));
        }
    }
    const int target = messages_.deliver(problem_, kind, virtual_stage, micro_batch, state.free);
    update(stage);
    if (target >= 0 && target != stage) update(target);
}

void Dispatcher::update(int stage) {
    choice_[stage] = choose(stage);
    for (int node = (leaves_ + stage) / 2; node > 0; node /= 2) {
        const int left = winner_[2 * node], right = winner_[2 * node + 1];
        winner_[node] = choice_[right].time < choice_[left].time ? right : left;
    }
}

}  // namespace adaptra
